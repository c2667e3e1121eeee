//! What a guest may see, sector by sector.
//!
//! The rules (promises of the README):
//! - Between power cuts a sector is linearizable: there is an order of its writes and reads, each between its start and its
//!   end, in which every read sees the last write. An unacknowledged write may take effect until it is known dead: it never
//!   appears after the first read that a later generation answered.
//! - After a power cut and the next activation the sector holds a value that no flushed write had replaced for certain. What
//!   an older upstairs has not answered yet may have been executed and lost by then: it may answer later, if it slept. The
//!   upstairs that activates knows what it has not answered, and loses none of that.
//!
//! Method: events in order of time; a set of configurations (current value, which open writes have taken effect) grows at
//! every start and shrinks at every end. No configuration left is a counter-example.

use std::collections::BTreeSet;

use super::history::{Access, Action, History, Nanos, Note};

#[derive(Clone, Debug)]
pub struct Violation {
    pub sector: usize,
    pub at: Nanos,
    pub text: String,
}

/// Open writes that one sector may have at once before the search is given up as too large.
const OPEN_MAX: usize = 24;
const CONFIGURATIONS_MAX: usize = 200_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Start,
    Reset,
    End,
}

pub fn check(history: &History) -> Result<(), Violation> {
    for (sector, accesses) in history.accesses.iter().enumerate() {
        check_sector(sector, accesses, history)?;
    }
    Ok(())
}

fn check_sector(sector: usize, accesses: &[Access], history: &History) -> Result<(), Violation> {
    if accesses.is_empty() {
        return Ok(());
    }
    let ends = effective_ends(accesses, history);
    let resets = resets(history);
    let mut events: Vec<(Nanos, Order, usize)> = Vec::new();
    for (index, access) in accesses.iter().enumerate() {
        // A read that was never answered shows nothing.
        if matches!(access.action, Action::Read(_)) && access.end.is_none() {
            continue;
        }
        events.push((access.start, Order::Start, index));
        if let Some(end) = ends[index] {
            events.push((end, Order::End, index));
        }
    }
    events.extend(resets.iter().enumerate().map(|(index, &(at, _))| (at, Order::Reset, index)));
    events.sort_by_key(|&(at, order, index)| (at, order, index));

    let mut search =
        Search { accesses, open: Vec::new(), configurations: BTreeSet::from([(0, 0)]), too_large: false };
    for (at, order, index) in events {
        let fits = match order {
            Order::Start => search.start(index),
            Order::End => search.end(index, accesses[index].end.is_none()),
            Order::Reset => {
                search.reset(allowed_after_power_cut(accesses, history, at), resets[index].1);
                true
            }
        };
        if search.too_large {
            let text = "the checker's search has grown too large".to_owned();
            return Err(Violation { sector, at, text });
        }
        if !fits {
            let access = &accesses[index];
            let text = format!("{:?} (guest operation {}) fits no order", access.action, access.guest_op);
            return Err(Violation { sector, at, text });
        }
    }
    Ok(())
}

/// Acknowledged: its end. Given up: when another upstairs came into service, as that has settled what becomes of it.
fn effective_ends(accesses: &[Access], history: &History) -> Vec<Option<Nanos>> {
    let another_served = |gone: Nanos, by: usize| {
        history.notes.iter().find_map(|note| match note {
            Note::Served { at, upstairs, .. } if *at > gone && *upstairs != by => Some(*at),
            Note::Served { .. } | Note::PowerCut { .. } => None,
        })
    };
    accesses
        .iter()
        .map(|access| {
            if access.end.is_some() || matches!(access.action, Action::Read(_)) {
                return access.end;
            }
            let (gone, by) = access.given_up?;
            another_served(gone, by)
        })
        .collect()
}

/// Activations before which a replica lost power since the activation before: when, and by which upstairs.
fn resets(history: &History) -> Vec<(Nanos, usize)> {
    let mut cut = false;
    let mut resets = Vec::new();
    for note in &history.notes {
        match note {
            Note::PowerCut { .. } => cut = true,
            Note::Served { at, upstairs, .. } => {
                if std::mem::take(&mut cut) {
                    resets.push((*at, *upstairs));
                }
            }
        }
    }
    resets
}

/// Every value that no flushed write had replaced for certain.
fn allowed_after_power_cut(accesses: &[Access], history: &History, at: Nanos) -> BTreeSet<u32> {
    let cut = history.notes.iter().rev().find_map(|note| match note {
        Note::PowerCut { at: cut, .. } if *cut < at => Some(*cut),
        Note::PowerCut { .. } | Note::Served { .. } => None,
    });
    let before = cut.unwrap_or(at);
    let flushed = |access: &&Access| {
        let Some(end) = access.end.filter(|&end| end <= before) else { return false };
        access.fua || history.flushes.iter().any(|&(issued, done)| issued >= end && done <= before)
    };
    let writes = || accesses.iter().filter(|a| matches!(a.action, Action::Write(_)) && a.start < at);
    let floor = writes().filter(flushed).map(|access| access.start).max();
    let mut allowed: BTreeSet<u32> = writes()
        .filter(|access| floor.is_none_or(|floor| access.end.is_none_or(|end| end >= floor)))
        .filter_map(|access| match access.action {
            Action::Write(value) => Some(value),
            Action::Read(_) => None,
        })
        .collect();
    if floor.is_none() {
        allowed.insert(0);
    }
    allowed
}

struct Search<'a> {
    accesses: &'a [Access],
    /// Writes that have begun and whose effect isn't settled; the position is the bit.
    open: Vec<Option<usize>>,
    /// Value, and which open writes have taken effect.
    configurations: BTreeSet<(u32, u32)>,
    too_large: bool,
}

impl Search<'_> {
    fn start(&mut self, index: usize) -> bool {
        if matches!(self.accesses[index].action, Action::Read(_)) {
            // Remembered as open too: it must find its value at some moment until its end.
            return self.add(index);
        }
        self.add(index)
    }

    fn add(&mut self, index: usize) -> bool {
        let place = match self.open.iter().position(Option::is_none) {
            Some(place) => place,
            None => {
                self.open.push(None);
                self.open.len() - 1
            }
        };
        assert!(place < OPEN_MAX, "too many operations open on one sector for the checker");
        self.open[place] = Some(index);
        self.close_over();
        true
    }

    /// Lets open operations take effect in every order that is possible.
    fn close_over(&mut self) {
        let settled = self.configurations.iter().map(|&configuration| self.with_reads(configuration));
        self.configurations = settled.collect();
        let mut todo: Vec<(u32, u32)> = self.configurations.iter().copied().collect();
        while let Some((_, done)) = todo.pop() {
            for (bit, open) in self.open.iter().enumerate() {
                let Some(index) = *open else { continue };
                if done & (1 << bit) != 0 {
                    continue;
                }
                let next = match self.accesses[index].action {
                    Action::Write(new) => (new, done | 1 << bit),
                    Action::Read(_) => continue,
                };
                let next = self.with_reads(next);
                if self.configurations.insert(next) {
                    todo.push(next);
                }
            }
            if self.configurations.len() >= CONFIGURATIONS_MAX {
                self.too_large = true;
                return;
            }
        }
    }

    /// An open read that can see its value now has seen it: to put that off opens no way that isn't open all the same.
    fn with_reads(&self, (value, done): (u32, u32)) -> (u32, u32) {
        let reads =
            self.open.iter().enumerate().filter(|(_, open)| {
                open.is_some_and(|index| self.accesses[index].action == Action::Read(value))
            });
        (value, reads.fold(done, |done, (bit, _)| done | 1 << bit))
    }

    /// `dead`: a write that nobody acknowledged is over; it need not have taken effect.
    fn end(&mut self, index: usize, dead: bool) -> bool {
        let Some(bit) = self.open.iter().position(|open| *open == Some(index)) else { return true };
        let mask = 1 << bit;
        self.configurations = self
            .configurations
            .iter()
            .filter(|(_, done)| dead || done & mask != 0)
            .map(|&(v, done)| (v, done & !mask))
            .collect();
        self.open[bit] = None;
        !self.configurations.is_empty()
    }

    /// The open writes that may lie under this value: it is their own, or that of a write that ended after they began.
    fn below(&self, value: u32) -> u32 {
        let writes = self.accesses.iter().filter(|access| access.action == Action::Write(value));
        let last = writes.map(|access| access.end.unwrap_or(Nanos::MAX)).max().unwrap_or(0);
        let open = self.open.iter().enumerate().filter_map(|(bit, open)| Some((bit, (*open)?)));
        open.filter(|&(_, index)| self.accesses[index].start <= last)
            .fold(0, |mask, (bit, _)| mask | 1 << bit)
    }

    /// Any of these values may be there now; what was open and unanswered may still come. It may also have been there already,
    /// under a newer write that was kept.
    fn reset(&mut self, allowed: BTreeSet<u32>, by: usize) {
        let reads: u32 = self
            .open
            .iter()
            .enumerate()
            .filter_map(|(bit, open)| open.map(|index| (bit, index)))
            .filter(|&(_, index)| matches!(self.accesses[index].action, Action::Read(_)))
            .fold(0, |mask, (bit, _)| mask | 1 << bit);
        let mut elsewhere = 0;
        for (bit, open) in self.open.iter().enumerate() {
            elsewhere |= u32::from(open.is_some_and(|index| self.accesses[index].by != by)) << bit;
        }
        let done: BTreeSet<u32> = self.configurations.iter().map(|&(_, done)| done).collect();
        let current: BTreeSet<u32> = self.configurations.iter().map(|&(value, _)| value).collect();
        let values: BTreeSet<u32> = allowed.into_iter().chain(current).collect();
        let mut configurations = BTreeSet::new();
        for &value in &values {
            for &done in &done {
                configurations.insert((value, done & reads));
                configurations.insert((value, done & reads | elsewhere & !reads));
                configurations.insert((value, done & (reads | self.below(value))));
            }
        }
        self.configurations = configurations;
        self.close_over();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(
        accesses: &[(Action, Nanos, Option<Nanos>)],
        notes: &[Note],
        flushes: &[(Nanos, Nanos)],
    ) -> History {
        let accesses = accesses
            .iter()
            .enumerate()
            .map(|(op, &(action, start, end))| Access {
                action,
                start,
                end,
                given_up: end.is_none().then_some((45, 0)),
                guest_op: op as u64,
                by: 0,
                fua: false,
            })
            .collect();
        History { accesses: vec![accesses], flushes: flushes.to_vec(), notes: notes.to_vec() }
    }

    use Action::{Read, Write};

    #[test]
    fn a_register_is_linearizable() {
        let check = |accesses: &[(Action, Nanos, Option<Nanos>)], good: bool| {
            assert_eq!(check(&history(accesses, &[], &[])).is_ok(), good, "{accesses:?}");
        };
        check(&[(Write(1), 0, Some(10)), (Read(1), 20, Some(30))], true);
        check(&[(Write(1), 0, Some(10)), (Read(0), 20, Some(30))], false);
        check(&[(Write(1), 0, Some(10)), (Read(0), 5, Some(30))], true);
        // Un-read: the new value, then the old one again.
        check(&[(Write(1), 0, Some(100)), (Read(1), 10, Some(20)), (Read(0), 30, Some(40))], false);
        check(&[(Write(1), 0, Some(9)), (Write(2), 5, Some(20)), (Read(1), 30, Some(40))], true);
        check(&[(Write(1), 0, Some(4)), (Write(2), 5, Some(20)), (Read(1), 30, Some(40))], false);
        check(
            &[(Write(1), 0, None), (Read(0), 5, Some(9)), (Read(1), 10, Some(19)), (Read(0), 20, Some(29))],
            false,
        );
    }

    #[test]
    fn a_dead_write_does_not_rise_again() {
        let served = [Note::Served { at: 50, generation: 2, upstairs: 1 }];
        let check = |accesses: &[(Action, Nanos, Option<Nanos>)], good: bool| {
            assert_eq!(check(&history(accesses, &served, &[])).is_ok(), good, "{accesses:?}");
        };
        check(&[(Write(1), 0, None), (Read(1), 60, Some(70))], true);
        check(&[(Write(1), 0, None), (Read(0), 60, Some(70)), (Read(1), 80, Some(90))], false);
        check(&[(Write(1), 0, None), (Read(0), 30, Some(40)), (Read(1), 60, Some(70))], true);
    }

    #[test]
    fn a_power_cut_takes_only_what_was_not_flushed() {
        let notes =
            [Note::PowerCut { at: 50, replica: 0 }, Note::Served { at: 60, generation: 2, upstairs: 1 }];
        let check = |flushes: &[(Nanos, Nanos)], seen: u32, good: bool| {
            let accesses = [(Write(1), 0, Some(10)), (Write(2), 20, Some(30)), (Read(seen), 70, Some(80))];
            assert_eq!(check(&history(&accesses, &notes, flushes)).is_ok(), good, "{flushes:?} {seen}");
        };
        check(&[], 0, true);
        check(&[(11, 15)], 0, false);
        check(&[(11, 15)], 1, true);
        check(&[(31, 35)], 1, false);
        check(&[(31, 35)], 2, true);
        check(&[(25, 35)], 1, true);
    }

    #[test]
    fn an_upstairs_that_slept_may_answer_for_what_a_power_cut_took() {
        let accesses = [
            (Write(1), 0, Some(10)),
            (Write(2), 20, Some(100)),
            (Read(1), 70, Some(80)),
            (Read(1), 110, Some(120)),
        ];
        for (upstairs, good) in [(1, true), (0, false)] {
            let notes =
                [Note::PowerCut { at: 50, replica: 0 }, Note::Served { at: 60, generation: 2, upstairs }];
            assert_eq!(check(&history(&accesses, &notes, &[])).is_ok(), good);
        }
    }
}

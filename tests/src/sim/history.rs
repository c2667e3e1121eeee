//! What guests did and saw, sector by sector.
//!
//! Invariants:
//! - A value identifies the write that made it; 0 is zeros, which fresh volumes, zeroing and trimming all give.
//! - An operation without an end may still take effect.

/// Virtual nanoseconds.
pub type Nanos = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Write(u32),
    Read(u32),
}

/// One sector's part of a guest's operation.
#[derive(Clone, Debug)]
pub struct Access {
    pub action: Action,
    pub start: Nanos,
    pub end: Option<Nanos>,
    /// This attempt will not be answered. Since when, and by which upstairs.
    pub given_up: Option<(Nanos, usize)>,
    pub guest_op: u64,
    /// The upstairs that was asked.
    pub by: usize,
    pub fua: bool,
}

#[derive(Clone, Debug)]
pub enum Note {
    /// An upstairs came into service with this generation.
    Served { at: Nanos, generation: u32, upstairs: usize },
    /// A replica lost power.
    PowerCut { at: Nanos, replica: usize },
}

#[derive(Clone, Debug, Default)]
pub struct History {
    /// By sector.
    pub accesses: Vec<Vec<Access>>,
    /// Flushes that were acknowledged: issued, acknowledged.
    pub flushes: Vec<(Nanos, Nanos)>,
    pub notes: Vec<Note>,
}

impl History {
    pub fn new(sectors: usize) -> Self {
        Self { accesses: vec![Vec::new(); sectors], flushes: Vec::new(), notes: Vec::new() }
    }

    /// What happened to one sector, a line each, in order of start.
    pub fn describe(&self, sector: usize) -> Vec<String> {
        let seconds = |at: Nanos| format!("{:.6}", at as f64 / 1e9);
        let mut lines: Vec<(Nanos, String)> = Vec::new();
        for access in self.accesses.get(sector).map(Vec::as_slice).unwrap_or_default() {
            let end = access.end.map_or("never answered".to_owned(), seconds);
            let fua = if access.fua { " FUA" } else { "" };
            let text = format!(
                "{} to {end}: {:?}{fua} by request {}",
                seconds(access.start),
                access.action,
                access.guest_op
            );
            lines.push((access.start, text));
        }
        for note in &self.notes {
            match note {
                Note::Served { at, generation, .. } => {
                    lines.push((*at, format!("{} generation {generation} is served", seconds(*at))))
                }
                Note::PowerCut { at, replica } => {
                    lines.push((*at, format!("{} replica {replica} loses power", seconds(*at))))
                }
            }
        }
        lines.sort();
        lines.into_iter().map(|(_, line)| line).collect()
    }
}

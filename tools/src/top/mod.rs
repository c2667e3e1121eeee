//! `newel top`: a volume and its replicas live in a terminal.
//!
//! Invariants:
//! - However it ends (a key, a signal, an error, a panic), the terminal is as it was before.
//! - A volume that doesn't answer ends nothing: what was seen last stays, with how old it is, until it answers again.
//! - Memory is bounded: two minutes or so of history.

#![expect(clippy::disallowed_methods, reason = "it shows what happens in real time")]

mod app;
mod stages;
mod view;

#[cfg(test)]
mod tests;

use std::io::IsTerminal as _;
use std::pin::Pin;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::address::Address;
use crate::http;
use crate::signals::Stop;
use crate::target::Target;
use app::{App, Flow, Look};

/// Keys that may wait to be handled.
const KEYS_MAX: usize = 16;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    target: Target,
    /// Between two looks
    #[arg(long, default_value = "1s", value_parser = parse_every)]
    every: Duration,
}

fn parse_every(text: &str) -> Result<Duration> {
    let every = humantime::parse_duration(text).with_context(|| format!("{text:?} is no duration"))?;
    if every < Duration::from_millis(100) || every > Duration::from_secs(60) {
        bail!("{text}: look every 100ms to 60s");
    }
    Ok(every)
}

pub(crate) async fn run(args: TopArgs) -> Result<()> {
    let address = args.target.address()?;
    if !std::io::stdout().is_terminal() {
        bail!(
            "newel top needs a terminal; `newel status` prints the state once, and `newel status --json` for programs"
        );
    }
    let first = look(&address).await?;
    let begun = Instant::now();
    let mut app = App::new(address.to_string(), args.every);
    app.seen(Duration::ZERO, first);
    let mut stop = Stop::new()?;
    let screen = Screen::open()?;
    let ended = live(screen, &mut app, &address, begun, &mut stop).await;
    // What is printed from here on stands below the shell's prompt again.
    ended.context("newel top ended")
}

/// The terminal while it is ours.
struct Screen(ratatui::DefaultTerminal);

impl Screen {
    fn open() -> Result<Self> {
        // This also has a panic give the terminal back first.
        Ok(Self(ratatui::try_init().context("this terminal can't be drawn on")?))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn live(
    mut screen: Screen,
    app: &mut App,
    address: &Address,
    begun: Instant,
    stop: &mut Stop,
) -> Result<()> {
    let mut events = events()?;
    let mut ticks = interval(app.every());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut asked: Asked<'_> = None;
    loop {
        app.passed(begun.elapsed());
        screen.0.draw(|frame| view::draw(frame, app)).context("cannot draw")?;
        tokio::select! {
            () = stop.requested() => return Ok(()),
            event = events.recv() => match event {
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => match app.key(key) {
                    Flow::Quit => return Ok(()),
                    Flow::Faster => {
                        ticks = interval(app.every());
                        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                    }
                    Flow::On => {}
                },
                // Whatever else happens (another size, for one), it is drawn anew.
                Some(_) => {}
                None => bail!("the terminal is gone"),
            },
            _ = ticks.tick(), if asked.is_none() => asked = Some(Box::pin(look(address))),
            seen = answer(&mut asked) => {
                asked = None;
                match seen {
                    Ok(look) => app.seen(begun.elapsed(), look),
                    Err(error) => app.unanswered(format!("{error:#}")),
                }
            }
        }
    }
}

/// A look that is under way. Keys don't wait for it.
type Asked<'a> = Option<Pin<Box<dyn Future<Output = Result<Look>> + 'a>>>;

async fn answer(asked: &mut Asked<'_>) -> Result<Look> {
    match asked {
        Some(look) => look.await,
        None => std::future::pending().await,
    }
}

/// Reads the terminal in a thread of its own, which ends with the process.
fn events() -> Result<mpsc::Receiver<Event>> {
    let (sender, events) = mpsc::channel(KEYS_MAX);
    std::thread::Builder::new()
        .name("keys".into())
        .spawn(move || {
            while let Ok(event) = event::read() {
                if sender.blocking_send(event).is_err() {
                    return;
                }
            }
        })
        .context("cannot start a thread")?;
    Ok(events)
}

async fn look(address: &Address) -> Result<Look> {
    let body = http::get(address, "/status").await?;
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let clock = now.split_once('T').map_or(now.as_str(), |(_, time)| time).trim_end_matches('Z').to_owned();
    Look::parse(&body, clock)
        .with_context(|| format!("the answer of {address} is not a status of this version of Newel"))
}

//! The seed of a test: a fresh one for each run, printed, and given back by `NEWEL_SEED`.

use uuid::Uuid;

/// Short enough to be read out.
const SEEDS: u64 = 1_000_000;

/// The seed by which `test` chooses.
#[track_caller]
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("NEWEL_SEED") {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("NEWEL_SEED={text}: {error}")),
        Err(_) => Uuid::new_v4().as_u64_pair().0 % SEEDS,
    };
    eprintln!("{test}: seed {seed} (NEWEL_SEED={seed} replays its choices)");
    seed
}

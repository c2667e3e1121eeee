use newel_tests::sim::plan::Bug;
use newel_tests::sim::{Plan, run};
#[test]
fn rates() {
    for bug in [Bug::JoinerCountsEarly, Bug::ReadsNotHeld, Bug::ReplacedEarly, Bug::ServedEarly] {
        let hits: Vec<u64> = (0..1200).filter(|&s| run(Plan::with_bug(s, bug)).violation.is_some()).collect();
        eprintln!("{bug:?}: {} {:?}", hits.len(), &hits[..hits.len().min(12)]);
    }
}

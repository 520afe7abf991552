//! A short piece of the long torture (`make torture MINUTES=60`), and the proof that its judge sees a loss.

use std::time::Duration;

use sawmill_tests::dice::Dice;
use sawmill_tests::torture::Torture;

#[test]
fn forty_seconds_of_torture_breaks_no_promise() {
    let mut torture = Torture::new(Dice::seeded("torture").word());
    torture.run(Duration::from_secs(40), |_| ());
    println!("{}", torture.report);
    let report = &torture.report;
    assert!(report.violations.is_empty(), "{report}");
    assert!(report.kills > 0 && report.verdict.demanded > 0, "nothing was proved: {report}");
    assert!(report.faults.total() > 0, "nothing went wrong: {report}");
}

#[test]
fn a_planted_loss_is_seen() {
    let judged = Torture::new(Dice::seeded("torture").word()).plant_a_loss();
    assert!(judged.is_err(), "a lost journal passed for a kept one: {judged:?}");
}

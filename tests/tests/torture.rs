//! A short piece of the long torture (`make torture MINUTES=60`), and the proof that its judge sees
//! losses.

use std::time::Duration;

use sawmill_testkit::Dice;
use sawmill_tests::torture::Torture;

#[test]
fn forty_seconds_of_torture_breaks_no_promise() {
    let mut torture = Torture::new(Dice::seeded("torture").word());
    // Its first two volumes meet each kind of action once, however long that takes.
    torture.run(Duration::from_secs(40), |_| ());
    println!("{}", torture.report);
    let report = &torture.report;
    assert!(report.violations.is_empty(), "{report}");
    assert!(report.kills > 0 && report.verdict.demanded > 0, "nothing was proved: {report}");
    assert!(report.faults.total() > 0, "nothing went wrong: {report}");
    let kinds = [
        "hand-off",
        "memory",
        "container",
        "one journal",
        "state folder copied",
        "taken over",
        "clock",
        "store put back",
        "store copied",
        "look at the past",
        "check",
        "journal",
    ];
    for kind in kinds {
        assert!(report.times_of_all(kind) > 0, "not met: {kind}: {report}");
    }
}

#[test]
fn a_planted_loss_is_seen() {
    let judged = Torture::new(Dice::seeded("torture").word()).plant_a_loss();
    assert!(judged.is_err(), "a lost journal passed for a kept one: {judged:?}");
}

#[test]
fn a_store_put_back_behind_the_judges_back_is_seen() {
    let judged = Torture::new(Dice::seeded("torture").word()).plant_a_store_put_back();
    assert!(judged.is_err(), "a store that was put back passed for what was stored: {judged:?}");
}

#[test]
fn bytes_of_another_history_are_seen() {
    let judged = Torture::new(Dice::seeded("torture").word()).plant_bytes_of_another_history();
    assert!(judged.is_err(), "bytes of another history passed for its own: {judged:?}");
}

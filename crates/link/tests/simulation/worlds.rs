//! Many stories, by seed: what must hold in each, and that all of them together had enough faults.

use std::fmt::Write;

use crate::story::{Outcome, Story};

fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match number("SAWMILL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..number("SAWMILL_SEEDS").unwrap_or(default) + 1,
    }
}

#[test]
fn no_write_is_lost_or_done_again_and_nothing_hangs_whatever_the_network_does() {
    let mut sum = Outcome::default();
    for seed in seeds(60) {
        sum.add(&Story::new(seed).run());
    }
    let mut totals = String::new();
    write!(totals, "{sum:?}").expect("a text takes everything");
    println!("{totals}");
    if std::env::var_os("SAWMILL_SEED").is_none() {
        assert!(
            sum.lost > 0 && sum.doubled > 0 && sum.damaged > 0,
            "the network was good: {totals}"
        );
        assert!(
            sum.restarts > 0 && sum.power_cuts > 0 && sum.reported_losses > 0,
            "no target died: {totals}"
        );
        assert!(sum.reconnections > 0, "no user reconnected: {totals}");
        assert!(sum.taken_over > 0 && sum.refused > 0, "no user was fenced: {totals}");
        assert!(sum.packed > 0 && sum.discards > 0, "nothing was packed or discarded: {totals}");
        assert!(sum.link_deaths > 0 && sum.partitions > 0, "no link died: {totals}");
    }
}

#[test]
fn a_seed_replays_the_same_run() {
    for seed in 1..9 {
        assert_eq!(Story::new(seed).run(), Story::new(seed).run(), "seed {seed}");
    }
}

//! A day of the world: a target's exports, users and disks go through load, faults and rest,
//! repeatedly; and the memory that both ends keep.
//!
//! Invariant: at each rest the ends have as many bytes as at the first rest, except for tables of
//! bounded size. Not here: the faults (`faults`), correctness (`oracle`).

use sawmill_sys::CountingAllocator;

use crate::story::{MS, Outcome, Story};
use crate::users::UserMix;

/// A target keeps answers to a few hellos; tables keep the capacity that they once needed.
const TABLES_BYTES_MAX: i64 = 32 << 10;
const DAY_S: u64 = 24 * 3600;
/// The operations, with faults, between two rests.
const OPERATIONS: u64 = 400;

/// Runs for this long. Returns what happened, the number of rests, and the largest difference
/// between the bytes kept at a rest and at the first one.
fn live(seed: u64, user_mix: UserMix, long_s: u64) -> (Outcome, u64, i64) {
    let mut story = Story::new(seed);
    story.user_mix = user_mix;
    story.grants_vary = false;
    story.begin();
    story.rest();
    let (first, mut rests, mut most) = (CountingAllocator::bytes_of_this_thread(), 0, 0);
    while story.now_ns() < long_s * 1000 * MS {
        story.run_load(OPERATIONS);
        story.rest();
        rests += 1;
        let growth_bytes = CountingAllocator::bytes_of_this_thread() - first;
        most = most.max(growth_bytes);
        if growth_bytes > TABLES_BYTES_MAX {
            story.fail(&format!(
                "after {rests} rests {growth_bytes} bytes more are kept than at first"
            ));
        }
    }
    (story.outcome(), rests, most)
}

const USER_MIXES: [UserMix; 4] =
    [UserMix::Alone, UserMix::Reader, UserMix::Writers, UserMix::Heirs];

#[test]
fn an_hour_of_load_and_faults_leaves_no_bytes_and_no_places_behind() {
    for (seed, user_mix) in USER_MIXES.into_iter().enumerate() {
        let (outcome, rests, most) = live(seed as u64 + 1, user_mix, 900);
        println!("{user_mix:?}: {rests} rests, {most} bytes more at most: {outcome:?}");
        assert!(rests > 1 && outcome.operations > OPERATIONS);
    }
}

#[test]
#[ignore = "minutes: cargo test --release -p sawmill-link --test simulation -- --ignored \
    --nocapture day"]
fn a_day_of_load_and_faults_leaves_no_bytes_and_no_places_behind() {
    for (seed, user_mix) in USER_MIXES.into_iter().enumerate() {
        let (outcome, rests, most) = live(seed as u64 + 11, user_mix, DAY_S / 4);
        println!("{user_mix:?}: {rests} rests, {most} bytes more at most: {outcome:?}");
    }
}

//! `sawmill wait` ends as soon as what it waits for is so, whatever the log's end is made of:
//! nothing, padding of a flush, or slots that a killed server never filled.

use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::on_each_store;
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::TestBed;

on_each_store!(
    waiting_for_nothing_returns_at_once,
    a_log_that_ends_in_padding_counts_as_stored,
    a_log_that_ends_in_slots_never_filled_counts_as_stored,
);

/// A wait that is not over in this time is not going to be.
const WAIT: [&str; 5] = ["wait", "disk", "--stored", "--timeout", "20s"];

fn waiting_for_nothing_returns_at_once(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "8M", &[]);
    let server = bed.serve("disk").start();
    let _ = bed.sawmill(&WAIT).ok();
    let _ = bed.sawmill(&["wait", "disk", "--logged", "--timeout", "20s"]).ok();
    let _ = server.stop().ok();
}

fn a_log_that_ends_in_padding_counts_as_stored(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "8M", &[]);
    let server = bed.serve("disk").start();
    let client = server.connect();
    client.write(0, &[1; 1000]).expect("accepted");
    let _ = bed.sawmill(&WAIT).ok();
    client.flush().expect("flushed");
    let _ = bed.sawmill(&WAIT).ok();
    client.flush().expect("flushed");
    let _ = bed.sawmill(&WAIT).ok();
    let _ = server.stop().ok();
}

fn a_log_that_ends_in_slots_never_filled_counts_as_stored(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "64M", &[]);
    // Long writes: many are in the middle of their payload when the server dies.
    let mix = Mix { depth: 24, sectors_max: 2048, ..Mix::default() };
    let mut load = Load::new(64 << 20, Dice::seeded("waiting"), mix);
    for _ in 0..5 {
        let server = bed.serve("disk").start();
        let clients = [server.connect(), server.connect(), server.connect()];
        let completions = 20 + load.dice.below(60);
        load.drive(&clients, completions, || server.kill());
        let server = bed.serve("disk").start();
        let _ = bed.sawmill(&WAIT).ok();
        let _ = server.stop().ok();
    }
}

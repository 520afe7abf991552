//! Two writers, real processes, one store: exactly one wins. The other's door fails, says why, and
//! nothing it wrote after the fence is ever visible.

use rustix::process::Signal;
use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, LoadCounts, Mix};
use sawmill_tests::machine::wait_for;
use sawmill_tests::nbd::{Client, Command, Failure};
use sawmill_tests::on_each_store;
use sawmill_tests::server::Server;
use sawmill_tests::stamp::{check_cut, check_nothing_accepted_lost};
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::TestBed;

on_each_store!(
    a_second_writer_fences_the_first,
    a_server_that_only_reads_and_flushes_is_fenced_too,
    a_frozen_writer_that_wakes_up_changes_nothing,
    a_fenced_journal_is_never_replayed,
    a_reader_beside_a_writer_does_not_disturb_it,
);

const VOLUME_BYTES: u64 = 8 << 20;
/// What a fenced serve ends with, by the table of exit codes.
const FENCED: i32 = 6;

fn place_with_disk(store: &StoreUnderTest) -> TestBed {
    let bed = TestBed::new(store);
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    bed
}

fn take_over(elsewhere: &TestBed) -> Server {
    elsewhere.serve("disk").with(&["--accept-journal-loss"]).start()
}

/// Keeps writing until the door fails.
fn write_until_refused(load: &mut Load, clients: &[Client]) -> LoadCounts {
    for _ in 0..500 {
        let counts = load.drive(clients, 200, || ());
        if counts.refused > 0 || counts.unanswered > 0 {
            return counts;
        }
    }
    panic!("100000 requests later the stale writer has not learned that it is fenced");
}

fn a_second_writer_fences_the_first(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    let first = bed.serve("disk").start();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("fencing"), Mix::default());
    let clients = [first.connect(), first.connect()];
    load.run(&clients, 1000);

    let elsewhere = bed.neighbor();
    let second = take_over(&elsewhere);
    let reader = second.connect();
    let at_takeover = reader.read_all().expect("the new writer reads");
    check_cut(&load.log, &at_takeover)
        .unwrap_or_else(|violation| panic!("at the takeover: {violation}"));

    let counts = write_until_refused(&mut load, &clients);
    println!("the first writer met the fence: {counts:?}");
    // From the fence on the door stays shut.
    assert!(clients[0].write(0, &[1; 512]).is_err());
    assert!(
        reader.read_all().expect("readable") == at_takeover,
        "the stale writer changed the volume"
    );
    let ended = first.stop();
    assert_eq!(ended.code, Some(FENCED), "{}", ended.stderr);
    assert!(ended.stderr.contains("fence"), "the log does not say it: {}", ended.stderr);

    reader.write(4096, &[7; 4096]).expect("the winner writes");
    let _ = second.stop().ok();
    let third = bed.neighbor();
    let third = third.serve("disk").start();
    let mut expected = at_takeover;
    expected[4096..8192].fill(7);
    assert!(
        third.connect().read_all().expect("readable") == expected,
        "the winner's state is another"
    );
}

fn a_server_that_only_reads_and_flushes_is_fenced_too(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    let first = bed.serve("disk").start();
    let client = first.connect();
    client.write(0, &[1; 4096]).expect("accepted");
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    let elsewhere = bed.neighbor();
    let second = take_over(&elsewhere);
    let winner = second.connect();
    winner.write(0, &[2; 4096]).expect("the winner writes");
    // It may go on for a moment, with what it has; but not forever.
    wait_for("a read is refused", || client.read(0, 4096).err());
    assert!(client.flush().is_err(), "a flush was answered after that");
    let ended = first.stop();
    assert_eq!(ended.code, Some(FENCED), "{}", ended.stderr);
    assert_eq!(winner.read(0, 4096), Ok(vec![2; 4096]));
    let _ = second.stop().ok();
}

fn a_frozen_writer_that_wakes_up_changes_nothing(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    let first = bed.serve("disk").start();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("fencing"), Mix::default());
    let clients = [first.connect()];
    load.run(&clients, 500);
    first.signal(Signal::STOP);
    // These lie in the frozen writer's socket until it wakes up; few enough for the socket to hold.
    let stale: Vec<_> = (0..16_u64)
        .map(|n| {
            clients[0].submit(&Command::Write {
                offset: n * 8192,
                bytes: vec![0xee; 4096],
                fua: false,
            })
        })
        .collect();

    let elsewhere = bed.neighbor();
    let second = take_over(&elsewhere);
    let reader = second.connect();
    let mut image = reader.read_all().expect("the new writer reads");
    check_cut(&load.log, &image).unwrap_or_else(|violation| panic!("at the takeover: {violation}"));
    for n in 0..64_u64 {
        reader.write(n * 4096, &[n as u8; 4096]).expect("the winner writes");
        image[(n * 4096) as usize..][..4096].fill(n as u8);
    }
    reader.flush().expect("the winner flushes");

    first.signal(Signal::CONT);
    // Accepted by a process that does not know yet, or refused: both are honest. What counts is the
    // store.
    let accepted = stale.into_iter().map(|pending| pending.wait()).filter(Result::is_ok).count();
    println!("{accepted} of 16 stale writes were accepted before the fence was met");
    write_until_refused(&mut load, &clients);
    assert!(reader.read_all().expect("readable") == image, "the woken writer changed the volume");
    assert_eq!(first.stop().code, Some(FENCED));
    let _ = second.stop().ok();
    let third = bed.neighbor();
    let third = third.serve("disk").start();
    assert!(third.connect().read_all().expect("readable") == image, "something stale came back");
    let _ = third.stop().ok();
    let _ = bed.sawmill(&["check", "disk"]).ok();
}

fn a_fenced_journal_is_never_replayed(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    let first = bed.serve("disk").start();
    first.connect().write(0, &[0xaa; 4096]).expect("accepted");
    first.kill();
    let elsewhere = bed.neighbor();
    let second = take_over(&elsewhere);
    second.connect().write(4096, &[0xbb; 4096]).expect("accepted");
    let _ = second.stop().ok();

    // The first machine comes back with a journal of an older epoch, in which there is an unstored
    // write.
    let journals = bed.journals();
    let before: Vec<Vec<u8>> =
        journals.iter().map(|path| std::fs::read(path).expect("a journal")).collect();
    assert!(!before.is_empty(), "the first machine kept a journal");
    let Err(refusal) = bed.serve("disk").attempt() else {
        panic!("a journal of an older epoch was taken without a word");
    };
    let age = "as it is in the store (last stored 20";
    refusal.refused(5, &["journal", "--accept-journal-loss", age, " ago)"]);
    for (path, before) in journals.iter().zip(&before) {
        assert!(
            std::fs::read(path).expect("still there") == *before,
            "the refusal changed {}",
            path.display()
        );
    }
    let server = take_over(&bed);
    let image = server.connect().read_all().expect("readable");
    assert!(image[..4096].iter().all(|&byte| byte == 0), "a write of the older epoch was replayed");
    assert!(image[4096..8192].iter().all(|&byte| byte == 0xbb), "the newer epoch's write is gone");
}

fn a_reader_beside_a_writer_does_not_disturb_it(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    let writer = bed.serve("disk").start();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("fencing"), Mix::default());
    let clients = [writer.connect()];
    load.run(&clients, 400);
    let elsewhere = bed.neighbor();
    for _ in 0..5 {
        let reader = elsewhere.serve("disk").with(&["--read-only"]).start();
        let client = reader.connect();
        let image = client.read_all().expect("a reader reads");
        check_cut(&load.log, &image)
            .unwrap_or_else(|violation| panic!("a reader sees no cut: {violation}"));
        assert_eq!(client.write(0, &[1; 512]), Err(Failure::Errno(1)), "writing is not permitted");
        load.run(&clients, 200);
        let _ = reader.stop().ok();
    }
    let all = clients[0].read_all().expect("the writer reads");
    check_nothing_accepted_lost(&load.log, &all).unwrap_or_else(|violation| panic!("{violation}"));
    let _ = writer.stop().ok();
    // Once everything is stored, a reader sees it all.
    let reader = wait_for("a reader attaches", || {
        elsewhere.serve("disk").with(&["--read-only"]).attempt().ok()
    });
    assert!(
        reader.connect().read_all().expect("a reader reads") == all,
        "stored writes are not seen"
    );
}

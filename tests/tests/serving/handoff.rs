//! A server replaced under its users: connections stay, nothing accepted is lost, and whatever the
//! new process does or does not, the old one goes on.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::nbd::{Client, Command};
use sawmill_tests::on_each_store;
use sawmill_tests::server::Server;
use sawmill_tests::stamp::check_nothing_accepted_lost;
use sawmill_tests::store::{self, Minio, StoreUnderTest};
use sawmill_tests::successor::impostor;
use sawmill_tests::test_bed::TestBed;

on_each_store!(
    a_server_is_replaced_again_and_again_under_load,
    what_a_failed_successor_left_behind_disturbs_no_hand_off,
);

const VOLUME_BYTES: u64 = 16 << 20;
/// How a successor begins to speak.
const HELLO: &str = "send(word='hello', conversation=1, version='9.9')\n";

fn served(bed: &TestBed) -> (Server, Vec<Client>, Load) {
    bed.create("disk", "16M", &["--segment-bytes", "256K"]);
    let server = bed.serve("disk").start();
    let clients = vec![server.connect(), server.connect()];
    let load = Load::new(VOLUME_BYTES, Dice::seeded("handoff"), Mix::default());
    (server, clients, load)
}

fn check_nothing_lost(load: &Load, client: &Client) {
    let image = client.read_all().expect("readable through the same connection");
    check_nothing_accepted_lost(&load.log, &image)
        .unwrap_or_else(|violation| panic!("{violation}"));
}

fn a_server_is_replaced_again_and_again_under_load(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    let (mut server, clients, mut load) = served(&bed);
    let mut pids = vec![server.pid()];
    for _ in 0..3 {
        let counts = load.drive(&clients, 400, || drop(server.hand_off(&bed, "disk")));
        assert_eq!((counts.refused, counts.unanswered), (0, 0), "a hand-off was felt: {counts:?}");
        pids.push(server.pid());
    }
    pids.dedup();
    assert_eq!(pids.len(), 4, "each time another process serves");
    check_nothing_lost(&load, &clients[0]);
    // New clients come in by the same door, and what happens next is as if nothing had been.
    let newcomer = server.connect();
    load.run(&[newcomer], 200);
    let accepted = load.log.clone();
    server.kill();
    let server = bed.serve("disk").start();
    let image = server.connect().read_all().expect("readable after a crash of a successor");
    check_nothing_accepted_lost(&accepted, &image)
        .unwrap_or_else(|violation| panic!("{violation}"));
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// Where memory for the next staging file of the one volume here is preallocated.
fn spare_of(bed: &TestBed) -> PathBuf {
    let names = std::fs::read_dir(bed.memory()).expect("the folder in memory").flatten();
    let mut names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let staging = names.find(|name| name.ends_with(".staging")).expect("a staging file");
    let (volume, _) = staging.rsplit_once('-').expect("volume and journal");
    bed.memory().join(format!("{volume}.spare"))
}

/// Refused with `code` and these words, and felt by nobody.
fn refused_unfelt(
    bed: &TestBed,
    load: &mut Load,
    clients: &[Client],
    binary: &Path,
    options: &[&str],
    refusal: &Refusal,
) {
    let binary = binary.display().to_string();
    let mut line = vec!["handoff", "disk", "--binary", &binary];
    line.extend(options);
    let counts =
        load.drive(clients, 200, || bed.sawmill(&line).refused(refusal.code, refusal.words));
    assert_eq!((counts.refused, counts.unanswered), (0, 0), "{binary} was felt: {counts:?}");
    check_nothing_lost(load, &clients[0]);
}

/// A successor that fails: what it does, how long it may, and what the refusal says.
struct FailingSuccessor {
    lines: String,
    options: &'static [&'static str],
    refusal: Refusal,
}

/// The exit code of a refusal, and what its text must say.
struct Refusal {
    code: i32,
    words: &'static [&'static str],
}

fn failing(lines: &str, refusal: Refusal) -> FailingSuccessor {
    FailingSuccessor { lines: lines.to_owned(), options: &[], refusal }
}

fn refusal(code: i32, words: &'static [&'static str]) -> Refusal {
    Refusal { code, words }
}

/// Successors that fail at each step of the conversation.
fn failing_successors(ready: &str) -> Vec<FailingSuccessor> {
    let script = format!("{ready}receive()\nreceive()\n");
    vec![
        failing("sys.exit(1)\n", refusal(7, &["still serves", "did not get ready"])),
        FailingSuccessor {
            options: &["--timeout", "500ms"],
            ..failing("signal.pause()\n", refusal(7, &["still serves", "in time"]))
        },
        failing("s.sendall(b'x' * 64)\n", refusal(7, &["still serves", "invalid message"])),
        failing(
            "send(word='hello', conversation=2, version='9.9')\n",
            refusal(5, &["9.9", "version 2", "stop this"]),
        ),
        failing("send(word='dance')\n", refusal(7, &["still serves", "invalid message"])),
        failing(
            // What an older program says of a volume that a newer one has written.
            &format!(
                "{HELLO}send(word='failed', text='checkpoint 7 has format version 9', exit=9)\n"
            ),
            refusal(9, &["still serves", "format version 9"]),
        ),
        failing(HELLO, refusal(7, &["still serves"])),
        failing(ready, refusal(7, &["still serves"])),
        failing(&script, refusal(7, &["still serves"])),
        FailingSuccessor {
            options: &["--stall-max", "300ms"],
            ..failing(
                &format!("{script}signal.pause()\n"),
                refusal(7, &["still serves", "in time"]),
            )
        },
        failing(
            &format!("{script}send(word='serving', lost_doors=[])\nsignal.pause()\n"),
            refusal(7, &["out of turn"]),
        ),
    ]
}

fn what_a_failed_successor_left_behind_disturbs_no_hand_off(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    let (mut server, clients, mut load) = served(&bed);
    let ready = format!("{HELLO}send(word='prepared')\n");
    let mut refused = |binary: &Path, options: &[&str], refusal: &Refusal| {
        refused_unfelt(&bed, &mut load, &clients, binary, options, refusal);
    };
    for FailingSuccessor { lines, options, refusal } in failing_successors(&ready) {
        println!("-- {lines}");
        refused(&impostor(&bed, &lines), options, &refusal);
    }
    refused(&bed.path("nowhere"), &[], &refusal(3, &["cannot start"]));
    refused(Path::new("/bin/false"), &[], &refusal(7, &["did not get ready"]));
    let spare = spare_of(&bed);
    std::fs::write(&spare, "preallocated by a process that got ready and no further")
        .expect("a file in memory");
    refused(&impostor(&bed, &ready), &[], &refusal(7, &["still serves"]));
    assert!(!spare.exists(), "memory that no process will use");
    // After all that, one that can.
    let counts = load.drive(&clients, 200, || drop(server.hand_off(&bed, "disk")));
    assert_eq!((counts.refused, counts.unanswered), (0, 0), "a hand-off was felt: {counts:?}");
    check_nothing_lost(&load, &clients[0]);
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let _ = bed.sawmill(&["check", "disk"]).ok();
}

#[test]
fn of_two_hand_offs_at_once_one_is_refused() {
    let bed = TestBed::new(&store::folder());
    let (mut server, clients, mut load) = served(&bed);
    let slow = impostor(&bed, "signal.pause()\n").display().to_string();
    let counts = load.drive(&clients, 200, || {
        std::thread::scope(|scope| {
            let first = scope
                .spawn(|| bed.sawmill(&["handoff", "disk", "--binary", &slow, "--timeout", "3s"]));
            // Until the first is at it, this one would simply be the first.
            sawmill_tests::machine::wait_for("the first hand-off starts its program", || {
                server.stderr().contains("handing off").then_some(())
            });
            bed.sawmill(&["handoff", "disk"]).refused(11, &["another hand-off is in progress"]);
            first.join().expect("no panic").refused(7, &["still serves"]);
        });
    });
    assert_eq!((counts.refused, counts.unanswered), (0, 0), "{counts:?}");
    server.hand_off(&bed, "disk");
    check_nothing_lost(&load, &clients[0]);
}

#[test]
fn a_full_journal_refuses_a_hand_off_and_nothing_is_lost() {
    let minio = std::sync::Arc::new(Minio::start());
    let bed = TestBed::new(&StoreUnderTest::Minio(std::sync::Arc::clone(&minio)));
    bed.create("disk", "64M", &["--segment-bytes", "256K"]);
    let server =
        bed.serve("disk").with(&["--journal-bytes", "16M", "--admin", "127.0.0.1:0"]).start();
    let mut server = server;
    let client = server.connect();
    minio.pause();
    let pending_replies: Vec<_> = (0..512_u64)
        .map(|n| {
            client.submit(&Command::Write {
                offset: n << 16,
                bytes: vec![n as u8; 64 << 10],
                fua: false,
            })
        })
        .collect();
    server.wait_for("a full journal makes writes wait", |status| {
        sawmill_tests::test_bed::field(status, "stalled_requests")
            .is_some_and(|n| n.as_u64() > Some(0))
    });
    // The new process cannot even read the volume.
    bed.sawmill(&["handoff", "disk", "--timeout", "2s"]).refused(7, &["still serves"]);
    // One that is ready in no time meets requests that cannot be answered.
    let ready = impostor(
        &bed,
        "send(word='hello', conversation=1, version='9')\nsend(word='prepared')\nreceive()\n",
    );
    let ready = ready.display().to_string();
    let refused = bed.sawmill(&["handoff", "disk", "--binary", &ready, "--stall-max", "1s"]);
    refused.refused(7, &["still serves"]);
    minio.resume();
    for (n, pending) in pending_replies.into_iter().enumerate() {
        pending
            .wait()
            .unwrap_or_else(|failure| panic!("write {n} failed instead of waiting: {failure}"));
    }
    server.hand_off(&bed, "disk");
    let image = client.read_all().expect("readable");
    for (n, block) in image.chunks(64 << 10).take(512).enumerate() {
        assert!(block.iter().all(|&byte| byte == n as u8), "block {n} is lost");
    }
}

#[test]
fn several_volumes_a_dashboard_and_readers_move_together() {
    let bed = TestBed::new(&store::folder());
    for name in ["oak", "ash"] {
        bed.create(name, "8M", &[]);
    }
    let mut server = bed.serve("oak").and("ash").with(&["--admin", "127.0.0.1:0"]).start();
    let clients: Vec<Client> = (0..2)
        .map(|n| {
            Client::connect(&server.uri_of(n), sawmill_tests::nbd::Style::Extended)
                .expect("connects")
        })
        .collect();
    for (n, client) in clients.iter().enumerate() {
        client.write(4096, &[n as u8 + 1; 512]).expect("accepted");
    }
    let admin = server.ready()["admin"].clone();
    server.hand_off(&bed, "ash");
    assert_eq!(server.ready()["admin"], admin, "the dashboard is where it was");
    assert_eq!(server.status()["pid"], server.pid());
    for (n, client) in clients.iter().enumerate() {
        assert_eq!(client.read(4096, 512), Ok(vec![n as u8 + 1; 512]));
    }
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);

    let mut reader = bed.serve("oak").with(&["--read-only"]).start();
    let client = reader.connect();
    reader.hand_off(&bed, "oak");
    assert_eq!(client.read(4096, 512), Ok(vec![1; 512]));
}

#[test]
fn a_signal_to_a_server_that_hands_over_is_for_the_server() {
    let bed = TestBed::new(&store::folder());
    let (server, clients, mut load) = served(&bed);
    let slow = impostor(&bed, "signal.pause()\n").display().to_string();
    load.run(&clients, 100);
    std::thread::scope(|scope| {
        let hand_off_thread =
            scope.spawn(|| bed.sawmill(&["handoff", "disk", "--binary", &slow, "--timeout", "1s"]));
        sawmill_tests::machine::wait_for("the hand-off starts", || {
            server.stderr().contains("handing off").then_some(())
        });
        server.signal(Signal::TERM);
        hand_off_thread.join().expect("no panic").refused(7, &["still serves"]);
    });
    let ended = server.finished();
    assert_eq!(ended.code, Some(0), "it stops in order afterwards: {}", ended.stderr);
    assert!(ended.stdout.contains(r#""event":"stopped""#), "{}", ended.stdout);
}

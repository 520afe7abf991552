//! In the middle of a hand-off, when no process has the volumes: failures, requests and
//! notifications there.

use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;

use rustix::process::Signal;
use sawmill_tests::machine::wait_for;
use sawmill_tests::nbd::{Client, Command, Failure, Style};
use sawmill_tests::proxy::{Fault, Proxy, Rule, Verb};
use sawmill_tests::server::Server;
use sawmill_tests::store;
use sawmill_tests::successor::{TAKES_ALL, impostor, reached, real_after};
use sawmill_tests::test_bed::TestBed;

/// `oak` and `ash`, served by one process, and a client of each with 512 bytes of 1 and 2 written
/// at 4096.
fn two_volumes(bed: &TestBed) -> (Server, Client, Client) {
    for name in ["oak", "ash"] {
        bed.create(name, "8M", &[]);
    }
    let server = bed.serve("oak").and("ash").with(&["--admin", "127.0.0.1:0"]).start();
    let connect = |n| Client::connect(&server.uri_of(n), Style::Extended).expect("connects");
    let (oak, ash) = (connect(0), connect(1));
    oak.write(4096, &[1; 512]).expect("accepted");
    ash.write(4096, &[2; 512]).expect("accepted");
    (server, oak, ash)
}

fn health(bed: &TestBed, volume: &str) -> (String, String) {
    let info = bed.info(volume);
    let health = sawmill_tests::test_bed::field(&info, "health")
        .expect("a volume that is served has a health");
    let text = |name: &str| health[name].as_str().unwrap_or_default().to_owned();
    (text("state"), text("reason"))
}

fn journal_of(bed: &TestBed, volume: &str) -> PathBuf {
    let info = bed.info(volume);
    let path = sawmill_tests::test_bed::field(&info, "journal_path").and_then(|path| path.as_str());
    PathBuf::from(path.expect("a volume that is served for writing has a journal"))
}

fn hand_off_to(
    bed: &TestBed,
    volume: &str,
    program: &std::path::Path,
) -> sawmill_tests::test_bed::CommandOutput {
    bed.sawmill(&["handoff", volume, "--binary", &program.display().to_string(), "--json"])
}

/// Takes everything, takes the lock of a journal, and dies. The lock is held by an orphan until the
/// test lets that go on.
fn leaves_a_lock(journal: &std::path::Path) -> String {
    format!(
        "{TAKES_ALL}
import fcntl
locked, lock_taken = os.pipe()
if os.fork() == 0:
    s.close()
    [os.close(n) for n in (0, 1, 2)]
    lock = open('{}.lock', 'r+')
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock_taken, b'!')
    hold('lock')
    os._exit(0)
os.read(locked, 1)
",
        journal.display()
    )
}

#[test]
fn a_volume_that_cannot_be_opened_again_is_given_up_and_the_others_go_on() {
    let bed = TestBed::new(&store::folder());
    let (mut server, oak, ash) = two_volumes(&bed);
    let journal = journal_of(&bed, "ash");
    let (path, aside) = (journal.display(), bed.path("aside"));
    let thief = impostor(&bed, &format!("{TAKES_ALL}os.rename('{path}', '{}')", aside.display()));
    hand_off_to(&bed, "oak", &thief)
        .refused(7, &["still serves", "volume ash", "there is no journal"]);
    oak.write(0, &[3; 512]).expect("accepted: nothing is wrong with this one");
    assert_eq!(oak.read(4096, 512), Ok(vec![1; 512]));
    assert!(
        matches!(ash.read(4096, 512), Err(Failure::Errno(_))),
        "given up, and its users get an error"
    );
    let (state, why) = health(&bed, "ash");
    assert!(state == "closed" && why.contains("no journal"), "{state}: {why}");
    bed.sawmill(&["wait", "ash", "--stored"]).refused(7, &["ash", "rolled back and reopen failed"]);
    bed.sawmill(&["snapshot", "create", "ash", "now"])
        .refused(7, &["rolled back and reopen failed"]);
    let socket = format!("unix:{}", bed.path("second.sock").display());
    bed.sawmill(&["door", "add", "ash", "--nbd", &socket])
        .refused(7, &["rolled back and reopen failed"]);
    // A second hand-off that fails takes nothing more from anybody.
    hand_off_to(&bed, "oak", &impostor(&bed, TAKES_ALL))
        .refused(7, &["still serves", "volume ash"]);
    assert!(
        matches!(ash.read(4096, 512), Err(Failure::Errno(_))),
        "errors as before, and no silence"
    );
    // Mended, it comes back under the users it had.
    std::fs::rename(&aside, &journal).expect("a rename");
    server.hand_off(&bed, "oak");
    assert_eq!(ash.read(4096, 512), Ok(vec![2; 512]));
    assert_eq!(oak.read(0, 512), Ok(vec![3; 512]));
    assert_eq!(health(&bed, "ash").0, "serving");
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn users_of_a_volume_that_may_come_back_wait_while_the_others_go_on() {
    let bed = TestBed::new(&store::folder());
    let (server, oak, ash) = two_volumes(&bed);
    let program = impostor(&bed, &leaves_a_lock(&journal_of(&bed, "ash")));
    hand_off_to(&bed, "oak", &program)
        .refused(7, &["still serves", "volume ash", "reopen failed, retrying"]);
    let held = reached(&bed, "lock");
    let waiting = ash.submit(&Command::Read { offset: 4096, length: 512 });
    oak.write(0, &[3; 512]).expect("accepted: nothing is wrong with this one");
    assert_eq!(ash.in_flight(), 1, "neither answered nor failed");
    assert_eq!(health(&bed, "ash").0, "closed");
    held.resume();
    assert_eq!(waiting.wait().map(|reply| reply.bytes), Ok(vec![2; 512]));
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn a_store_that_hangs_holds_up_neither_the_other_volumes_nor_a_signal() {
    let proxy = Proxy::before(store::shared_minio());
    let bed = TestBed::new(&proxy.store());
    ["ash", "oak"].iter().for_each(|name| bed.create(name, "8M", &[]));
    let server = bed.serve("ash").and("oak").with(&["--admin", "127.0.0.1:0"]).start();
    let connect = |n| Client::connect(&server.uri_of(n), Style::Extended).expect("connects");
    let (ash, oak) = (connect(0), connect(1));
    ash.write(4096, &[2; 512]).expect("accepted");
    // Whoever asks for the name of `ash` from now on waits forever.
    proxy.rule(Rule::every(Verb::Get, "names/ash/", Fault::Held));
    let program = impostor(&bed, TAKES_ALL);
    hand_off_to(&bed, "oak", &program)
        .refused(7, &["still serves", "volume ash", "has not answered yet"]);
    let waiting = ash.submit(&Command::Read { offset: 4096, length: 512 });
    oak.write(0, &[3; 512]).expect("accepted: nothing is wrong with this one");
    assert_eq!(ash.in_flight(), 1, "neither answered nor failed");
    let ended = server.stop();
    assert_eq!(ended.code, Some(1), "not everything is stored: {}", ended.stderr);
    assert_eq!(waiting.wait().err(), Some(Failure::Gone), "as when the server is killed: no error");
}

#[test]
fn a_signal_while_a_volume_is_away_ends_the_server_and_loses_nothing() {
    let bed = TestBed::new(&store::folder());
    let (server, oak, ash) = two_volumes(&bed);
    let program = impostor(&bed, &leaves_a_lock(&journal_of(&bed, "ash")));
    hand_off_to(&bed, "oak", &program).refused(7, &["still serves", "volume ash"]);
    let held = reached(&bed, "lock");
    let waiting = ash.submit(&Command::Read { offset: 4096, length: 512 });
    oak.write(0, &[3; 512]).expect("accepted");
    let ended = server.stop();
    assert_eq!(ended.code, Some(1), "not everything is stored: {}", ended.stderr);
    assert_eq!(waiting.wait().err(), Some(Failure::Gone), "as when the server is killed: no error");
    assert!(ended.stderr.contains("ash") && ended.stderr.contains("in use"), "{}", ended.stderr);
    let stored = |name: &str, yes: bool| {
        ended.stdout.lines().any(|line| {
            line.contains(r#""event":"stopped""#)
                && line.contains(&format!(r#""volume":"{name}""#))
                && line.contains(&format!(r#""everything_stored":{yes}"#))
        })
    };
    assert!(stored("oak", true) && stored("ash", false), "{}", ended.stdout);
    held.resume();
    let server = wait_for("the lock is free", || bed.serve("oak").and("ash").attempt().ok());
    let read = |n, at| {
        Client::connect(&server.uri_of(n), Style::Extended).expect("connects").read(at, 512)
    };
    assert_eq!((read(0, 0), read(1, 4096)), (Ok(vec![3; 512]), Ok(vec![2; 512])));
}

#[test]
fn a_signal_while_all_volumes_are_away_ends_the_server_in_order() {
    let bed = TestBed::new(&store::folder());
    let (server, oak, _ash) = two_volumes(&bed);
    let program = impostor(&bed, &format!("{TAKES_ALL}hold('switch')"));
    let waiting = std::thread::scope(|scope| {
        let hand_off_thread = scope.spawn(|| hand_off_to(&bed, "oak", &program));
        let held = reached(&bed, "switch");
        server.signal(Signal::TERM);
        let waiting = oak.submit(&Command::Write { offset: 0, bytes: vec![3; 512], fua: false });
        held.resume();
        hand_off_thread.join().expect("no panic").refused(7, &["still serves"]);
        waiting
    });
    let ended = server.finished();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.matches(r#""everything_stored":true"#).count(), 2, "{}", ended.stdout);
    let was_accepted = waiting.wait().is_ok();
    let server = bed.serve("oak").and("ash").start();
    let read = |n, at| {
        Client::connect(&server.uri_of(n), Style::Extended).expect("connects").read(at, 512)
    };
    assert_eq!((read(0, 4096), read(1, 4096)), (Ok(vec![1; 512]), Ok(vec![2; 512])));
    assert!(!was_accepted || read(0, 0) == Ok(vec![3; 512]), "an answered write is lost");
}

#[test]
fn a_signal_during_a_hand_off_that_succeeds_is_for_the_new_server() {
    let bed = TestBed::new(&store::folder());
    let (mut server, _oak, _ash) = two_volumes(&bed);
    let program = real_after(&bed, "hold start");
    let outcome = std::thread::scope(|scope| {
        let hand_off_thread = scope.spawn(|| hand_off_to(&bed, "oak", &program));
        let held = reached(&bed, "start");
        server.signal(Signal::TERM);
        held.resume();
        hand_off_thread.join().expect("no panic").json()
    });
    server.follow(&outcome);
    let ended = server.finished();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout.matches(r#""everything_stored":true"#).count(), 2, "{}", ended.stdout);
}

#[test]
fn a_request_to_collect_garbage_during_a_hand_off_is_carried_out_by_the_serving_process() {
    let bed = TestBed::new(&store::folder());
    let (mut server, _oak, _ash) = two_volumes(&bed);
    let collected = |server: &Server| server.stderr().matches("collected: ").count();
    let hand_off_during = |server: &Server, program: &std::path::Path, hold: &str| {
        std::thread::scope(|scope| {
            let hand_off_thread = scope.spawn(|| hand_off_to(&bed, "oak", program));
            let held = reached(&bed, hold);
            server.signal(Signal::USR1);
            held.resume();
            hand_off_thread.join().expect("no panic")
        })
    };
    let stuck = impostor(&bed, &format!("{TAKES_ALL}hold('switch')"));
    hand_off_during(&server, &stuck, "switch").refused(7, &["still serves"]);
    wait_for("the old process collects both", || (collected(&server) == 2).then_some(()));
    let slow = real_after(&bed, "hold start");
    let outcome = hand_off_during(&server, &slow, "start").json();
    server.follow(&outcome);
    wait_for("the new process collects both", || (collected(&server) == 4).then_some(()));
    assert_eq!(server.stop().code, Some(0));
}

/// A client that has sent half of a write; `finish` sends the other half and waits for the answer.
struct PartialWrite(UnixStream);

impl PartialWrite {
    const BYTES: usize = 4 << 20;

    fn send(socket: &std::path::Path, export: &str) -> Self {
        let mut stream = UnixStream::connect(socket).expect("the door is open");
        stream.read_exact(&mut [0; 18]).expect("a greeting");
        let mut message = 3_u32.to_be_bytes().to_vec();
        message.extend(*b"IHAVEOPT");
        message.extend(1_u32.to_be_bytes());
        message.extend(u32::try_from(export.len()).expect("short").to_be_bytes());
        message.extend(export.as_bytes());
        stream.write_all(&message).expect("said");
        stream.read_exact(&mut [0; 10]).expect("size and flags");
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0, 0, 0, 1]);
        request.extend([7; 8]);
        request.extend(0_u64.to_be_bytes());
        request.extend(u32::try_from(Self::BYTES).expect("short").to_be_bytes());
        stream.write_all(&request).expect("asked");
        stream.write_all(&vec![9; Self::BYTES / 2]).expect("the server reads");
        PartialWrite(stream)
    }

    fn finish(mut self) {
        self.0.write_all(&vec![9; Self::BYTES / 2]).expect("the server reads on");
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).expect("an answer");
        assert_eq!(reply[4..8], [0; 4], "the write failed");
    }
}

#[test]
fn a_successor_that_reads_nothing_is_given_up_after_the_stall() {
    let bed = TestBed::new(&store::folder());
    let (mut server, oak, _ash) = two_volumes(&bed);
    // More than a socket holds goes over with this connection.
    let half = PartialWrite::send(&bed.path("nbd.sock"), "oak");
    let deaf = impostor(
        &bed,
        "send(word='hello', conversation=1, version='9.9')\nsend(word='prepared')\nsignal.pause()",
    );
    let deaf = deaf.display().to_string();
    let refused = bed.sawmill(&["handoff", "oak", "--binary", &deaf, "--stall-max", "500ms"]);
    refused.refused(7, &["still serves", "could not be sent", "in time"]);
    half.finish();
    assert_eq!(oak.read(0, 512), Ok(vec![9; 512]));
    let half = PartialWrite::send(&bed.path("nbd.sock"), "oak");
    server.hand_off(&bed, "oak");
    half.finish();
}

#[test]
fn a_successor_that_dies_with_everything_is_as_a_killed_server() {
    let bed = TestBed::new(&store::folder());
    let (server, _oak, _ash) = two_volumes(&bed);
    let dies = impostor(&bed, &format!("{TAKES_ALL}send(word='opened')\nreceive()"));
    hand_off_to(&bed, "oak", &dies).refused(7, &["did not report", "start a server"]);
    let ended = server.finished();
    assert_eq!(ended.code, Some(7), "the service manager starts another: {}", ended.stderr);
    let server = bed.serve("oak").and("ash").start();
    let read =
        |n| Client::connect(&server.uri_of(n), Style::Extended).expect("connects").read(4096, 512);
    assert_eq!((read(0), read(1)), (Ok(vec![1; 512]), Ok(vec![2; 512])));
}

#[test]
fn a_loss_that_was_accepted_once_is_not_accepted_in_a_hand_off() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    bed.serve("disk").start().kill();
    bed.lose_state();
    let mut server = bed.serve("disk").with(&["--accept-journal-loss"]).start();
    let client = server.connect();
    client.write(4096, &[1; 512]).expect("accepted");
    let journal = journal_of(&bed, "disk");
    let aside = bed.path("aside");
    let thief = real_after(&bed, &format!("mv '{}' '{}'", journal.display(), aside.display()));
    // Neither by the new process nor by the old one, when it opens the volume again.
    hand_off_to(&bed, "disk", &thief)
        .refused(5, &["still serves", "there is no journal", "volume disk"]);
    assert!(
        matches!(client.read(4096, 512), Err(Failure::Errno(_))),
        "a state of the past is never served"
    );
    std::fs::rename(&aside, &journal).expect("a rename");
    server.hand_off(&bed, "disk");
    assert_eq!(client.read(4096, 512), Ok(vec![1; 512]));
}

#[test]
fn doors_that_are_asked_for_during_a_hand_off_are_refused_or_wait() {
    let bed = TestBed::new(&store::folder());
    let (mut server, oak, _ash) = two_volumes(&bed);
    let socket = |name: &str| format!("unix:{}", bed.path(name).display());
    let add = |name: &str| bed.sawmill(&["door", "add", "oak", "--nbd", &socket(name)]);
    let remove = |uri: &str| bed.sawmill(&["door", "remove", "oak", uri]);
    let connect = |uri: &str| Client::connect(uri, Style::Structured);
    let first = add("first.sock").ok().trim().to_owned();
    let second = add("second.sock").ok().trim().to_owned();
    // While the new process gets ready.
    let slow = real_after(&bed, "hold start");
    let outcome = std::thread::scope(|scope| {
        let hand_off_thread = scope.spawn(|| hand_off_to(&bed, "oak", &slow));
        let held = reached(&bed, "start");
        add("third.sock").refused(11, &["a hand-off is in progress"]);
        let _ = remove(&first).ok();
        held.resume();
        hand_off_thread.join().expect("no panic").json()
    });
    server.follow(&outcome);
    assert!(
        connect(&first).is_err() && connect(&second).is_ok(),
        "the new process has what is left"
    );
    // While nobody has the volumes.
    let stuck = impostor(&bed, &format!("{TAKES_ALL}hold('switch')"));
    let third = std::thread::scope(|scope| {
        let hand_off_thread = scope.spawn(|| hand_off_to(&bed, "oak", &stuck));
        let held = reached(&bed, "switch");
        let status = server.status();
        assert_eq!(status["handing_over"], true, "{status}");
        assert_eq!(status["volumes"], serde_json::json!([]), "{status}");
        let added = scope.spawn(|| add("third.sock"));
        let removed = scope.spawn(|| remove(&second));
        let info = scope.spawn(|| health(&bed, "oak"));
        held.resume();
        hand_off_thread.join().expect("no panic").refused(7, &["still serves"]);
        let added = added.join().expect("no panic");
        let _ = removed.join().expect("no panic").ok();
        assert_eq!(info.join().expect("no panic").0, "serving");
        // It waits for the end of the switch; what it meets then may still be the end of the
        // hand-off.
        if added.code == Some(0) {
            added.ok()
        } else {
            wait_for("it is over", || add("third.sock").into_ok())
        }
    });
    assert!(connect(&second).is_err() && connect(third.trim()).is_ok());
    assert_eq!(oak.read(4096, 512), Ok(vec![1; 512]));
}

#[test]
fn the_service_manager_is_notified_when_a_new_process_serves_before_the_old_one_ends() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let address = bed.path("notify");
    let manager = UnixDatagram::bind(&address).expect("a socket");
    let notification = || {
        let mut message = [0; 256];
        let length = manager.recv(&mut message).expect("a notification");
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    let notify = address.display().to_string();
    let with = ["--admin", "127.0.0.1:0"];
    let mut server = bed.serve("disk").with(&with).env("NOTIFY_SOCKET", &notify).start();
    assert_eq!(notification(), "READY=1\n");
    let client = server.connect();
    let old = server.pid();
    // A hand-off that is taken back is nothing to tell of.
    hand_off_to(&bed, "disk", &impostor(&bed, TAKES_ALL)).refused(7, &["still serves"]);
    manager.set_nonblocking(true).expect("our own socket");
    assert!(manager.recv(&mut [0; 256]).is_err(), "a notification was sent");
    manager.set_nonblocking(false).expect("our own socket");
    // A manager that is busy: nobody can tell it anything.
    let busy = UnixDatagram::unbound().expect("a socket");
    busy.set_nonblocking(true).expect("our own socket");
    let mut fillers = 0;
    while busy.send_to(b"filler", &address).is_ok() {
        fillers += 1;
    }
    let outcome = std::thread::scope(|scope| {
        let hand_off_thread = scope.spawn(|| bed.sawmill(&["handoff", "disk", "--json"]));
        let status = server.wait_for("the new process answers", |status| status["pid"] != old);
        assert_eq!(client.write(0, &[1; 512]), Ok(()), "users are served meanwhile");
        assert!(server.is_running(), "the old process waits until the manager knows");
        (0..fillers).for_each(|_| assert_eq!(notification(), "filler"));
        assert_eq!(notification(), format!("MAINPID={}\n", status["pid"]));
        hand_off_thread.join().expect("no panic").json()
    });
    server.follow(&outcome);
    assert_eq!(notification(), "READY=1\n");
}

#[test]
fn sockets_of_readers_go_with_their_process_or_with_the_next_one() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let sockets = || {
        let mut found = Vec::new();
        let mut folders = vec![bed.path("state")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if entry.path().is_dir() {
                    folders.push(entry.path());
                } else if name.starts_with("reader-") {
                    found.push(name);
                }
            }
        }
        found
    };
    let reader = || bed.serve("disk").with(&["--read-only", "--cache-bytes", "0"]);
    let own = |server: &Server| vec![format!("reader-{}.sock", server.pid())];
    let mut server = reader().start();
    server.hand_off(&bed, "disk");
    assert_eq!(sockets(), own(&server), "the old process has left nothing");
    server.kill();
    assert_eq!(sockets().len(), 1, "killed, it could not");
    let server = reader().start();
    assert_eq!(sockets(), own(&server));
    let ended = server.stop();
    assert_eq!((ended.code, sockets().len()), (Some(0), 0), "{}", ended.stderr);
}

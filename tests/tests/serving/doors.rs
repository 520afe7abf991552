//! Many doors, one volume: opened and closed while it is served, all showing the same bytes.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use sawmill_tests::machine::require_mount;
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::test_bed::TestBed;
use sawmill_tests::{requires, store};

fn doors(bed: &TestBed) -> Vec<(String, String)> {
    let listed = bed.sawmill(&["door", "list", "disk", "--json"]).json();
    let text =
        |door: &serde_json::Value, name: &str| door[name].as_str().unwrap_or_default().to_owned();
    let all = listed.as_array().expect("a list").iter();
    all.map(|door| (text(door, "kind"), text(door, "address"))).collect()
}

#[test]
fn a_door_comes_and_goes_while_others_stay_open() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let server = bed.serve("disk").start();
    let first = server.connect();
    let socket = format!("unix:{}", bed.path("second.sock").display());
    let uri = bed.sawmill(&["door", "add", "disk", "--nbd", &socket]).ok().trim().to_owned();
    let second = Client::connect(&uri, Style::Structured).expect("the second door is open");
    first.write(1000, b"through the first").expect("accepted");
    assert_eq!(second.read(1000, 17), Ok(b"through the first".to_vec()));
    second.write(5000, b"through the second").expect("accepted");
    assert_eq!(first.read(5000, 18), Ok(b"through the second".to_vec()));
    assert_eq!(doors(&bed).len(), 2);
    let output = bed.sawmill(&["door", "remove", "disk", &uri]).ok();
    assert!(output.contains("removed"), "{output}");
    assert!(second.read(0, 1).is_err(), "the second door is closed");
    assert_eq!(
        first.read(5000, 18),
        Ok(b"through the second".to_vec()),
        "the first knows nothing of it"
    );
    assert_eq!(doors(&bed).len(), 1);
}

#[test]
fn a_door_that_was_added_survives_a_hand_off() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let mut server = bed.serve("disk").start();
    let socket = format!("unix:{}", bed.path("second.sock").display());
    let uri = bed.sawmill(&["door", "add", "disk", "--nbd", &socket]).ok().trim().to_owned();
    let client = Client::connect(&uri, Style::Structured).expect("the second door is open");
    client.write(0, b"before").expect("accepted");
    let before = doors(&bed);
    server.hand_off(&bed, "disk");
    assert_eq!(doors(&bed), before);
    assert_eq!(client.read(0, 6), Ok(b"before".to_vec()));
    let _ = bed.sawmill(&["door", "remove", "disk", &uri]).ok();
    assert!(client.read(0, 6).is_err());
}

#[test]
fn a_door_that_was_added_comes_back_after_a_crash_and_not_after_a_stop() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let mut server = bed.serve("disk").start();
    let socket = |name: &str| format!("unix:{}", bed.path(name).display());
    let add = |name: &str| bed.sawmill(&["door", "add", "disk", "--nbd", &socket(name)]).ok();
    let (second, third) = (add("second.sock"), add("third.sock"));
    let _ = bed.sawmill(&["door", "remove", "disk", third.trim()]).ok();
    let before = doors(&bed);
    assert_eq!(before.len(), 2);
    server.connect().write(0, b"before").expect("accepted");
    server.kill();
    server = bed.serve("disk").start();
    assert_eq!(doors(&bed), before);
    // As well of a server that took over: it was not there when the door was added.
    server.hand_off(&bed, "disk");
    server.kill();
    let listener =
        std::os::unix::net::UnixListener::bind(bed.path("fourth.sock")).expect("a socket");
    let journals = bed.journals();
    let note = journals[0].parent().expect("in the state folder").join("doors");
    let left = std::fs::read_to_string(&note).expect("the door is noted");
    std::fs::write(&note, format!("iscsi=1\nnbd={}\n{left}", socket("fourth.sock")))
        .expect("our own file");
    server = bed.serve("disk").start();
    drop(listener);
    assert_eq!(doors(&bed), before, "what cannot be had stops nothing: {}", server.stderr());
    assert!(
        server.stderr().contains("iscsi") && server.stderr().contains("fourth"),
        "{}",
        server.stderr()
    );
    let client =
        Client::connect(second.trim(), Style::Structured).expect("the second door is open");
    assert_eq!(client.read(0, 6), Ok(b"before".to_vec()));
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let server = bed.serve("disk").start();
    assert_eq!(doors(&bed), before[..1]);
    assert_eq!(server.connect().read(0, 6), Ok(b"before".to_vec()));
}

#[test]
fn a_file_that_was_added_survives_a_crash_under_its_users() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let server = bed.serve("disk").start();
    let mount = bed.path("mount").display().to_string();
    let file = bed.sawmill(&["door", "add", "disk", "--fuse", &mount]).ok().trim().to_owned();
    // A process of its own: one that starts others while it has the file open would wait for its
    // server then.
    let lines = "import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
os.pwrite(fd, b'before', 0)
print('written', flush=True)
sys.stdin.readline()
print(os.pread(fd, 6, 0).decode())";
    let mut user = std::process::Command::new("python3")
        .args(["-c", lines, &file])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 is there");
    let mut responses = BufReader::new(user.stdout.take().expect("a pipe")).lines();
    assert_eq!(responses.next().and_then(Result::ok).as_deref(), Some("written"));
    server.kill();
    drop(user.stdin.take());
    let server = bed.serve("disk").start();
    assert_eq!(doors(&bed).len(), 2, "{}", server.stderr());
    assert_eq!(
        responses.next().and_then(Result::ok).as_deref(),
        Some("before"),
        "{}",
        server.stderr()
    );
    assert!(user.wait().is_ok_and(|ended| ended.success()));
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn what_cannot_be_a_door_is_refused_and_the_others_stay() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    bed.sawmill(&["door", "list", "disk"]).refused(3, &["is not served", "sawmill serve disk"]);
    let server = bed.serve("disk").start();
    let client = server.connect();
    let uri = server.uri();
    let socket = format!("unix:{}", bed.path("nbd.sock").display());
    bed.sawmill(&["door", "add", "disk"]).refused(2, &["name a door", "--ublk"]);
    bed.sawmill(&["door", "add", "disk", "--nbd", &socket]).refused(7, &["another server listens"]);
    bed.sawmill(&["door", "add", "disk", "--nbd", "tcp:0.0.0.0:0"]).refused(2, &["other machines"]);
    bed.sawmill(&["door", "remove", "disk", "/dev/nothing"]).refused(3, &["/dev/nothing", &uri]);
    bed.sawmill(&["door", "add", "disk", "--ublk=x"]).refused(2, &["'x'", "--ublk=3"]);
    client.write(0, &[1]).expect("the first door is as it was");
}

#[test]
fn a_mount_has_one_server_at_a_time() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let mount = bed.path("mount").display().to_string();
    let mut server = bed.serve("disk").with(&["--fuse", &mount]).start();
    let file = bed.path("mount").join("disk");
    let mut bytes = std::fs::OpenOptions::new().write(true).open(&file).expect("the file is there");
    std::io::Write::write_all(&mut bytes, b"through the file").expect("accepted");
    // A reader of the volume, and the server itself, would share the requests of its users.
    let reader = ["serve", "disk", "--read-only", "--cache-bytes", "0", "--fuse", &mount];
    bed.sawmill(&reader).refused(11, &["is served already"]);
    bed.sawmill(&["door", "add", "disk", "--fuse", &mount]).refused(11, &["is served already"]);
    server.hand_off(&bed, "disk");
    bed.sawmill(&reader).refused(11, &["is served already"]);
    drop(bytes);
    let read = std::fs::read(&file).expect("the file is where it was");
    assert_eq!(&read[..16], b"through the file");
    let _ = bed.sawmill(&["door", "remove", "disk", &file.display().to_string()]).ok();
    assert!(!file.exists(), "the mount went with its door");
    let _ = bed.sawmill(&["door", "add", "disk", "--fuse", &mount]).ok();
    assert_eq!(&std::fs::read(&file).expect("mounted again")[..16], b"through the file");
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

//! Programs written for BDUS on the real host (`sdk/c/include/bdus.h`): one test for each of BDUS's
//! own that can be kept without its kernel module, on an NBD door. On block devices of the kernel:
//! `tests/vm/driver`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use sawmill_tests::driven::fio_verifies;
use sawmill_tests::machine::{output_text, repository, run, sawmill_binary, wait_for};
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::test_bed::TestBed;
use sawmill_tests::{compiled, requires, store};

/// A machine with the program `ram` of `sdk/c/tests/bdus` on it.
struct World {
    bed: TestBed,
    program: PathBuf,
}

/// A driver in the foreground.
struct Ram {
    child: Child,
    out: BufReader<ChildStdout>,
    id: String,
    uri: String,
}

impl World {
    fn new() -> Self {
        let bed = TestBed::new(&store::folder());
        let program = bed.path("ram");
        compiled::c(&repository().join("sdk/c/tests/bdus/ram.c"), &program, &["-std=c11"]);
        World { bed, program }
    }

    fn environment<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let door = format!("nbd=unix:{}", self.bed.path("door").display());
        command.env("SAWMILL_DOORS", door).env("SAWMILL", sawmill_binary()).stdin(Stdio::null());
        command.env("SAWMILL_BDUS_FOLDER", self.bed.path("bdus"));
        command
            .env("XDG_STATE_HOME", self.bed.path("state"))
            .env("LD_LIBRARY_PATH", compiled::libraries())
    }

    fn ram(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        self.environment(&mut command).args(words);
        command
    }

    /// Runs it to its end.
    fn runs(&self, words: &[&str]) -> Output {
        self.ram(words).output().expect("it starts")
    }

    /// What it says when it is refused.
    fn refused(&self, words: &[&str]) -> String {
        let output = self.runs(words);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", output_text(&output));
        output_text(&output)
    }

    /// Starts it in the foreground, and waits until the device is there.
    fn starts(&self, words: &[&str]) -> Ram {
        let mut child =
            self.ram(words).arg("foreground").stdout(Stdio::piped()).spawn().expect("it starts");
        let mut out = BufReader::new(child.stdout.take().expect("a pipe was asked for"));
        let mut line = String::new();
        out.read_line(&mut line).expect("readable");
        let mut words = line.split_whitespace().map(str::to_owned);
        let (id, uri) = (words.next().expect("an id"), words.next().expect("a path"));
        Ram { child, out, id, uri }
    }

    fn bdus(&self, words: &[&str]) -> Output {
        let mut command = Command::new(compiled::libraries().join("bdus"));
        self.environment(command.args(words)).output().expect("bdus starts")
    }

    fn bdus_code(&self, words: &[&str]) -> Option<i32> {
        self.bdus(words).status.code()
    }

    fn devices(&self) -> usize {
        let list = self.bed.sawmill(&["driver", "list", "--json"]).json();
        list.as_array().expect("a list").len()
    }
}

impl Ram {
    fn connect(&self) -> Client {
        Client::connect(&self.uri, Style::Structured).expect("the door is open")
    }

    fn kill(&mut self) {
        self.child.kill().expect("a process of ours");
        let _ = self.child.wait();
    }

    fn ends(mut self) -> Option<i32> {
        drop(self.out);
        self.child.wait().expect("it ends").code()
    }
}

#[test]
fn abort_ends_the_device_with_a_message() {
    requires!(compiled::require_compiler());
    let world = World::new();
    for callback in ["initialize", "on_device_available"] {
        let message = world.refused(&["foreground", &format!("fail={callback}:abort")]);
        assert!(message.contains("errno 5: Driver aborted"), "{message}");
        assert_eq!(message.contains("terminate run"), callback != "initialize", "{message}");
    }
    let ram = world.starts(&["fail=write:abort"]);
    let client = ram.connect();
    let _ = client.write(0, &[1; 512]).expect_err("the driver aborts");
    assert_eq!(ram.ends(), Some(1));
    wait_for("nothing is left", || (world.devices() == 0).then_some(()));
}

#[test]
fn a_callback_that_fails_says_which_and_why() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let message = world.refused(&["foreground", "fail=initialize:28"]);
    assert!(message.contains("errno 28: Callback initialize() failed"), "{message}");
    let message = world.refused(&["foreground", "size=1000"]);
    assert!(message.contains("errno 22") && message.contains("attribute size"), "{message}");
    assert_eq!(world.devices(), 0);
}

#[test]
fn errors_reach_users_as_they_are_or_as_eio() {
    requires!(compiled::require_compiler());
    let world = World::new();
    for (errno, expected) in [(28, "28"), (110, "5"), (67, "5"), (1, "5"), (95, "5"), (1000, "5")] {
        let ram = world.starts(&[&format!("fail=write:{errno}")]);
        let text = format!("{:?}", ram.connect().write(0, &[1; 512]).unwrap_err());
        let words = match expected {
            "28" => ["28", "NoSpace", "StorageFull"],
            _ => ["5", "Io", "Other"],
        };
        assert!(words.iter().any(|word| text.contains(word)), "{errno}: {text}");
        assert_eq!(world.bdus_code(&["destroy", &ram.id]), Some(0));
        assert_eq!(ram.ends(), Some(0));
    }
}

#[test]
fn a_daemon_serves_when_the_program_has_ended() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let image = format!("file={}", world.bed.path("image").display());
    let output = world.runs(&[&image]);
    assert!(output.status.success(), "{}", output_text(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut words = text.split_whitespace();
    let (id, uri) = (words.next().expect("an id"), words.next().expect("a path"));
    let _ =
        fio_verifies(uri, &world.bed, &["--size=8M", "--rw=randwrite", "--bs=4k", "--iodepth=8"]);
    assert_eq!(world.bdus_code(&["flush", id]), Some(0));
    assert_eq!(world.bdus_code(&["destroy", uri]), Some(0), "by its path");
    assert_eq!(world.bdus_code(&["destroy", id]), Some(0), "what is gone is as it shall be");
    assert_eq!(world.devices(), 0);
}

#[test]
fn ids_are_never_used_again() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let mut ids = Vec::new();
    for _ in 0..3 {
        let ram = world.starts(&[]);
        ids.push(ram.id.clone());
        assert_eq!(world.bdus_code(&["destroy", &ram.id]), Some(0));
        assert_eq!(ram.ends(), Some(0));
    }
    assert_eq!(ids, ["0", "1", "2"]);
    assert_eq!(world.bdus_code(&["destroy", "3"]), Some(1), "there never was one");
    assert!(world.refused(&["rerun=3"]).contains("errno 22"));
    assert!(world.refused(&["rerun=1"]).contains("errno 19"), "that was, and is not any more");
}

#[test]
fn retry_request_a_request_waits_for_the_next_driver() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let image = format!("file={}", world.bed.path("image").display());
    let mut first = world.starts(&["recoverable", &image]);
    let client = first.connect();
    client.write(0, b"kept").expect("accepted");
    first.kill();
    let (id, uri) = (first.id.clone(), first.uri.clone());
    let reader = std::thread::spawn(move || client.read(0, 4));
    let second = world.starts(&["recoverable", &image, &format!("rerun={id}")]);
    assert_eq!((&second.id, &second.uri), (&id, &uri));
    assert_eq!(reader.join().expect("no panic").expect("no error"), b"kept");
    assert_eq!(world.bdus_code(&["destroy", &id]), Some(0));
    assert_eq!(second.ends(), Some(0));
}

#[test]
fn a_device_that_is_not_recoverable_goes_with_its_driver() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let mut ram = world.starts(&[]);
    ram.kill();
    wait_for("nothing is left", || (world.devices() == 0).then_some(()));
    assert!(world.refused(&[&format!("rerun={}", ram.id)]).contains("errno 19"));
}

#[test]
fn fail_while_replacing_leaves_the_old_driver_or_none() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let image = format!("file={}", world.bed.path("image").display());
    let old = world.starts(&[&image]);
    let rerun = format!("rerun={}", old.id);
    for words in [&["none=flush"][..], &["none=write_zeros"], &["size=4096"], &["recoverable"]] {
        let message = world.refused(&[&[rerun.as_str(), "foreground"], words].concat());
        assert!(
            message.contains("errno 22") && !message.contains("terminate"),
            "{words:?}: {message}"
        );
    }
    let message = world.refused(&[&rerun, "foreground", "fail=initialize:5"]);
    assert!(message.contains("errno 5"), "{message}");
    old.connect().write(0, b"served").expect("the old driver is there");
    // This one is attached, and then fails: the old one has gone.
    let message = world.refused(&[&rerun, "foreground", "fail=on_device_available:abort"]);
    assert!(message.contains("terminate rerun"), "{message}");
    assert_eq!(old.ends(), Some(0));
    wait_for("nothing is left", || (world.devices() == 0).then_some(()));
}

#[test]
fn fio_verify_while_drivers_are_replaced_and_killed() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let rounds: usize =
        std::env::var("SAWMILL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let image = format!("file={}", world.bed.path("image").display());
    let mut driver = world.starts(&["recoverable", &image, "threads=4"]);
    let (id, uri) = (driver.id.clone(), driver.uri.clone());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let arguments = ["--size=16M", "--rw=randrw", "--bs=4k", "--iodepth=16", "--fsync=32"];
            let mut longest_ns = 0;
            while !is_over.load(Ordering::SeqCst) {
                longest_ns = fio_verifies(&uri, &world.bed, &arguments).max(longest_ns);
            }
            longest_ns
        });
        for round in 0..rounds {
            let is_killed = round % 2 == 0;
            if is_killed {
                driver.kill();
            }
            let rerun = format!("rerun={id}");
            let next = world.starts(&["recoverable", &image, "threads=4", &rerun]);
            let old = std::mem::replace(&mut driver, next);
            assert_eq!(old.ends(), (!is_killed).then_some(0), "one that is replaced ends well");
        }
        is_over.store(true, Ordering::SeqCst);
        let stall = load.join().expect("no error, no other byte");
        println!(
            "{rounds} replacements, half of them kills: the longest request took {} ms",
            stall / 1_000_000
        );
    });
    assert_eq!(world.bdus_code(&["destroy", &id]), Some(0));
    assert_eq!(driver.ends(), Some(0));
}

#[test]
fn drop_privileges_the_host_keeps_them() {
    requires!(compiled::require_compiler());
    requires!(match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err("only root can drop its rights".to_owned()),
    });
    let world = World::new();
    let ram = world.starts(&["drop"]);
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", ram.child.id())).expect("a process");
    assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"), "{status}");
    let client = ram.connect();
    client.write(4096, &[3; 4096]).expect("accepted");
    client.flush().expect("flushed");
    assert_eq!(world.bdus_code(&["destroy", &ram.id]), Some(0));
    assert_eq!(ram.ends(), Some(0));
}

#[test]
fn logs_are_those_of_a_driver_that_asked_for_them() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let ram = world.starts(&["log"]);
    ram.connect().write(8192, &[3; 512]).expect("accepted");
    let logs = world.bdus(&["logs", &ram.id]);
    assert!(output_text(&logs).contains("write(8192, 512) = 0"), "{}", output_text(&logs));
    assert_eq!(world.bdus_code(&["destroy", &ram.id]), Some(0));
    assert_eq!(ram.ends(), Some(0));
    let plain = world.starts(&[]);
    assert_eq!(world.bdus_code(&["logs", &plain.id]), Some(1));
    // It is shown as a stopped driver is: nobody waits for it.
    let pid = Pid::from_child(&plain.child);
    kill_process(pid, Signal::KILL).expect("a process of ours");
    assert_eq!(plain.ends(), None);
}

#[test]
fn version_coherence_all_parts_are_of_one_version() {
    requires!(compiled::require_compiler());
    let world = World::new();
    let output_of = |words: &[&str]| output_text(&world.bdus(words)).trim().to_owned();
    for part in ["--cmdbdus", "--libbdus", "--kbdus"] {
        assert_eq!(output_of(&["version", part]), "0.1.2");
    }
    assert_eq!(world.bdus_code(&["version", "--all"]), Some(2));
    assert_eq!(world.bdus_code(&["--help"]), Some(0));
}

#[test]
fn require_version_refuses_what_the_header_does_not_serve() {
    requires!(compiled::require_compiler());
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("a.c");
    std::fs::write(&source, "#include <bdus.h>\nint main(void) { return 0; }\n").expect("a source");
    let compile = |versions: &[(&str, u32)]| {
        let mut cc = Command::new("cc");
        for (name, number) in versions {
            cc.arg(format!("-DBDUS_REQUIRE_VERSION_{name}={number}"));
        }
        cc.arg("-fsyntax-only").arg("-I").arg(repository().join("sdk/c/include")).arg(&source);
        cc.output().expect("cc starts").status.success()
    };
    for (version, is_served) in [
        ((0, 1, 0), true),
        ((0, 1, 1), true),
        ((0, 1, 2), true),
        ((0, 1, 3), false),
        ((0, 2, 0), false),
        ((1, 1, 0), false),
    ] {
        let (major, minor, patch) = version;
        assert_eq!(
            compile(&[("MAJOR", major), ("MINOR", minor), ("PATCH", patch)]),
            is_served,
            "{version:?}"
        );
    }
    assert!(compile(&[]) && !compile(&[("MAJOR", 0)]) && !compile(&[("MAJOR", 0), ("MINOR", 1)]));
}

#[test]
fn compile_examples_also_for_programs_of_the_first_version() {
    requires!(compiled::require_compiler());
    let folder = tempfile::tempdir().expect("a folder");
    let source = repository().join("sdk/c/tests/bdus/first.c");
    let program = folder.path().join("first");
    compiled::c(&source, &program, &["-std=c99", "-pedantic"]);
    let symbols = run(Command::new("nm").arg(&program));
    assert!(
        symbols.contains("bdus_run_0_1_0_") && !symbols.contains("bdus_run_0_1_1_"),
        "{symbols}"
    );
}

#[test]
fn what_no_device_carries_is_refused_when_there_is_nothing_else() {
    requires!(compiled::require_compiler());
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("first");
    compiled::c(&repository().join("sdk/c/tests/bdus/first.c"), &program, &["-std=c99"]);
    let output = Command::new(&program)
        .env("LD_LIBRARY_PATH", compiled::libraries())
        .output()
        .expect("it starts");
    assert!(output_text(&output).contains("errno 95"), "{}", output_text(&output));
}

//! Drivers in Go (`sdk/go`) on the real host: the modules keep their own tests, the examples are
//! disks, an error or a panic is one request's, and a driver that is killed or replaced under load
//! loses nothing.
//!
//! `SAWMILL_ROUNDS` says how often drivers are killed and replaced; 5 without it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use sawmill_testkit::Dice;
use sawmill_tests::driven::{DrivenDevice, saying_into};
use sawmill_tests::examples::{self, SIZE_BYTES, text};
use sawmill_tests::golang::{go, require_go};
use sawmill_tests::machine::{command, repository, run, sawmill_binary, wait_for};
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::test_bed::TestBed;
use sawmill_tests::{requires, store};

/// The folder of the examples and of this test's driver, built once.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let into = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver_go");
        std::fs::create_dir_all(&into).expect("a folder for programs");
        for module in ["sdk/go/examples", "tests/tests/drivers/driver_go"] {
            run(go(module).args(["build", "-o"]).arg(&into).arg("./..."));
        }
        into
    })
}

fn driver(name: &str, arguments: &[&str]) -> Command {
    let mut driver = Command::new(built().join(name));
    driver.args(arguments);
    driver
}

#[test]
fn the_modules_keep_their_own_tests() {
    requires!(require_go());
    for module in ["sdk/go/sawmill", "sdk/go/buse", "sdk/go/examples"] {
        run(go(module).args(["vet", "./..."]));
        // A result that Go remembers would hide a change of the golden packets: they lie outside of
        // the module.
        run(go(module).args(["test", "-count=1", "./..."]));
        let mut gofmt = go(module);
        let untidy = run(gofmt.args(["fmt", "-n", "./..."]));
        assert!(!untidy.is_empty(), "go fmt says what it would look at");
    }
}

#[test]
fn ram_and_file_are_disks_request_by_request_and_in_batches() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    examples::ram_and_file(&bed, &driver);
}

#[test]
fn mirror_is_a_disk_and_reports_when_its_sides_differ() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    examples::mirror(&bed, &driver);
}

#[test]
fn null_takes_everything_and_reads_zeroes() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    examples::null(&bed, &driver);
}

/// A web server for one file, killed when dropped.
struct Web(Child, String);

impl Web {
    fn start(content: &Path) -> Self {
        let port = content.with_extension("port");
        let mut server = driver("web", &[text(content), text(&port)]);
        let child = server.stdin(Stdio::null()).spawn().expect("a web server");
        let port = wait_for("the web server says its port", || std::fs::read_to_string(&port).ok());
        Web(child, format!("http://{port}/"))
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn lazy_is_a_disk_that_begins_as_its_source_and_needs_it_once() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    let source = bed.path("source");
    let content = Dice::seeded("lazy").bytes(SIZE_BYTES as usize);
    std::fs::write(&source, &content).expect("a source");
    let web = Web::start(&source);
    let url = web.1.clone();
    examples::lazy_of(&bed, &driver, content, &url, || drop(web));
}

#[test]
fn an_error_or_a_panic_is_of_one_request() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    let log_path = bed.path("said");
    let mut device =
        DrivenDevice::start(&bed, "faulty", &[], &saying_into(&log_path, &driver("faulty", &[])));
    let client = device.connect();
    let full = client.write(4096, &[1; 512]).unwrap_err().to_string();
    let bug = client.read(8192, 512).unwrap_err().to_string();
    client.write(512, &[1; 512]).expect("accepted");
    assert_eq!(client.read(512, 512).expect("readable"), [1; 512], "the same process goes on");
    assert!(full.contains("NoSpace") || full.contains("28"), "{full}");
    assert!(bug.contains("Io") || bug.contains('5'), "{bug}");
    let first = device.driver;
    device.replace_driver(&bed, "faulty");
    assert_ne!(device.driver, first);
    device.end(&bed, "faulty");
    let log = std::fs::read_to_string(log_path).expect("what it said");
    assert!(log.contains("goroutine"), "where it panicked: {log}");
}

#[test]
fn a_driver_that_is_killed_under_load_is_followed_by_one_that_loses_nothing() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    examples::undisturbed(&bed, &driver, "kills", |_, device| device.kill_driver());
}

#[test]
fn a_driver_is_replaced_under_load_and_no_client_notices() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    let replace = |bed: &TestBed, device: &mut DrivenDevice| device.replace_driver(bed, "disk");
    examples::undisturbed(&bed, &driver, "replacements", replace);
}

/// The first block of Go of the guide.
fn quick_start() -> String {
    let guide =
        std::fs::read_to_string(repository().join("docs/guide/driver-go.md")).expect("the guide");
    let (_, rest) = guide.split_once("```go\n").expect("a program in the guide");
    let (program, _) = rest.split_once("```").expect("an end of it");
    program.to_owned()
}

#[test]
fn the_program_in_the_guide_compiles_and_serves_a_disk() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    let folder = bed.path("mydisk");
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(folder.join("main.go"), quick_start()).expect("a program");
    let go = |arguments: &[&str]| run(go(text(&folder)).args(arguments));
    let _ = go(&["mod", "init", "mydisk"]);
    let module = repository().join("sdk/go/sawmill").display().to_string();
    let _ = go(&["mod", "edit", &format!("-replace=sawmill={module}"), "-require=sawmill@v0.0.0"]);
    let _ = go(&["build"]);
    let door = format!("nbd=unix:{}", bed.path("disk.sock").display());
    let mut disk = Command::new(folder.join("mydisk"))
        .env("SAWMILL", sawmill_binary())
        .env("SAWMILL_DOORS", &door)
        .env("XDG_STATE_HOME", bed.path("state"))
        .stdin(Stdio::null())
        .spawn()
        .expect("it starts");
    let uri = format!("nbd+unix:///mydisk?socket={}", bed.path("disk.sock").display());
    let size = wait_for("the disk is there", || {
        let output = command("nbdinfo").args(["--size", &uri]).output().expect("nbdinfo starts");
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    });
    assert_eq!(size.trim(), "67108864");
    run(command("nbdcopy").arg(repository().join("README.md")).arg(&uri));
    let pid = rustix::process::Pid::from_child(&disk);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a process of ours");
    assert!(disk.wait().expect("it ends").success());
    bed.sawmill(&["driver", "socket", "mydisk"]).refused(3, &["mydisk"]);
}

#[test]
fn a_driver_that_started_its_host_is_killed_and_others_take_over() {
    requires!(require_go());
    let bed = TestBed::new(&store::folder());
    let (image, socket) = (bed.path("image"), bed.path("disk.sock"));
    std::fs::write(&image, vec![0; SIZE_BYTES as usize]).expect("an image");
    let start = |mut command: Command| {
        let state = bed.path("state");
        let door = format!("nbd=unix:{}", socket.display());
        command
            .env("SAWMILL", sawmill_binary())
            .env("SAWMILL_DOORS", door)
            .env("XDG_STATE_HOME", state);
        command.stdin(Stdio::null()).spawn().expect("it starts")
    };
    let device = || bed.sawmill(&["driver", "list", "--json"]).json()[0].clone();
    let mut first = start(driver("file", &[text(&image)]));
    let name = wait_for("the device is there", || {
        let device = device();
        (device["driver_pid"] == u64::from(first.id()))
            .then(|| device["name"].as_str().map(str::to_owned))
    });
    let name = name.expect("it has a name");
    let client = wait_for("its door is open", || {
        Client::connect(
            &format!("nbd+unix:///{name}?socket={}", socket.display()),
            Style::Structured,
        )
        .ok()
    });
    client.write(512, b"of the first").expect("accepted");
    first.kill().expect("a process of ours");
    let _ = first.wait();
    let mut second = start(driver("rerun", &[&name, text(&image)]));
    client.write(1024, b"of the second").expect("accepted");
    let third = start(driver("rerun", &[&name, text(&image)]));
    assert!(second.wait().expect("it ends").success(), "the replaced driver ends well");
    assert_eq!(client.read(512, 12).expect("readable"), b"of the first");
    assert_eq!(client.read(1024, 13).expect("readable"), b"of the second");
    assert_eq!(device()["driver_pid"], u64::from(third.id()));
    drop(client);
    let _ = bed.sawmill(&["driver", "end", &name]).ok();
    assert!(third.wait_with_output().expect("it ends").status.success());
}

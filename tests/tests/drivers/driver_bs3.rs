//! The original BS3 on `sdk/go/buse`: built with one replace line, it serves a volume that lies on
//! `MinIO`, and finds it again.
//!
//! Its source comes from the Go module proxy, or from the folder in `SAWMILL_BS3`; where neither
//! has it this test is skipped. It is built outside the repository.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use sawmill_testkit::Dice;
use sawmill_tests::golang::{go, require_go};
use sawmill_tests::machine::{command, repository, run, sawmill_binary, wait_for};
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::store::{self, PASSWORD, USER, shared_minio};
use sawmill_tests::test_bed::TestBed;

const MODULE: &str = "github.com/asch/bs3";
const REPLACED: &str = "github.com/asch/buse/lib/go/buse";
/// Its last commit.
const COMMIT: &str = "f1a0c34";

/// Where its source is, or why not.
fn source() -> Result<PathBuf, String> {
    require_go()?;
    if let Some(folder) = std::env::var_os("SAWMILL_BS3") {
        return Ok(folder.into());
    }
    let mut download = go(std::env::temp_dir());
    download.args(["mod", "download", "-json", &format!("{MODULE}@{COMMIT}")]);
    let output = download.output().map_err(|error| error.to_string())?.stdout;
    let output: serde_json::Value = serde_json::from_slice(&output).unwrap_or_default();
    match output["Dir"].as_str() {
        Some(folder) => Ok(folder.into()),
        None => {
            Err(format!("no source of BS3, and SAWMILL_BS3 names no folder: {}", output["Error"]))
        }
    }
}

/// Its source with one more line, built.
fn built(source: &Path, bed: &TestBed) -> PathBuf {
    let (folder, program) = (bed.path("bs3"), bed.path("bs3-program"));
    run(command("cp").args(["-r", "--no-preserve=mode"]).arg(source).arg(&folder));
    let ours = repository().join("sdk/go/buse").display().to_string();
    run(go(&folder).args(["mod", "edit", &format!("-replace={REPLACED}={ours}")]));
    run(go(&folder).args(["build", "-buildvcs=false", "-o"]).arg(&program).arg("."));
    program
}

/// BS3 while it runs; killed when dropped.
struct Bs3(Child, String);

impl Bs3 {
    fn start(program: &Path, bed: &TestBed) -> Self {
        let socket = bed.path("bs3.sock");
        let child = Command::new(program)
            .arg("-c")
            .arg(bed.path("config.toml"))
            .env("SAWMILL", sawmill_binary())
            .env("SAWMILL_DOORS", format!("nbd=unix:{}", socket.display()))
            .env("XDG_STATE_HOME", bed.path("state"))
            .stdin(Stdio::null())
            .spawn()
            .expect("BS3 starts");
        let uri = format!("nbd+unix:///buse0?socket={}", socket.display());
        let _ = wait_for("BS3 serves", || Client::connect(&uri, Style::Structured).ok());
        Bs3(child, uri)
    }

    fn connect(&self) -> Client {
        Client::connect(&self.1, Style::Structured).expect("the door is open")
    }

    fn stop(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).expect("a process of ours");
        assert!(self.0.wait().expect("it ends").success(), "BS3 ends well");
    }
}

impl Drop for Bs3 {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn configure(bed: &TestBed) {
    let remote = shared_minio().address();
    let text = format!(
        "size = 1\n[s3]\naccess_key = \"{USER}\"\nsecret_key = \"{PASSWORD}\"\nbucket \
         = \"bs3-{}\"\nremote = \"http://{remote}\"\nuploaders = 8\ndownloaders = \
         8\n[write]\ndurable = true\n",
        std::process::id()
    );
    std::fs::write(bed.path("config.toml"), text).expect("a configuration");
}

#[test]
fn the_original_bs3_serves_a_volume_and_finds_it_again() {
    let source = match source() {
        Ok(source) => source,
        Err(why) => return sawmill_tests::machine::skip(&why),
    };
    let bed = TestBed::new(&store::folder());
    let program = built(&source, &bed);
    configure(&bed);
    let data = Dice::seeded("bs3").bytes(24 << 20);
    let bs3 = Bs3::start(&program, &bed);
    let client = bs3.connect();
    // BS3 forgets what lies in its very first object (sdk/go/buse/README.md): it gets what nobody
    // needs.
    client.write((1 << 30) - 4096, &[1; 4096]).expect("accepted");
    client.flush().expect("flushed");
    let writes = data.chunks(1 << 20).enumerate();
    for (at, part) in writes {
        client.write((at as u64) << 20, part).expect("accepted");
    }
    client.write(4097, b"at any byte").expect("accepted");
    client.flush().expect("flushed");
    let mut expected = data;
    expected[4097..4108].copy_from_slice(b"at any byte");
    let read = |client: &Client| -> Vec<u8> {
        (0..24).flat_map(|at| client.read(at << 20, 1 << 20).expect("readable")).collect()
    };
    assert!(read(&client) == expected, "what was written");
    assert_eq!(client.read(512 << 20, 4096).expect("readable"), [0; 4096], "a hole");
    drop(client);
    bs3.stop();
    let bs3 = Bs3::start(&program, &bed);
    assert!(read(&bs3.connect()) == expected, "what was written, after BS3 went and came");
    bs3.stop();
}

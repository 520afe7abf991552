//! A server replaced again and again under a verifying load, with journal, cache and staging where
//! its user wants them: each of them is free when the next process opens it.
//!
//! `SAWMILL_HANDOFFS=200` sets how often; `--nocapture` shows how it went.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use sawmill_tests::machine::{command, require_mount};
use sawmill_tests::requires;
use sawmill_tests::server::Server;
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;

/// Reads and writes at once, of more than the cache holds: requests to the store are always under
/// way.
const MIXED: &[&str] = &[
    "--rw=randrw",
    "--rwmixread=70",
    "--bsrange=4k-64k",
    "--iodepth=16",
    "--size=128M",
    "--time_based",
    "--runtime=5",
    "--verify_backlog=256",
];

fn hand_offs() -> u32 {
    std::env::var("SAWMILL_HANDOFFS").ok().and_then(|text| text.parse().ok()).unwrap_or(20)
}

/// The files that the user names.
struct FioFiles {
    bed: TestBed,
    mountpoint: PathBuf,
}

impl FioFiles {
    fn new() -> Self {
        let bed = TestBed::new(&store::folder());
        bed.create("disk", "128M", &["--segment-bytes", "1M"]);
        let mountpoint = bed.path("fuse");
        std::fs::create_dir(&mountpoint).expect("room for a folder");
        FioFiles { bed, mountpoint }
    }

    fn serve(&self, options: &[&str]) -> Server {
        let text = |path: PathBuf| path.to_str().expect("UTF-8").to_owned();
        let (journal, cache) = (text(self.bed.path("my.journal")), text(self.bed.path("my.cache")));
        let memory = text(self.bed.memory().to_path_buf());
        let files = ["--journal", &journal, "--cache", &cache, "--staging", &memory];
        self.bed.serve("disk").with(&files).with(&["--cache-bytes", "16M"]).with(options).start()
    }

    /// Hands over several times while fio writes and verifies; `disk` is how fio reaches it.
    fn hand_over_under_fio(&self, server: &mut Server, disk: &[&str]) {
        let fio = |job: &[&str]| {
            let mut fio = command("fio");
            fio.current_dir(self.bed.path("")).args([
                "--name=load",
                "--verify=crc32c",
                "--randrepeat=0",
            ]);
            fio.args(["--verify_fatal=1", "--verify_state_save=0"]).args(disk).args(job);
            let output = fio.output().expect("fio starts");
            assert!(
                output.status.success(),
                "{fio:?}: {}",
                String::from_utf8_lossy(&output.stdout)
            );
        };
        fio(&["--rw=write", "--bs=1M", "--iodepth=4", "--size=128M", "--do_verify=0"]);
        let is_done = AtomicBool::new(false);
        let mut stalls_ms = Vec::new();
        std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                while !is_done.load(Ordering::Acquire) {
                    fio(MIXED);
                }
            });
            for number in 0..hand_offs() {
                // A load that has failed reports it when it is joined.
                if load.is_finished() {
                    break;
                }
                let done = self.bed.sawmill(&["handoff", "disk", "--json"]);
                if done.code != Some(0) {
                    is_done.store(true, Ordering::Release);
                    panic!("hand-off {number}: {}\n{}", done.stderr, server.stderr());
                }
                let outcome = done.json();
                server.follow(&outcome);
                stalls_ms.push(outcome["stall_ms"].as_u64().expect("a number"));
            }
            is_done.store(true, Ordering::Release);
            load.join().expect("the load went on without an error");
        });
        stalls_ms.sort_unstable();
        let (median, worst) = (stalls_ms[stalls_ms.len() / 2], stalls_ms[stalls_ms.len() - 1]);
        let (count, disk) = (stalls_ms.len(), disk.join(" "));
        println!("{disk}: {count} hand-offs, stall: median {median} ms, worst {worst} ms");
        // The status does not show where the cache is: check that it is there, and used.
        let cells = server.status()["cache"]["cells"].as_u64();
        assert!(cells.is_some_and(|cells| cells > 0), "it has its cache: {}", server.status());
        assert!(!server.stderr().contains("without the read cache"), "{}", server.stderr());
    }
}

impl Drop for FioFiles {
    /// A process that waits for a dead server would hang the test.
    fn drop(&mut self) {
        let _ = command("umount").args(["-f", "-l"]).arg(&self.mountpoint).output();
    }
}

#[test]
fn named_journal_cache_and_staging_are_free_at_each_hand_off_over_nbd() {
    let named = FioFiles::new();
    let mut server = named.serve(&["--admin", "127.0.0.1:0"]);
    let uri = format!("--uri={}", server.uri());
    named.hand_over_under_fio(&mut server, &["--ioengine=nbd", &uri]);
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let _ = named.bed.sawmill(&["check", "disk"]).ok();
}

#[test]
fn named_journal_cache_and_staging_are_free_at_each_hand_off_over_a_loop_device() {
    requires!(require_mount());
    let named = FioFiles::new();
    let mountpoint = named.mountpoint.to_str().expect("UTF-8");
    let mut server = named.serve(&["--admin", "127.0.0.1:0", "--fuse", mountpoint, "--loop"]);
    let doors = named.bed.sawmill(&["door", "list", "disk", "--json"]).json();
    let addresses =
        doors.as_array().expect("a list").iter().filter_map(|door| door["address"].as_str());
    let node = addresses
        .into_iter()
        .find(|address| address.starts_with("/dev/loop"))
        .expect("a loop device");
    let file = format!("--filename={node}");
    named.hand_over_under_fio(&mut server, &["--ioengine=libaio", "--direct=1", &file]);
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let _ = named.bed.sawmill(&["check", "disk"]).ok();
}

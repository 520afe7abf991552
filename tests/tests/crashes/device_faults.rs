//! Local trouble on the real binary: a journal disk whose sync fails and then "succeeds", whose
//! writes fail, that is slow or hangs; file systems that are full; no more file descriptors. A
//! clear error or on it goes; nothing acknowledged is lost.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use sawmill_testkit::Dice;
use sawmill_tests::bad_disk::{BadDisk, DiskRequest, Trouble};
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::machine::{self, command, require_mount, run, wait_for};
use sawmill_tests::nbd::{Client, Command, Failure, Style};
use sawmill_tests::proxy::Proxy;
use sawmill_tests::requires;
use sawmill_tests::server::{Server, ServerBuilder};
use sawmill_tests::stamp::{check_flushed_kept, check_nothing_accepted_lost};
use sawmill_tests::store::{self, shared_minio};
use sawmill_tests::test_bed::TestBed;

const VOLUME_BYTES: u64 = 8 << 20;
const EIO: u32 = 5;
/// How `sawmill` ends when it has no descriptors to serve with.
const UNAVAILABLE: i32 = 7;
/// No space is left.
const FULL: i32 = 10;

/// A volume whose journal is on a disk that can fail, and whose store can be shut off.
struct Scene {
    proxy: Arc<Proxy>,
    disk: BadDisk,
    journal: PathBuf,
    load: Load,
    has_lost_memory: bool,
    // The bed goes last: its folder is under the disk.
    bed: TestBed,
}

impl Scene {
    fn new() -> Self {
        let proxy = Proxy::before(shared_minio());
        let bed = TestBed::new(&proxy.store());
        bed.create("disk", "8M", &["--segment-bytes", "256K"]);
        let journal = bed.path("journal");
        // A good life makes the journal; then the bad disk takes its place.
        let server = serve(&bed, &journal).start();
        let _ = server.stop().ok();
        let disk = BadDisk::over(&journal);
        let load = Load::new(VOLUME_BYTES, Dice::seeded("device_faults"), Mix::default());
        Scene { proxy, disk, journal, load, bed, has_lost_memory: false }
    }

    fn start(&self) -> Server {
        let serve = serve(&self.bed, &self.journal);
        // The machine does not reboot, so the test declares the power loss.
        if self.has_lost_memory {
            serve.with(&["--accept-memory-loss"]).start()
        } else {
            serve.start()
        }
    }

    fn lose_power(&mut self) {
        for entry in std::fs::read_dir(self.bed.memory()).expect("the folder in memory").flatten() {
            std::fs::remove_file(entry.path()).expect("memory is lost");
        }
        self.has_lost_memory = true;
        self.disk.cut_power();
    }

    fn flush(&mut self, server: &Server) -> Result<(), Failure> {
        let flush = self.load.log.submit_flush();
        let flushed = server.connect().flush();
        if flushed.is_ok() {
            self.load.log.flushes[flush].completed = Some(self.load.log.clock.tick());
        }
        flushed
    }

    fn judge_accepted(&self, server: &Server) {
        let image = server.connect().read_all().expect("readable");
        check_nothing_accepted_lost(&self.load.log, &image)
            .unwrap_or_else(|wrong| panic!("{wrong}"));
    }

    fn judge_flushed(&self, server: &Server) {
        let image = server.connect().read_all().expect("readable");
        check_flushed_kept(&self.load.log, &image).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}

fn serve<'a>(bed: &'a TestBed, journal: &Path) -> ServerBuilder<'a> {
    let journal = journal.display().to_string();
    bed.serve("disk").with(&["--journal", &journal, "--journal-bytes", "16M"])
}

/// The first sync fails, and the disk drops what it had; the next would succeed. Nothing is in the
/// store.
fn after_a_failed_sync() -> (Scene, Server) {
    let mut scene = Scene::new();
    let server = scene.start();
    scene.proxy.shut();
    scene.load.run(&[server.connect()], 150);
    scene.flush(&server).expect("the disk is well");
    scene.load.run(&[server.connect()], 1);
    scene.disk.trouble(DiskRequest::Sync, 0, 1, Trouble::Fails);
    let client = server.connect();
    // Only a flush syncs: one in forty would leave some runs without any.
    let usual = scene.load.mix;
    scene.load.mix.flush_once_in = 8;
    let counts = scene.load.drive(&[client], 100, || ());
    scene.load.mix = usual;
    assert!(counts.refused > 0, "no client received the failed sync: {counts:?}");
    assert_eq!(counts.last_errno, Some(EIO));
    assert_eq!(scene.disk.struck(), 1);
    assert_eq!(
        scene.flush(&server),
        Err(Failure::Errno(EIO)),
        "the disk would sync now; its cache is gone"
    );
    assert!(server.connect().write(0, &[1; 512]).is_err(), "writes stop");
    wait_for("the server says why", || {
        server.stderr().contains("journal disk failed to sync").then_some(())
    });
    (scene, server)
}

#[test]
fn after_a_failed_sync_no_flush_succeeds_and_a_restart_loses_nothing() {
    requires!(require_mount());
    let (mut scene, server) = after_a_failed_sync();
    server.kill();
    scene.proxy.open();
    let server = scene.start();
    scene.judge_accepted(&server);
    // What the restart found in memory is on the disk again: now a flush may say so, and must be
    // right.
    scene.proxy.shut();
    scene.flush(&server).expect("the disk is well again");
    server.kill();
    scene.lose_power();
    scene.proxy.open();
    let server = scene.start();
    scene.judge_flushed(&server);
    let _ = server.stop().ok();
}

#[test]
fn a_power_cut_after_a_failed_sync_takes_nothing_that_was_flushed() {
    requires!(require_mount());
    let (mut scene, server) = after_a_failed_sync();
    server.kill();
    scene.lose_power();
    scene.proxy.open();
    let server = scene.start();
    scene.judge_flushed(&server);
    let _ = server.stop().ok();
}

#[test]
fn after_a_failed_sync_what_was_accepted_still_goes_to_the_store() {
    requires!(require_mount());
    let (mut scene, server) = after_a_failed_sync();
    scene.proxy.open();
    let _ = server.stop();
    let server = scene.start();
    scene.judge_accepted(&server);
    scene.load.run(&[server.connect()], 50);
    let _ = server.stop().ok();
}

#[test]
fn a_write_to_the_journal_that_fails_loses_nothing() {
    requires!(require_mount());
    let mut scene = Scene::new();
    for skip in [0, 1, 7, 40] {
        let server = scene.start();
        let struck = scene.disk.struck();
        // Two: nobody is refused for one that writes blocks ahead of the records.
        scene.disk.trouble(DiskRequest::Write, skip, 2, Trouble::Fails);
        // However many requests share a write of the journal.
        let mut drive = || scene.load.drive(&[server.connect()], 1500, || ());
        let counts = (0..50).map(|_| drive()).find(|counts| counts.refused > 0).unwrap_or_default();
        assert!(scene.disk.struck() > struck, "write {skip} did not fail: {counts:?}");
        assert!(counts.refused > 0 && counts.last_errno == Some(EIO), "{counts:?}");
        wait_for("the server says why", || {
            server.stderr().contains("journal disk failed to").then_some(())
        });
        server.kill();
        scene.disk.heal();
        let server = scene.start();
        scene.judge_accepted(&server);
        server.kill();
    }
}

#[test]
fn a_slow_journal_disk_is_waited_for() {
    requires!(require_mount());
    let mut scene = Scene::new();
    let mut server = scene.start();
    scene.disk.trouble(DiskRequest::Sync, 0, u64::MAX, Trouble::Drags(Duration::from_millis(60)));
    scene.disk.trouble(DiskRequest::Write, 0, u64::MAX, Trouble::Drags(Duration::from_millis(20)));
    scene.load.run(&[server.connect(), server.connect()], 400);
    assert!(scene.disk.struck() > 5 && server.is_running());
    scene.judge_accepted(&server);
    server.kill();
    let server = scene.start();
    scene.judge_accepted(&server);
    scene.disk.heal();
    let _ = server.stop().ok();
}

#[test]
fn a_flush_is_not_answered_before_the_disk_has_synced() {
    requires!(require_mount());
    let scene = Scene::new();
    let server = scene.start();
    let (client, other) = (server.connect(), server.connect());
    client.write(0, &[7; 4096]).expect("accepted");
    scene.disk.trouble(DiskRequest::Sync, 0, 1, Trouble::Hangs);
    let flush = client.submit(&Command::Flush);
    scene.disk.wait_hanging();
    // Meanwhile the disk that we show goes on.
    other.write(8192, &[8; 4096]).expect("accepted while the journal's disk hangs");
    assert_eq!(other.read(0, 4096), Ok(vec![7; 4096]));
    assert_eq!(client.in_flight(), 1, "the flush was answered and nothing was synced");
    scene.disk.release();
    flush.wait().expect("synced");
    let _ = server.stop().ok();
}

/// A small file system in memory, unmounted when dropped.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn new(size: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("sawmill-tmpfs-").tempdir().expect("a folder");
        run(command("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"])
            .arg(folder.path()));
        Tmpfs(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Takes every byte that is left.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.path("filling")).expect("a file");
        let ended = std::io::copy(&mut std::io::repeat(1), &mut file).expect_err("it is small");
        assert_eq!(ended.kind(), std::io::ErrorKind::StorageFull);
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = command("umount").arg("-l").arg(self.0.path()).output();
    }
}

#[test]
fn a_journal_that_does_not_fit_is_refused_and_leaves_nothing_behind() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let small = Tmpfs::new("8m");
    let journal = PathBuf::from(small.path("journal"));
    let Err(refusal) = serve(&bed, &journal).attempt() else { panic!("16 MiB do not fit into 8") };
    refusal.refused(FULL, &["journal", &small.path("journal")]);
    assert!(!journal.exists(), "a half-made journal was left");
    // Elsewhere it goes on as if nothing had been.
    let server = serve(&bed, &bed.path("journal")).start();
    server.connect().write(0, &[1; 512]).expect("accepted");
    let _ = server.stop().ok();
}

#[test]
fn the_volumes_of_one_command_share_a_small_disk() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    for name in ["oak", "ash"] {
        bed.create(name, "8M", &["--segment-bytes", "256K"]);
    }
    let small = Tmpfs::new("320m");
    let serve = || {
        let serve = bed.serve("oak").and("ash").with_default_sizes();
        serve.env("XDG_STATE_HOME", &small.path("state")).start()
    };
    let sizes = || {
        let folder = PathBuf::from(small.path("state/sawmill"));
        let length = |path: PathBuf| path.metadata().expect("a file").len() >> 20;
        let folders = std::fs::read_dir(&folder).expect("the state folder");
        let journals = folders.map(|entry| entry.expect("an entry").path().join("journal"));
        let journals: Vec<u64> = journals.filter(|path| path.exists()).map(length).collect();
        (journals, length(folder.join("cache")))
    };
    let server = serve();
    let (journals, cache) = sizes();
    assert!(journals == [39, 39] || journals == [40, 40], "{journals:?} of 80 MiB");
    assert!((79..=80).contains(&cache), "{cache}");
    wait_for("the server says what it takes", || {
        server.stderr().contains("the journals of 2 volumes take").then_some(())
    });
    let _ = server.stop().ok();
    let server = serve();
    assert_eq!(sizes(), (journals, cache), "less is free now, and what exists keeps its size");
    let _ = server.stop().ok();
}

#[test]
fn a_disk_that_fills_up_beside_the_journal_takes_nothing_from_it() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let small = Tmpfs::new("40m");
    let journal = PathBuf::from(small.path("journal"));
    let cache = small.path("cache");
    let options = ["--cache", cache.as_str(), "--cache-bytes", "64M"];
    let server = serve(&bed, &journal).with(&options).start();
    small.fill();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("device_faults"), Mix::default());
    // The journal has all its blocks and wraps around; the cache, which is sparse, is not used.
    load.run(&[server.connect()], 3000);
    server.kill();
    let server = serve(&bed, &journal).with(&options).start();
    let image = server.connect().read_all().expect("readable");
    check_nothing_accepted_lost(&load.log, &image).unwrap_or_else(|wrong| panic!("{wrong}"));
    let _ = server.stop().ok();
    // Every read comes from the store, through a cache that cannot grow.
    let server = serve(&bed, &journal).with(&options).start();
    assert!(
        server.connect().read_all().expect("readable") == image,
        "the full cache gave other bytes"
    );
    let _ = server.stop().ok();
}

#[test]
fn staging_memory_that_is_not_there_is_refused_before_anybody_relies_on_it() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let small = Tmpfs::new("8m");
    let staging = small.path("");
    let Err(refusal) = bed.serve("disk").with(&["--staging", &staging]).attempt() else {
        panic!("32 MiB of staging memory do not fit into 8")
    };
    refusal.refused(FULL, &["staging"]);
    let server = bed.serve("disk").with(&["--staging", &staging, "--staging-bytes", "4M"]).start();
    small.fill();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("device_faults"), Mix::default());
    load.run(&[server.connect()], 1000);
    let _ = server.stop().ok();
}

#[test]
fn too_few_file_descriptors_are_refused_before_anything_is_accepted() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let (memory, socket) = (bed.memory().display().to_string(), bed.path("nbd.sock"));
    let nbd = format!("unix:{}", socket.display());
    let words =
        ["serve", "disk", "--json", "--nbd", &nbd, "--staging", &memory, "--journal-bytes", "16M"];
    let served = bed.command(&words);
    for (limit, is_enough) in [(8, false), (21, false), (47, false), (48, true), (128, true)] {
        let mut limited = command("prlimit");
        limited.arg(format!("--nofile={limit}")).arg(machine::sawmill_binary()).args(words);
        for (name, value) in served.get_envs() {
            if let Some(value) = value {
                limited.env(name, value);
            }
        }
        let mut child =
            limited.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("prlimit starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe was asked for");
        BufReader::new(stdout).read_line(&mut line).expect("text");
        let is_ready = line.contains("ready");
        if is_ready {
            let pid = Pid::from_raw(child.id().cast_signed()).expect("a pid");
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
        }
        let ended = child.wait_with_output().expect("it ends");
        let output = machine::output_text(&ended);
        assert_eq!(is_ready, is_enough, "{limit}: {output}");
        if is_ready {
            assert_eq!(
                ended.status.code(),
                Some(0),
                "{limit}: it serves and cannot store: {output}"
            );
        } else {
            assert_eq!(ended.status.code(), Some(UNAVAILABLE), "{limit}: {output}");
            let message = format!("this process may open {limit} files");
            assert!(output.contains(&message) && output.contains("ulimit"), "{limit}: {output}");
        }
    }
}

#[test]
fn a_server_without_a_free_descriptor_serves_on_and_takes_new_connections_later() {
    let bed = TestBed::new(&store::minio());
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let mut server = bed.serve("disk").start();
    let client = [server.connect()];
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("device_faults"), Mix::default());
    load.run(&client, 200);
    let pid = Pid::from_raw(server.pid().cast_signed());
    let open =
        std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("it runs").count() as u64;
    let limit = Rlimit { current: Some(open + 3), maximum: Some(4096) };
    prlimit(pid, Resource::Nofile, limit).expect("the server is ours");
    let socket = bed.path("nbd.sock");
    let crowd: Vec<UnixStream> = (0..40).map_while(|_| UnixStream::connect(&socket).ok()).collect();
    assert!(crowd.len() > 3, "more connections than the server has descriptors");
    load.run(&client, 400);
    assert!(server.is_running(), "{}", server.stderr());
    drop(crowd);
    // The crowd's descriptors are free when the server has seen that it left, not when it leaves.
    let connected = || Client::connect(&server.uri(), Style::Structured).ok();
    let newcomer = wait_for("the server has room for a newcomer", connected);
    newcomer.write(0, &[0; 512]).expect("accepted");
    let limit = Rlimit { current: Some(1024), maximum: Some(4096) };
    prlimit(pid, Resource::Nofile, limit).expect("the server is ours");
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    let image = newcomer.read_all().expect("readable");
    server.kill();
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").with(&["--accept-journal-loss"]).start();
    assert!(server.connect().read_all().expect("readable") == image, "the store has another state");
}

//! The real binary's journal on a disk that somebody else records: QEMU's storage daemon exports a
//! file over FUSE and logs each write and flush (`blklogwrites`). The log is cut between its
//! entries, whole, in part and torn; the real binary is started on each journal that power loss may
//! have left.
//!
//! Nothing is stored meanwhile: the store holds what it held when serving began, so that every byte
//! that is found comes out of the journal.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::machine::{command, require_mount, run, sawmill_binary};
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::requires;
use sawmill_tests::stamp::{Log, check_flushed_kept};
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;
use sawmill_verify::image::Image;
use sawmill_verify::plan::{Budget, plan};
use sawmill_verify::power_cut::PowerCut;
use sawmill_verify::program::Process;
use sawmill_verify::recorded_run::{Knowledge, RecordedRun};
use sawmill_verify::recording::Recording;

const VOLUME_BYTES: u64 = 2 << 20;
/// With segments of 32 MiB nothing is stored before the journal is nearly full.
const JOURNAL_BYTES: &str = "128M";
/// Images, when `SAWMILL_CRASH_IMAGES` says nothing else.
const IMAGES: usize = 760;
const POINTS_MIN: usize = 500;
const WORKERS: usize = 2;

/// QEMU's storage daemon that shows `file` at `mountpoint` and logs to `log`.
fn recorder(file: &Path, mountpoint: &Path, log: &Path) -> Process {
    fs::write(mountpoint, "").expect("a file to mount at");
    fs::File::create(log).and_then(|log| log.set_len(4 << 30)).expect("a sparse file");
    let mut daemon = command("qemu-storage-daemon");
    for (node, path) in [("disk", file), ("log", log)] {
        daemon
            .arg("--blockdev")
            .arg(format!("driver=file,node-name={node},filename={}", path.display()));
    }
    daemon.args([
        "--blockdev",
        "driver=blklogwrites,node-name=both,file=disk,log=log,log-sector-size=512",
    ]);
    let export = "type=fuse,id=export,node-name=both,writable=on,mountpoint=";
    daemon.arg("--export").arg(format!("{export}{}", mountpoint.display()));
    let mut process =
        Process::start(&mut daemon, &mountpoint.with_extension("said")).expect("it starts");
    let mounted =
        || fs::metadata(mountpoint).is_ok_and(|metadata| metadata.len() > 0).then_some(());
    process
        .wait_for("the recorded journal is to be there", mounted)
        .expect("qemu-storage-daemon serves");
    process
}

/// How many entries the log has, as of its last flush.
fn entry_count(log: &Path) -> usize {
    let mut bytes = [0; 8];
    let log = fs::File::open(log).expect("the log is there");
    log.read_exact_at(&mut bytes, 16).expect("it has a superblock");
    u64::from_le_bytes(bytes) as usize
}

fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").args(["-r", "--sparse=always"]).arg(from).arg(to));
}

/// The log of the client as of each flush: which entries had been logged when it was answered.
struct RecordedLog {
    log: Log,
    /// Of each flush of the client.
    flushed_at: Vec<usize>,
}

fn make(client: Client, log: &Path) -> RecordedLog {
    let mix =
        Mix { flush_once_in: u64::MAX, fua_once_in: u64::MAX, sectors_max: 12, ..Mix::default() };
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("journal_recorded"), mix);
    let (clients, mut flushed_at) = ([client], Vec::new());
    for round in 0..400 {
        // Few at a time in some rounds, so that the journal has entries of every size.
        load.mix.depth = [32, 1, 4][round % 3];
        let burst = 1 + load.dice.below(5);
        load.run(&clients, burst);
        let flush = load.log.submit_flush();
        clients[0].flush().expect("flushed");
        load.log.flushes[flush].completed = Some(load.log.clock.tick());
        flushed_at.push(entry_count(log));
    }
    RecordedLog { log: load.log.clone(), flushed_at }
}

/// The client's log as it must hold at a cut: a flush that was answered later demands nothing.
fn as_of(recorded_log: &RecordedLog, cut: &PowerCut) -> Log {
    let mut log = recorded_log.log.clone();
    for (flush, entries) in log.flushes.iter_mut().zip(&recorded_log.flushed_at) {
        if *entries > cut.entry {
            flush.completed = None;
        }
    }
    log
}

/// Starts the real binary on a journal and reads the volume.
fn serve_again(image: &Image, store: &Path, folder: &Path) -> Result<Vec<u8>, String> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder.join("memory")).expect("a folder");
    copy(store, &folder.join("store"));
    let (journal, socket) = (folder.join("journal"), folder.join("sock"));
    image.write_file(&journal).expect("room for a journal");
    let mut serve = Command::new(sawmill_binary());
    serve
        .args([
            "serve",
            "disk",
            "--cache-bytes",
            "0",
            "--segment-age",
            "0",
            "--staging-bytes",
            "4M",
        ])
        .args(["--journal-bytes", JOURNAL_BYTES])
        .stdin(Stdio::null());
    serve.arg("--journal").arg(&journal).arg("--staging").arg(folder.join("memory"));
    // The machine does not reboot, so the test declares the power loss.
    serve.arg("--accept-memory-loss");
    serve.arg("--nbd").arg(format!("unix:{}", socket.display()));
    serve.env("SAWMILL_STORE", format!("file://{}", folder.join("store").display()));
    for name in ["XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HOME"] {
        serve.env(name, folder);
    }
    let mut process =
        Process::start(&mut serve, &folder.join("said")).map_err(|error| error.to_string())?;
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    let ask = || Client::connect(&uri, Style::Structured).ok();
    let client =
        process.wait_for("it is to serve again", ask).map_err(|error| error.to_string())?;
    client.read_all().map_err(|failure| failure.to_string())
}

/// Fails when a store has objects that its copy lacks.
fn check_nothing_new(live: &Path, copied: &Path) {
    let objects =
        |store: &Path| run(command("find").arg(store).args(["-type", "f", "-printf", "%P\n"]));
    let (now, then) = (objects(live), objects(copied));
    let new_keys: Vec<&str> =
        now.lines().filter(|key| !then.lines().any(|known| known == *key)).collect();
    assert!(
        new_keys.is_empty(),
        "stored meanwhile, so the store is not what a cut needs: {new_keys:?}"
    );
}

/// How many writes were found again after a cut. Fails when one that was flushed was not.
fn kept_after(cut: &PowerCut, recorded_log: &RecordedLog, found: Result<Vec<u8>, String>) -> usize {
    let found = found.unwrap_or_else(|why| panic!("after the cut {cut}: {why}"));
    let verdict = check_flushed_kept(&as_of(recorded_log, cut), &found)
        .unwrap_or_else(|violation| panic!("after the cut {cut}: {violation}"));
    verdict.kept
}

#[test]
fn every_journal_that_power_loss_may_leave_holds_what_was_flushed() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "2M", &["--segment-bytes", "32M"]);
    let room =
        tempfile::Builder::new().prefix("sawmill-").tempdir_in("/dev/shm").expect("room in memory");
    let inside = |name: &str| room.path().join(name);
    let (file, mountpoint, log) = (inside("file"), inside("shown"), inside("log"));
    let path = file.display().to_string();
    // A journal bound to the volume: a foreign file would be renamed, and a mount point cannot be.
    let server =
        bed.serve("disk").with(&["--journal", &path, "--journal-bytes", JOURNAL_BYTES]).start();
    let _ = server.stop().ok();
    let before = Image::read_file(&file).expect("the journal can be read");

    let mut daemon = recorder(&file, &mountpoint, &log);
    let path = mountpoint.display().to_string();
    let size = ["--journal-bytes", JOURNAL_BYTES];
    let server =
        bed.serve("disk").with(&["--journal", &path, "--segment-age", "0"]).with(&size).start();
    let first = entry_count(&log);
    let (live, store) = (bed.store_folder().expect("a folder"), inside("store"));
    copy(live, &store);
    let recorded_log = make(server.connect(), &log);
    server.kill();
    // It knows how far the journal was synced, beyond what a cut has: the power took it.
    for entry in fs::read_dir(bed.memory()).expect("the folder in memory").flatten() {
        fs::remove_file(entry.path()).expect("a staging file can be removed");
    }
    check_nothing_new(live, &store);
    assert!(daemon.stop().success(), "qemu-storage-daemon ends in order: {}", daemon.output());

    let recording = Recording::open(&log).expect("QEMU's log can be read");
    let images_max = std::env::var("SAWMILL_CRASH_IMAGES").ok().and_then(|text| text.parse().ok());
    let budget =
        Budget { images_max: images_max.unwrap_or(IMAGES), tear_bytes: Some(512), seed: 1 };
    let plan = plan(&recording, first, &budget);
    let recorded = RecordedRun { recording, before, first, knowledge: Knowledge::Nothing };
    let folders: Vec<PathBuf> =
        (0..WORKERS).map(|worker| inside(&format!("again-{worker}"))).collect();
    let check = &|worker: usize| {
        let mut replay = recorded.replay();
        let cuts = plan.cuts.iter().skip(worker).step_by(WORKERS);
        cuts.map(|cut| {
            let image = replay.image(cut).expect("the log can be replayed");
            kept_after(cut, &recorded_log, serve_again(&image, &store, &folders[worker]))
        })
        .sum::<usize>()
    };
    let kept_count: usize = std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..WORKERS).map(|worker| scope.spawn(move || check(worker))).collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker's claims hold")).sum()
    });
    let (entries, images) = (recorded.recording.entries.len(), plan.cuts.len());
    println!(
        "{entries} entries, {images} images at {} points, {kept_count} writes found again",
        plan.points
    );
    assert!(
        images_max.is_some() || plan.points >= POINTS_MIN,
        "only {} points were replayed",
        plan.points
    );
    assert!(kept_count > 0, "no write was ever found: this run proves nothing");
}

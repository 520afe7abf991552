//! The devices of the crash checker keep the contract of a device: a recorder, a file, an export.
//!
//! Not here: the faulty device, which keeps it except for its fault (`faulty`).

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use sawmill_device::layer::Align;
use sawmill_device::{BlockDevice, BlockDeviceExt, Flags, MemoryDevice, Operation, conformance};
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};
use sawmill_verify::program::{self, Process};
use sawmill_verify::recorder::Recorder;
use sawmill_verify::recording::LogWriter;
use sawmill_verify::stamp::Clock;
use sawmill_verify::target::{FileTarget, NbdTarget};

const SIZE_BYTES: u64 = 32 << 20;

/// A file of zeroes, each time.
fn blank(path: &Path) {
    File::create(path).unwrap().set_len(SIZE_BYTES).unwrap();
}

#[test]
fn a_recorder_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    conformance::all(&|| {
        let log = LogWriter::create(&folder.path().join("log")).unwrap();
        Arc::new(Recorder::new(MemoryDevice::new(SIZE_BYTES), log, Clock::default()))
    });
}

#[test]
fn a_file_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    conformance::all(&|| {
        blank(&path);
        Arc::new(FileTarget::open(&path).unwrap())
    });
}

/// It accepts whole blocks, which its load sends; here a layer turns all requests into these.
#[test]
fn a_file_around_the_page_cache_keeps_the_contract_in_whole_blocks() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk");
    conformance::all(&|| {
        blank(&path);
        let file = FileTarget::direct(&path).unwrap();
        let block_bytes = file.geometry().block_bytes;
        Arc::new(Align::new(file, block_bytes).unwrap())
    });
}

#[test]
fn an_export_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("disk.sock");
    let server = NbdServer::start(NbdOptions::new(Listen::Unix(socket))).unwrap();
    let count = AtomicU32::new(0);
    conformance::all(&|| {
        let name = count.fetch_add(1, Ordering::Relaxed).to_string();
        let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(SIZE_BYTES));
        server
            .add_export(Export { name: name.clone(), description: String::new(), device })
            .unwrap();
        Arc::new(NbdTarget::connect(&server.uri(&name)).unwrap())
    });
}

/// A third-party server of zeroes, limited to requests of 64 KiB and without FUA, and its export.
fn modest(folder: &Path) -> (Process, NbdTarget) {
    let at = |name: &str| folder.join(name).display().to_string();
    let _ = std::fs::remove_file(folder.join("socket"));
    let mut kit = program::command("nbdkit").unwrap();
    kit.args(["--foreground", "--exit-with-parent", "--unix", &at("socket")])
        .args(["--filter=log", "--filter=blocksize-policy", "--filter=fua", "memory"])
        .arg(SIZE_BYTES.to_string())
        .args(["blocksize-maximum=64K", "blocksize-error-policy=error"])
        .arg(format!("logfile={}", at("log")));
    let mut process = Process::start(&mut kit, &folder.join("output")).unwrap();
    let uri = format!("nbd+unix:///?socket={}", at("socket"));
    let target = process.wait_for("nbdkit serves", || NbdTarget::connect(&uri).ok()).unwrap();
    (process, target)
}

#[test]
fn an_export_of_a_modest_server_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let last = Mutex::new(None);
    conformance::all(&|| {
        // The previous server ends first, because both use one socket.
        drop(last.lock().unwrap().take());
        let (process, target) = modest(folder.path());
        *last.lock().unwrap() = Some(process);
        Arc::new(target)
    });
}

#[test]
fn a_write_with_fua_to_a_server_that_knows_none_is_flushed() {
    let folder = tempfile::tempdir().unwrap();
    let (_process, target) = modest(folder.path());
    let fua = Flags { fua: true, ..Flags::default() };
    let flushes = || {
        let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
        log.lines().filter(|line| line.contains(" Flush id=")).count()
    };
    for (operation, bytes) in [(Operation::Write, 512), (Operation::WriteZeroes, 0)] {
        target.call(operation, 0, 512, Flags::default(), vec![1; bytes]).unwrap();
        let before = flushes();
        target.call(operation, 0, 512, fua, vec![1; bytes]).unwrap();
        assert_eq!(flushes(), before + 1, "{operation:?}");
    }
}

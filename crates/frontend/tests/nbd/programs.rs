//! Third-party clients: nbdinfo, nbdcopy, Python's libnbd, qemu-io.
//!
//! They must be installed; a machine without them fails these tests and says what is missing.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Output};
use std::sync::Arc;

use sawmill_device::{BlockDevice, BlockDeviceExt, MemoryDevice};
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};

use crate::client::{pattern, serve};
use crate::devices::ThreadDevice;

const SIZE: u64 = 16 << 20;

fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(SIZE))
}

/// Runs a program of a package and returns what it printed; it must succeed.
fn run(package: &str, program: &str, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) => panic!("{program} cannot be run ({error}); install the package {package}"),
    };
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{program} {arguments:?}: {status}\n{stdout}{stderr}");
    stdout.into_owned()
}

#[test]
fn nbdinfo_sees_what_is_offered() {
    let served = serve(memory());
    let json = run("libnbd-bin", "nbdinfo", &["--json", &served.server.uri("disk")]);
    for expected in [
        "\"protocol\": \"newstyle-fixed\"",
        "\"structured\": true",
        "\"export-name\": \"disk\"",
        "\"description\": \"about disk\"",
        "\"export-size\": 16777216",
        "\"base:allocation\"",
        "\"is_read_only\": false",
        "\"can_cache\": true",
        "\"can_df\": true",
        "\"can_fast_zero\": true",
        "\"can_flush\": true",
        "\"can_fua\": true",
        "\"can_multi_conn\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"block_size_minimum\": 1",
        "\"block_size_preferred\": 65536",
        "\"block_size_maximum\": 33554432",
    ] {
        assert!(json.contains(expected), "{expected} is missing in {json}");
    }
    let list = run("libnbd-bin", "nbdinfo", &["--list", "--json", &served.server.uri("")]);
    assert!(list.contains("\"export-name\": \"disk\""), "{list}");
}

#[test]
fn nbdinfo_maps_data_and_holes() {
    let device = memory();
    device.write_at(1 << 20, &[1; 64 << 10]).expect("in range");
    let served = serve(device);
    let map = run("libnbd-bin", "nbdinfo", &["--map", &served.server.uri("disk")]);
    let words: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().collect()).collect();
    let expected = [
        ["0", "1048576", "3", "hole,zero"],
        ["1048576", "65536", "0", "data"],
        ["1114112", "15663104", "3", "hole,zero"],
    ];
    assert_eq!(words, expected);
}

#[test]
fn nbdcopy_brings_a_file_in_and_out_unchanged() {
    for device in [memory() as Arc<dyn BlockDevice>, Arc::new(ThreadDevice::new(SIZE))] {
        let served = serve(device);
        let (input, output) =
            (served.folder.path().join("in.raw"), served.folder.path().join("out.raw"));
        let mut data = pattern(5, SIZE as usize);
        data[3 << 20..9 << 20].fill(0);
        std::fs::write(&input, &data).expect("written");
        let uri = served.server.uri("disk");
        let (input, output) = (input.to_str().expect("UTF-8"), output.to_str().expect("UTF-8"));
        run("libnbd-bin", "nbdcopy", &["--flush", input, &uri]);
        run("libnbd-bin", "nbdcopy", &[&uri, output]);
        assert!(std::fs::read(output).expect("there") == data);
        let metrics = served.server.metrics();
        assert!(metrics.requests.flush > 0 && metrics.requests.write_zeroes > 0, "{metrics:?}");
        assert_eq!((metrics.errors, metrics.protocol_violations), (0, 0));
    }
}

#[test]
fn nbdcopy_copies_a_disk_over_tcp_byte_for_byte() {
    let device = memory();
    device.write_at(0, &pattern(9, SIZE as usize)).expect("in range");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = NbdServer::start(NbdOptions::new(Listen::Tcp(address))).expect("it starts");
    let export = Export { name: "disk".into(), description: String::new(), device };
    server.add_export(export).expect("a fresh name");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("out.raw");
    run("libnbd-bin", "nbdcopy", &[&server.uri("disk"), out.to_str().expect("UTF-8")]);
    assert!(std::fs::read(out).expect("there") == pattern(9, SIZE as usize));
}

#[test]
fn libnbd_does_every_command_through_python() {
    let device = memory();
    let served = serve(device.clone());
    let script = r#"
import nbd, sys
h = nbd.NBD()
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.set_export_name("disk")
h.set_full_info(True)
h.connect_uri(sys.argv[1])
assert h.get_size() == 16 << 20, h.get_size()
assert h.get_canonical_export_name() == "disk"
assert h.get_export_description() == "about disk"
assert h.get_structured_replies_negotiated()
h.pwrite(b"sawmill" * 1000, 12345)
h.pwrite(b"fua", 0, nbd.CMD_FLAG_FUA)
assert h.pread(7000, 12345) == b"sawmill" * 1000
chunks = []
keep = lambda data, offset, kind, error: chunks.append(bytes(data))
h.pread_structured(3, 0, keep, nbd.CMD_FLAG_DF)
assert chunks == [b"fua"], chunks
h.flush()
h.cache(1 << 20, 0)
h.zero(7, 12345, nbd.CMD_FLAG_NO_HOLE)
h.zero(1, 12352, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(9, 12345) == bytes(8) + b"a"
h.trim(8 << 20, 8 << 20)
runs = []
h.block_status(16 << 20, 0, lambda context, offset, entries, error: runs.extend(entries))
assert sum(runs[0::2]) == 16 << 20 and runs[1] == 0 and runs[-1] == 3, runs
h.set_strict_mode(0)
for call, errno in [
    (lambda: h.pread(2, (16 << 20) - 1), "EINVAL"),
    (lambda: h.pwrite(b"xy", (16 << 20) - 1), "ENOSPC"),
    (lambda: h.zero(0, 0), "EINVAL"),
]:
    try:
        call()
    except nbd.Error as error:
        assert error.errno == errno, (error.errno, errno)
    else:
        sys.exit("no error where " + errno + " is due")
block = lambda n: nbd.Buffer.from_bytearray(bytearray([n] * 4096))
cookies = [h.aio_pwrite(block(n), n * 4096) for n in range(64)]
for cookie in cookies:
    while not h.aio_command_completed(cookie):
        h.poll(-1)
assert h.pread(64 * 4096, 0) == b"".join(bytes([n] * 4096) for n in range(64))
h.shutdown()
"#;
    run("python3-libnbd", "/usr/bin/python3", &["-c", script, &served.server.uri("")]);
    assert_eq!(device.read_at(63 * 4096, 1).expect("in range"), [63]);
    assert_eq!(served.server.metrics().protocol_violations, 0);
}

#[test]
fn qemu_io_writes_reads_and_discards() {
    let device = memory();
    let served = serve(device.clone());
    let commands = [
        "write -P 0x5a 1000 3000",
        "read -P 0x5a 1000 3000",
        "write -z 2000 100",
        "read -P 0 2000 100",
        "aio_write -P 1 1M 1M",
        "aio_write -P 2 2M 3M",
        "aio_flush",
        "read -P 2 2M 3M",
        "discard 8M 8M",
        "flush",
        "map",
    ];
    let mut arguments = vec!["-f", "raw"];
    arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
    let uri = served.server.uri("disk");
    arguments.push(&uri);
    let printed = run("qemu-utils", "qemu-io", &arguments);
    assert!(!printed.contains("failed") && !printed.contains("rror"), "{printed}");
    assert_eq!(device.read_at(999, 2).expect("in range"), [0, 0x5a]);
    assert_eq!(device.read_at((5 << 20) - 1, 2).expect("in range"), [2, 0]);
}

//! Tests of the five examples that each language has, as disks: request by request, and for the
//! special feature of each.
//!
//! Not here: building and starting an example, which the test of each language does; replaced
//! drivers (`driven`).

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::driven::{DrivenDevice, fio_verifies};
use crate::test_bed::TestBed;
use sawmill_testkit::Dice;

/// The size of all disks here.
pub const SIZE_BYTES: u64 = 16 << 20;

/// An example of this name, with these arguments.
pub type Example<'a> = &'a dyn Fn(&str, &[&str]) -> Command;

/// A path as an argument.
///
/// # Panics
/// When it is not text.
#[must_use]
pub fn text(path: &Path) -> &str {
    path.to_str().expect("a path of text")
}

/// Writes, reads and verifies a device as users do.
///
/// # Panics
/// When it does not behave as a disk.
pub fn assert_is_disk(bed: &TestBed, device: &DrivenDevice) {
    let common = ["--size=16M", "--do_verify=1"];
    let jobs: [&[&str]; 3] = [
        &["--rw=randwrite", "--bsrange=512-256k", "--bs_unaligned=1", "--iodepth=8"],
        &["--rw=randrw", "--bs=4k", "--iodepth=32", "--fsync=64", "--io_size=8M"],
        &["--rw=write", "--bs=1M", "--iodepth=4"],
    ];
    for job in jobs {
        let _ = fio_verifies(&device.uri, bed, &[&common[..], job].concat());
    }
    let client = device.connect();
    client.write(12_345, b"at any byte").expect("accepted");
    client.flush().expect("flushed");
    assert_eq!(client.read(12_345, 11).expect("readable"), b"at any byte");
}

/// `ram` and `file` are disks in every mode, and a file has the bytes of its disk.
///
/// # Panics
/// When they do not.
pub fn ram_and_file(bed: &TestBed, example: Example<'_>) {
    let image = bed.path("image");
    let batch = &["--option", "mode=batch", "--option", "hw_queues=2"];
    for options in [&[][..], &batch[..2], batch, &["--option", "hw_queues=3"]] {
        let device = DrivenDevice::start(bed, "ram", options, &example("ram", &["16M"]));
        assert_is_disk(bed, &device);
        device.end(bed, "ram");
        let device =
            DrivenDevice::start(bed, "file", options, &example("file", &[text(&image), "16M"]));
        assert_is_disk(bed, &device);
        let content = device.connect().read_all().expect("readable");
        device.end(bed, "file");
        assert!(
            std::fs::read(&image).expect("the image") == content,
            "the file has other bytes: {options:?}"
        );
    }
}

/// `mirror` is a disk, and fails where its sides differ.
///
/// # Panics
/// When it does not.
pub fn mirror(bed: &TestBed, example: Example<'_>) {
    let sides = [bed.path("one"), bed.path("other")];
    std::fs::write(&sides[0], vec![0; SIZE_BYTES as usize]).expect("a side");
    std::fs::write(&sides[1], vec![0xff; SIZE_BYTES as usize]).expect("a side");
    let device = DrivenDevice::start(
        bed,
        "mirror",
        &[],
        &example("mirror", &[text(&sides[0]), text(&sides[1])]),
    );
    assert_is_disk(bed, &device);
    let mut side = std::fs::read(&sides[1]).expect("a side");
    side[8192] ^= 1;
    std::fs::write(&sides[1], side).expect("a side");
    let client = device.connect();
    assert!(client.read(8192, 512).is_err(), "the sides differ there");
    let _ = client.read(16_384, 512).expect("and nowhere else");
    device.end(bed, "mirror");
}

/// `null` accepts everything and reads as zeroes.
///
/// # Panics
/// When it does not.
pub fn null(bed: &TestBed, example: Example<'_>) {
    let device = DrivenDevice::start(bed, "null", &[], &example("null", &["16M"]));
    let client = device.connect();
    client.write(4096, &[7; 65_536]).expect("accepted");
    assert_eq!(client.read(0, 131_072).expect("readable"), vec![0; 131_072]);
    device.end(bed, "null");
}

/// `lazy` begins with the content of its source, and fetches each part once.
///
/// # Panics
/// When it does not.
pub fn lazy(bed: &TestBed, example: Example<'_>) {
    let content = Dice::seeded("lazy").bytes(SIZE_BYTES as usize);
    let source = Source::start(content.clone());
    lazy_of(bed, example, content, &source.url, || source.is_gone.store(true, Ordering::SeqCst));
}

/// As [`lazy`], of another source: what it has, where it is, and how it ends.
///
/// # Panics
/// When it does not.
pub fn lazy_of(
    bed: &TestBed,
    example: Example<'_>,
    mut expected: Vec<u8>,
    url: &str,
    end_source: impl FnOnce(),
) {
    let copy = bed.path("copy");
    let device = DrivenDevice::start(bed, "lazy", &[], &example("lazy", &[url, text(&copy)]));
    let client = device.connect();
    client.write(70_000, b"news").expect("accepted");
    expected[70_000..70_004].copy_from_slice(b"news");
    assert!(client.read_all().expect("readable") == expected, "the source with news in it");
    end_source();
    assert!(client.read_all().expect("readable") == expected, "and again without a source");
    assert_is_disk(bed, &device);
    device.end(bed, "lazy");
}

/// How often a test kills or replaces a driver: `SAWMILL_ROUNDS`, or 5 without it.
#[must_use]
pub fn rounds() -> u64 {
    std::env::var("SAWMILL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5)
}

/// Verifies writes to `file` while `disturb` disturbs the driver, in every mode; prints the longest
/// stall.
///
/// # Panics
/// When a byte is lost, or a request fails.
pub fn undisturbed(
    bed: &TestBed,
    example: Example<'_>,
    what: &str,
    disturb: impl Fn(&TestBed, &mut DrivenDevice),
) {
    let (rounds, image) = (rounds(), bed.path("image"));
    for options in [&[][..], &["--option", "mode=batch"]] {
        let mut device =
            DrivenDevice::start(bed, "disk", options, &example("file", &[text(&image), "16M"]));
        let stall = longest_request(bed, &mut device, rounds, |device| disturb(bed, device));
        device.end(bed, "disk");
        println!("{rounds} {what}, {options:?}: the longest request took {stall:?}");
    }
}

/// Verifies writes while `disturb` disturbs the driver so many times; returns how long the longest
/// request took. The device is a disk afterwards.
///
/// # Panics
/// When a byte is lost, or a request fails.
pub fn longest_request(
    bed: &TestBed,
    device: &mut DrivenDevice,
    rounds: u64,
    mut disturb: impl FnMut(&mut DrivenDevice),
) -> Duration {
    let (is_over, longest_ns) = (AtomicBool::new(false), AtomicU64::new(0));
    let uri = device.uri.clone();
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let arguments = ["--size=16M", "--rw=randrw", "--bs=4k", "--iodepth=16", "--fsync=32"];
            while !is_over.load(Ordering::SeqCst) {
                let took_ns = fio_verifies(&uri, bed, &arguments);
                longest_ns.fetch_max(took_ns, Ordering::SeqCst);
            }
        });
        for _ in 0..rounds {
            // A failed load reports its error when it is joined.
            if !load.is_finished() {
                disturb(device);
            }
        }
        is_over.store(true, Ordering::SeqCst);
    });
    assert_is_disk(bed, device);
    Duration::from_nanos(longest_ns.load(Ordering::SeqCst))
}

/// A web server with one page, which supports ranges.
pub struct Source {
    /// The URL of the page.
    pub url: String,
    is_gone: Arc<AtomicBool>,
}

impl Source {
    /// Serves these bytes until the test ends.
    ///
    /// # Panics
    /// When there is no port.
    #[must_use]
    pub fn start(content: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let is_gone = Arc::new(AtomicBool::new(false));
        let gone_flag = Arc::clone(&is_gone);
        std::thread::spawn(move || {
            for client in
                listener.incoming().flatten().take_while(|_| !gone_flag.load(Ordering::SeqCst))
            {
                // A client that goes away needs no answer.
                let _ = answer(client, &content);
            }
        });
        Source { url: format!("http://{address}/image"), is_gone }
    }
}

fn answer(mut client: TcpStream, content: &[u8]) -> std::io::Result<()> {
    let mut question = Vec::new();
    let mut byte = [0];
    while !question.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte)?;
        question.push(byte[0].to_ascii_lowercase());
    }
    let question = String::from_utf8_lossy(&question).into_owned();
    let range = question.split_once("range: bytes=").and_then(|(_, rest)| rest.lines().next());
    let Some((from, last)) = range.and_then(|range| range.split_once('-')) else {
        assert!(question.starts_with("head "), "a range or the size is asked for: {question}");
        let size = content.len();
        return write!(
            client,
            "HTTP/1.0 200 OK\r\nAccept-Ranges: bytes\r\nContent-Length: {size}\r\n\r\n"
        );
    };
    let (from, end) =
        (from.parse::<usize>().expect("a number"), last.parse::<usize>().expect("a number") + 1);
    let (length, size) = (end - from, content.len());
    let range = format!("Content-Range: bytes {from}-{last}/{size}");
    write!(client, "HTTP/1.0 206 Partial Content\r\nContent-Length: {length}\r\n{range}\r\n\r\n")?;
    client.write_all(&content[from..end])
}

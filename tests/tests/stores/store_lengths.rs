//! A store that claims absurd lengths harms the volume whose object it is, and nobody else in the
//! process.

use std::fs::File;
use std::path::PathBuf;

use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::store;
use sawmill_tests::test_bed::{TestBed, field};

const PIECE: usize = 256 << 10;

/// The name that the next checkpoint of a volume will have.
fn next_checkpoint(bed: &TestBed, volume: &str) -> PathBuf {
    let info = bed.info(volume);
    let id = field(&info, "id").and_then(|id| id.as_str()).expect("info names the id").to_owned();
    let folder = bed.store_folder().expect("a folder store").join(id).join("checkpoint");
    let names = std::fs::read_dir(&folder).expect("it has checkpoints");
    let numbers = names.map(|entry| {
        let name = entry.expect("listed").file_name();
        name.to_str().and_then(|name| name.parse::<u64>().ok()).expect("a number")
    });
    folder.join(format!("{:020}", numbers.max().expect("one at least") + 1))
}

#[test]
fn an_absurd_length_under_one_volume_leaves_the_other_served() {
    let bed = TestBed::new(&store::folder());
    bed.create("oak", "16M", &["--segment-bytes", "256K"]);
    bed.create("ash", "16M", &["--segment-bytes", "256K"]);
    let options = ["--checkpoint-bytes", "1M", "--admin", "127.0.0.1:0"];
    let server = bed.serve("oak").and("ash").with(&options).start();
    let connect = |n| Client::connect(&server.uri_of(n), Style::Structured).expect("connects");
    let (oak, ash) = (connect(0), connect(1));
    ash.write(0, &[7; PIECE]).expect("accepted");
    let huge = File::create_new(next_checkpoint(&bed, "oak")).expect("the name is free");
    huge.set_len(4 << 40).expect("a sparse file");
    // Enough for a checkpoint; what is refused once the volume has failed is as it should be.
    for number in 0..32 {
        let _ = oak.write(number * PIECE as u64, &[number as u8 + 1; PIECE]);
    }
    server.wait_for("the damage is reported", |status| {
        status.to_string().contains("exists already and cannot be read")
    });
    assert_eq!(ash.read(0, PIECE as u32).expect("still served"), vec![7; PIECE]);
    ash.write(PIECE as u64, &[8; PIECE]).expect("still served");
    ash.flush().expect("still served");
    let resident = server.resident_bytes();
    assert!(resident < 512 << 20, "{resident} bytes of memory");
    server.kill();
}

#[test]
fn a_volume_whose_newest_checkpoint_is_absurd_goes_back_to_the_one_before() {
    let bed = TestBed::new(&store::folder());
    bed.create("oak", "16M", &["--segment-bytes", "256K"]);
    let server = bed.serve("oak").start();
    server.connect().write(0, &[7; PIECE]).expect("accepted");
    let _ = server.stop().ok();
    let huge = File::create_new(next_checkpoint(&bed, "oak")).expect("the name is free");
    huge.set_len(4 << 40).expect("a sparse file");
    let server = bed.serve("oak").start();
    assert_eq!(server.connect().read(0, PIECE as u32).expect("served"), vec![7; PIECE]);
    server.kill();
}

#[test]
fn a_pipe_in_place_of_an_object_is_an_error_at_once() {
    let bed = TestBed::new(&store::folder());
    bed.create("oak", "16M", &[]);
    let record =
        bed.store_folder().expect("a folder store").join("names/oak").join(format!("{:020}", 1));
    std::fs::rename(&record, bed.path("aside")).expect("moved");
    let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600));
    rustix::fs::mknodat(rustix::fs::CWD, &record, fifo, mode, 0).expect("a pipe");
    bed.sawmill(&["info", "oak"]).refused(9, &["not a file"]);
}

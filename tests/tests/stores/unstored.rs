//! A journal whose writes were overtaken by another attachment: they are never replayed, and can be
//! taken out.

use sawmill_tests::nbd::Command;
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::TestBed;

const REFUSED: i32 = 5;

#[test]
fn writes_of_an_overtaken_journal_can_be_taken_out_of_it() {
    let bed = TestBed::new(&StoreUnderTest::Folder);
    bed.create("disk", "16M", &[]);
    let server = bed.serve("disk").with(&["--segment-age", "0"]).start();
    let client = server.connect();
    client.write(0, &[1; 4096]).expect("accepted");
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    client.write(1 << 20, &[2; 65536]).expect("accepted");
    client
        .call(&Command::WriteZeroes {
            offset: (1 << 20) + 4096,
            length: 4096,
            fua: false,
            no_hole: false,
        })
        .expect("accepted");
    client.write(5000, &[3; 100]).expect("accepted");
    client.flush().expect("logged");
    server.kill();
    let second = bed.neighbor().serve("disk").with(&["--accept-journal-loss"]).start();
    bed.serve("disk").attempt().err().expect("refused").refused(REFUSED, &["inspect journal"]);

    let (journal, out) = (bed.journals()[0].display().to_string(), bed.path("out"));
    let before = std::fs::read(&journal).expect("readable");
    let line = ["inspect", "journal", &journal, "--unstored-to", &out.display().to_string()];
    let _ = bed.sawmill(&line).ok();
    let bytes = std::fs::read(&out).expect("it was made");
    assert_eq!(&bytes[5000..5100], [3; 100]);
    assert_eq!(&bytes[1 << 20..][..4096], [2; 4096]);
    assert_eq!(&bytes[(1 << 20) + 4096..][..4096], [0; 4096], "zeroed after it was written");
    assert_eq!(&bytes[(1 << 20) + 8192..(1 << 20) + 65536], [2; 57344]);
    let ranges = std::fs::read_to_string(bed.path("out.ranges")).expect("it was made");
    let rows: Vec<&str> =
        ranges.lines().map(|row| row.rsplit_once(' ').expect("a position").0).collect();
    let unstored = ["1048576 65536 write", "1052672 4096 zeroes", "5000 100 write"];
    assert_eq!(rows[rows.len() - 3..], unstored, "after what was stored meanwhile, if any");
    assert_eq!(std::fs::read(&journal).expect("readable"), before, "the journal is as it was");
    // Nothing is written over.
    assert_ne!(bed.sawmill(&line).code, Some(0));
    let _ = second.stop().ok();
}

//! A journal that is not what it should be: missing, empty, cut short, overwritten, or of another
//! volume. Each is a refusal that names the file and the way on; none is ever "nothing to replay".

use std::path::{Path, PathBuf};

use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::server::Server;
use sawmill_tests::stamp::check_cut;
use sawmill_tests::store;
use sawmill_tests::test_bed::{CommandOutput, TestBed};

const VOLUME_BYTES: u64 = 8 << 20;
/// The command line names the wrong thing.
const USAGE: i32 = 2;
/// Going on could lose data.
const REFUSED: i32 = 5;
/// Held by another process.
const IN_USE: i32 = 11;

/// A volume whose server died with accepted writes in its journal, and the journal's path.
fn crashed() -> (TestBed, PathBuf, Load) {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let journal = bed.path("journal");
    let server = serve(&bed, &journal, &[]).unwrap_or_else(|ended| panic!("{}", ended.stderr));
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("journal_cases"), Mix::default());
    load.drive(&[server.connect()], 600, || server.kill());
    (bed, journal, load)
}

fn serve(bed: &TestBed, journal: &Path, options: &[&str]) -> Result<Server, CommandOutput> {
    let journal = journal.display().to_string();
    bed.serve("disk").with(&["--journal", &journal]).with(options).attempt()
}

/// The volume is refused with this journal; with the override it opens and is a cut.
fn refused_then_accepted_as_a_cut(bed: &TestBed, journal: &Path, load: &Load, words: &[&str]) {
    let before = std::fs::read(journal).ok();
    for _ in 0..2 {
        let Err(refusal) = serve(bed, journal, &[]) else {
            panic!("{}: taken without a word", journal.display());
        };
        refusal.refused(REFUSED, &[&["journal", "--accept-journal-loss"], words].concat());
        assert!(std::fs::read(journal).ok() == before, "the refusal changed the journal");
    }
    let server = serve(bed, journal, &["--accept-journal-loss"]);
    let server =
        server.unwrap_or_else(|ended| panic!("the override does not help:\n{}", ended.stderr));
    let image = server.connect().read_all().expect("readable");
    check_cut(&load.log, &image).unwrap_or_else(|violation| panic!("not a cut: {violation}"));
    server.connect().write(0, &[9; 4096]).expect("the volume takes writes again");
    server.kill();
    // The new journal is a good one: no override is needed any more.
    let server = serve(bed, journal, &[]).unwrap_or_else(|ended| panic!("{}", ended.stderr));
    assert_eq!(server.connect().read(0, 4096), Ok(vec![9; 4096]));
    let _ = server.stop().ok();
}

#[test]
fn a_missing_journal_is_refused_until_its_loss_is_accepted() {
    let (bed, journal, load) = crashed();
    std::fs::remove_file(&journal).expect("the journal is there");
    let says = ["journal", "the last state that reached the store (20", " ago; ", "is not known"];
    refused_then_accepted_as_a_cut(&bed, &journal, &load, &says);
}

#[test]
fn an_empty_journal_is_refused_until_its_loss_is_accepted() {
    let (bed, journal, load) = crashed();
    std::fs::write(&journal, "").expect("the journal can be emptied");
    refused_then_accepted_as_a_cut(&bed, &journal, &load, &[&journal.display().to_string()]);
}

#[test]
fn a_journal_of_zeroes_is_refused_until_its_loss_is_accepted() {
    let (bed, journal, load) = crashed();
    let length = std::fs::metadata(&journal).expect("the journal is there").len();
    std::fs::write(&journal, vec![0; length as usize]).expect("the journal can be overwritten");
    refused_then_accepted_as_a_cut(&bed, &journal, &load, &[&journal.display().to_string()]);
}

#[test]
fn a_journal_cut_short_is_refused_until_its_loss_is_accepted() {
    let (bed, journal, load) = crashed();
    let file =
        std::fs::OpenOptions::new().write(true).open(&journal).expect("the journal is there");
    file.set_len(1 << 20).expect("the journal can be cut short");
    refused_then_accepted_as_a_cut(&bed, &journal, &load, &[&journal.display().to_string()]);
}

#[test]
fn a_journal_of_another_volume_is_refused_and_left_alone() {
    let (bed, journal, load) = crashed();
    bed.create("stranger", "8M", &[]);
    let strange = bed.path("strange-journal");
    let server = bed.serve("stranger").with(&["--journal", &strange.display().to_string()]).start();
    server.connect().write(0, &[1; 4096]).expect("accepted");
    server.kill();
    let before = std::fs::read(&strange).expect("the stranger's journal");
    for options in [&[][..], &["--accept-journal-loss"]] {
        let Err(refusal) = serve(&bed, &strange, options) else {
            panic!("another volume's journal was taken, with {options:?}");
        };
        refusal.refused(USAGE, &["belongs to volume", "--journal"]);
        assert!(
            std::fs::read(&strange).expect("still there") == before,
            "the stranger's journal was changed"
        );
    }
    // Both volumes are well with their own journals.
    let server = serve(&bed, &journal, &[]).unwrap_or_else(|ended| panic!("{}", ended.stderr));
    let image = server.connect().read_all().expect("readable");
    sawmill_tests::stamp::check_nothing_accepted_lost(&load.log, &image)
        .unwrap_or_else(|violation| panic!("{violation}"));
    drop(server);
    let server = bed.serve("stranger").with(&["--journal", &strange.display().to_string()]).start();
    assert_eq!(server.connect().read(0, 4096), Ok(vec![1; 4096]));
}

#[test]
fn a_journal_lost_after_an_orderly_stop_is_no_loss() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let journal = bed.path("journal");
    let server = serve(&bed, &journal, &[]).unwrap_or_else(|ended| panic!("{}", ended.stderr));
    server.connect().write(0, &[4; 4096]).expect("accepted");
    let _ = server.stop().ok();
    std::fs::remove_file(&journal).expect("the journal is there");
    let server = serve(&bed, &journal, &[]).unwrap_or_else(|ended| panic!("{}", ended.stderr));
    assert_eq!(server.connect().read(0, 4096), Ok(vec![4; 4096]));
}

#[test]
fn a_journal_serves_one_process_at_a_time() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let journal = bed.path("journal");
    let first = serve(&bed, &journal, &[]).unwrap_or_else(|ended| panic!("{}", ended.stderr));
    let elsewhere = bed.neighbor();
    let socket = format!("unix:{}", elsewhere.path("nbd.sock").display());
    let second =
        elsewhere.serve("disk").at(&socket).with(&["--journal", &journal.display().to_string()]);
    let Err(refusal) = second.attempt() else {
        panic!("two processes share one journal");
    };
    refusal.refused(IN_USE, &[&journal.display().to_string()]);
    first.connect().write(0, &[1; 512]).expect("the first one is not disturbed");
    let _ = first.stop().ok();
}

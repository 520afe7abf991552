//! A store that was put back from a backup, or is a copy of another: the machine that has seen the
//! newer one says so, also where no journal is left that could.

use std::path::Path;

use sawmill_tests::machine::wait_for;
use sawmill_tests::server::Server;
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::{TestBed, field};
use serde_json::Value;

const REFUSED: i32 = 5;

fn copy(from: &Path, to: &Path) {
    let done = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(done.expect("cp runs").success(), "{} is copied", from.display());
}

fn write_and_stop(bed: &TestBed, byte: u8) {
    let server = bed.serve("disk").start();
    server.connect().write(0, &[byte; 4096]).expect("accepted");
    let _ = server.stop().ok();
}

fn read(server: &Server) -> Vec<u8> {
    server.connect().read(0, 4096).expect("readable")
}

/// What `info` or `check` remark, in one text.
fn remarks(document: &Value, name: &str) -> String {
    field(document, name).unwrap_or_else(|| panic!("no {name}: {document:#}")).to_string()
}

#[test]
fn a_store_put_back_from_a_backup_is_refused_also_without_its_journal() {
    let bed = TestBed::new(&StoreUnderTest::Folder);
    bed.create("disk", "8M", &[]);
    let store = bed.store_folder().expect("a folder").to_owned();
    let backup = bed.path("backup");
    write_and_stop(&bed, 1);
    copy(&store, &backup);
    write_and_stop(&bed, 2);
    // Nothing is missed by it: all was stored.
    std::fs::remove_file(&bed.journals()[0]).expect("the journal is there");
    write_and_stop(&bed, 3);
    assert_eq!(remarks(&bed.info("disk"), "remarks"), "[]", "all is as it was seen");

    std::fs::remove_file(&bed.journals()[0]).expect("the journal is there");
    std::fs::remove_dir_all(&store).expect("the store goes");
    copy(&backup, &store);
    let text = remarks(&bed.info("disk"), "remarks");
    assert!(text.contains("older than what this machine has seen"), "{text}");
    let text = remarks(&bed.sawmill(&["check", "disk", "--json"]).json(), "notes");
    assert!(text.contains("older than what this machine has seen"), "{text}");
    let refusal = bed.serve("disk").attempt().err().expect("refused");
    refusal.refused(REFUSED, &["restored from a backup", "--accept-older-store"]);
    bed.sawmill(&["snapshot", "create", "disk", "noon"])
        .refused(REFUSED, &["restored from a backup"]);

    let mut server = bed.serve("disk").with(&["--accept-older-store"]).start();
    assert_eq!(read(&server), [1; 4096]);
    // What was accepted once is what there is from now on, for whoever serves next.
    let _ = server.hand_off(&bed, "disk");
    assert_eq!(read(&server), [1; 4096]);
    let _ = server.stop().ok();
    assert_eq!(remarks(&bed.info("disk"), "remarks"), "[]");
    let _ = bed.serve("disk").start().stop().ok();
}

#[test]
fn a_store_put_back_under_a_server_that_died_is_refused_without_its_journal() {
    let bed = TestBed::new(&StoreUnderTest::Folder);
    bed.create("disk", "8M", &[]);
    let store = bed.store_folder().expect("a folder").to_owned();
    let backup = bed.path("backup");
    let server = bed.serve("disk").start();
    let write = |byte: u8| {
        server.connect().write(0, &[byte; 4096]).expect("accepted");
        let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "50s"]).ok();
    };
    write(1);
    copy(&store, &backup);
    let noted = bed.journals()[0].with_file_name("newest");
    let before = std::fs::read(&noted).expect("noted when it was attached");
    write(2);
    wait_for("it is noted what the store has", || {
        (std::fs::read(&noted).is_ok_and(|now| now != before)).then_some(())
    });
    server.kill();
    std::fs::remove_file(&bed.journals()[0]).expect("the journal is there");
    std::fs::remove_dir_all(&store).expect("the store goes");
    copy(&backup, &store);
    let refusal =
        bed.serve("disk").with(&["--accept-journal-loss"]).attempt().err().expect("refused");
    refusal.refused(REFUSED, &["restored from a backup", "--accept-older-store"]);
}

#[test]
fn a_copy_of_a_store_is_reported_by_a_machine_that_knows_the_other() {
    let bed = TestBed::new(&StoreUnderTest::Folder);
    bed.create("disk", "8M", &[]);
    write_and_stop(&bed, 1);
    let store = bed.store_folder().expect("a folder").to_owned();
    let beside = bed.path("copy");
    copy(&store, &beside);
    let url = format!("file://{}/disk", beside.display());
    let info = bed.info(&url);
    let known_url = bed.store_url().trim_end_matches('/');
    assert!(remarks(&info, "remarks").contains(known_url), "{info:#}");
    let elsewhere = field(&info, "elsewhere").and_then(|all| all[0]["epoch"].as_u64());
    assert!(elsewhere.is_some_and(|epoch| epoch > 0), "{info:#}");
    let text = remarks(&bed.sawmill(&["check", &url, "--json"]).json(), "notes");
    assert!(text.contains("a copy or a replica") && text.contains(known_url), "{text}");
    assert_eq!(remarks(&bed.info("disk"), "remarks"), "[]", "the copy was never used here");
}

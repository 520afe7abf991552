//! Drivers in C (`sdk/c`) and in Rust (`crates/driver/examples`) on the real host: headers that any
//! compiler takes, examples that are disks, drivers that die or are replaced under load.
//!
//! `SAWMILL_ROUNDS` says how often drivers are killed and replaced; 5 without it. Not here:
//! `bdus.h` (`driver_bdus`).

use std::path::{Path, PathBuf};
use std::process::Command;

use sawmill_tests::compiled::{c_example, rust_example};
use sawmill_tests::driven::DrivenDevice;
use sawmill_tests::machine::{repository, run, skip};
use sawmill_tests::test_bed::TestBed;
use sawmill_tests::{compiled, examples, requires, store};

type Language = (&'static str, fn(&str, &[&str]) -> Command);

/// The languages that this machine can build.
fn languages() -> Vec<Language> {
    let mut languages: Vec<Language> = vec![("Rust", rust_example)];
    match compiled::require_compiler() {
        Ok(()) => languages.push(("C", c_example)),
        Err(why) => skip(&format!("for C: {why}")),
    }
    languages
}

fn header_is_taken(header: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let text = format!("#include <{header}>\nint main(void) {{ return 0; }}\n");
    for (name, compiler, standards) in
        [("a.c", "cc", &["c99", "c11", "c17"][..]), ("a.cpp", "c++", &["c++11", "c++20"][..])]
    {
        let source = folder.path().join(name);
        std::fs::write(&source, &text).expect("a source");
        for standard in standards {
            let mut compile = Command::new(compiler);
            compile.args([
                &format!("-std={standard}"),
                "-Wall",
                "-Wextra",
                "-Werror",
                "-pedantic",
                "-c",
                "-o",
            ]);
            compile.arg(folder.path().join("a.o")).arg(&source);
            run(compile.arg("-I").arg(repository().join("sdk/c/include")));
        }
    }
}

#[test]
fn the_headers_are_c99_and_cpp_without_a_warning() {
    requires!(compiled::require_compiler());
    header_is_taken("sawmill.h");
    header_is_taken("bdus.h");
}

#[test]
fn structures_of_the_header_are_those_of_the_library() {
    requires!(compiled::require_compiler());
    let folder = tempfile::tempdir().expect("a folder");
    let source = repository().join("sdk/c/tests/layout.c");
    let program = folder.path().join("layout");
    compiled::c(&source, &program, &["-std=c11"]);
    run(Command::new(&program).env("LD_LIBRARY_PATH", compiled::libraries()));
}

#[test]
fn examples_are_short() {
    for folder in ["sdk/c/examples", "crates/driver/examples"] {
        for entry in std::fs::read_dir(repository().join(folder)).expect("examples").flatten() {
            let text = std::fs::read_to_string(entry.path()).expect("a text");
            let lines = text.lines().count();
            assert!(lines < 60, "{} has {lines} lines", entry.path().display());
        }
    }
}

#[test]
fn ram_and_file_are_disks_request_by_request_and_in_batches() {
    for (_, example) in languages() {
        examples::ram_and_file(&TestBed::new(&store::folder()), &example);
    }
}

#[test]
fn mirror_is_a_disk_and_reports_when_its_sides_differ() {
    for (_, example) in languages() {
        examples::mirror(&TestBed::new(&store::folder()), &example);
    }
}

#[test]
fn null_takes_everything_and_reads_zeroes() {
    for (_, example) in languages() {
        examples::null(&TestBed::new(&store::folder()), &example);
    }
}

#[test]
fn lazy_is_a_disk_that_begins_as_its_source_and_needs_it_once() {
    for (_, example) in languages() {
        examples::lazy(&TestBed::new(&store::folder()), &example);
    }
}

#[test]
fn a_driver_that_is_killed_under_load_is_followed_by_one_that_loses_nothing() {
    for (language, example) in languages() {
        let bed = TestBed::new(&store::folder());
        let kill = |_: &TestBed, device: &mut DrivenDevice| device.kill_driver();
        examples::undisturbed(&bed, &example, &format!("kills in {language}"), kill);
    }
}

#[test]
fn a_driver_is_replaced_under_load_and_no_client_notices() {
    for (language, example) in languages() {
        let bed = TestBed::new(&store::folder());
        let replace = |bed: &TestBed, device: &mut DrivenDevice| device.replace_driver(bed, "disk");
        examples::undisturbed(&bed, &example, &format!("replacements in {language}"), replace);
    }
}

#[test]
fn a_driver_is_a_class_of_cpp() {
    requires!(compiled::require_compiler());
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("fibonacci");
    compiled::cpp(&repository().join("sdk/c/examples/fibonacci.cpp"), &program);
    let bed = TestBed::new(&store::folder());
    let mut driver = Command::new(&program);
    driver.env("LD_LIBRARY_PATH", compiled::libraries());
    let device = DrivenDevice::start(&bed, "fibonacci", &[], &driver);
    let client = device.connect();
    let bytes = client.read(10 * 8, 8).expect("readable");
    assert_eq!(bytes, 55u64.to_le_bytes());
    assert!(client.write(0, &[1; 512]).is_err(), "it is read-only");
    device.end(&bed, "fibonacci");
}

/// The blocks of a page that are in this language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let page = std::fs::read_to_string(repository().join(page)).expect("a page");
    let fence = format!("```{language}\n");
    let parts = page.split(&fence).skip(1).filter_map(|rest| rest.split_once("```"));
    parts.map(|(block, _)| block.to_owned()).collect()
}

/// Has a driver that starts its own host serve, kills it, and ends the device.
fn serves_by_itself(bed: &TestBed, driver: &mut Command, name: &str, socket: &Path) {
    driver.env("SAWMILL", sawmill_tests::machine::sawmill_binary());
    let mut driver = driver.env("XDG_STATE_HOME", bed.path("state")).spawn().expect("it starts");
    let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
    sawmill_tests::machine::wait_for("the disk is there", || {
        let output =
            sawmill_tests::machine::command("nbdinfo").args(["--size", &uri]).output().ok()?;
        (String::from_utf8_lossy(&output.stdout).trim() == "67108864").then_some(())
    });
    driver.kill().expect("a process of ours");
    let _ = driver.wait();
    let list = bed.sawmill(&["driver", "list", "--json"]).json();
    assert_eq!(list[0]["name"], name, "the host outlives the driver that started it");
    let _ = bed.sawmill(&["driver", "end", "--now", name]).ok();
}

#[test]
fn the_program_in_the_guide_for_c_serves_a_disk() {
    requires!(compiled::require_compiler());
    let bed = TestBed::new(&store::folder());
    let (source, socket): (PathBuf, PathBuf) = (bed.path("ram.c"), bed.path("ram.sock"));
    let [text] = &blocks("docs/guide/driver-c.md", "c")[..] else {
        panic!("one program in the guide")
    };
    std::fs::write(&source, text.replace("/tmp/ram.sock", socket.to_str().expect("text")))
        .expect("a source");
    let program = bed.path("ram");
    compiled::c(&source, &program, &["-std=c99"]);
    let mut driver = Command::new(&program);
    driver.env("LD_LIBRARY_PATH", compiled::libraries());
    serves_by_itself(&bed, &mut driver, "ram", &socket);
}

#[test]
fn the_program_in_the_guide_for_rust_serves_a_disk() {
    let text = std::fs::read_to_string(repository().join("crates/driver/examples/quick_start.rs"));
    assert_eq!(
        blocks("docs/guide/driver-rust.md", "rust"),
        [text.expect("the example")],
        "the page has the example, byte for byte"
    );
    let bed = TestBed::new(&store::folder());
    let socket = bed.path("ram.sock");
    let mut driver = rust_example("quick_start", &[]);
    driver.env("SAWMILL_DOORS", format!("nbd=unix:{}", socket.display()));
    serves_by_itself(&bed, &mut driver, "ram", &socket);
}

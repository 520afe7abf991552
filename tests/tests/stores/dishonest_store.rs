//! A store that lets two racers win is found out, every time, and refused; an honest one never is.
//!
//! Other people's servers, honest and not, are asked by `make test-stores`
//! (tests/stores/matrix.py).

use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;
use serde_json::Value;

/// A check that finds nothing would pass by luck in one run.
const RUNS: usize = 20;

/// The names of the checks that failed in one run of doctor, and their advice.
fn failed_checks(bed: &TestBed, code: i32) -> Vec<(String, String)> {
    let done = bed.sawmill(&["doctor", "--json"]);
    assert_eq!(done.code, Some(code), "{}{}", done.stdout, done.stderr);
    let report: Value = serde_json::from_str(&done.stdout).expect("doctor prints JSON");
    let checks = report["store_checks"].as_array().expect("a list of checks");
    let text = |check: &Value, field: &str| check[field].as_str().unwrap_or_default().to_owned();
    checks
        .iter()
        .filter(|check| check["ok"] != true)
        .map(|check| (text(check, "name"), text(check, "advice")))
        .collect()
}

#[test]
fn doctor_refuses_a_store_that_checks_before_the_body_arrives_in_every_run() {
    let bed = TestBed::new(&store::dishonest());
    for _ in 0..RUNS {
        let failed = failed_checks(&bed, 1);
        let interleaved = failed.iter().any(|(name, _)| name.contains("interleaved puts win"));
        assert!(interleaved, "the race of halves had one winner: {failed:?}");
        // Asked in turn it is as good as any: races alone tell.
        assert!(failed.iter().all(|(name, _)| name.contains("puts win")), "{failed:?}");
        assert!(failed.iter().all(|(_, advice)| advice.contains("--no-fencing")), "{failed:?}");
    }
}

#[test]
fn doctor_never_accuses_an_honest_store() {
    for store in [store::folder(), store::minio()] {
        let bed = TestBed::new(&store);
        for _ in 0..RUNS / 4 {
            assert_eq!(failed_checks(&bed, 0), []);
        }
    }
}

#[test]
fn create_and_serve_refuse_a_store_that_lets_two_creates_win_and_say_what_to_do() {
    let bed = TestBed::new(&store::dishonest());
    let words =
        ["cannot fence a second writer", "several winners", "sawmill doctor", "--no-fencing"];
    bed.sawmill(&["create", "disk", "--size", "16M"]).refused(5, &words);
    assert_eq!(
        bed.sawmill(&["list", "--json"]).json(),
        Value::Array(Vec::new()),
        "nothing was made"
    );
    bed.create("disk", "16M", &["--no-fencing"]);
    match bed.serve("disk").attempt() {
        Ok(_) => panic!("a store that lets two win was served"),
        Err(ended) => ended.refused(5, &words),
    }
    // Who knows better is believed.
    let server = bed.serve("disk").with(&["--no-fencing"]).start();
    assert_eq!(server.connect().export().size_bytes, 16 << 20);
    let _ = server.stop().ok();
}

//! `sawmill simulate` as its users meet it: figures that agree with an independent simulator of
//! LSVD's method, tables, JSON, charts, money, and refusals that say which line of which file.

use std::path::PathBuf;

use sawmill_tests::machine::repository;
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;
use serde_json::Value;

/// 900 requests, 15 MB written: a hot set, a log that wraps around, and scattered writes.
fn synthetic() -> PathBuf {
    repository().join("tests/tests/serving/simulate/synthetic.ascii")
}

fn bed() -> TestBed {
    TestBed::new(&store::folder())
}

fn text(path: &std::path::Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn simulate(bed: &TestBed, trace: &str, options: &[&str]) -> Value {
    bed.sawmill(&[&["simulate", trace, "--json"], options].concat()).json()
}

fn number(document: &Value, name: &str) -> f64 {
    document[name].as_f64().unwrap_or_else(|| panic!("no number {name} in {document:#}"))
}

/// What a simulator that shares nothing with Sawmill finds in the same trace: 1 MiB batches sealed
/// by size alone, 70 % to 75 %, an array with an entry for each 512 bytes. Without plugged holes,
/// then with.
#[test]
fn figures_agree_with_an_independent_simulator() {
    let bed = bed();
    let lsvd =
        ["--segment-bytes", "1M", "--segment-age", "0", "--gc-start", "0.7", "--gc-stop", "0.75"];
    let expected: [(&[&str], f64, f64); 2] =
        [(&["--no-gc-plugs"], 272.0, 1.188), (&[], 254.0, 1.207)];
    for (more, extents, gc_amplification) in expected {
        let found = simulate(&bed, text(&synthetic()), &[&lsvd[..], more].concat());
        let found = &found["traces"][0];
        let near = |name: &str, expected: f64| {
            let found = number(found, name);
            assert!(
                (found / expected - 1.0).abs() < 0.03,
                "{name} {found}, expected {expected} ({more:?})"
            );
        };
        near("extents", extents);
        near("gc_amplification", gc_amplification);
        near("merge_ratio", 0.0634);
        near("written_bytes", 14_987_264.0);
    }
}

#[test]
fn the_document_has_parameters_prices_figures_requests_money_and_samples() {
    let bed = bed();
    let document = simulate(&bed, text(&synthetic()), &["--size", "10G", "--segment-bytes", "1M"]);
    assert_eq!(document["parameters"]["segment_bytes"], 1 << 20);
    assert_eq!(document["parameters"]["gc"]["choice"], "greedy");
    for name in ["name", "date", "source"] {
        assert!(document["prices"][name].is_string(), "{document:#}");
    }
    let trace = &document["traces"][0];
    assert_eq!(
        (trace["format"].as_str(), trace["bad_lines"].as_u64()),
        (Some("ascii-ns"), Some(0))
    );
    assert_eq!(trace["size_bytes"].as_u64(), Some(10 << 30));
    for name in [
        "requests",
        "disks",
        "span_s",
        "writes",
        "reads",
        "discards",
        "write_amplification",
        "gc_amplification",
        "batch_amplification",
        "merge_ratio",
        "moved_bytes",
        "plugged_bytes",
        "collections",
        "checkpoints",
        "extents",
        "map_bytes",
        "segments",
        "live_bytes",
        "data_bytes",
        "store_bytes",
        "store_bytes_max",
    ] {
        assert!(trace[name].is_number(), "{name} in {trace:#}");
    }
    for name in ["put", "get_max", "list", "delete"] {
        assert!(trace["store_requests"][name].is_u64(), "{name} in {trace:#}");
    }
    // 10 GiB at the list price of $0.08.
    assert!((number(&trace["month"], "block_total_usd") - 0.8).abs() < 1e-9, "{trace:#}");
    let samples = trace["samples"].as_array().expect("samples");
    assert!(
        samples.len() > 5 && samples.iter().all(|sample| sample["store_bytes"].is_u64()),
        "{trace:#}"
    );
    assert_eq!(samples.last().expect("a last one")["live_bytes"], trace["live_bytes"]);
    let without = simulate(&bed, text(&synthetic()), &["--no-gc", "--segment-bytes", "1M"]);
    assert!(without["parameters"]["gc"].is_null() && without["traces"][0]["moved_bytes"] == 0);
}

#[test]
fn each_trace_is_a_row_and_one_alone_is_reported_in_full() {
    let bed = bed();
    let trace = synthetic();
    let alone = bed.sawmill(&["simulate", text(&trace)]).ok();
    for word in [
        "write amplification",
        "merge ratio",
        "extents",
        "store requests",
        "a month",
        "block storage",
    ] {
        assert!(alone.contains(word), "{word} is not in\n{alone}");
    }
    assert!(alone.contains("of 2025-11-01") && alone.contains("too short to say much"), "{alone}");
    let both = bed.sawmill(&["simulate", text(&trace), text(&trace)]).ok();
    let rows = both.lines().filter(|line| line.starts_with("synthetic.ascii ")).count();
    assert!(rows == 2 && both.contains("AMPLIFICATION") && both.contains("$/MONTH"), "{both}");
}

#[test]
fn a_packed_trace_and_one_of_our_own_format_give_the_same_figures() {
    let bed = bed();
    let lines = std::fs::read_to_string(synthetic()).expect("the trace");
    let mut csv = String::from("time_ns,device,address_sectors,length_sectors,operation\n");
    for line in lines.lines() {
        let (rest, operation) = line.rsplit_once(' ').expect("five fields");
        let name = if operation == "1" { "read" } else { "write" };
        csv.push_str(&format!("{},{name}\n", rest.replace(' ', ",")));
    }
    std::fs::write(bed.path("own.csv"), csv).expect("a file");
    let packed =
        std::process::Command::new("gzip").arg("-c").arg(synthetic()).output().expect("gzip runs");
    std::fs::write(bed.path("packed"), packed.stdout).expect("a file");
    let figures = |path: &std::path::Path| {
        let mut trace = simulate(&bed, text(path), &[])["traces"][0].take();
        for name in ["trace", "format"] {
            trace[name] = Value::Null;
        }
        trace
    };
    let expected = figures(&synthetic());
    assert_eq!(figures(&bed.path("own.csv")), expected);
    assert_eq!(figures(&bed.path("packed")), expected);
}

#[test]
fn a_chart_is_drawn_for_each_trace() {
    let bed = bed();
    let (trace, chart) = (synthetic(), bed.path("chart.svg"));
    let _ = bed.sawmill(&["simulate", text(&trace), text(&trace), "--chart", text(&chart)]).ok();
    let svg = std::fs::read_to_string(chart).expect("a chart");
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches(">write amplification<").count(), 2);
    let nowhere = bed.path("nowhere/chart.svg");
    bed.sawmill(&["simulate", text(&trace), "--chart", text(&nowhere)]).refused(3, &["chart.svg"]);
}

#[test]
fn prices_of_a_file_are_used_and_a_wrong_file_is_refused() {
    let bed = bed();
    let (trace, prices) = (synthetic(), bed.path("mine.toml"));
    let built_in = repository().join("crates/lab/src/simulate/prices.toml");
    let built_in = std::fs::read_to_string(built_in).expect("the built-in prices");
    std::fs::write(&prices, built_in.replace("gib_month = 0.08", "gib_month = 0.50"))
        .expect("a file");
    let options = ["--size", "4G", "--prices", text(&prices)];
    let found = simulate(&bed, text(&trace), &options);
    assert!(
        (number(&found["traces"][0]["month"], "block_total_usd") - 2.0).abs() < 1e-9,
        "{found:#}"
    );
    std::fs::write(&prices, built_in.replace("list_per_1000", "list_per_100")).expect("a file");
    let line = [&["simulate", text(&trace)], &options[..]].concat();
    bed.sawmill(&line).refused(2, &["mine.toml", "store.list_per_1000 is missing"]);
    bed.sawmill(&["simulate", text(&trace), "--prices", "/no/such.toml"])
        .refused(3, &["/no/such.toml"]);
}

#[test]
fn a_bad_line_is_refused_with_its_place_or_counted() {
    let bed = bed();
    let path = bed.path("odd.ascii");
    let lines = std::fs::read_to_string(synthetic()).expect("the trace");
    std::fs::write(&path, format!("{lines}what is this\n")).expect("a file");
    let path = text(&path).to_owned();
    bed.sawmill(&["simulate", &path])
        .refused(2, &["odd.ascii: line 901", "NANOSECONDS", "what is this"]);
    let counted = simulate(&bed, &path, &["--skip-bad-lines"]);
    assert_eq!(counted["traces"][0]["bad_lines"], 1);
    assert_eq!(counted["traces"][0]["requests"], 900);
}

#[test]
fn what_cannot_be_simulated_is_refused_with_the_documented_codes() {
    let bed = bed();
    let trace = synthetic();
    let trace = text(&trace);
    let empty = bed.path("empty");
    std::fs::write(&empty, "").expect("a file");
    let refused = |options: &[&str], code: i32, words: &[&str]| {
        bed.sawmill(&[&["simulate"], options].concat()).refused(code, words);
    };
    refused(&[], 2, &["TRACE"]);
    refused(&["/no/such/trace"], 3, &["/no/such/trace"]);
    refused(&[text(&empty)], 2, &["is empty"]);
    refused(&[text(&repository().join("Cargo.toml"))], 2, &["--format"]);
    refused(&[trace, "--format", "msr"], 2, &["line 1", "FILETIME"]);
    refused(&[trace, "--size", "1M"], 2, &["--size 1 MiB is too small"]);
    refused(&[trace, "--segment-bytes", "3M"], 2, &["power of two"]);
    refused(&[trace, "--gc-start", "0.8", "--gc-stop", "0.7"], 2, &["0.8", "0.7"]);
    refused(&[trace, "--gc-start", "high"], 2, &["not a ratio"]);
    refused(&[trace, "--no-gc", "--gc-start", "0.5"], 2, &["--no-gc"]);
    refused(&[trace, "--repeat", "0"], 2, &["--repeat"]);
}

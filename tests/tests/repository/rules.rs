//! Rules of CONTRIBUTING.md about threads, limits and parameters that a test can check. Not here:
//! lists of waiting work (`queues`), commits (`tests/setup/lint.sh`).

use sawmill_tests::machine::repository;

use super::tidy::{files, none};

/// The code of a crate without its tests: path, and numbered lines.
pub(super) fn production() -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for (path, text) in files(&[".rs"]) {
        let path_text = path.display().to_string();
        let is_product = path_text.starts_with("crates/") && path_text.contains("/src/");
        // What tests a device, a store or the engine is no product.
        let is_test =
            ["test", "conformance", "schedules", "crates/sim/", "crates/fuzz/", "/fault.rs"];
        if !is_product || is_test.iter().any(|word| path_text.contains(word)) {
            continue;
        }
        found.push((path_text, without_tests(&text)));
    }
    found
}

/// The lines of a file; those of items that only tests have are empty.
fn without_tests(text: &str) -> Vec<String> {
    let (mut lines, mut is_attribute, mut is_body) = (Vec::new(), false, false);
    for line in text.lines() {
        let is_test = is_attribute || is_body || line.starts_with("#[cfg(test)]");
        lines.push(if is_test { String::new() } else { line.to_owned() });
        // An item ends with its declaration, or with the brace in the first column.
        is_body = is_body && !line.starts_with('}') || is_attribute && line.ends_with('{');
        is_attribute = is_test && !is_body && !line.ends_with([';', '}']) && !line.starts_with('}');
    }
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}

#[test]
fn what_stands_behind_a_test_module_is_product() {
    let text = [
        "use a;",
        "#[cfg(test)]",
        "mod b;",
        "fn c() {}",
        "#[cfg(test)]",
        "fn d() {",
        "    e();",
        "}",
        "fn f() {}",
        "#[cfg(test)]",
        "fn h() { i() }",
        "fn j() {}",
        "#[cfg(test)]",
        "mod tests {",
        "    fn g() {}",
        "}",
    ];
    let text = text.join("\n");
    assert_eq!(
        without_tests(&text),
        ["use a;", "", "", "fn c() {}", "", "", "", "", "fn f() {}", "", "", "fn j() {}"]
    );
}

/// The limits that ARCHITECTURE.md states in "How much is in flight": the file, the declaration,
/// and how the page writes its value.
const ADMITTED: [(&str, &str, &str); 20] = [
    ("crates/frontend/src/nbd/limits.rs", "REQUESTS_IN_FLIGHT_MAX: u64 = 1024", "1,024"),
    ("crates/frontend/src/nbd/limits.rs", "IN_FLIGHT_BYTES_MAX: u64 = 128 << 20", "128 MiB"),
    ("crates/frontend/src/nbd/options.rs", "connections_max: 256", "256"),
    ("crates/frontend/src/nbd/budget.rs", "BYTES_DEFAULT: u64 = 1 << 30", "1 GiB"),
    ("crates/frontend/src/ublk/options.rs", "queue_depth: 128", "128"),
    ("crates/frontend/src/ublk/options.rs", "request_bytes_max: 1 << 20", "1 MiB"),
    ("crates/sys/src/ublk/abi.rs", "QUEUE_DEPTH_MAX: u16 = 4096", "4,095"),
    ("crates/frontend/src/ublk/options.rs", "QUEUES_DEFAULT_MAX: usize = 16", "16"),
    ("crates/frontend/src/ublk/options.rs", "QUEUES_MAX: u16 = 256", "256"),
    ("crates/frontend/src/vhost/options.rs", "queue_size_max: 1024", "1,024"),
    ("crates/frontend/src/vhost/options.rs", "queues_max: 16", "16"),
    ("crates/frontend/src/vhost/limits.rs", "IN_FLIGHT_BYTES_MAX: u64 = 64 << 20", "64 MiB"),
    ("crates/frontend/src/fuse/limits.rs", "REQUESTS_MAX: u16 = 512", "512"),
    ("crates/frontend/src/fuse/limits.rs", "IN_FLIGHT_BYTES_MAX: u64 = 128 << 20", "128 MiB"),
    ("crates/link/src/target/mod.rs", "places_max: 256", "256"),
    ("crates/link/src/target/mod.rs", "place_bytes_max: 256 << 10", "256 KiB"),
    ("crates/link/src/target/mod.rs", "connections_max: 64", "64"),
    ("crates/link/src/initiator/pending.rs", "REQUESTS_MAX: usize = 4096", "4,096"),
    ("crates/driver/src/batch/options.rs", "queue_depth: 64", "64"),
    ("crates/driver/src/batch/options.rs", "QUEUE_DEPTH_MAX: u32 = 4096", "4,096"),
];

#[test]
fn what_doors_admit_is_as_architecture_states_it() {
    let page = std::fs::read_to_string(repository().join("ARCHITECTURE.md")).unwrap();
    let section = page.split("\n## ").find(|part| part.starts_with("How much is in flight"));
    let rows: Vec<&str> = section.unwrap().lines().filter(|line| line.starts_with('|')).collect();
    let mut faults = Vec::new();
    for (path, declaration, value) in ADMITTED {
        let code = std::fs::read_to_string(repository().join(path)).unwrap();
        let name = declaration.split(':').next().unwrap();
        if !code.contains(declaration) {
            faults.push(format!("{path} has no `{declaration}`: correct the page and this list"));
        }
        let is_stated = |row: &&str| {
            row.contains(&format!("`{name}`"))
                && row.contains(&format!("`{path}`"))
                && row.contains(value)
        };
        if !rows.iter().any(is_stated) {
            faults.push(format!("no row of ARCHITECTURE.md says {value} for `{name}` in `{path}`"));
        }
    }
    none(&faults);
}

/// A product file of more lines says an invariant or what is not in it.
const HEAD_LINES_MIN: usize = 100;

#[test]
fn every_longer_file_says_an_invariant_or_what_is_elsewhere() {
    let mut faults = Vec::new();
    for (path, lines) in production().into_iter().filter(|(_, lines)| lines.len() > HEAD_LINES_MIN)
    {
        let head: Vec<&str> =
            lines.iter().map(String::as_str).take_while(|line| line.starts_with("//!")).collect();
        let head = head.join(" ");
        if !["nvariant", "Not here", "not here"].iter().any(|word| head.contains(word)) {
            faults.push(path);
        }
    }
    none(&faults);
}

/// A sentence in a comment that begins in lower case, as those do that a bad merge left.
fn torn_sentence(line: &str) -> Option<&str> {
    let comment = line.trim().strip_prefix("//")?.trim_start_matches(['/', '!']);
    let words: Vec<&str> = comment.split_whitespace().collect();
    let torn = words.windows(2).find(|pair| {
        let ends =
            pair[0].ends_with('.') && !["e.g.", "i.e.", "vs.", "...", "etc."].contains(&pair[0]);
        ends && pair[1].trim_end_matches([',', '.']).chars().all(|c| c.is_ascii_lowercase())
    })?;
    Some(torn[1])
}

#[test]
fn every_sentence_of_a_comment_begins_with_a_capital() {
    let mut faults = Vec::new();
    for (path, text) in files(&[".rs"]) {
        for (n, line) in text.lines().enumerate() {
            let torn = torn_sentence(line);
            faults.extend(torn.map(|word| format!("{}:{}: {word}", path.display(), n + 1)));
        }
    }
    none(&faults);
    assert_eq!(torn_sentence("/// A writer without room. wait for them."), Some("wait"));
    assert_eq!(
        torn_sentence("/// See `docs/a.md`. on_death=fail ends it. Read it e.g. twice."),
        None
    );
}

/// What the kernel keeps, and `top -H` shows, of a thread's name.
const THREAD_NAME_BYTES_MAX: usize = 15;

#[test]
fn every_thread_has_a_name_that_the_architecture_knows() {
    let architecture =
        std::fs::read_to_string(repository().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let mut faults = Vec::new();
    for (path, lines) in production() {
        for (n, line) in lines.iter().enumerate() {
            if line.contains("thread::spawn(") || line.contains("Builder::new().spawn(") {
                faults.push(format!("{path}:{}: a thread without a name", n + 1));
            }
            let Some((_, rest)) = line.split_once(".name(\"") else { continue };
            let name = rest.split('"').next().unwrap_or_default();
            if name.len() > THREAD_NAME_BYTES_MAX {
                faults.push(format!("{path}:{}: the kernel cuts the name {name:?}", n + 1));
            }
            if !line.contains("Command") && !architecture.contains(&format!("`{name}")) {
                faults.push(format!("{path}:{}: ARCHITECTURE.md has no thread {name:?}", n + 1));
            }
        }
    }
    none(&faults);
}

/// Signatures of functions that begin with `word`: the file, the function, its parameters without
/// `self`.
fn signatures(word: &str) -> Vec<(String, String, Vec<String>)> {
    let mut found = Vec::new();
    for (path, lines) in production() {
        let text = lines.join(" ");
        for signature in text.split(word).skip(1) {
            let Some((name, rest)) = signature.split_once('(') else { continue };
            let parameters = split_at_commas(rest);
            found.push((path.clone(), name.to_owned(), parameters));
        }
    }
    found
}

/// The parameters up to the bracket that closes the list.
fn split_at_commas(text: &str) -> Vec<String> {
    let (mut depth, mut parts, mut part) = (0, Vec::new(), String::new());
    for letter in text.chars() {
        match letter {
            '(' | '[' | '<' => depth += 1,
            ')' if depth == 0 => break,
            ')' | ']' | '>' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(std::mem::take(&mut part));
                continue;
            }
            _ => (),
        }
        part.push(letter);
    }
    parts.push(part);
    let parts = parts.iter().map(|part| part.trim().to_owned());
    parts.filter(|part| !part.is_empty() && !part.ends_with("self")).collect()
}

/// The functions that begin with `word` and have such a list of parameters.
fn functions_with(word: &str, is_such: impl Fn(&[String]) -> bool) -> Vec<String> {
    let found = signatures(word).into_iter().filter(|(_, _, parameters)| is_such(parameters));
    found.map(|(path, name, _)| format!("{path}: {name}")).collect()
}

/// Functions whose flag is the condition that they check, as that of `assert!` is.
const CHECKS: [&str; 1] = ["crates/format/src/error.rs: check_field"];

/// A caller's `true` says nothing where it stands beside other arguments.
#[test]
fn no_function_that_other_files_can_call_has_a_flag_beside_other_parameters() {
    let is_flag = |one: &String| one.ends_with(": bool");
    let has_flag = |all: &[String]| all.len() > 1 && all.iter().any(is_flag);
    let declared = ["pub fn ", "pub const fn ", ") fn ", ") const fn "];
    let found: Vec<String> =
        declared.iter().flat_map(|word| functions_with(word, has_flag)).collect();
    let unlisted = found.iter().filter(|one| !CHECKS.contains(&one.as_str()));
    let gone = CHECKS.iter().filter(|one| !found.iter().any(|found| found == *one));
    let gone = gone.map(|one| format!("{one} has no flag: delete it from the list"));
    none(&unlisted.cloned().chain(gone).collect::<Vec<_>>());
}

/// A tuple is two parameters where the list says one.
#[test]
fn no_list_of_parameters_takes_a_tuple_apart() {
    let is_taken_apart = |one: &String| one.starts_with('(') && one.contains("): (");
    none(&functions_with("fn ", |all| all.iter().any(is_taken_apart)));
}

/// A test that says so itself and returns counts as one that passed.
#[test]
fn no_test_leaves_something_out_without_being_counted_as_skipped() {
    let says_so = "println!(\"skipped";
    let mut faults = Vec::new();
    for (path, text) in files(&[".rs"]) {
        let is_counter = path.ends_with("crates/testkit/src/skip.rs");
        for (at, line) in text.lines().enumerate() {
            if line.contains(says_so) && !is_counter && !line.contains("says_so") {
                faults.push(format!("{}:{}: {}", path.display(), at + 1, line.trim()));
            }
        }
    }
    none(&faults);
}

/// Guest tests run rarely, so a file that moves away from under them would be missed late.
#[test]
fn every_file_that_a_guest_test_names_exists() {
    let guest = repository().join("tests/vm");
    let mut faults = Vec::new();
    for (path, text) in files(&[".sh"]) {
        for rest in text.split("$VM_TESTS/").skip(1) {
            let named = rest.split(['"', ' ', '\n', '`']).next().unwrap_or_default();
            let is_known_when_run = named.contains('$') || named.contains(".prepared");
            if !is_known_when_run && !guest.join(named).exists() {
                faults.push(format!("{}: {named}", path.display()));
            }
        }
    }
    none(&faults);
}

//! Rules of CONTRIBUTING.md about threads, queues and parameters that a test can check. Not here:
//! commits (`tests/setup/lint.sh`).

use sawmill_tests::machine::repository;

use super::tidy::{files, none};

/// Public functions with a parameter that is `true` or `false` beside other parameters: a caller's
/// `true` says nothing. The number may only fall.
const FLAG_PARAMETERS_MAX: usize = 0;

/// Functions that take a tuple apart in their list of parameters: two parameters where the list
/// says one. The number may only fall.
const TUPLE_PARAMETERS_MAX: usize = 13;

/// The code of a crate without its tests: path, and numbered lines.
pub(super) fn production() -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for (path, text) in files(&[".rs"]) {
        let shown = path.display().to_string();
        let is_product = shown.starts_with("crates/") && shown.contains("/src/");
        // What tests a device, a store or the engine is no product.
        let is_test =
            ["test", "conformance", "schedules", "crates/sim/", "crates/fuzz/", "/fault.rs"];
        if !is_product || is_test.iter().any(|word| shown.contains(word)) {
            continue;
        }
        let lines = text
            .lines()
            .take_while(|line| !line.starts_with("#[cfg(test)]") && !line.contains("mod tests {"));
        found.push((shown, lines.map(ToOwned::to_owned).collect()));
    }
    found
}

#[test]
fn every_queue_has_a_bound_or_says_what_bounds_it() {
    let mut faults = Vec::new();
    for (path, lines) in production() {
        for (n, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let is_unbounded = (code.contains("channel()") || code.contains("mpsc::channel::<"))
                && !code.contains("oneshot");
            let says =
                lines[n.saturating_sub(2)..n].iter().any(|above| above.contains("ounded by"));
            if is_unbounded && !says {
                faults.push(format!("{path}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    none(&faults);
}

#[test]
fn every_thread_has_a_name_that_the_architecture_knows() {
    let known =
        std::fs::read_to_string(repository().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let mut faults = Vec::new();
    for (path, lines) in production() {
        for (n, line) in lines.iter().enumerate() {
            if line.contains("thread::spawn(") {
                faults.push(format!("{path}:{}: a thread without a name", n + 1));
            }
            let Some((_, rest)) = line.split_once(".name(\"") else { continue };
            let name = rest.split('"').next().unwrap_or_default();
            if !line.contains("Command") && !known.contains(&format!("`{name}")) {
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

/// Fails when there are more than `max`, and when there are fewer: then `max` is to be lowered.
fn only_fewer(found: &[String], max: usize, name: &str) {
    let count = found.len();
    assert!(count <= max, "{count}, {name} is {max}:\n{}", found.join("\n"));
    assert_eq!(count, max, "they have become fewer: lower {name}");
}

#[test]
fn flags_beside_other_parameters_become_fewer() {
    let has_flag = |parameters: &[String]| {
        parameters.len() > 1 && parameters.iter().any(|one| one.ends_with(": bool"))
    };
    let found: Vec<_> =
        signatures("pub fn ").into_iter().filter(|(_, _, all)| has_flag(all)).collect();
    let found: Vec<_> = found.iter().map(|(path, name, _)| format!("{path}: {name}")).collect();
    only_fewer(&found, FLAG_PARAMETERS_MAX, "FLAG_PARAMETERS_MAX");
}

#[test]
fn tuples_as_parameters_become_fewer() {
    let is_taken_apart = |one: &String| one.starts_with('(') && one.contains("): (");
    let found = signatures("fn ").into_iter().filter(|(_, _, all)| all.iter().any(is_taken_apart));
    let found: Vec<_> = found.map(|(path, name, _)| format!("{path}: {name}")).collect();
    only_fewer(&found, TUPLE_PARAMETERS_MAX, "TUPLE_PARAMETERS_MAX");
}

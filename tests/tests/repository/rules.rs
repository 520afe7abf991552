//! Rules of CONTRIBUTING.md about threads, queues and parameters that a test can check. Not here: commits
//! (`tests/setup/lint.sh`).

use sawmill_tests::machine::repository;

use super::tidy::{files, none};

/// Public functions with a parameter that is `true` or `false` beside other parameters: a caller's `true`
/// says nothing. The number may only fall.
const FLAG_PARAMETERS_MAX: usize = 5;

/// The code of a crate without its tests: path, and numbered lines.
pub(super) fn production() -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for (path, text) in files(&[".rs"]) {
        let shown = path.display().to_string();
        let is_product = shown.starts_with("crates/") && shown.contains("/src/");
        // What tests a device, a store or the engine is no product.
        let is_test = ["test", "conformance", "schedules", "crates/sim/", "crates/fuzz/", "/fault.rs"];
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
            let says = lines[n.saturating_sub(2)..n].iter().any(|above| above.contains("ounded by"));
            if is_unbounded && !says {
                faults.push(format!("{path}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    none(&faults);
}

#[test]
fn every_thread_has_a_name_that_the_architecture_knows() {
    let known = std::fs::read_to_string(repository().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
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

#[test]
fn flags_beside_other_parameters_become_fewer() {
    let mut found = Vec::new();
    for (path, lines) in production() {
        let text = lines.join(" ");
        for signature in text.split("pub fn ").skip(1) {
            let Some((name, rest)) = signature.split_once('(') else { continue };
            let parameters = rest.split(')').next().unwrap_or_default().split(',').map(str::trim);
            let parameters: Vec<_> =
                parameters.filter(|one| !one.is_empty() && !one.ends_with("self")).collect();
            let has_flag = parameters.iter().any(|one| one.ends_with(": bool"));
            if has_flag && parameters.len() > 1 {
                found.push(format!("{path}: {name}"));
            }
        }
    }
    let count = found.len();
    assert!(count <= FLAG_PARAMETERS_MAX, "{count}, {FLAG_PARAMETERS_MAX} before:\n{}", found.join("\n"));
    assert_eq!(count, FLAG_PARAMETERS_MAX, "they have become fewer: lower FLAG_PARAMETERS_MAX");
}

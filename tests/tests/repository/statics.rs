//! State that no value owns: each static that can change, and each variable of a thread or a task,
//! stands in ARCHITECTURE.md with the reason why it is no field.
//!
//! Not here: lists of waiting work, which are fields (`queues`).

use sawmill_tests::machine::repository;

use super::tidy::{files, none};

/// What a type has in it whose value changes behind a shared reference.
const CHANGING: [&str; 6] = ["Atomic", "Mutex<", "RwLock<", "OnceLock<", "LazyLock<", "Cell<"];

/// The statics that can change: their lines, counted from 1, and names.
fn changing_statics(lines: &[String]) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut is_local = false;
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim();
        // The block of a macro ends with a brace alone, and what it declares has an indentation.
        is_local = (is_local && code != "}") || code.ends_with("_local! {");
        let visible = || Some(code.strip_prefix("pub")?.split_once("static ")?.1);
        let declared = code.strip_prefix("static ").or_else(visible);
        let Some((name, kind)) = declared.and_then(|text| text.split_once(": ")) else { continue };
        if is_local || CHANGING.iter().any(|word| kind.contains(word)) {
            found.push((at + 1, name));
        }
    }
    found
}

/// The product's code, with the C library's. What tests it may keep what it likes.
fn sources() -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for (path, text) in files(&[".rs"]) {
        let path = path.display().to_string();
        let is_product =
            path.starts_with("crates/") && path.contains("/src/") || path.starts_with("sdk/c/src/");
        let is_test = ["/tests/", "tests.rs", "crates/sim/", "crates/fuzz/"]
            .iter()
            .any(|word| path.contains(word));
        if is_product && !is_test {
            found.push((path, text.lines().map(ToOwned::to_owned).collect()));
        }
    }
    found
}

#[test]
fn architecture_names_all_state_of_the_process() {
    let page = std::fs::read_to_string(repository().join("ARCHITECTURE.md")).unwrap();
    let table =
        page.split("\n\n").skip_while(|part| !part.starts_with("State of the whole")).nth(1);
    let rows: Vec<&str> = table.expect("the table of state").lines().skip(2).collect();
    let mut faults = Vec::new();
    let mut named = vec![false; rows.len()];
    for (path, lines) in sources() {
        for (line, name) in changing_statics(&lines) {
            let names = |row: &&str| {
                row.contains(&format!("`{name}`")) && row.contains(&format!("`{path}`"))
            };
            match rows.iter().position(names) {
                Some(row) => named[row] = true,
                None => faults.push(format!("{path}:{line}: ARCHITECTURE.md has no {name}")),
            }
        }
    }
    let stale = rows.iter().zip(named).filter(|(_, is_named)| !is_named);
    faults.extend(stale.map(|(row, _)| format!("ARCHITECTURE.md names no state: {row}")));
    none(&faults);
}

#[test]
fn a_static_that_can_change_is_found_and_a_table_is_none() {
    let text = "static KINDS: [Kind; 4] = [A, B];\npub(crate) static OPEN: AtomicBool = NO;\n\
        thread_local! {\n    /// A number.\n    static HERE: usize = 1;\n}\nstatic MAX: u8 = 1;\n\
        static NAMED: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);";
    let lines: Vec<String> = text.lines().map(ToOwned::to_owned).collect();
    assert_eq!(changing_statics(&lines), [(2, "OPEN"), (5, "HERE"), (8, "NAMED")]);
}

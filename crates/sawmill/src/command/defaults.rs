//! Checks that no option repeats a number, a size or a duration that a constant has. Tests only.
//!
//! Clap sees only the text of a default, and the types of Rust do not tell where it comes from, so
//! this reads the sources of the commands. A zero may be typed: it switches something off, and
//! there is no constant for that.
//!
//! Invariant: the test fails if it finds few defaults, so it cannot pass because it finds none.
//!
//! Not here: whether the text of a default is read back as its constant (`sawmill_console::units`).

use std::fs;
use std::path::Path;

/// What follows `default_value =` or `default_value_t =` in a file, each with its line number.
fn defaults(text: &str) -> Vec<(usize, &str)> {
    let value = |(at, name): (usize, &str)| {
        let rest = text[at + name.len()..].trim_start_matches("_t").trim_start();
        let line = text[..at].lines().count();
        rest.strip_prefix("= ").map(|value| (line, value.trim_start()))
    };
    text.match_indices("default_value").filter_map(value).collect()
}

/// Whether a default is typed where it stands: `30`, `0.7`, `"8M"`.
fn is_typed_number(value: &str) -> bool {
    value.trim_start_matches(['"', '-']).starts_with(|first| matches!(first, '1'..='9'))
        || value.trim_start_matches('"').starts_with("0.")
}

fn visit(folder: &Path, found: &mut Vec<String>, typed: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            visit(&path, found, typed);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            for (line, value) in defaults(&fs::read_to_string(&path).unwrap()) {
                let place = format!("{}:{line}", path.display());
                found.push(place.clone());
                typed.extend(is_typed_number(value).then_some(place));
            }
        }
    }
}

#[test]
fn no_default_of_an_option_is_a_number_typed_beside_its_constant() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut found, mut typed) = (Vec::new(), Vec::new());
    for folder in ["src", "../lab/src"] {
        visit(&own.join(folder), &mut found, &mut typed);
    }
    assert!(found.len() > 30, "only {found:?}");
    assert!(
        typed.is_empty(),
        "take these from the constant of the code that uses them, with exact_size and \
         exact_duration for sizes and durations: {typed:#?}"
    );
}

#[test]
fn a_typed_number_is_told_from_a_constant() {
    let typed = |values: [&str; 3]| values.map(is_typed_number);
    assert_eq!(typed(["\"8M\")]", "30,", "0.7)"]), [true; 3]);
    assert_eq!(typed(["exact_size(1 << 20)", "\"0\"", "SEED_DEFAULT"]), [false; 3]);
}

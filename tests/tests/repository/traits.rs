//! A trait has no default methods and at most four methods, but for what decision 0041 names.
//!
//! Not here: the reasons, which are the decision's.

use sawmill_tests::machine::repository;

use super::rules::production;
use super::tidy::none;

const DECISION: &str = "docs/decisions/0041-traits-without-defaults.md";
/// Traits with default methods, which the decision names as exceptions.
const WITH_DEFAULTS: [&str; 3] = ["BlockDeviceExt", "ChunkDriver", "Driver"];
const METHODS_MAX: usize = 4;

/// The name, the number of methods and the methods with a body of each trait.
fn traits(code: &str) -> Vec<(&str, usize, Vec<&str>)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("trait ") {
        let is_item = code[..at].ends_with("pub ")
            || code[..at].ends_with(") ")
            || code[..at].ends_with('\n');
        let rest = &code[at + "trait ".len()..];
        let name = rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        let Some(open) = rest.find('{').filter(|_| is_item) else { continue };
        let mut depth = 0;
        let end = rest[open..].char_indices().find_map(|(index, letter)| {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            (depth == 0).then_some(open + index)
        });
        let body = &rest[open + 1..end.unwrap_or(rest.len())];
        let methods: Vec<&str> = body.split("fn ").skip(1).collect();
        let has_body = |method: &&&str| {
            let end = method.find([';', '{']);
            end.is_some_and(|end| method[end..].starts_with('{'))
        };
        let names = methods.iter().filter(has_body).map(|method| {
            method.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
        });
        found.push((name, methods.len(), names.collect()));
    }
    found
}

#[test]
fn a_trait_has_no_defaults_and_at_most_four_methods_or_a_decision_names_it() {
    let decision = std::fs::read_to_string(repository().join(DECISION)).expect("the decision");
    let (mut faults, mut count) = (Vec::new(), 0);
    for (path, lines) in production() {
        let code: Vec<&str> =
            lines.iter().map(|line| line.split("//").next().unwrap_or_default()).collect();
        for (name, methods, defaults) in traits(&code.join("\n")) {
            count += 1;
            if WITH_DEFAULTS.contains(&name) {
                continue;
            }
            faults.extend(defaults.iter().map(|one| format!("{path}: {name}::{one} has a body")));
            let is_named = || {
                decision.lines().filter(|line| line.contains(&format!("`{name}`"))).any(|line| {
                    line.contains(&format!("({methods}"))
                        || line.contains(&format!("and {methods})"))
                })
            };
            if methods > METHODS_MAX && !is_named() {
                faults.push(format!("{path}: {name} has {methods} methods: {DECISION} says why"));
            }
        }
    }
    assert!(count > 20, "only {count} traits were read");
    let unnamed = WITH_DEFAULTS.iter().filter(|name| !decision.contains(&format!("`{name}`")));
    faults.extend(unnamed.map(|name| format!("{DECISION} has no `{name}`")));
    none(&faults);
}

#[test]
fn a_default_method_is_found() {
    let code = "\npub trait A: B {\n fn c(&self);\n fn d(&self) -> u8 { 1 }\n}\ntrait E {}";
    assert_eq!(traits(code), [("A", 2, vec!["d"]), ("E", 0, vec![])]);
}

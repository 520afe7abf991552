//! The prototypes of the headers, compared with the exported functions by their text.
//!
//! Invariant: each function of a header is exported under the same name, with the same arguments
//! in the same order and of the same types; nothing else is exported. Not here: the layout of
//! structures (`layout.c`, `driver`, `bdus/layout`).

use std::collections::BTreeMap;

/// A type of a header, and what stands for it in Rust. Both have the same size and meaning.
const TYPES: &[(&str, &str)] = &[
    ("void", "()"),
    ("int", "c_int"),
    ("bool", "bool"),
    ("size_t", "usize"),
    ("uint32_t", "u32"),
    ("uint64_t", "u64"),
    ("uint64_t *", "Option<NonNull<u64>>"),
    ("char *", "*mut c_char"),
    ("const char *", "*const c_char"),
    ("const char *const *", "*const *const c_char"),
    ("void *", "UserPointer"),
    ("void *", "*mut u8"),
    ("const void *", "*const u8"),
    ("const struct sawmill_driver *", "*const DriverTable"),
    ("const struct sawmill_chunk *", "&WriteChunk"),
    ("struct sawmill_device *", "Option<&Device>"),
    ("struct sawmill_device *", "&Device"),
    ("const struct bdus_ops *", "Option<NonNull<Ops>>"),
    ("const struct bdus_attrs *", "Option<NonNull<Attrs>>"),
    ("struct bdus_version *", "Option<NonNull<Version>>"),
    ("const struct bdus_version *", "&'static Version"),
];

/// A function: its result's type, and the name and type of each argument.
type Signature = (String, Vec<(String, String)>);
type Signatures = BTreeMap<String, Signature>;

/// The text on one line, with one space between words.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A header without comments and lines of the preprocessor.
fn declarations(header: &str) -> Vec<String> {
    let mut text = String::new();
    for part in header.split("/*") {
        text.push_str(part.split_once("*/").map_or(part, |(_, after)| after));
    }
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let statements = lines.join("\n");
    let after_brace = |text: &str| one_line(text.rsplit(['{', '}']).next().unwrap_or(text));
    statements.split(';').map(after_brace).collect()
}

/// `const char *name` as its name and its type.
fn of_c(argument: &str) -> (String, String) {
    let split = argument.trim_end().rfind([' ', '*']).expect("a type before a name") + 1;
    (argument[split..].to_owned(), argument[..split].trim().to_owned())
}

fn arguments_of_c(list: &str) -> Vec<(String, String)> {
    let arguments = list.trim_end_matches(')').split(", ");
    arguments.filter(|argument| !matches!(*argument, "" | "void")).map(of_c).collect()
}

/// The functions that a header declares.
fn prototypes(header: &str) -> Signatures {
    let mut found = Signatures::new();
    for text in declarations(header) {
        let Some((head, list)) = text.split_once('(') else { continue };
        // Not the callbacks of a table, nor the calls in inline functions.
        if list.starts_with('*') || head.starts_with("return ") {
            continue;
        }
        let (name, result) = of_c(head);
        found.insert(name, (result, arguments_of_c(list)));
    }
    found
}

/// The callbacks in the tables of a header.
fn callbacks(header: &str) -> Signatures {
    let mut found = Signatures::new();
    for text in declarations(header) {
        let Some((result, rest)) = text.split_once(" (*") else { continue };
        let (name, list) = rest.split_once(")(").expect("a callback's arguments");
        found.insert(name.to_owned(), (result.to_owned(), arguments_of_c(list)));
    }
    found
}

/// What follows `fn(` as arguments and the type of the result, which `end` ends.
fn of_rust<'a>(text: &'a str, end: &str) -> (Vec<&'a str>, String) {
    let (list, rest) = text.split_once(')').expect("the end of the arguments");
    let result = rest.split(end).next().unwrap_or(rest).trim();
    let result = result.strip_prefix("-> ").unwrap_or("()");
    let arguments = list.split(',').map(str::trim).filter(|argument| !argument.is_empty());
    (arguments.collect(), result.to_owned())
}

/// The functions that these sources export.
fn exported(sources: &[&str]) -> Signatures {
    let mut found = Signatures::new();
    for source in sources {
        for text in one_line(source).split("#[unsafe(no_mangle)] pub ").skip(1) {
            let text = text.strip_prefix("unsafe ").unwrap_or(text);
            let text = text.strip_prefix("extern \"C\" fn ").expect("a panic ends at the edge");
            let (name, rest) = text.split_once('(').expect("arguments");
            let (arguments, result) = of_rust(rest, "{");
            let pairs = arguments.iter().map(|argument| argument.split_once(": "));
            let pairs = pairs.map(|pair| pair.expect("a name and a type"));
            let pairs = pairs.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect();
            found.insert(name.to_owned(), (result, pairs));
        }
    }
    found
}

/// The fields of `DriverTable` that are functions. Their arguments have no names.
fn table(source: &str) -> Signatures {
    let mut found = Signatures::new();
    for line in source.lines().filter(|line| line.contains(": Option<unsafe extern \"C\" fn(")) {
        let (name, rest) = line.trim().split_once(": Option<unsafe extern \"C\" fn(").unwrap();
        let name = name.strip_prefix("pub ").unwrap_or(name);
        let (arguments, result) = of_rust(rest, ">,");
        let pairs = arguments.iter().map(|kind| (String::new(), (*kind).to_owned())).collect();
        found.insert(name.to_owned(), (result, pairs));
    }
    found
}

fn assert_same(of_header: &Signatures, of_library: &Signatures) {
    let names = |signatures: &Signatures| signatures.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(of_header), names(of_library));
    for (function, (result, arguments)) in of_header {
        let (own_result, own_arguments) = &of_library[function];
        let is_same = |c: &str, rust: &str| TYPES.contains(&(c, rust));
        assert!(is_same(result, own_result), "{function} returns {result}, here {own_result}");
        assert_eq!(arguments.len(), own_arguments.len(), "{function}: arguments");
        for ((name, kind), (own_name, own_kind)) in arguments.iter().zip(own_arguments) {
            assert!(own_name.is_empty() || name == own_name, "{function}: {name}, here {own_name}");
            assert!(is_same(kind, own_kind), "{function}: {name} is {kind}, here {own_kind}");
        }
    }
}

#[test]
fn each_function_of_sawmill_h_is_exported_with_the_types_of_its_prototype() {
    let of_header = prototypes(include_str!("../include/sawmill.h"));
    assert_eq!(of_header.len(), 9, "{:?}", of_header.keys());
    assert_same(&of_header, &exported(&[include_str!("../src/lib.rs")]));
}

#[test]
fn each_function_of_bdus_h_is_exported_with_the_types_of_its_prototype() {
    let mut of_header = prototypes(include_str!("../include/bdus.h"));
    of_header.retain(|_, (result, _)| !result.starts_with("static inline"));
    assert_eq!(of_header.len(), 10, "{:?}", of_header.keys());
    assert_same(&of_header, &exported(&[include_str!("../src/bdus/mod.rs")]));
}

#[test]
fn the_callbacks_of_a_driver_table_have_the_types_of_the_header() {
    let of_header = callbacks(include_str!("../include/sawmill.h"));
    assert_eq!(of_header.len(), 9, "{:?}", of_header.keys());
    assert_same(&of_header, &table(include_str!("../src/driver.rs")));
}

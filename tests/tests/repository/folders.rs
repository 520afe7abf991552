//! The tree of folders in ARCHITECTURE.md: every folder is in it, and what it names is there. Also:
//! every source file is part of its crate.
//!
//! Not here: how many files a folder may have (`tidy.rs`), what a folder may be called.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sawmill_tests::machine::repository;

use super::tidy::{files, none};

/// Columns between a folder and the one it is in.
const INDENT_COLUMNS: usize = 4;
/// What lies below these is named after what it is for: the tree ends with them.
const ENDS: [&str; 3] = ["corpus", "examples", "vectors"];

fn architecture() -> String {
    std::fs::read_to_string(repository().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md")
}

/// The folders that a tree names, from the root: `a/b` below `c` is `c/a/b`.
fn named(tree: &str) -> BTreeSet<String> {
    let mut above: Vec<(usize, String)> = Vec::new();
    let mut found = BTreeSet::new();
    for line in tree.lines() {
        let depth = (line.len() - line.trim_start().len()) / INDENT_COLUMNS;
        let name = line.split_whitespace().next().expect("a line of the tree names a folder");
        above.retain(|(other, _)| *other < depth);
        let path = above.last().map_or(name.to_owned(), |(_, folder)| format!("{folder}/{name}"));
        found.insert(path.clone());
        above.push((depth, path));
    }
    found
}

/// The folders with a file in them or below, from the root. Not what was built, nor hidden ones
/// but `.ci`.
fn folders_in(root: &Path, folder: &str, found: &mut BTreeSet<String>) -> bool {
    let mut has_files = false;
    for entry in std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        // A link to a folder leads to one that is named elsewhere.
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            has_files = true;
            continue;
        }
        let is_built = entry.path().join("CACHEDIR.TAG").exists()
            || ["target", "raw", "build", "__pycache__"].contains(&name.as_str()) && path != SOURCE
            || name.ends_with(".egg-info");
        let is_hidden = name.starts_with('.') && path != ".ci";
        if !is_built && !is_hidden && folders_in(root, &path, found) {
            found.insert(path);
            has_files = true;
        }
    }
    has_files
}

/// The one folder of ours that is called as what a build makes.
const SOURCE: &str = "crates/link/src/target";

#[test]
fn architecture_names_every_folder() {
    let map = architecture();
    let (_, tree) = map.split_once("## Folders").expect("the section");
    let tree = tree.split("```").nth(1).expect("a tree").trim_matches('\n');
    let named = named(tree);
    let mut folders = BTreeSet::new();
    folders_in(&repository(), "", &mut folders);
    assert!(folders.len() > 100, "{} folders", folders.len());
    let below_an_end = |folder: &&String| {
        let mut above = Path::new(folder).parent().into_iter().flat_map(Path::components);
        above.any(|part| ENDS.iter().any(|end| part.as_os_str() == *end))
    };
    let is_above_one_named =
        |folder: &String| named.iter().any(|name| name.starts_with(&format!("{folder}/")));
    let missing = folders
        .iter()
        .filter(|folder| !named.contains(*folder) && !is_above_one_named(folder))
        .filter(|folder| !below_an_end(folder))
        .map(|folder| format!("ARCHITECTURE.md does not name {folder}"));
    let stale_names = named
        .iter()
        .filter(|folder| !repository().join(folder).is_dir())
        .map(|folder| format!("ARCHITECTURE.md names {folder}, which is gone"));
    none(&missing.chain(stale_names).collect::<Vec<_>>());
}

#[test]
fn architecture_has_a_row_for_every_crate_and_names_only_files_that_exist() {
    let map = architecture();
    let mut faults = Vec::new();
    let crates = std::fs::read_dir(repository().join("crates")).expect("the crates");
    for entry in crates.flatten().filter(|entry| entry.path().is_dir()) {
        let name = format!("crates/{}", entry.file_name().to_string_lossy());
        if !map.contains(&format!("| `{name}` |")) {
            faults.push(format!("ARCHITECTURE.md does not say what `{name}` owns"));
        }
    }
    for quoted in map.split('`').skip(1).step_by(2).filter(|quoted| quoted.starts_with("crates/")) {
        if !repository().join(quoted).exists() {
            faults.push(format!("ARCHITECTURE.md names {quoted}, which is gone"));
        }
    }
    none(&faults);
}

#[test]
fn a_tree_names_what_stands_deeper_below_what_stands_above_it() {
    let tree = "a/b    one\n    c    two\n        d\n    e/f\ng\n";
    let expected = ["a/b", "a/b/c", "a/b/c/d", "a/b/e/f", "g"].map(str::to_owned);
    assert_eq!(named(tree), BTreeSet::from(expected));
}

/// Whether the file of a module is named by the module above it: in the folder's `mod.rs`, `lib.rs`
/// or `main.rs`, or in the file of the folder's name.
fn is_reached(path: &Path, sources: &BTreeMap<PathBuf, String>) -> bool {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let folder = path.parent().expect("a file is in a folder");
    let (name, folder) = if stem == "mod" {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (name, folder.parent().expect("src is above it"))
    } else {
        (stem, folder)
    };
    let above = ["mod.rs", "lib.rs", "main.rs"].map(|file| folder.join(file));
    let declared = [format!("mod {name};"), format!("mod {name} {{")];
    above.into_iter().chain([folder.with_extension("rs")]).any(|parent| {
        sources.get(&parent).is_some_and(|text| declared.iter().any(|line| text.contains(line)))
    })
}

/// A file that no `mod` names is compiled by nothing: it looks like code, and rots.
#[test]
fn every_source_file_is_part_of_its_crate() {
    let sources: BTreeMap<PathBuf, String> = files(&[".rs"]).into_iter().collect();
    let is_root = |path: &Path| {
        let name = path.file_name().unwrap_or_default();
        name == "lib.rs" || name == "main.rs" || path.parent().is_some_and(|up| up.ends_with("bin"))
    };
    let below_src = |path: &Path| path.components().any(|part| part.as_os_str() == "src");
    let faults: Vec<String> = sources
        .keys()
        .filter(|path| below_src(path) && !is_root(path) && !is_reached(path, &sources))
        .map(|path| format!("{}: no module names it", path.display()))
        .collect();
    none(&faults);
}

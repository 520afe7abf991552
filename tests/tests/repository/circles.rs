//! Which files of a crate name each other in a circle. The arrows are read from `use` lines and
//! from paths in the code, through re-exports; what lies below a file (its child modules) may name
//! it, and it them.
//!
//! Not here: arrows between crates (`arrows`), and what is called through a trait.

use std::collections::{BTreeMap, BTreeSet};

use super::rules::production;
use super::tidy::none;

/// A module: `["cache", "state"]` is `crate::cache::state`.
type Module = Vec<String>;

/// One crate: its modules, what they name, and what they re-export under which name.
#[derive(Default)]
struct Crate {
    named: BTreeMap<Module, Vec<Module>>,
    exported: BTreeMap<Module, BTreeMap<String, Module>>,
}

#[test]
fn no_files_of_a_crate_name_each_other_in_a_circle() {
    let mut crates: BTreeMap<String, Vec<(Module, String)>> = BTreeMap::new();
    for (path, lines) in production() {
        let Some((name, file)) = path.trim_start_matches("crates/").split_once("/src/") else {
            continue;
        };
        let code = lines.iter().map(|line| line.split("//").next().unwrap_or_default());
        let code = code.collect::<Vec<_>>().join("\n");
        crates.entry(name.to_owned()).or_default().push((module_of(file), code));
    }
    let mut faults = Vec::new();
    for (name, files) in &crates {
        for circle in circles(&Crate::read(files).arrows()) {
            faults.push(format!("crates/{name}: {} name each other", circle.join(", ")));
        }
    }
    none(&faults);
}

#[test]
fn a_circle_is_found_through_a_re_export_and_one_with_a_child_is_none() {
    let files = [
        ("", "mod a;\nmod b;\npub use b::Thing;"),
        ("a", "use crate::Thing;\nmod child;\nuse child::Leaf;"),
        ("a/child", "use super::Parent;"),
        ("b", "fn f() { crate::a::run() }"),
    ];
    let files: Vec<_> =
        files.iter().map(|(file, code)| (module_of(file), (*code).to_owned())).collect();
    assert_eq!(circles(&Crate::read(&files).arrows()), [["a", "b"]]);
}

/// The paths in code without its `use` lines that say where they begin.
fn paths_in(code: &str) -> Vec<&str> {
    let is_path = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let begins_a_word =
        |at: usize| !code[..at].ends_with(|letter: char| letter.is_alphanumeric() || letter == ':');
    let roots = ["crate::", "super::", "self::"].into_iter();
    roots
        .flat_map(|root| code.match_indices(root))
        .filter(|(at, _)| begins_a_word(*at))
        .map(|(at, _)| {
            let length = code[at..].find(|letter| !is_path(letter));
            &code[at..length.map_or(code.len(), |length| at + length)]
        })
        .collect()
}

fn module_of(file: &str) -> Module {
    let path = file.trim_end_matches(".rs");
    let parts = path.split('/').filter(|part| !["mod", "lib", "main", ""].contains(part));
    parts.map(str::to_owned).collect()
}

impl Crate {
    fn read(files: &[(Module, String)]) -> Self {
        let mut found = Crate::default();
        for (module, _) in files {
            found.named.insert(module.clone(), Vec::new());
            found.exported.insert(module.clone(), BTreeMap::new());
        }
        for (module, code) in files {
            let (uses, rest) = split_uses(code);
            for (is_public, tree) in uses {
                for path in paths_of(&tree) {
                    found.note(module, &path, is_public);
                }
            }
            for path in paths_in(&rest) {
                found.note(module, path, false);
            }
        }
        found
    }

    /// Notes that `module` names `path`, if that lies in this crate.
    fn note(&mut self, module: &Module, path: &str, is_public: bool) {
        let mut parts = path.split("::").map(str::trim).peekable();
        let mut target = match parts.peek() {
            Some(&"crate") => Vec::new(),
            Some(&("super" | "self")) => module.clone(),
            Some(first) => {
                let child: Module = module.iter().cloned().chain([(*first).to_owned()]).collect();
                if !self.named.contains_key(&child) {
                    return;
                }
                module.clone()
            }
            None => return,
        };
        for part in parts {
            match part {
                "super" => drop(target.pop()),
                "crate" | "self" | "" => (),
                part => target.push(part.to_owned()),
            }
        }
        if is_public && let Some(name) = target.last() {
            self.exported.entry(module.clone()).or_default().insert(name.clone(), target.clone());
        } else {
            self.named.entry(module.clone()).or_default().push(target);
        }
    }

    /// The file that a path leads to.
    fn file_of(&self, path: &[String], depth: u32) -> Module {
        let mut file = Module::new();
        let mut rest = path;
        while let Some((first, behind)) = rest.split_first() {
            let child: Module = file.iter().cloned().chain([first.clone()]).collect();
            if !self.named.contains_key(&child) {
                break;
            }
            (file, rest) = (child, behind);
        }
        let exported = rest.first().and_then(|name| self.exported.get(&file)?.get(name));
        match exported {
            Some(target) if depth < 6 && target != path => self.file_of(target, depth + 1),
            _ => file,
        }
    }

    /// The arrows between files, without those between a file and what lies below it.
    fn arrows(&self) -> BTreeMap<Module, BTreeSet<Module>> {
        let arrows = self.named.iter().map(|(module, paths)| {
            let files = paths.iter().map(|path| self.file_of(path, 0));
            let is_family = |file: &Module| file.starts_with(module) || module.starts_with(file);
            (module.clone(), files.filter(|file| !is_family(file)).collect())
        });
        arrows.collect()
    }
}

/// The `use` declarations of a file, and the code without them.
fn split_uses(code: &str) -> (Vec<(bool, String)>, String) {
    let (mut uses, mut rest, mut open): (Vec<(bool, String)>, String, bool) = Default::default();
    for line in code.lines() {
        let begins = line.trim_start();
        let declares =
            begins.starts_with("use ") || begins.starts_with("pub") && begins.contains(" use ");
        if open && let Some((_, tree)) = uses.last_mut() {
            tree.push_str(begins);
        } else if declares {
            let tree = begins.split_once("use ").map_or("", |(_, tree)| tree);
            uses.push((begins.starts_with("pub"), tree.to_owned()));
        } else {
            rest.push_str(line);
            rest.push('\n');
            continue;
        }
        open = !line.contains(';');
    }
    (uses, rest)
}

/// The single paths of a tree like `a::{b, c::{d, e}}`.
fn paths_of(tree: &str) -> Vec<String> {
    let tree = tree.trim().trim_end_matches(';');
    let Some((head, inside)) = tree.split_once('{') else {
        return vec![tree.split(" as ").next().unwrap_or_default().to_owned()];
    };
    let inside = inside.rsplit_once('}').map_or(inside, |(inside, _)| inside);
    let (mut depth, mut parts, mut part) = (0, Vec::new(), String::new());
    for letter in inside.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => (),
        }
        if letter == ',' && depth == 0 {
            parts.push(std::mem::take(&mut part));
        } else {
            part.push(letter);
        }
    }
    parts.push(part);
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| paths_of(part)).map(|path| format!("{head}{path}")).collect()
}

/// The groups of files that reach each other.
fn circles(arrows: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<Vec<String>> {
    let reached = |from: &Module| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(module) = next.pop() {
            for target in arrows.get(&module).into_iter().flatten() {
                if seen.insert(target.clone()) {
                    next.push(target.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<_, _> =
        arrows.keys().map(|module| (module.clone(), reached(module))).collect();
    let mut found = BTreeSet::new();
    for (module, targets) in &reached {
        let back =
            |target: &&Module| reached.get(*target).is_some_and(|again| again.contains(module));
        let circle: BTreeSet<_> =
            targets.iter().filter(back).map(|module| module.join("/")).collect();
        if circle.len() > 1 {
            found.insert(circle.into_iter().collect::<Vec<_>>());
        }
    }
    found.into_iter().collect()
}

//! The tables of ARCHITECTURE.md that say what the lines buy: their figures agree with the files.
//!
//! Not here: how long a file or a function may be (`lengths.rs`).

use std::collections::BTreeMap;
use std::path::Path;

use sawmill_tests::machine::repository;

use super::tidy::{files, none};

const COUNTED: [&str; 7] = [".rs", ".py", ".go", ".c", ".h", ".cpp", ".sh"];
/// How far a figure may be from the count, beside what rounding makes of it.
const SHARE_OFF_MAX: f64 = 0.05;

/// A row: what it counts, and the thousands of lines that it states.
struct Row {
    /// The folder of the crate or the part, from the root.
    base: String,
    /// Files and folders of it; none: all of it.
    items: Vec<String>,
    /// Also what no other row counts.
    has_rest: bool,
    thousands: f64,
    /// How far rounding alone moves the figure: half of its last digit.
    rounding_thousands: f64,
}

impl Row {
    /// A row of the first table.
    fn is_whole(&self) -> bool {
        self.items.is_empty() && (!self.has_rest || self.base == "crates")
    }
}

fn rows() -> Vec<Row> {
    let page = std::fs::read_to_string(repository().join("ARCHITECTURE.md")).unwrap();
    let (_, from) = page.split_once("\nBS3, the ancestor").expect("the tables of lines");
    let (tables, _) = from.split_once("\n## ").expect("their end");
    tables.lines().filter_map(row).collect()
}

fn row(line: &str) -> Option<Row> {
    let cells: Vec<&str> = line.strip_prefix("| ")?.split(" | ").collect();
    let figure = cells.get(1)?;
    let thousands = figure.parse().ok()?;
    let rounding_thousands = if figure.contains('.') { 0.05 } else { 0.5 };
    let (name, items) = cells[0].split_once(": ").unwrap_or((cells[0], ""));
    let in_crates = format!("crates/{name}");
    let base = if name == "all others" {
        "crates".to_owned()
    } else if repository().join(&in_crates).is_dir() {
        in_crates
    } else {
        name.to_owned()
    };
    let quoted = items.split('`').skip(1).step_by(2).map(ToOwned::to_owned);
    let has_rest = items.contains("the rest") || name == "all others";
    Some(Row { base, items: quoted.collect(), has_rest, thousands, rounding_thousands })
}

/// Lines of each source file, once: a link to a folder leads to files that are counted there.
fn lines() -> BTreeMap<String, usize> {
    let root = repository().canonicalize().unwrap();
    let is_real = |path: &Path| root.join(path).canonicalize().unwrap() == root.join(path);
    let sources = files(&COUNTED).into_iter().filter(|(path, _)| is_real(path));
    sources.map(|(path, text)| (path.display().to_string(), text.lines().count())).collect()
}

/// `item` is the file or the folder of that name in `base` or in its `src`.
fn is_in(path: &str, base: &str, item: &str) -> bool {
    let Some(path) = path.strip_prefix(base).and_then(|rest| rest.strip_prefix('/')) else {
        return false;
    };
    [path, path.strip_prefix("src/").unwrap_or(path)].iter().any(|path| {
        let rest = path.strip_prefix(item);
        rest.is_some_and(|rest| rest.starts_with('/') || rest.starts_with('.'))
    })
}

/// The row that counts `path`: it names it, or has the rest of the deepest folder around it.
fn row_of(path: &str, rows: &[Row]) -> Option<usize> {
    let is_below = |row: &Row| path.starts_with(&format!("{}/", row.base));
    let names = |row: &Row| match &row.items[..] {
        [] => !row.has_rest && is_below(row),
        items => items.iter().any(|item| is_in(path, &row.base, item)),
    };
    let rest = || {
        let found = rows.iter().enumerate().filter(|(_, row)| row.has_rest && is_below(row));
        found.max_by_key(|(_, row)| row.base.len()).map(|(n, _)| n)
    };
    rows.iter().position(names).or_else(rest)
}

fn faults_in(rows: &[Row], lines: &BTreeMap<String, usize>) -> Vec<String> {
    let mut counts = vec![0; rows.len()];
    for (path, count) in lines {
        if let Some(n) = row_of(path, rows) {
            counts[n] += count;
        }
    }
    let off = rows.iter().zip(counts).filter_map(|(row, count)| {
        let counted = count as f64 / 1000.0;
        let off = (row.thousands - counted).abs();
        let is_off = off > counted * SHARE_OFF_MAX + row.rounding_thousands;
        let (base, items, stated) = (&row.base, &row.items, row.thousands);
        is_off.then(|| format!("{base} {items:?}: {stated} stated, {counted:.1} counted"))
    });
    off.collect()
}

#[test]
fn what_the_lines_buy_states_as_many_lines_as_there_are() {
    let (crates, modules): (Vec<Row>, Vec<Row>) = rows().into_iter().partition(Row::is_whole);
    assert!(crates.len() > 15 && modules.len() > 60, "the tables are not where they were");
    let lines = lines();
    none(&[faults_in(&crates, &lines), faults_in(&modules, &lines)].concat());
}

#[test]
fn a_figure_that_is_off_is_found_and_the_rest_is_what_no_row_names() {
    let lines = [("crates/link/src/a/b.rs", 1020), ("crates/link/src/c.rs", 2000)];
    let lines = BTreeMap::from(lines.map(|(path, count)| (path.to_owned(), count)));
    let table = |a: &str, rest: &str| {
        let rows = [format!("| link: `a` | {a} | b |"), format!("| link: the rest | {rest} | c |")];
        rows.iter().filter_map(|line| row(line)).collect::<Vec<Row>>()
    };
    assert_eq!(faults_in(&table("1.1", "2.0"), &lines), Vec::<String>::new());
    assert_eq!(faults_in(&table("1.2", "2.0"), &lines).len(), 1);
    assert_eq!(faults_in(&table("1.0", "2.2"), &lines).len(), 1);
    assert_eq!(faults_in(&table("1", "2"), &lines).len(), 0);
    assert_eq!(faults_in(&table("1", "3"), &lines).len(), 1);
}

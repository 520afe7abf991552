//! Golden vectors: files with the bytes of a value, checked in and never edited, only added to.
//! Beside each is a dump for readers.
//!
//! Invariant: a file that is there is never written. Not here: the values, and how they are encoded
//! (the tests of each crate with a folder `vectors`).

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// One golden vector as its encoder makes it today.
pub struct Vector {
    /// `<structure>/v<version>-<case>`: the name of its files.
    pub name: &'static str,
    /// The encoded value.
    pub bytes: Vec<u8>,
    /// What a reader sees.
    pub dump: String,
}

/// The folder of a crate's vectors, and what should be in it.
pub struct Vectors {
    folder: PathBuf,
    all: Vec<Vector>,
}

impl Vectors {
    /// These vectors, in this folder.
    pub fn new(folder: impl Into<PathBuf>, all: impl IntoIterator<Item = Vector>) -> Self {
        Vectors { folder: folder.into(), all: all.into_iter().collect() }
    }

    /// Compares each encoded value with its file.
    ///
    /// # Panics
    /// When one differs.
    pub fn assert_encoded(&self) {
        for vector in &self.all {
            let kept = read(&self.folder, vector.name);
            assert!(vector.bytes == kept, "{} is encoded otherwise than it was", vector.name);
        }
    }

    /// Compares each dump with its file.
    ///
    /// # Panics
    /// When one differs.
    pub fn assert_dumped(&self) {
        for vector in &self.all {
            let path = path(&self.folder, vector.name, "txt");
            let kept = fs::read_to_string(&path);
            let kept = kept.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert_eq!(vector.dump, kept, "{}", vector.name);
        }
    }

    /// Looks for files that belong to no vector.
    ///
    /// # Panics
    /// When there is one.
    pub fn assert_no_other_files(&self) {
        let names = self.all.iter().map(|vector| vector.name);
        let known: Vec<PathBuf> = names
            .flat_map(|name| ["bin", "txt"].map(|ending| path(&self.folder, name, ending)))
            .collect();
        for folder in files_in(&self.folder) {
            for file in files_in(&folder) {
                assert!(known.contains(&file), "no test reads {}", file.display());
            }
        }
    }

    /// Writes the files of the vectors that have none, and leaves the others.
    ///
    /// # Panics
    /// When one cannot be written.
    pub fn write_new(&self) {
        for vector in &self.all {
            let (bin, txt) =
                (path(&self.folder, vector.name, "bin"), path(&self.folder, vector.name, "txt"));
            if bin.exists() {
                continue;
            }
            let folder = bin.parent().unwrap_or(&self.folder);
            fs::create_dir_all(folder).expect("a folder for vectors");
            fs::write(bin, &vector.bytes).expect("a new vector");
            fs::write(txt, &vector.dump).expect("a new dump");
        }
    }
}

fn path(folder: &Path, name: &str, ending: &str) -> PathBuf {
    folder.join(format!("{name}.{ending}"))
}

/// The bytes of the vector with this name.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn read(folder: &Path, name: &str) -> Vec<u8> {
    let path = path(folder, name, "bin");
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder);
    let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.expect("a readable folder").path()).collect()
}

/// The first lines of a dump.
#[must_use]
pub fn dump_head(name: &str, size: usize) -> String {
    format!("{name}: {size} bytes\n\noffset size name and bytes\n")
}

/// Adds a row to a dump: a field, its place and its bytes as text.
pub fn dump_row(dump: &mut String, (offset, size): (usize, usize), name: &str, bytes: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(dump, "{offset:6} {size:4} {name:20} {bytes}");
}

/// Bytes as text; many that are all the same are counted.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    match bytes {
        [first, ..] if bytes.len() > 32 && bytes.iter().all(|byte| byte == first) => {
            format!("{} bytes of {first:02x}", bytes.len())
        }
        _ => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

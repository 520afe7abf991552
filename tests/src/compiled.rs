//! Programs in C and C++, compiled for a test against `sdk/c`.
//!
//! Not here: what they are for.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::machine::{repository, run, sawmill_binary};

/// Whether there is a compiler.
///
/// # Errors
/// What is missing.
pub fn require_compiler() -> Result<(), String> {
    for compiler in ["cc", "c++"] {
        if let Err(error) = Command::new(compiler).arg("--version").output() {
            return Err(format!("no {compiler}: {error}"));
        }
    }
    Ok(())
}

/// The folder of the built library.
///
/// # Panics
/// When the library was not built.
#[must_use]
pub fn libraries() -> PathBuf {
    let folder = sawmill_binary().parent().expect("a binary lies in a folder").to_owned();
    assert!(
        folder.join("libsawmill.so").is_file(),
        "build it first: cargo build --release -p sawmill-c"
    );
    folder
}

fn compile(compiler: &str, source: &Path, program: &Path, options: &[&str]) {
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror"]).args(options).arg("-o").arg(program).arg(source);
    command.arg("-I").arg(repository().join("sdk/c/include")).arg("-L").arg(libraries());
    run(command.args(["-lsawmill", "-pthread"]));
}

/// Makes a program of a C source.
///
/// # Panics
/// When the compiler prints anything.
pub fn c(source: &Path, program: &Path, options: &[&str]) {
    compile("cc", source, program, options);
}

/// Makes a program of a C++ source.
///
/// # Panics
/// As `c`.
pub fn cpp(source: &Path, program: &Path) {
    compile("c++", source, program, &["-std=c++11", "-pedantic"]);
}

/// An example in C, built once.
///
/// # Panics
/// As `c`.
#[must_use]
pub fn c_example(name: &str, arguments: &[&str]) -> Command {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["null", "ram", "file", "mirror", "lazy"] {
            let source = repository().join(format!("sdk/c/examples/{name}.c"));
            c(&source, &folder.path().join(name), &["-std=c99", "-pedantic", "-O2"]);
        }
        folder
    });
    let mut command = Command::new(folder.path().join(name));
    command.env("LD_LIBRARY_PATH", libraries()).args(arguments).stdin(Stdio::null());
    command
}

/// An example in Rust.
///
/// # Panics
/// When it was not built.
#[must_use]
pub fn rust_example(name: &str, arguments: &[&str]) -> Command {
    let path = libraries().join("examples").join(name);
    assert!(path.is_file(), "build it first: cargo build --release -p sawmill-driver --examples");
    let mut command = Command::new(path);
    command.args(arguments).stdin(Stdio::null());
    command
}

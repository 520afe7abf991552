//! The `sawmill` binary: its `main` alone.
//!
//! Not here: everything else, which is the library of the same name.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    sawmill_program::run()
}

//! The program `bdus`. Not here: what it does (`bdus/command.rs`).

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    ExitCode::from(sawmill::bdus::command(&arguments))
}

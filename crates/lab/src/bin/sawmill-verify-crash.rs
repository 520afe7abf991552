//! `verify-crash` as a program of its own, small: no engine, no store.
//! Not here: the check (`verify_crash`); `simulate`, which needs the engine (`crates/sawmill`).
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use sawmill_console::{Console, output};
use sawmill_lab::verify_crash;

#[derive(Parser)]
#[command(name = "sawmill-verify-crash", version)]
struct Cli {
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    arguments: verify_crash::Arguments,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let exit =
        verify_crash::run(&Console { json: cli.json }, &cli.arguments).unwrap_or_else(|failure| {
            output::error(&failure);
            failure.exit()
        });
    ExitCode::from(exit.code())
}

//! `sawmill bench`: work for a served disk, measured and verified.

mod content;
mod flight;
mod replay;

use clap::{Args, Subcommand};

use sawmill_console::Console;
use sawmill_console::exit::{Exit, Result};

/// Give a served disk work, measure it, and verify what it holds.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    work: Work,
}

#[derive(Subcommand)]
enum Work {
    Replay(replay::Arguments),
}

/// Carries the command out.
pub fn run(console: &Console, arguments: &Arguments) -> Result<Exit> {
    match &arguments.work {
        Work::Replay(arguments) => replay::run(console, arguments),
    }
}

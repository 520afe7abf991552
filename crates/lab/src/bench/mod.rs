//! `sawmill bench`: workloads for a served disk, measured and verified.
//! Not here: measuring Sawmill beside other products (`bench/run.py`).

mod content;
mod flight;
mod replay;

use clap::{Args, Subcommand};

use sawmill_console::Console;
use sawmill_console::exit::{Exit, Result};

/// Run a workload on a served disk, measure it, and verify the data.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    work: Work,
}

#[derive(Subcommand)]
enum Work {
    Replay(replay::Arguments),
}

/// Runs the command.
pub fn run(console: &Console, arguments: &Arguments) -> Result<Exit> {
    match &arguments.work {
        Work::Replay(arguments) => replay::run(console, arguments),
    }
}

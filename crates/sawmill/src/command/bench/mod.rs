//! `sawmill bench`: work for a served disk, measured and verified.

mod content;
mod flight;
mod replay;

use clap::{Args, Subcommand};

use super::Context;
use crate::exit::{Exit, Result};

/// Give a served disk work, measure it, and verify what it holds.
#[derive(Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    work: Work,
}

#[derive(Subcommand)]
enum Work {
    Replay(replay::Arguments),
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    match &arguments.work {
        Work::Replay(arguments) => replay::run(context, arguments),
    }
}

//! `sawmill rollback`: returns a volume to an earlier state.
//!
//! Not here: carrying the order out, in a server or at rest (`crate::past`); the states to return
//! to (`log`).

use clap::Args;

use crate::attach::Attach;
use crate::command::Context;
use crate::control::protocol::PastChange;
use crate::moment::parse_cut;
use crate::past::order;
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;

/// Return a volume to an earlier state: a snapshot, a time, or a position of its log.
///
/// The present state first gets a snapshot, so that you can undo the rollback; delete it when you
/// no longer need it. Unmount the disk first: a file system does not expect its disk to change.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// The state to return to: the name of a snapshot, a time such as 2026-11-21T10:00:00Z, or
    /// position:N.
    #[arg(long, value_name = "CUT")]
    to: String,

    #[command(flatten)]
    attach: Attach,
}

#[derive(serde::Serialize)]
struct Document<'a> {
    volume: &'a str,
    rolled_back_to: &'a str,
    before: &'a str,
    undo: String,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let cut = parse_cut(&arguments.to)?;
    let address = context.paths.resolve(&arguments.volume)?;
    let before = order(&context.paths, &address, &arguments.attach, &PastChange::RollBack(cut))?;
    let before = before.unwrap_or_default();
    let undo = format!("sawmill rollback {} --to {before}", arguments.volume);
    if context.json {
        let rolled_back_to = &arguments.to;
        output::json(&Document { volume: &address.name, rolled_back_to, before: &before, undo })?;
    } else {
        output::line(&format!(
            "{} is rolled back to {}; to undo: {undo}",
            address.name, arguments.to
        ))?;
    }
    Ok(Exit::Ok)
}

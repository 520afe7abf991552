//! `sawmill explain`: what an exit code means, and what to do. The table is [`exit::TABLE`].
//! Not here: which error ends with which code (`sawmill_console::exit`).

use clap::Args;
use serde::Serialize;

use crate::command::Context;
use sawmill_console::exit::{self, Exit, Failure, Result};
use sawmill_console::output;

/// Explain an exit code: what it means, and what to do.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The exit code of a command; the shell has it in $?.
    #[arg(value_name = "CODE")]
    code: u8,
}

#[derive(Serialize)]
struct Document<'a> {
    code: u8,
    meaning: &'a str,
    what_to_do: &'a str,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let row = exit::TABLE.iter().find(|(exit, ..)| exit.code() == arguments.code);
    let Some((_, meaning, what_to_do)) = row else {
        let codes: Vec<String> =
            exit::TABLE.iter().map(|(exit, ..)| exit.code().to_string()).collect();
        return Err(Failure::usage(format!(
            "no command exits with {}; the codes are {}",
            arguments.code,
            codes.join(", ")
        )));
    };
    if context.json {
        output::json(&Document { code: arguments.code, meaning, what_to_do })?;
        return Ok(Exit::Ok);
    }
    output::line(&format!("{}: {meaning}", arguments.code))?;
    if !what_to_do.is_empty() {
        output::line(what_to_do)?;
    }
    output::line("All codes: sawmill help exit-codes")?;
    Ok(Exit::Ok)
}

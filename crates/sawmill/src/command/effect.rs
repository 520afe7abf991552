//! What a command does: a reader that goes away (`| head`) ends only what prints as if all was
//! well.
//!
//! Not here: how a command finds out (`sawmill_console::output`), the commands (`super`).

use clap::ArgMatches;

use sawmill_console::exit::{Exit, Result};

/// What a command does beyond its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// It only prints.
    Print,
    /// It changes something, or its exit code is an answer.
    Act,
}

impl Effect {
    pub(super) fn of(matches: &ArgMatches) -> Effect {
        let prints = match matches.subcommand() {
            Some(("list" | "info" | "log" | "inspect", _)) => true,
            Some(("explain" | "help" | "man" | "completions", _)) => true,
            Some(("door" | "device" | "driver" | "link", inner)) => {
                matches!(inner.subcommand_name(), Some("list" | "status" | "find" | "socket"))
            }
            _ => false,
        };
        if prints { Effect::Print } else { Effect::Act }
    }
}

/// A command that only prints is done when nobody reads on (`| head`), and has nothing to say.
pub(super) fn as_far_as_read(exit: Result<Exit>) -> Result<Exit> {
    match exit {
        Err(failure) if failure.has_no_reader() => Ok(Exit::Ok),
        exit => exit,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use sawmill_console::exit::Failure;

    use super::*;

    #[test]
    fn a_command_that_changes_something_or_decides_is_no_printer() {
        let effect = |line: &str| {
            let words = std::iter::once("sawmill").chain(line.split_whitespace());
            Effect::of(&super::super::command_line().try_get_matches_from(words).unwrap())
        };
        for line in ["list", "info disk", "log disk", "door list disk", "link status", "help"] {
            assert_eq!(effect(line), Effect::Print, "{line}");
        }
        for line in ["create disk --size 1G", "check disk", "serve disk", "door remove disk nbd"] {
            assert_eq!(effect(line), Effect::Act, "{line}");
        }
        let unread = || Failure::output(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(as_far_as_read(Err(unread())).unwrap(), Exit::Ok);
        assert!(as_far_as_read(Err(Failure::usage("x"))).is_err());
    }
}

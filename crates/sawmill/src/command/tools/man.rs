//! `sawmill man`: the manual pages, generated from the same definitions as `--help`. Not here: the
//! texts, which are defined with the commands and their options; the guide (`help`).

use std::path::PathBuf;

use clap::Args;

use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;

/// Write the manual pages to a folder.
///
/// One page for sawmill, and one for each command. To install them: sawmill man --to
/// /usr/share/man/man1
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The folder; it is created if it does not exist.
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
}

pub(in crate::command) fn run(arguments: &Arguments) -> Result<Exit> {
    let failed = |error| Failure::io(format!("cannot write to {}", arguments.to.display()), &error);
    std::fs::create_dir_all(&arguments.to).map_err(failed)?;
    clap_mangen::generate_to(crate::command::command_line(), &arguments.to).map_err(failed)?;
    output::line(&format!("wrote the manual pages to {}", arguments.to.display()))?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_manual_page() {
        let folder = tempfile::tempdir().unwrap();
        run(&Arguments { to: folder.path().join("man1") }).unwrap();
        for (name, _) in crate::command::visible_commands() {
            let page =
                std::fs::read_to_string(folder.path().join(format!("man1/sawmill-{name}.1")))
                    .unwrap();
            assert!(page.contains(".SH SYNOPSIS") && page.contains(".SH DESCRIPTION"), "{name}");
        }
        assert!(folder.path().join("man1/sawmill.1").is_file());
    }
}

//! `sawmill completions`: what a shell needs to complete commands and their options.
//! Not here: names of volumes, which a script made in advance cannot know.

use clap::Args;
use clap_complete::Shell;

use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;

/// Print the completions for a shell.
///
/// For bash: sawmill completions bash > /etc/bash_completion.d/sawmill
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The shell.
    shell: Shell,
}

pub(in crate::command) fn run(arguments: &Arguments) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(
        arguments.shell,
        &mut crate::command::command_line(),
        "sawmill",
        &mut script,
    );
    output::raw(&script)?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_completes_every_command() {
        let names: Vec<String> =
            crate::command::visible_commands().into_iter().map(|(name, _)| name).collect();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(
                shell,
                &mut crate::command::command_line(),
                "sawmill",
                &mut script,
            );
            let script = String::from_utf8(script).unwrap();
            let missing: Vec<_> =
                names.iter().filter(|name| !script.contains(name.as_str())).collect();
            assert!(missing.is_empty(), "{shell}: {missing:?}");
        }
    }
}

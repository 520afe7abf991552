//! Configuration files from a fuzzer.
//!
//! Not here: which file is read, and what an option means.

use std::path::PathBuf;

use clap::Command;

use super::{ConfigFile, parse};

pub(crate) fn arguments(text: &str, cli: &Command, name: &str) -> Result<Vec<String>, String> {
    let options = parse(text, cli, name).map_err(|failure| failure.to_string())?;
    let command = cli.find_subcommand(name).expect("a command");
    // A command line without options: what is missing there is no matter here.
    let empty = command.clone().ignore_errors(true).no_binary_name(true);
    let matches = empty.try_get_matches_from([] as [&str; 0]).expect("errors are ignored");
    let values: usize = options.iter().map(|one| one.values.len()).sum();
    let file = ConfigFile { path: PathBuf::new(), options };
    let arguments: Vec<String> = file
        .arguments(&matches, command)
        .into_iter()
        .map(|argument| argument.into_string().expect("it comes from a text"))
        .collect();
    assert!(arguments.len() <= values, "a value is one argument at most");
    for argument in &arguments {
        let long = argument.strip_prefix("--").expect("an option");
        let long = long.split_once('=').map_or(long, |(long, _)| long);
        let is_known = command.get_arguments().any(|one| one.get_long() == Some(long));
        assert!(is_known, "{argument:?} is no option of {name}");
        assert!(
            file.options.iter().any(|one| one.option == long),
            "{argument:?} is not in the file"
        );
    }
    Ok(arguments)
}

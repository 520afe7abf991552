//! The configuration file: options of commands, so that a command line or a unit need not repeat
//! them.
//!
//! TOML, with a table for each command and its long options as keys:
//!
//! ```toml
//! [serve]
//! journal-bytes = "4G"
//! nbd = ["unix:/run/sawmill/nbd.sock"]
//! ```
//!
//! Invariants: an option on the command line or in the environment overrides the file. A table or a
//! key that no command has is refused, also in tables of other commands. Not here: what an option
//! means.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use toml::{Table, Value};

use sawmill_console::exit::{Failure, Result};

pub(crate) mod fuzzing;

/// The file of the whole machine.
const SYSTEM_FILE: &str = "/etc/sawmill/config.toml";

/// An option from the file: its name, and its values as on a command line.
#[derive(Debug, PartialEq, Eq)]
struct FileOption {
    option: String,
    values: Vec<String>,
}

/// The options that the file has for one command, and the path of the file.
pub(super) struct ConfigFile {
    path: PathBuf,
    options: Vec<FileOption>,
}

/// The file to read: the named one, otherwise the user's, otherwise the machine's, if there is one.
fn path_of(named: Option<&Path>) -> Option<PathBuf> {
    if let Some(path) = named {
        return Some(path.to_owned());
    }
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home =
        absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
    let user = home.map(|home| home.join("sawmill/config.toml"));
    user.into_iter().chain([PathBuf::from(SYSTEM_FILE)]).find(|path| path.is_file())
}

impl ConfigFile {
    /// Reads what the file has for `command`, whose name is `name`; none if there is no file.
    pub(super) fn read(
        named: Option<&Path>,
        cli: &Command,
        name: &str,
    ) -> Result<Option<ConfigFile>> {
        let Some(path) = path_of(named) else { return Ok(None) };
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))?;
        let options = parse(&text, cli, name).map_err(|failure| {
            let what = format!("configuration file {}", path.display());
            Failure::caused(failure.exit(), what, failure)
        })?;
        Ok(Some(ConfigFile { path, options }))
    }

    /// The arguments that the file adds to a command line that was parsed to `matches`.
    pub(super) fn arguments(&self, matches: &ArgMatches, command: &Command) -> Vec<OsString> {
        let mut arguments = Vec::new();
        for FileOption { option, values } in &self.options {
            let Some(argument) = command.get_arguments().find(|one| one.get_long() == Some(option))
            else {
                continue;
            };
            let source = matches.value_source(argument.get_id().as_str());
            if matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
                continue;
            }
            if argument.get_action().takes_values() {
                // One word: a value that begins with a dash must not be read as an option.
                arguments.extend(values.iter().map(|value| format!("--{option}={value}").into()));
            } else if values.iter().any(|value| value == "true") {
                arguments.push(format!("--{option}").into());
            }
        }
        arguments
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// What `text` has for command `name`. Checks the whole text.
fn parse(text: &str, cli: &Command, name: &str) -> Result<Vec<FileOption>> {
    let file: Table = text.parse().map_err(|error: toml::de::Error| {
        // The error has several lines: the place, a picture, the reason.
        Failure::usage(error.to_string()).caused_by(error)
    })?;
    let mut file_options = Vec::new();
    // All tables: a mistake in that of another command shows now, and not when its unit starts.
    for (table, options) in &file {
        let Some(command) = cli.find_subcommand(table) else {
            return Err(Failure::usage(format!("[{table}] is not a command of sawmill")));
        };
        let Value::Table(options) = options else {
            return Err(Failure::usage(format!(
                "{table:?} is outside a table; write it below [serve], for example"
            )));
        };
        for (option, value) in options {
            let long_names = || command.get_arguments().filter_map(clap::Arg::get_long);
            let Some(current) = current_name(command, option) else {
                // People write the names with underscores, as in other TOML files.
                let near = long_names()
                    .find(|long| long.replace('-', "") == option.replace(['-', '_'], ""));
                let hint = near.map_or_else(String::new, |near| format!("; do you mean {near:?}?"));
                let text = format!("[{table}] has no option {option:?}{hint}");
                return Err(Failure::usage(text));
            };
            let values = values_of(value).ok_or_else(|| {
                Failure::usage(format!(
                    "[{table}] {option}: write a string, a number, true, false, or a list of those"
                ))
            })?;
            if table == name {
                file_options.push(FileOption { option: current.to_owned(), values });
            }
        }
    }
    Ok(file_options)
}

/// The name that an option has now: an older one is an alias.
fn current_name<'a>(command: &'a Command, option: &str) -> Option<&'a str> {
    let is_named = |argument: &&clap::Arg| {
        let aliases = argument.get_all_aliases().unwrap_or_default();
        argument.get_long() == Some(option) || aliases.contains(&option)
    };
    command.get_arguments().find(is_named).and_then(clap::Arg::get_long)
}

fn values_of(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Array(values) => {
            let each = values.iter().map(values_of).collect::<Option<Vec<_>>>()?;
            Some(each.concat())
        }
        Value::String(text) => Some(vec![text.clone()]),
        Value::Integer(number) => Some(vec![number.to_string()]),
        Value::Float(number) => Some(vec![number.to_string()]),
        Value::Boolean(flag) => Some(vec![flag.to_string()]),
        Value::Datetime(_) | Value::Table(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cli() -> Command {
        super::super::command_line()
    }

    fn refusal(text: &str) -> String {
        parse(text, &cli(), "serve").map(drop).unwrap_err().to_string()
    }

    #[test]
    fn unknown_tables_and_options_are_refused_with_what_may_be_meant() {
        assert!(refusal("[serv]\n").contains("[serv] is not a command"));
        assert!(refusal("[serve]\njournal_bytes = 1\n").contains("do you mean \"journal-bytes\"?"));
        assert!(
            refusal("[target]\nwhatever = 1\n").contains("[target] has no option \"whatever\"")
        );
        assert!(refusal("journal-bytes = 1\n").contains("not a command"));
        assert!(
            refusal("[serve]\njournal-bytes = 1979-05-27\n").contains("write a string, a number")
        );
        assert!(refusal("[serve\n").contains("TOML parse error"));
    }

    #[test]
    fn an_option_by_its_older_name_is_the_option() {
        let options = parse("[target]\nslots = 8\n", &cli(), "target").unwrap();
        assert_eq!(options[0].option, "places-max");
        assert_eq!(options[0].values, ["8"]);
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_defaults() {
        let text = "[serve]\njournal-bytes = \"4G\"\ncache-bytes = \"1G\"\nread-only = false\n\
                    nbd = [\"unix:/run/a.sock\", \"unix:/run/b.sock\"]\n";
        let options = parse(text, &cli(), "serve").unwrap();
        let file = ConfigFile { path: PathBuf::from("config.toml"), options };
        let matches = cli().get_matches_from(["sawmill", "serve", "disk1", "--cache-bytes", "2G"]);
        let (_, matches) = matches.subcommand().unwrap();
        let mut arguments = file.arguments(matches, cli().find_subcommand("serve").unwrap());
        arguments.sort();
        assert_eq!(
            arguments,
            ["--journal-bytes=4G", "--nbd=unix:/run/a.sock", "--nbd=unix:/run/b.sock"]
                .map(OsString::from)
        );
    }

    #[test]
    fn the_example_of_the_guide_is_one_that_is_accepted() {
        let page = include_str!("../../../../docs/guide/operate.md");
        let (_, example) = page.split_once("```toml\n").expect("an example");
        let (example, _) = example.split_once("```").expect("its end");
        assert!(!parse(example, &cli(), "serve").unwrap().is_empty());
    }
}

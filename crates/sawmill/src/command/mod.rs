//! The command line: what there is to type, and how the process ends.
//!
//! Invariants: every way out goes through [`crate::exit::TABLE`]; an error is one line on stderr that begins
//! with `sawmill: error:`, also when clap found it.

mod attach;
mod bench;
mod check;
mod clone;
mod conform;
mod copy;
mod create;
mod delete;
mod device;
mod doctor;
mod door;
mod driver;
mod export;
mod flatten;
mod gc;
mod handoff;
mod import;
mod info;
mod inspect;
mod link;
mod list;
mod log;
mod opening;
mod promote;
mod rename;
mod replicate;
mod resize;
mod rollback;
mod run;
mod serve;
mod set;
mod simulate;
mod snapshot;
mod target;
mod verify_crash;
mod wait;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

use crate::config::Places;
use crate::exit::{self, Exit, Failure, Result};
use crate::output;

/// Virtual disks on object stores, at the speed of a local SSD.
///
/// VOL is the name of a volume in the default store (SAWMILL_STORE, else a folder under the XDG data home),
/// or a URL that ends in the volume's name: s3://bucket/prefix/disk1, gs://..., az://...,
/// file:///srv/sawmill/disk1. Credentials come from the usual variables of each store (AWS_* and so on).
#[derive(Parser)]
#[command(
    name = "sawmill",
    version,
    max_term_width = 100,
    disable_help_subcommand = false,
    after_long_help = exit::table_as_help()
)]
struct Cli {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,

    /// What to log on stderr: error, warn, info, debug, trace, or a filter such as sawmill_volume=debug.
    #[arg(long, global = true, value_name = "FILTER", env = "SAWMILL_LOG", hide_env_values = true)]
    log: Option<String>,

    #[command(subcommand)]
    command: Command,
}

/// What every command is given besides its own options.
struct Context {
    json: bool,
    places: Places,
}

#[derive(Subcommand)]
enum Command {
    Create(create::Arguments),
    Serve(serve::Arguments),
    Run(run::Arguments),
    Target(target::Arguments),
    Attach(attach::Arguments),
    Link(link::Arguments),
    Driver(driver::Arguments),
    Door(door::Arguments),
    Device(device::Arguments),
    #[command(name = "handoff")]
    HandOff(handoff::Arguments),
    List(list::Arguments),
    Info(info::Arguments),
    Delete(delete::Arguments),
    Gc(gc::Arguments),
    Set(set::Arguments),
    Snapshot(snapshot::Arguments),
    Log(log::Arguments),
    Rollback(rollback::Arguments),
    Clone(clone::Arguments),
    Flatten(flatten::Arguments),
    Wait(wait::Arguments),
    Import(import::Arguments),
    Export(export::Arguments),
    Copy(copy::Arguments),
    Replicate(replicate::Arguments),
    Promote(promote::Arguments),
    Rename(rename::Arguments),
    Resize(resize::Arguments),
    Inspect(inspect::Arguments),
    Check(check::Arguments),
    Doctor(doctor::Arguments),
    Simulate(simulate::Arguments),
    VerifyCrash(verify_crash::Arguments),
    Conform(conform::Arguments),
    Bench(bench::Arguments),
    /// Hold the mount of a FUSE door while no server runs; started by servers alone.
    #[command(hide = true, name = KEEP)]
    Keep,
}

/// The command of the process that holds a mount, see [`sawmill_frontend::keeper`].
pub(crate) const KEEP: &str = "keep";

/// Parses the command line, carries it out, and says how the process shall end.
pub(crate) fn run() -> ExitCode {
    let exit = match Cli::try_parse() {
        Ok(cli) => carry_out(cli),
        Err(error) => refuse(&error),
    };
    let exit = exit.unwrap_or_else(|failure| {
        output::error(&failure);
        failure.exit()
    });
    ExitCode::from(exit.code())
}

fn carry_out(cli: Cli) -> Result<Exit> {
    // What serves tells its story on stderr; the other commands speak up only when something is wrong.
    let usual = match cli.command {
        Command::Serve(_) | Command::Run(_) | Command::Target(_) | Command::Attach(_) => "info",
        _ => "warn",
    };
    start_log(cli.log.as_deref().unwrap_or(usual))?;
    let context = Context { json: cli.json, places: Places::from_environment() };
    match cli.command {
        Command::Create(arguments) => create::run(&context, &arguments),
        Command::Serve(arguments) => serve::run(&context, &arguments),
        Command::Target(arguments) => target::run(&context, &arguments),
        Command::Attach(arguments) => attach::run(&context, &arguments),
        Command::Link(arguments) => link::run(&context, &arguments),
        Command::Run(arguments) => run::run(&context, &arguments),
        Command::Driver(arguments) => driver::run(&context, &arguments),
        Command::Device(arguments) => device::run(&context, &arguments),
        Command::Door(arguments) => door::run(&context, &arguments),
        Command::HandOff(arguments) => handoff::run(&context, &arguments),
        Command::List(arguments) => list::run(&context, &arguments),
        Command::Info(arguments) => info::run(&context, &arguments),
        Command::Delete(arguments) => delete::run(&context, &arguments),
        Command::Gc(arguments) => gc::run(&context, &arguments),
        Command::Set(arguments) => set::run(&context, &arguments),
        Command::Snapshot(arguments) => snapshot::run(&context, &arguments),
        Command::Log(arguments) => log::run(&context, &arguments),
        Command::Rollback(arguments) => rollback::run(&context, &arguments),
        Command::Clone(arguments) => clone::run(&context, &arguments),
        Command::Flatten(arguments) => flatten::run(&context, &arguments),
        Command::Wait(arguments) => wait::run(&context, &arguments),
        Command::Import(arguments) => import::run(&context, &arguments),
        Command::Export(arguments) => export::run(&context, &arguments),
        Command::Copy(arguments) => copy::run(&context, &arguments),
        Command::Replicate(arguments) => replicate::run(&context, &arguments),
        Command::Promote(arguments) => promote::run(&context, &arguments),
        Command::Rename(arguments) => rename::run(&context, &arguments),
        Command::Resize(arguments) => resize::run(&context, &arguments),
        Command::Inspect(arguments) => inspect::run(&context, &arguments),
        Command::Check(arguments) => check::run(&context, &arguments),
        Command::Doctor(arguments) => doctor::run(&context, &arguments),
        Command::Simulate(arguments) => simulate::run(&context, &arguments),
        Command::Conform(arguments) => conform::run(&context, &arguments),
        Command::Bench(arguments) => bench::run(&context, &arguments),
        Command::Keep => {
            let kept = sawmill_frontend::keeper::keep();
            kept.map(|()| Exit::Ok).map_err(|error| Failure::io("cannot keep a mount", &error))
        }
        Command::VerifyCrash(arguments) => verify_crash::run(&context, &arguments),
    }
}

fn start_log(filter: &str) -> Result<()> {
    use std::io::IsTerminal;
    let filter = tracing_subscriber::EnvFilter::builder().parse(filter).map_err(|error| {
        Failure::usage(format!(
            "'{filter}' is not a log filter ({error}); write error, warn, info, debug or trace, \
             or a filter such as sawmill_volume=debug"
        ))
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    Ok(())
}

/// What clap could not parse: help and version are answers, everything else becomes one line.
fn refuse(error: &clap::Error) -> Result<Exit> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let text = error.render();
            let shown = write!(io::stdout(), "{text}").and_then(|()| io::stdout().flush());
            shown.map_err(|error| Failure::io("cannot write to standard output", &error))?;
            Ok(Exit::Ok)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(Failure::usage("no command is given; 'sawmill --help' lists them"))
        }
        _ => Err(Failure::usage(one_line(error))),
    }
}

/// Clap's message without its usage block, and with the help to ask for.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let paragraphs: Vec<&str> = text
        .split("\n\n")
        .map(str::trim)
        .filter(|p| !p.is_empty() && !p.starts_with("Usage:") && !p.starts_with("For more information"))
        .collect();
    let joined = paragraphs.join("; ");
    let message = joined.trim_start_matches("error: ").replace("tip: ", "").trim_end().to_owned();
    format!("{message}; see '{} --help'", asked_command(&text))
}

/// The command that clap's usage line is about, `sawmill create` say.
fn asked_command(text: &str) -> String {
    let usage = text.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let words: Vec<&str> = usage
        .unwrap_or_default()
        .split_whitespace()
        .take_while(|word| {
            word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-') && !word.starts_with('-')
        })
        .collect();
    if words.is_empty() { asked_by_arguments() } else { words.join(" ") }
}

/// Errors of value parsers come without a usage line; the arguments say which command was meant.
fn asked_by_arguments() -> String {
    let known = Cli::command();
    let asked = std::env::args().skip(1).find(|word| known.find_subcommand(word).is_some());
    asked.map_or_else(|| "sawmill".to_owned(), |command| format!("sawmill {command}"))
}

#[cfg(test)]
mod tests {
    use clap::{Arg, Command as ClapCommand};

    use super::*;

    fn option_row(argument: &Arg) -> String {
        let names: Vec<String> =
            argument.get_value_names().unwrap_or_default().iter().map(|n| n.to_string()).collect();
        let takes_value = argument.get_action().takes_values();
        let mut form = match (argument.get_long(), names.first()) {
            (Some(long), Some(name)) if takes_value => format!("--{long} {name}"),
            (Some(long), _) => format!("--{long}"),
            (None, name) => name.cloned().unwrap_or_default(),
        };
        if argument.get_num_args().is_some_and(|range| range.max_values() > 1)
            && argument.get_long().is_none()
        {
            form.push_str("...");
        }
        let help =
            argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
        let mut notes = Vec::new();
        let defaults: Vec<_> = argument.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
        if !defaults.is_empty() && takes_value {
            notes.push(format!("default {}", defaults.join(" ")));
        }
        if takes_value {
            let choices = argument.get_possible_values();
            if !choices.is_empty() {
                let choices: Vec<&str> = choices.iter().map(|choice| choice.get_name()).collect();
                notes.push(format!("one of {}", choices.join(", ")));
            }
        }
        if let Some(variable) = argument.get_env() {
            notes.push(format!("variable {}", variable.to_string_lossy()));
        }
        if argument.is_required_set() && argument.get_long().is_some() {
            notes.push("required".to_owned());
        }
        let notes = notes.join("; ");
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
        format!("| `{form}` | {help} | {notes} |\n")
    }

    fn arguments_table(command: &ClapCommand) -> String {
        let told: Vec<&Arg> = command
            .get_arguments()
            .filter(|a| !matches!(a.get_id().as_str(), "help" | "version"))
            .filter(|a| !a.is_hide_set())
            .filter(|a| !a.is_global_set() || command.get_name() == "sawmill")
            .collect();
        if told.is_empty() {
            return String::new();
        }
        let rows: String = told.into_iter().map(option_row).collect();
        format!("| option | meaning | value |\n|---|---|---|\n{rows}\n")
    }

    fn describe(command: &ClapCommand, path: &str, level: usize, into: &mut String) {
        let about =
            command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
        into.push_str(&format!("{} `{path}`\n\n{about}\n\n{}", "#".repeat(level), arguments_table(command)));
        let told = |c: &&ClapCommand| c.get_name() != "help" && !c.is_hide_set();
        for inner in command.get_subcommands().filter(told) {
            describe(inner, &format!("{path} {}", inner.get_name()), level + 1, into);
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_guide_lists_exactly_the_commands_and_options() {
        let mut text = String::new();
        describe(&Cli::command(), "sawmill", 2, &mut text);
        crate::guide::compare("commands.md", &text);
    }

    #[test]
    fn every_command_and_option_says_what_it_is_for() {
        fn visit(command: &ClapCommand) {
            assert!(command.get_about().is_some(), "command {} has no text", command.get_name());
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} of {}", argument.get_id(), command.get_name());
            }
            command.get_subcommands().for_each(visit);
        }
        visit(&Cli::command());
    }

    #[test]
    fn a_refused_command_line_is_one_line_with_a_hint() {
        let lines: &[(&[&str], &str)] = &[
            (&["sawmill", "create", "disk1", "--sise", "10G"], "--sise"),
            (&["sawmill", "create", "disk1"], "--size"),
            (&["sawmill", "create", "disk1", "--size", "ten"], "'ten' is not a size"),
            (&["sawmill", "creat"], "creat"),
            (&["sawmill", "wait", "disk1"], "--stored"),
            (&["sawmill", "wait", "disk1", "--stored", "--logged"], "--logged"),
        ];
        for (line, word) in lines {
            let error = Cli::try_parse_from(*line).err().unwrap();
            let failure = refuse(&error).unwrap_err();
            let text = failure.to_string();
            assert_eq!(failure.exit(), Exit::Usage, "{text}");
            assert!(text.contains(word) && text.contains("--help'") && !text.contains('\n'), "{text}");
            assert!(!text.contains("Usage:"), "{text}");
        }
    }
}

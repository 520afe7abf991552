//! The command line: the commands, their options, and how the process ends.
//!
//! Invariants: every exit code comes from [`sawmill_console::exit::TABLE`]. An error is one line on
//! stderr that begins with `sawmill: error:`, also if clap found it.
//!
//! Not here: what a command does (its module), the configuration file (`config_file`), how output
//! and errors look (`sawmill_console`).

pub(crate) mod config_file;
#[cfg(test)]
mod defaults;
mod disks;
#[cfg(test)]
mod documented;
mod door_options;
mod doors;
mod drivers;
mod effect;
mod groups;
mod links;
mod opening;
mod past;
mod tools;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::{Paths, STORE_VARIABLE};
use config_file::ConfigFile;
use disks::{boot_set, create, delete, gc, info, list, rename, resize, serve, wait, warm};
use doors::{device, door, handoff};
use drivers::{conform, driver, run};
use effect::{Effect, as_far_as_read};
use groups::GROUPS;
use links::{attach, link, target};
use past::{
    clone, copy, export, flatten, import, log, promote, replicate, rollback, set, snapshot,
};
use sawmill_console::Console;
use sawmill_console::exit::{self, Exit, Failure, Result};
use sawmill_console::output;
use sawmill_lab::{bench, simulate, verify_crash};
use tools::{check, completions, doctor, explain, help, inspect, man};

/// Virtual disks on object stores, at the speed of a local SSD.
///
/// VOL is the name of a volume in the default store (SAWMILL_STORE, else a folder under the XDG
/// data home), or a URL that ends in the volume's name: s3://bucket/prefix/disk1, gs://...,
/// az://..., file:///srv/sawmill/disk1. Credentials come from the usual variables of each store
/// (AWS_* and so on).
#[derive(Parser)]
#[command(
    name = "sawmill",
    version = concat!(env!("CARGO_PKG_VERSION"), " (", env!("SAWMILL_COMMIT"), ")"),
    max_term_width = 100,
    disable_help_subcommand = true,
    after_long_help = exit::table_as_help()
)]
struct Cli {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,

    /// What to log on stderr: error, warn, info, debug, trace, or a filter such as
    /// sawmill_volume=debug.
    #[arg(long, global = true, value_name = "FILTER", env = "SAWMILL_LOG", hide_env_values = true)]
    log: Option<String>,

    /// The store in which plain names are volumes.
    #[arg(long, global = true, value_name = "URL", env = STORE_VARIABLE, hide_env_values = true)]
    store: Option<String>,

    /// Options from this file, for those that are not on the command line. Default:
    /// ~/.config/sawmill/config.toml, else /etc/sawmill/config.toml.
    #[arg(long, global = true, value_name = "FILE", env = "SAWMILL_CONFIG")]
    config: Option<PathBuf>,

    /// Print the command line that results from options and configuration file, and stop.
    #[arg(long, global = true)]
    print_config: bool,

    #[command(subcommand)]
    command: Command,
}

/// The command line, with the commands grouped in its help.
pub(crate) fn command_line() -> clap::Command {
    let plain = Cli::command();
    let mut text = String::from("{about}\n\n{usage-heading} {usage}\n");
    for (group, names) in GROUPS {
        text.push_str(&format!("\n{group}:\n"));
        for command in names.iter().filter_map(|name| plain.find_subcommand(name)) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            text.push_str(&format!("  {:<13} {about}\n", command.get_name()));
        }
    }
    text.push_str("\nOptions:\n{options}{after-help}");
    plain.help_template(text)
}

/// Name and purpose of each visible command.
#[cfg(test)]
fn visible_commands() -> Vec<(String, String)> {
    let is_visible = |command: &&clap::Command| !command.is_hide_set();
    let about =
        |command: &clap::Command| command.get_about().map(ToString::to_string).unwrap_or_default();
    let commands = Cli::command();
    let commands = commands.get_subcommands().filter(is_visible);
    commands.map(|command| (command.get_name().to_owned(), about(command))).collect()
}

/// What every command gets besides its own options.
struct Context {
    json: bool,
    paths: Paths,
}

impl Context {
    fn console(&self) -> Console {
        Console { json: self.json }
    }
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
    Warm(warm::Arguments),
    BootSet(boot_set::Arguments),
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
    Explain(explain::Arguments),
    Help(help::Arguments),
    Man(man::Arguments),
    Completions(completions::Arguments),
    /// Hold the mount of a FUSE door while no server runs. Only servers start this.
    #[command(hide = true, name = KEEP)]
    Keep,
}

/// The command of the process that holds a mount, see [`sawmill_frontend::mount_holder`].
pub(crate) const KEEP: &str = "keep";

/// Parses the command line, runs the command, and returns the exit code.
pub(crate) fn run() -> ExitCode {
    let exit = match parse(std::env::args_os().collect()) {
        Ok(ParsedLine::Cli(cli, Effect::Act)) => carry_out(*cli),
        Ok(ParsedLine::Cli(cli, Effect::Print)) => as_far_as_read(carry_out(*cli)),
        Ok(ParsedLine::Shown) => Ok(Exit::Ok),
        Err(Refusal::Clap(error)) => as_far_as_read(refuse(&error)),
        Err(Refusal::Other(failure)) => as_far_as_read(Err(failure)),
    };
    let exit = exit.unwrap_or_else(|failure| {
        output::error(&failure);
        failure.exit()
    });
    ExitCode::from(exit.code())
}

/// A parsed command line.
enum ParsedLine {
    Cli(Box<Cli>, Effect),
    /// `--print-config` has printed it; nothing is left to do.
    Shown,
}

enum Refusal {
    Clap(clap::Error),
    Other(Failure),
}

/// Parses the command line, then parses it again with what the configuration file adds.
fn parse(mut line: Vec<OsString>) -> std::result::Result<ParsedLine, Refusal> {
    let parse_cli = |line: &[OsString]| {
        let matches = command_line().try_get_matches_from(line)?;
        Cli::from_arg_matches(&matches).map(|cli| (cli, matches))
    };
    let (mut cli, matches) = parse_cli(&line).map_err(Refusal::Clap)?;
    let file = match matches.subcommand() {
        // Commands that need no server work without a file, or with a wrong one.
        Some(("help" | "man" | "completions" | "explain" | KEEP, _)) | None => None,
        Some((name, inner)) => {
            let file = ConfigFile::read(cli.config.as_deref(), &command_line(), name);
            file.map_err(Refusal::Other)?.map(|file| {
                let command = command_line();
                let added =
                    command.find_subcommand(name).map(|command| file.arguments(inner, command));
                (file.path().to_owned(), added.unwrap_or_default())
            })
        }
    };
    if let Some((_, added)) = &file {
        // Before the command's own arguments, because what follows `--` belongs to a driver. The
        // whole line is parsed again, so that options of the file can conflict with typed ones.
        let behind = place_of_command(&line) + 1;
        line.splice(behind..behind, added.iter().cloned());
        (cli, _) = parse_cli(&line).map_err(Refusal::Clap)?;
    }
    if cli.print_config {
        let path = file
            .map_or_else(|| "no configuration file".into(), |(path, _)| path.display().to_string());
        let words = line.iter().map(|word| word.to_string_lossy());
        let words: Vec<_> = words.filter(|word| word != "--print-config").collect();
        output::line(&format!("# {path}\n{}", words.join(" "))).map_err(Refusal::Other)?;
        return Ok(ParsedLine::Shown);
    }
    Ok(ParsedLine::Cli(Box::new(cli), Effect::of(&matches)))
}

/// The index of the command's name in a command line that was parsed.
fn place_of_command(line: &[OsString]) -> usize {
    let mut at = 1;
    while let Some(word) =
        line.get(at).and_then(|word| word.to_str()).filter(|word| word.starts_with('-'))
    {
        // These three take their value from the next word.
        at += if ["--log", "--store", "--config"].contains(&word) { 2 } else { 1 };
    }
    at
}

fn carry_out(cli: Cli) -> Result<Exit> {
    // Servers log their progress on stderr; other commands log only what is wrong.
    let usual = match cli.command {
        Command::Serve(_) | Command::Run(_) | Command::Target(_) | Command::Attach(_) => "info",
        _ => "warn",
    };
    start_log(cli.log.as_deref().unwrap_or(usual))?;
    let context =
        Context { json: cli.json, paths: Paths::from_environment().with_store(cli.store) };
    warn_of_another_home(&context.paths);
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
        Command::Warm(arguments) => warm::run(&context, &arguments),
        Command::BootSet(arguments) => boot_set::run(&context, &arguments),
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
        Command::Simulate(arguments) => simulate::run(&context.console(), &arguments),
        Command::Conform(arguments) => conform::run(&context, &arguments),
        Command::Bench(arguments) => bench::run(&context.console(), &arguments),
        Command::Explain(arguments) => explain::run(&context, &arguments),
        Command::Help(arguments) => help::run(&arguments),
        Command::Man(arguments) => man::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments),
        Command::Keep => {
            let outcome = sawmill_frontend::mount_holder::keep();
            outcome.map(|()| Exit::Ok).map_err(|error| Failure::io("cannot keep a mount", &error))
        }
        Command::VerifyCrash(arguments) => verify_crash::run(&context.console(), &arguments),
    }
}

/// Warns that, under sudo, the default store is not that of the user who typed the command.
fn warn_of_another_home(paths: &Paths) {
    if paths.store.is_none()
        && let (Some(user), Ok(store)) = (std::env::var_os("SUDO_USER"), paths.default_store())
    {
        tracing::warn!(
            "plain names mean volumes in {store}, not in the home of {}: give --store or \
            SAWMILL_STORE",
            user.to_string_lossy()
        );
    }
}

fn start_log(filter: &str) -> Result<()> {
    use std::io::IsTerminal;
    let filter = tracing_subscriber::EnvFilter::builder().parse(filter).map_err(|error| {
        Failure::usage(format!(
            "'{filter}' is not a log filter ({error}); write error, warn, info, debug or trace, \
             or a filter such as sawmill_volume=debug"
        ))
        .caused_by(error)
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // It would say on stderr that stderr cannot be written, and panic.
        .log_internal_errors(false)
        .init();
    Ok(())
}

/// Handles what clap does not run: help and version are printed, everything else is one line.
fn refuse(error: &clap::Error) -> Result<Exit> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            output::raw(error.render().to_string().as_bytes())?;
            Ok(Exit::Ok)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(Failure::usage("no command is given; 'sawmill --help' lists them"))
        }
        _ => Err(Failure::usage(one_line(error))),
    }
}

/// Clap's message without its usage block, with the help command to run.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let paragraphs: Vec<&str> = text
        .split("\n\n")
        .map(str::trim)
        .filter(|p| {
            !p.is_empty() && !p.starts_with("Usage:") && !p.starts_with("For more information")
        })
        .collect();
    let summary = paragraphs.join("; ");
    let message = summary.trim_start_matches("error: ").replace("tip: ", "").trim_end().to_owned();
    format!("{message}; see '{} --help'", usage_command(&text))
}

/// The command in clap's usage line, for example `sawmill create`.
fn usage_command(text: &str) -> String {
    let usage = text.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let words: Vec<&str> = usage
        .unwrap_or_default()
        .split_whitespace()
        .take_while(|word| {
            word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-') && !word.starts_with('-')
        })
        .collect();
    if words.is_empty() { command_of_arguments() } else { words.join(" ") }
}

/// Errors of value parsers have no usage line; the arguments show the command.
fn command_of_arguments() -> String {
    let command_line = Cli::command();
    // The first word that is a command; a value of a global option rarely is one.
    let command_name =
        std::env::args().skip(1).find(|word| command_line.find_subcommand(word).is_some());
    command_name.map_or_else(|| "sawmill".to_owned(), |command| format!("sawmill {command}"))
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
        let help = argument
            .get_long_help()
            .or(argument.get_help())
            .map(ToString::to_string)
            .unwrap_or_default();
        let mut notes = Vec::new();
        let defaults: Vec<_> =
            argument.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
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
        let arguments: Vec<&Arg> = command
            .get_arguments()
            .filter(|a| !matches!(a.get_id().as_str(), "help" | "version"))
            .filter(|a| !a.is_hide_set())
            .filter(|a| !a.is_global_set() || command.get_name() == "sawmill")
            .collect();
        if arguments.is_empty() {
            return String::new();
        }
        let rows: String = arguments.into_iter().map(option_row).collect();
        format!("| option | meaning | value |\n|---|---|---|\n{rows}\n")
    }

    fn describe(command: &ClapCommand, path: &str, level: usize, into: &mut String) {
        let about = command
            .get_long_about()
            .or(command.get_about())
            .map(ToString::to_string)
            .unwrap_or_default();
        into.push_str(&format!(
            "{} `{path}`\n\n{about}\n\n{}",
            "#".repeat(level),
            arguments_table(command)
        ));
        let is_documented = |c: &&ClapCommand| c.get_name() != "help" && !c.is_hide_set();
        for inner in command.get_subcommands().filter(is_documented) {
            describe(inner, &format!("{path} {}", inner.get_name()), level + 1, into);
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_and_readme_group_the_same_commands() {
        let help = command_line().render_long_help().to_string();
        let readme = include_str!("../../../../README.md");
        let (_, tables) = readme.split_once("## Commands").expect("README's commands");
        let mut grouped: Vec<&str> = Vec::new();
        for (group, names) in GROUPS {
            assert!(help.contains(&format!("\n{group}:\n")), "--help lacks {group}");
            let (_, table) =
                tables.split_once(&format!("### {group}\n")).unwrap_or_else(|| panic!("{group}"));
            let (table, _) = table.split_once("\n#").unwrap_or((table, ""));
            for name in names {
                let is_listed = [format!("`sawmill {name}"), format!("`{name} ")]
                    .iter()
                    .any(|form| table.contains(form));
                assert!(is_listed, "README's table {group:?} lacks {name}");
                assert!(help.contains(&format!("\n  {name} ")), "--help lacks {name}");
            }
            grouped.extend(names);
        }
        let mut commands: Vec<String> =
            visible_commands().into_iter().map(|(name, _)| name).collect();
        commands.sort();
        grouped.sort_unstable();
        assert_eq!(grouped, commands);
    }

    #[test]
    fn the_guide_lists_exactly_the_exit_codes() {
        let mut table = String::from("| code | meaning | what to do |\n|---|---|---|\n");
        for (exit, meaning, advice) in exit::TABLE {
            table.push_str(&format!("| {} | {meaning} | {advice} |\n", exit.code()));
        }
        crate::guide::compare("exit-codes.md", &table);
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
                assert!(
                    argument.get_help().is_some(),
                    "{} of {}",
                    argument.get_id(),
                    command.get_name()
                );
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
            assert!(
                text.contains(word) && text.contains("--help'") && !text.contains('\n'),
                "{text}"
            );
            assert!(!text.contains("Usage:"), "{text}");
        }
    }
}

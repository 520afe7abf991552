//! `sawmill help`: the help of a command, or a page of the guide.
//!
//! The pages are those of `docs/guide`. They are built in, so they match this version and need no
//! network.
//!
//! Invariant: the help of a command wins over a topic of the same name, which `help topic NAME`
//! shows. Not here: the texts about options, which are in each command's own file.

use clap::Args;

use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;

/// Show the help of a command, or a page of the guide.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// A command (and its subcommand), or a topic; "topics" lists the topics.
    #[arg(value_name = "COMMAND|TOPIC")]
    asked: Vec<String>,
}

macro_rules! pages {
    ($($name:literal),+ $(,)?) => {
        /// The pages of the guide, by name.
        const PAGES: &[(&str, &str)] = &[
            $(($name, include_str!(concat!("../../../../../docs/guide/", $name, ".md")))),+
        ];
    };
}

pages!(
    "bdus",
    "buse-module",
    "commands",
    "cuts",
    "doors",
    "driver-c",
    "driver-go",
    "driver-python",
    "driver-rust",
    "driver-tools",
    "drivers",
    "exit-codes",
    "fuse",
    "kernel-nbd",
    "link",
    "metrics",
    "move",
    "operate",
    "replay",
    "replicate",
    "simulate",
    "ublk",
    "verify-crash",
    "vhost-user",
    "warm",
);

/// Topics that are a section of a page: name, page, heading.
const SECTIONS: &[(&str, &str, &str)] = &[
    ("boot", "operate", "At boot"),
    ("cache", "operate", "Sizes"),
    ("files", "operate", "Where things are"),
    ("flush", "operate", "Start"),
    ("handoff", "doors", "Replacing the server: `sawmill handoff`"),
    ("journal", "operate", "Sizes"),
    ("trouble", "operate", "When something is wrong"),
];

pub(in crate::command) fn run(arguments: &Arguments) -> Result<Exit> {
    let words: Vec<&str> = arguments.asked.iter().map(String::as_str).collect();
    match words[..] {
        [] => output::line(&crate::command::command_line().render_long_help().to_string())?,
        ["topic", topic] => match text_of(topic) {
            Some(text) => output::line(text.trim_end())?,
            None => return Err(unknown(topic)),
        },
        ["topics"] => output::line(&topics_as_text())?,
        // The help of a command leads to its page, so the command comes first.
        [topic] if text_of(topic).is_some() && !is_command(topic) => {
            output::line(text_of(topic).unwrap_or_default().trim_end())?;
        }
        _ => output::line(&help_of(&words)?)?,
    }
    Ok(Exit::Ok)
}

fn is_command(name: &str) -> bool {
    crate::command::command_line().find_subcommand(name).is_some()
}

/// The text of a topic.
fn text_of(topic: &str) -> Option<String> {
    let page = |name: &str| PAGES.iter().find(|(page, _)| *page == name).map(|(_, text)| *text);
    match SECTIONS.iter().find(|(name, ..)| *name == topic) {
        Some((_, name, heading)) => section(page(name)?, heading),
        None => page(topic).map(ToOwned::to_owned),
    }
}

/// A section of a page, with its heading.
fn section(page: &str, heading: &str) -> Option<String> {
    let mut lines = page.lines().skip_while(|line| line.trim_start_matches('#').trim() != heading);
    let first = lines.next()?;
    let level = first.chars().take_while(|c| *c == '#').count();
    let ends = |line: &str| {
        let deep = line.chars().take_while(|c| *c == '#').count();
        (1..=level).contains(&deep) && line[deep..].starts_with(' ')
    };
    let rest = lines.take_while(|line| !ends(line));
    Some(std::iter::once(first).chain(rest).collect::<Vec<_>>().join("\n"))
}

fn topics_as_text() -> String {
    let title =
        |text: &str| text.lines().next().unwrap_or_default().trim_start_matches("# ").to_owned();
    let pages = PAGES.iter().map(|(name, text)| (*name, title(text)));
    let sections =
        SECTIONS.iter().map(|(name, page, heading)| (*name, format!("{heading} ({page})")));
    let mut topics: Vec<_> = pages.chain(sections).collect();
    topics.sort_unstable();
    let lines: Vec<String> =
        topics.iter().map(|(name, title)| format!("  {name:<15} {title}")).collect();
    format!(
        "Topics, for 'sawmill help TOPIC' ('sawmill help topic NAME' if a command has that \
        name):\n\n{}",
        lines.join("\n")
    )
}

/// The help of a command or of a subcommand.
fn help_of(words: &[&str]) -> Result<String> {
    let mut command = crate::command::command_line();
    // Before the look-up: only a built command has global options and full names below it.
    command.build();
    for word in words {
        let Some(inner) = command.find_subcommand(word) else {
            return Err(unknown(&words.join(" ")));
        };
        command = inner.clone();
    }
    Ok(command.render_long_help().to_string())
}

fn unknown(text: &str) -> Failure {
    let topics = PAGES.iter().map(|(name, _)| *name).chain(SECTIONS.iter().map(|(name, ..)| *name));
    let near: Vec<&str> =
        topics.filter(|topic| topic.contains(text) || text.contains(topic)).collect();
    let hint =
        if near.is_empty() { String::new() } else { format!(" (near: {})", near.join(", ")) };
    Failure::usage(format!(
        "'{text}' is neither a command nor a topic{hint}; see 'sawmill help topics' and 'sawmill \
        --help'"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_of_the_guide_is_a_topic() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide");
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(name) = name.strip_suffix(".md").filter(|name| *name != "README") else {
                continue;
            };
            assert!(PAGES.iter().any(|(page, _)| *page == name), "{name} is no topic");
        }
    }

    #[test]
    fn every_topic_that_is_a_section_has_its_section() {
        for (name, page, heading) in SECTIONS {
            let text = text_of(name).unwrap_or_else(|| panic!("{page} has no section {heading:?}"));
            assert!(text.lines().count() > 3, "{name}: {text}");
        }
    }

    #[test]
    fn help_of_a_command_wins_and_an_unknown_word_names_what_is_near() {
        assert!(help_of(&["snapshot", "create"]).unwrap().contains("Usage:"));
        assert!(
            is_command("link") && text_of("link").is_some(),
            "the command's help names the page"
        );
        let failure = help_of(&["jour"]).unwrap_err();
        assert!(failure.to_string().contains("near: journal"), "{failure}");
    }
}

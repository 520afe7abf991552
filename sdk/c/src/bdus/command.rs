//! The program `bdus`: destroys and flushes devices, prints logs and versions. Its messages and
//! exit statuses are those of BDUS.
//!
//! Invariants: a wrong command line changes nothing and ends with 2. The kernel writes back what it
//! caches of a block device before its host flushes or ends it in order. A device that no longer
//! exists counts as destroyed.
//!
//! Not here: how a device is found (`device_file`).

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use sawmill_driver::client::query;

use super::device_file::{self, DeviceFacts};
use super::fault::Fault;

const USAGE: &str = "\
Usage: bdus destroy [-q|--quiet] [--no-flush] <path_or_id>   end a device; it is flushed before
       bdus flush <path_or_id>                               make everything durable
       bdus logs <path_or_id>                                print the requests of a driver with
                                                             attribute log
       bdus version [--cmdbdus|--libbdus|--kbdus]            print versions
       bdus --help
Exits with 0, with 1 when it failed, with 2 when it was called in a wrong way.
";

/// Flushes the device of this number.
pub(super) fn flush(number: u64) -> Result<(), Fault> {
    let facts = device_file::find(number)?;
    write_back(&facts)?;
    query(&facts.socket(), "flush")?;
    Ok(())
}

/// Makes the kernel write its cached data of a block device: a host flushes only what has reached
/// it.
fn write_back(facts: &DeviceFacts) -> Result<(), Fault> {
    let path = Path::new(facts.get("path"));
    if path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device()) {
        File::open(path)?.sync_all()?;
    }
    Ok(())
}

/// How a device ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DeviceEnd {
    /// After a flush, unless it has no driver that could flush.
    Flushed,
    Now,
}

/// Ends the device of this number.
pub(super) fn destroy(number: u64, device_end: DeviceEnd) -> Result<(), Fault> {
    let facts = device_file::find(number)?;
    // A device that ends during the request is gone, whatever it answered.
    end(&facts, device_end).or_else(|fault| device_file::find(number).and(Err(fault)))
}

fn end(facts: &DeviceFacts, device_end: DeviceEnd) -> Result<(), Fault> {
    let status = query(&facts.socket(), "status")?;
    let has_driver = status.get("state") == Some("running");
    let in_order = device_end == DeviceEnd::Flushed && has_driver;
    if in_order {
        write_back(facts)?;
    }
    query(&facts.socket(), if in_order { "end" } else { "fail" })?;
    Ok(())
}

/// What the user requests.
enum Subcommand {
    Help,
    Destroy { which: String, device_end: DeviceEnd, is_quiet: bool },
    Flush(String),
    Logs(String),
    Version(Option<&'static str>),
}

/// Runs `bdus` with these arguments, without its name. Returns the exit status.
#[must_use]
pub fn command(arguments: &[String]) -> u8 {
    let Some(subcommand) = parse(arguments) else {
        complain(USAGE);
        return 2;
    };
    match carry_out(&subcommand) {
        Ok(()) => 0,
        Err(fault) => {
            complain(&format!("bdus: error: {}\n", fault.message));
            1
        }
    }
}

fn parse(arguments: &[String]) -> Option<Subcommand> {
    let (first, rest) = arguments.split_first()?;
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    let only = |rest: &[&str]| match rest {
        [which] if !which.starts_with('-') => Some((*which).to_owned()),
        _ => None,
    };
    match first.as_str() {
        "-h" | "--help" => Some(Subcommand::Help),
        "flush" => only(&rest).map(Subcommand::Flush),
        "logs" => only(&rest).map(Subcommand::Logs),
        "version" => match rest[..] {
            [] => Some(Subcommand::Version(None)),
            ["--cmdbdus"] => Some(Subcommand::Version(Some("cmdbdus"))),
            ["--libbdus"] => Some(Subcommand::Version(Some("libbdus"))),
            ["--kbdus"] => Some(Subcommand::Version(Some("kbdus"))),
            _ => None,
        },
        "destroy" => {
            let is_quiet = rest.iter().any(|argument| matches!(*argument, "-q" | "--quiet"));
            let device_end = match rest.contains(&"--no-flush") {
                true => DeviceEnd::Now,
                false => DeviceEnd::Flushed,
            };
            let is_no_option =
                |argument: &&&str| !matches!(**argument, "-q" | "--quiet" | "--no-flush");
            let others: Vec<&str> = rest.iter().filter(is_no_option).copied().collect();
            only(&others).map(|which| Subcommand::Destroy { which, device_end, is_quiet })
        }
        _ => None,
    }
}

fn carry_out(subcommand: &Subcommand) -> Result<(), Fault> {
    match subcommand {
        Subcommand::Help => print(USAGE),
        Subcommand::Flush(which) => flush(number(which)?),
        Subcommand::Logs(which) => print(&log_text(&device_file::log_path(number(which)?)?)?),
        Subcommand::Version(part) => {
            let parts = ["cmdbdus", "libbdus", "kbdus"];
            match part {
                Some(_) => print("0.1.2\n"),
                None => print(&parts.map(|part| format!("{part} 0.1.2\n")).concat()),
            }
        }
        Subcommand::Destroy { which, device_end, is_quiet } => {
            match number(which).and_then(|number| destroy(number, *device_end)) {
                // A device that no longer exists is already in the desired state.
                Err(fault) if fault.errno == libc::ENODEV => Ok(()),
                Err(fault) if *is_quiet && fault.errno == libc::EINVAL => Ok(()),
                other => other,
            }
        }
    }
}

/// What a driver has logged.
fn log_text(path: &Path) -> Result<String, Fault> {
    std::fs::read_to_string(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Fault::new(
            libc::ENOENT,
            "this device's driver logs nothing: its attribute log is false",
        ),
        _ => Fault::from(error).about(path),
    })
}

fn number(which: &str) -> Result<u64, Fault> {
    match which.parse() {
        Ok(number) => Ok(number),
        Err(_) => device_file::find_by_path(which),
    }
}

fn print(text: &str) -> Result<(), Fault> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())?;
    Ok(())
}

fn complain(text: &str) {
    // If the output is closed, the exit status still reports the result.
    let _ = io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_cannot_be_read_is_not_called_missing() {
        let folder = std::env::temp_dir();
        let fault = log_text(&folder).unwrap_err();
        assert_eq!(fault.errno, libc::EISDIR);
        assert!(fault.message.contains(folder.to_str().unwrap()), "{}", fault.message);
        let fault = log_text(&folder.join("sawmill-no-such.log")).unwrap_err();
        assert!(fault.message.contains("logs nothing"), "{}", fault.message);
    }

    #[test]
    fn a_wrong_command_line_ends_with_2_and_help_with_0() {
        let exit =
            |line: &str| command(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        for line in [
            "",
            "destory 1",
            "destroy",
            "destroy 1 2",
            "flush",
            "flush --all",
            "version --all",
            "logs",
        ] {
            assert_eq!(exit(line), 2, "{line}");
        }
        assert_eq!((exit("--help"), exit("version"), exit("version --libbdus")), (0, 0, 0));
    }
}

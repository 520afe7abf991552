//! The doors that a user requests, as options of a command and as one line of text.
//!
//! The line travels to a running server (`sawmill door add`) and to the process that takes over its
//! doors. Invariant: parsing what a plan writes gives the same plan. Not here: opening.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use clap::Args;
use sawmill_frontend::nbd::{Budget, Listen};
use serde::{Deserialize, Serialize};

use sawmill_console::exit::{Failure, Result};
use sawmill_console::units::parse_size;

/// One door.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum DoorPlan {
    /// `nbd=unix:/path`, `nbd=tcp:127.0.0.1:10809`; `nbd-insecure=...` also where other machines
    /// can connect.
    Nbd { listen: Listen, insecure: bool },
    /// `ublk`, `ublk=3`: a device node, with this number or any; `ublk-unprivileged...`: one that
    /// ends with its server.
    Ublk { id: Option<u32>, unprivileged: bool },
    /// `vhost-user=/path`: a socket for QEMU and similar programs.
    VhostUser { path: PathBuf },
    /// `fuse=/mountpoint`: a file; `loop=/mountpoint`: a file and a loop device on it.
    Fuse { mountpoint: PathBuf, with_loop: bool },
}

impl DoorPlan {
    /// Parses a line.
    pub(crate) fn parse(text: &str) -> Result<DoorPlan> {
        let (kind, value) = text.split_once('=').unwrap_or((text, ""));
        let path = || match value {
            "" => Err(Failure::usage(format!("the door '{text}' needs a path"))),
            path => Ok(PathBuf::from(path)),
        };
        match kind {
            "nbd" | "nbd-insecure" => {
                let listen = parse_listen(value).map_err(Failure::usage)?;
                Ok(DoorPlan::Nbd { listen, insecure: kind == "nbd-insecure" })
            }
            "ublk" | "ublk-unprivileged" => {
                let number = |_| Failure::usage(format!("'{value}' is not a ublk device number"));
                let id = if value.is_empty() { None } else { Some(value.parse().map_err(number)?) };
                Ok(DoorPlan::Ublk { id, unprivileged: kind == "ublk-unprivileged" })
            }
            "vhost-user" => Ok(DoorPlan::VhostUser { path: path()? }),
            "fuse" => Ok(DoorPlan::Fuse { mountpoint: path()?, with_loop: false }),
            "loop" => Ok(DoorPlan::Fuse { mountpoint: path()?, with_loop: true }),
            _ => Err(Failure::usage(format!(
                "unknown door '{text}'; write nbd=ADDRESS, ublk, ublk=ID, vhost-user=PATH, \
                 fuse=FOLDER or loop=FOLDER"
            ))),
        }
    }

    /// The same door for one volume of several: sockets and mount points are in a folder, under the
    /// volume's name.
    pub(crate) fn of_volume(&self, name: &str) -> DoorPlan {
        match self {
            DoorPlan::VhostUser { path } => {
                DoorPlan::VhostUser { path: path.join(format!("{name}.sock")) }
            }
            DoorPlan::Fuse { mountpoint, with_loop } => {
                DoorPlan::Fuse { mountpoint: mountpoint.join(name), with_loop: *with_loop }
            }
            DoorPlan::Nbd { .. } | DoorPlan::Ublk { .. } => self.clone(),
        }
    }

    /// Whether one door of this kind serves many volumes.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, DoorPlan::Nbd { .. })
    }

    /// The same door with paths that are valid in another process.
    pub(crate) fn absolute(self) -> DoorPlan {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        match self {
            DoorPlan::Nbd { listen: Listen::Unix(path), insecure } => {
                DoorPlan::Nbd { listen: Listen::Unix(absolute(path)), insecure }
            }
            DoorPlan::VhostUser { path } => DoorPlan::VhostUser { path: absolute(path) },
            DoorPlan::Fuse { mountpoint, with_loop } => {
                DoorPlan::Fuse { mountpoint: absolute(mountpoint), with_loop }
            }
            other => other,
        }
    }
}

impl TryFrom<String> for DoorPlan {
    type Error = Failure;

    fn try_from(text: String) -> Result<Self> {
        DoorPlan::parse(&text)
    }
}

impl From<DoorPlan> for String {
    fn from(plan: DoorPlan) -> String {
        plan.to_string()
    }
}

impl fmt::Display for DoorPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DoorPlan::Nbd { listen, insecure } => {
                let kind = if *insecure { "nbd-insecure" } else { "nbd" };
                let family = if matches!(listen, Listen::Unix(_)) { "unix" } else { "tcp" };
                write!(f, "{kind}={family}:{listen}")
            }
            DoorPlan::Ublk { id, unprivileged } => {
                f.write_str(if *unprivileged { "ublk-unprivileged" } else { "ublk" })?;
                id.map_or(Ok(()), |id| write!(f, "={id}"))
            }
            DoorPlan::VhostUser { path } => write!(f, "vhost-user={}", path.display()),
            DoorPlan::Fuse { mountpoint, with_loop } => {
                write!(f, "{}={}", if *with_loop { "loop" } else { "fuse" }, mountpoint.display())
            }
        }
    }
}

/// The doors that a command opens. Any combination may serve one volume.
#[derive(Args)]
#[command(next_help_heading = "Doors")]
pub(crate) struct DoorOptions {
    /// An NBD server at unix:/path or tcp:127.0.0.1:10809 (port 0 takes a free one).
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    nbd: Option<Listen>,

    /// Allow --nbd on an address that other machines can reach. There is no encryption and no
    /// password.
    #[arg(long)]
    insecure_listen: bool,

    /// A device node /dev/ublkbID (Linux 6.5 and later, module ublk_drv); --ublk=ID selects the
    /// number.
    #[arg(
        long, value_name = "ID", num_args = 0..=1, require_equals = true,
        default_missing_value = "any",
        value_parser = parse_ublk
    )]
    ublk: Option<UblkId>,

    /// With --ublk: a device that an unprivileged user may serve. It ends with its server, and its
    /// users then get errors: no restart, no hand-off.
    #[arg(long, requires = "ublk")]
    ublk_unprivileged: bool,

    /// A vhost-user-blk socket for QEMU and Cloud Hypervisor; with several volumes, a folder of
    /// sockets.
    #[arg(long, value_name = "PATH")]
    vhost_user: Option<PathBuf>,

    /// A file in this folder, through FUSE; with several volumes, one subfolder for each.
    #[arg(long, value_name = "FOLDER")]
    fuse: Option<PathBuf>,

    /// With --fuse: also a loop device on that file, /dev/loopN.
    #[arg(long = "loop", requires = "fuse")]
    with_loop: bool,
}

/// Memory of all NBD doors of a process.
#[derive(Args)]
#[command(next_help_heading = "Doors")]
pub(crate) struct NbdMemory {
    /// Memory for the requests and replies of all NBD connections of this process, at least 160M.
    /// When it is full, clients wait; a client that does not read its replies is disconnected when
    /// others wait.
    #[arg(long, value_name = "SIZE", value_parser = parse_budget, default_value = "1G")]
    nbd_memory_max: Budget,
}

fn parse_budget(text: &str) -> Result<Budget, String> {
    Budget::new(parse_size(text)?).map_err(|error| error.to_string())
}

impl NbdMemory {
    /// The memory that all doors of the process share.
    pub(crate) fn budget(&self) -> Budget {
        self.nbd_memory_max.clone()
    }
}

/// The number in `--ublk`.
#[derive(Clone, Copy, Debug)]
struct UblkId(Option<u32>);

fn parse_ublk(text: &str) -> Result<UblkId, String> {
    match text {
        "any" => Ok(UblkId(None)),
        number => match number.parse() {
            Ok(id) => Ok(UblkId(Some(id))),
            Err(_) => {
                Err(format!("'{text}' is not a ublk device number; write --ublk or --ublk=3"))
            }
        },
    }
}

impl DoorOptions {
    /// The requested doors, in the order of the options.
    pub(crate) fn plans(&self) -> Vec<DoorPlan> {
        let nbd =
            self.nbd.clone().map(|listen| DoorPlan::Nbd { listen, insecure: self.insecure_listen });
        let unprivileged = self.ublk_unprivileged;
        let ublk = self.ublk.map(|UblkId(id)| DoorPlan::Ublk { id, unprivileged });
        let vhost = self.vhost_user.clone().map(|path| DoorPlan::VhostUser { path });
        let with_loop = self.with_loop;
        let fuse = self.fuse.clone().map(|mountpoint| DoorPlan::Fuse { mountpoint, with_loop });
        [nbd, ublk, vhost, fuse].into_iter().flatten().map(DoorPlan::absolute).collect()
    }

    /// The same for a `serve` of this many volumes. Without any door: an NBD socket at `usual`.
    pub(crate) fn plans_of_serve(&self, volumes: usize, usual: &Path) -> Result<Vec<DoorPlan>> {
        let mut plans = self.plans();
        if plans.is_empty() {
            plans.push(DoorPlan::Nbd {
                listen: Listen::Unix(usual.to_path_buf()),
                insecure: self.insecure_listen,
            });
        }
        if volumes > 1
            && plans.iter().any(|plan| matches!(plan, DoorPlan::Ublk { id: Some(_), .. }))
        {
            return Err(Failure::usage(format!(
                "--ublk=ID names one device, but there are {volumes} volumes; write --ublk"
            )));
        }
        Ok(plans)
    }
}

fn parse_listen(text: &str) -> Result<Listen, String> {
    match text.split_once(':') {
        Some(("unix", path)) if !path.is_empty() => Ok(Listen::Unix(PathBuf::from(path))),
        Some(("tcp", address)) => resolve(address).map(Listen::Tcp),
        _ => Err(format!(
            "'{text}' is not an address; write unix:/path/of/socket or tcp:127.0.0.1:10809"
        )),
    }
}

/// The socket address behind `host:port`.
pub(crate) fn resolve(text: &str) -> Result<SocketAddr, String> {
    let wrong = |why: String| {
        format!("'{text}' is not an address ({why}); write host:port, as in 127.0.0.1:10809")
    };
    let mut found = text.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("the host has no IP address".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_door_are_read_or_refused_with_an_example() {
        assert_eq!(parse_listen("unix:/run/x.sock"), Ok(Listen::Unix("/run/x.sock".into())));
        assert_eq!(
            parse_listen("tcp:127.0.0.1:0"),
            Ok(Listen::Tcp("127.0.0.1:0".parse().unwrap()))
        );
        assert_eq!(
            parse_listen("tcp:[::1]:10809"),
            Ok(Listen::Tcp("[::1]:10809".parse().unwrap()))
        );
        for text in [
            "",
            "unix:",
            "tcp:",
            "tcp:127.0.0.1",
            "127.0.0.1:10809",
            "/run/x.sock",
            "tcp:1.2.3.4:99999",
        ] {
            let error = parse_listen(text).unwrap_err();
            assert!(error.contains("10809"), "{text}: {error}");
        }
    }

    #[test]
    fn memory_of_the_doors_is_a_size_that_is_large_enough() {
        assert_eq!(parse_budget("160M").unwrap().in_use().bytes_max, 160 << 20);
        for text in ["", "much", "0", "159M"] {
            assert!(parse_budget(text).is_err(), "{text}");
        }
        assert!(parse_budget("1M").unwrap_err().contains("160 MiB"));
    }

    #[test]
    fn a_plan_reads_what_it_wrote() {
        for text in [
            "nbd=unix:/run/a=b.sock",
            "nbd=tcp:127.0.0.1:10809",
            "nbd-insecure=tcp:[::1]:1",
            "ublk",
            "ublk=7",
            "ublk-unprivileged",
            "ublk-unprivileged=7",
            "vhost-user=/run/x y.sock",
            "fuse=/mnt/disk1",
            "loop=/mnt/disk1",
        ] {
            assert_eq!(DoorPlan::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_door_is_refused_with_what_there_is() {
        for text in [
            "",
            "nbd",
            "nbd=",
            "ublk=x",
            "vhost-user",
            "fuse=",
            "loop",
            "iscsi=3",
            "ublk=-1",
            "ublk-x",
        ] {
            assert!(DoorPlan::parse(text).is_err(), "{text}");
        }
        assert!(DoorPlan::parse("iscsi").unwrap_err().to_string().contains("vhost-user=PATH"));
    }

    #[test]
    fn volumes_of_one_folder_get_places_of_their_own() {
        let plan = DoorPlan::parse("vhost-user=/run/disks").unwrap();
        assert_eq!(plan.of_volume("a").to_string(), "vhost-user=/run/disks/a.sock");
        let plan = DoorPlan::parse("loop=/mnt").unwrap();
        assert_eq!(plan.of_volume("a").to_string(), "loop=/mnt/a");
    }
}

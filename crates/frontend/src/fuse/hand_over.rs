//! What another process needs to take over a mount: facts by name, and one descriptor.
//!
//! Facts: `mountpoint`, `file_name`, `minor`, `flags` and `write_bytes_max` (the agreement with the
//! kernel), `size_bytes`, and `loop` if a loop device is attached. The descriptor is that of
//! `/dev/fuse`. Not here: how they travel.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use sawmill_device::{Error, ErrorKind, Result};

use super::answer::InitParameters;
use super::mount::{Mount, settled};
use super::options::FuseOptions;
use crate::DoorPiece;

/// The facts another process needs, with a duplicate of the descriptor.
pub(super) fn handed(
    name: &str,
    mount: &Mount,
    kernel: impl AsFd,
    parameters: &InitParameters,
    number: Option<u32>,
    size_bytes: u64,
) -> Result<DoorPiece> {
    // Never `FUSE_DEV_IOC_CLONE`: what was read through a clone fails when the clone is closed, so
    // when this server dies (decision 0019).
    let kernel = rustix::io::fcntl_dupfd_cloexec(kernel, 3).map_err(|error| {
        Error::caused(ErrorKind::Unavailable, "fuse: cannot duplicate the descriptor", error)
    })?;
    let Some(path) = mount.path.to_str() else {
        let text = format!(
            "fuse: {}: the path of a mountpoint must be UTF-8 to be handed over",
            mount.path.display()
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    };
    let mut facts = BTreeMap::from([
        ("mountpoint".to_owned(), path.to_owned()),
        ("file_name".to_owned(), name.to_owned()),
        ("minor".to_owned(), parameters.minor.to_string()),
        ("flags".to_owned(), parameters.flags.to_string()),
        ("write_bytes_max".to_owned(), parameters.write_bytes_max.to_string()),
        ("size_bytes".to_owned(), size_bytes.to_string()),
    ]);
    facts.extend(number.map(|number| ("loop".to_owned(), number.to_string())));
    Ok(DoorPiece { what: "fuse".into(), facts, bytes: Vec::new(), descriptors: vec![kernel] })
}

/// The parsed pieces of a hand-over.
pub(super) struct MountHandOver {
    pub(super) mount: Mount,
    pub(super) kernel: OwnedFd,
    pub(super) parameters: InitParameters,
    /// The number of the loop device.
    pub(super) number: Option<u32>,
    pub(super) size_bytes: u64,
}

impl MountHandOver {
    pub(super) fn read(options: &FuseOptions, mut piece: DoorPiece) -> Result<Self> {
        let missing = |what: &str| {
            Error::new(ErrorKind::Invalid, format!("fuse: the hand-over lacks {what}"))
        };
        let kernel = piece.descriptors.pop().ok_or_else(|| missing("the descriptor"))?;
        let fact = |name: &str| piece.facts.get(name).ok_or_else(|| missing(name));
        let number = |name: &str| fact(name)?.parse::<u64>().map_err(|_| missing(name));
        let small = |name: &str| u32::try_from(number(name)?).map_err(|_| missing(name));
        let (path, name) = (PathBuf::from(fact("mountpoint")?), fact("file_name")?);
        // Refused and not unmounted: users wait on that mount, and its server may only have been
        // started with the wrong arguments.
        if path != settled(&options.mountpoint).unwrap_or_default() || *name != options.file_name {
            let text = format!(
                "fuse: users of {} wait for this server, which must serve {}: start it with that \
                 mountpoint and name, or disconnect the users with `umount -f -l {}`",
                path.join(name).display(),
                options.mountpoint.join(&options.file_name).display(),
                path.display()
            );
            return Err(Error::new(ErrorKind::Refused, text));
        }
        let agreed = InitParameters {
            minor: small("minor")?,
            flags: number("flags")?,
            write_bytes_max: small("write_bytes_max")?,
        };
        let device = piece.facts.get("loop").map(|_| small("loop")).transpose()?;
        Ok(MountHandOver {
            mount: Mount::existing(path),
            kernel,
            parameters: agreed,
            number: device,
            size_bytes: number("size_bytes")?,
        })
    }
}

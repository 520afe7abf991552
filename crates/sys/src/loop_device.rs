//! Loop devices: a file as a block device of the kernel.
//!
//! Invariant: a [`LoopDevice`] is only a number: the kernel keeps the device, and the file open,
//! until it is detached, whatever happens to this process. Not here: why a file is attached.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::ioctl::{Getter, Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl};

// From linux/loop.h.
const LOOP_CLR_FD: Opcode = 0x4C01;
const LOOP_GET_STATUS64: Opcode = 0x4C05;
const LOOP_SET_CAPACITY: Opcode = 0x4C07;
const LOOP_CONFIGURE: Opcode = 0x4C0A;
const LOOP_CTL_GET_FREE: Opcode = 0x4C82;
const READ_ONLY: u32 = 1;
const DIRECT_IO: u32 = 16;

/// Another process may take the free number first; the next one is tried then, this many times.
const RACES_MAX: u32 = 64;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    /// Device, inode, rdevice, offset, size limit.
    places: [u64; 5],
    number: u32,
    /// Encryption's kind and key length: history.
    encryption: [u32; 2],
    flags: u32,
    /// File name, encryption's name and key.
    names: [u8; 160],
    init: [u64; 2],
}
const _: () = assert!(size_of::<Info>() == 232);

impl Info {
    const EMPTY: Info = Info {
        places: [0; 5],
        number: 0,
        encryption: [0; 2],
        flags: 0,
        names: [0; 160],
        init: [0; 2],
    };
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    descriptor: u32,
    block_bytes: u32,
    info: Info,
    reserved: [u64; 8],
}
const _: () = assert!(size_of::<Config>() == 304);

/// LOOP_CTL_GET_FREE: its result is the number.
struct GetFree;

// SAFETY: this ioctl takes no argument and touches no memory of ours; its result is a plain number.
unsafe impl Ioctl for GetFree {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        LOOP_CTL_GET_FREE
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(
        out: IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> rustix::io::Result<u32> {
        u32::try_from(out).map_err(|_| Errno::INVAL)
    }
}

/// A loop device by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    number: u32,
}

/// What users of a loop device may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopAccess {
    /// Read.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

impl LoopDevice {
    /// The device of this number, whatever is attached to it.
    #[must_use]
    pub fn numbered(number: u32) -> Self {
        LoopDevice { number }
    }

    /// Attaches `file` to a free loop device, with direct I/O and this logical block size. The
    /// device is writable if `access` allows it. The server of the file must answer meanwhile.
    ///
    /// Errors: those of `/dev/loop-control` and LOOP_CONFIGURE: usually a missing permission.
    pub fn attach(file: impl AsFd, block_bytes: u32, access: LoopAccess) -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
        let flags = DIRECT_IO | if access == LoopAccess::ReadOnly { READ_ONLY } else { 0 };
        for _ in 0..RACES_MAX {
            // SAFETY: `GetFree` describes this ioctl truly, see there.
            let device = LoopDevice { number: unsafe { ioctl(&control, GetFree) }? };
            let descriptor = file.as_fd().as_raw_fd().cast_unsigned();
            let info = Info { flags, ..Info::EMPTY };
            let config = Config { descriptor, block_bytes, info, reserved: [0; 8] };
            // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`, which `Config` is.
            let configure = unsafe { Setter::<LOOP_CONFIGURE, Config>::new(config) };
            let node = OpenOptions::new()
                .read(true)
                .write(access == LoopAccess::ReadWrite)
                .open(device.path())?;
            // SAFETY: the argument is the one structure that LOOP_CONFIGURE reads; the descriptor
            // that it names is open through the call.
            match unsafe { ioctl(&node, configure) } {
                Ok(()) => return Ok(device),
                Err(Errno::BUSY) => (),
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "every free loop device was taken by others at once",
        ))
    }

    /// The devices whose files lie below this folder.
    #[must_use]
    pub fn attached_below(folder: &Path) -> Vec<Self> {
        let names = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
        let numbers = names
            .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("loop")?.parse().ok());
        let is_below = |path: PathBuf| path.starts_with(folder);
        let devices = numbers.map(LoopDevice::numbered);
        devices
            .filter(|device| device.backing_file().ok().flatten().is_some_and(is_below))
            .collect()
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its device node.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/dev/loop{}", self.number).into()
    }

    /// The path of the file that is attached, as the kernel knows it; `None` when none is.
    pub fn backing_file(&self) -> io::Result<Option<PathBuf>> {
        let path = format!("/sys/block/loop{}/loop/backing_file", self.number);
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(Some(text.trim_end_matches('\n').into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // The kernel says this while the file is being detached.
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether this file is attached.
    #[must_use]
    pub fn is_of(&self, file: &Path) -> bool {
        self.backing_file().is_ok_and(|found| found.is_some_and(|found| found == file))
    }

    /// Whether it accesses its file around the page cache.
    pub fn is_direct(&self) -> io::Result<bool> {
        // SAFETY: LOOP_GET_STATUS64 fills one `struct loop_info64`, which `Info` is; any bytes are
        // valid in it.
        let status = unsafe { ioctl(self.open()?, Getter::<LOOP_GET_STATUS64, Info>::new()) }?;
        Ok(status.flags & DIRECT_IO != 0)
    }

    /// Adopts the file's current size.
    pub fn take_size(&self) -> io::Result<()> {
        // SAFETY: LOOP_SET_CAPACITY has no argument.
        Ok(unsafe { ioctl(self.open()?, NoArg::<LOOP_SET_CAPACITY>::new()) }?)
    }

    /// Detaches its file. If others have the device open, the kernel does so only after they close
    /// it: [`LoopDevice::backing_file`] shows that.
    pub fn detach(&self) -> io::Result<()> {
        // SAFETY: LOOP_CLR_FD has no argument.
        match unsafe { ioctl(self.open()?, NoArg::<LOOP_CLR_FD>::new()) } {
            Ok(()) | Err(Errno::NXIO) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn open(&self) -> io::Result<File> {
        File::open(self.path())
    }
}

//! Discards and zeroes on files and block devices.
//!
//! Invariant: nothing outside the range changes. Not here: the content of a discarded range, which
//! is up to the device (a hole of a file reads as zeroes).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, StatxFlags, fallocate, fstat, ioctl_blksszget, statx,
};
use rustix::ioctl::{Opcode, Setter, ioctl};

// From linux/fs.h.
const BLKDISCARD: Opcode = 0x1277;

/// Tells the device that this range is no longer needed; in a file, punches a hole.
///
/// Errors: `Unsupported` (`EOPNOTSUPP`) where it cannot; `InvalidInput` for a range that is not
/// whole blocks.
pub fn discard(file: &File, offset: u64, length: u64) -> io::Result<()> {
    if !is_block_device(file)? {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        return Ok(fallocate(file, hole, offset, length)?);
    }
    // SAFETY: BLKDISCARD reads two 64-bit numbers, which the argument is.
    let discard = unsafe { Setter::<BLKDISCARD, [u64; 2]>::new([offset, length]) };
    // SAFETY: the argument is the two numbers that BLKDISCARD reads, and the kernel keeps no
    // pointer to them after the call.
    Ok(unsafe { ioctl(file.as_fd(), discard) }?)
}

/// Makes this range read as zeroes. Errors: as [`discard`].
pub fn write_zeroes(file: &File, offset: u64, length: u64) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::ZERO_RANGE, offset, length)?)
}

/// The shortest direct write that a block device or file takes. If the file system does not report
/// it (Linux before 6.1), 512, all that the kernel itself requires.
pub fn logical_block_bytes(file: &File) -> io::Result<u32> {
    if is_block_device(file)? {
        return Ok(ioctl_blksszget(file)?);
    }
    let status = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let align = status.map_or(0, |status| status.stx_dio_offset_align);
    Ok(if align.is_power_of_two() { align.clamp(512, 4096) } else { 512 })
}

fn is_block_device(file: &File) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(fstat(file)?.st_mode) == FileType::BlockDevice)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn what_is_discarded_or_zeroed_of_a_file_reads_as_zeroes_and_the_rest_stays() {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&[7; 16384]).expect("written");
        discard(&file, 4096, 4096).expect("a hole");
        // Not every file system can; then it says so.
        let zeroed = write_zeroes(&file, 8192, 512);
        let zeroed_bytes = match zeroed {
            Ok(()) => 512,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}");
                0
            }
        };
        let mut bytes = [1; 16384];
        file.read_exact_at(&mut bytes, 0).expect("read");
        let zeroes = 4096..8192 + zeroed_bytes;
        for (n, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, if zeroes.contains(&n) { 0 } else { 7 }, "byte {n}");
        }
        let unit = logical_block_bytes(&file).expect("the block size");
        assert!((512..=4096).contains(&unit) && unit.is_power_of_two(), "{unit}");
    }
}

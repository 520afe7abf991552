//! The content of a device as pages: cheap to clone, so that many cuts of one recording share what
//! they have in common.
//!
//! Invariant: a page that is absent is zero; no page of zeroes is kept. Not here: where the bytes
//! come from.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use sawmill_device::{BlockDeviceExt, MemoryDevice};

const PAGE_BYTES: u64 = 4096;

type Page = [u8; PAGE_BYTES as usize];

/// A device's content. Clones share what neither has changed.
#[derive(Clone, Debug, Default)]
pub struct Image {
    size_bytes: u64,
    pages: BTreeMap<u64, Arc<Page>>,
}

impl Image {
    /// An image of this many bytes, all zeroes.
    #[must_use]
    pub fn new(size_bytes: u64) -> Self {
        Image { size_bytes, pages: BTreeMap::new() }
    }

    /// What a file or a block device holds.
    pub fn read_file(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        // The metadata of a block device has no length, but a seek finds its end.
        let size_bytes = file.seek(SeekFrom::End(0))?;
        let mut image = Image::new(size_bytes);
        let mut bytes = vec![0; 1 << 20];
        let mut at = 0;
        while at < size_bytes {
            let part = (size_bytes - at).min(bytes.len() as u64) as usize;
            file.read_exact_at(&mut bytes[..part], at)?;
            image.write(at, &bytes[..part]);
            at += part as u64;
        }
        Ok(image)
    }

    /// Its size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Puts bytes at a place; what reaches past the end is dropped.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        let mut rest = &bytes[..bytes.len().min(self.size_bytes.saturating_sub(address) as usize)];
        let mut at = address;
        while !rest.is_empty() {
            let (page, inside) = (at / PAGE_BYTES, (at % PAGE_BYTES) as usize);
            let (part, tail) = rest.split_at(rest.len().min(PAGE_BYTES as usize - inside));
            self.write_page(page, inside, part);
            at += part.len() as u64;
            rest = tail;
        }
    }

    fn write_page(&mut self, page: u64, inside: usize, part: &[u8]) {
        let blank = part.iter().all(|&byte| byte == 0);
        // Pages of zeroes are not kept, so that images of a nearly empty disk stay small, however
        // they came about.
        if blank && (part.len() as u64 == PAGE_BYTES || !self.pages.contains_key(&page)) {
            self.pages.remove(&page);
            return;
        }
        let into = self.pages.entry(page).or_insert_with(|| Arc::new([0; PAGE_BYTES as usize]));
        Arc::make_mut(into)[inside..inside + part.len()].copy_from_slice(part);
    }

    /// Puts zeroes at a place; what reaches past the end is dropped.
    pub fn zero(&mut self, address: u64, length: u64) {
        let end = address.saturating_add(length).min(self.size_bytes);
        if address >= end {
            return;
        }
        // Only the pages that exist: a discard may cover a disk of terabytes.
        let known: Vec<u64> = self
            .pages
            .range(address / PAGE_BYTES..end.div_ceil(PAGE_BYTES))
            .map(|(page, _)| *page)
            .collect();
        for page in known {
            let first = page * PAGE_BYTES;
            let (from, to) = (address.max(first) - first, end.min(first + PAGE_BYTES) - first);
            if to - from == PAGE_BYTES {
                self.pages.remove(&page);
            } else if let Some(into) = self.pages.get_mut(&page) {
                Arc::make_mut(into)[from as usize..to as usize].fill(0);
            }
        }
    }

    /// Bytes at a place; past the end zeroes.
    #[must_use]
    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let end = address + length as u64;
        for (page, from) in self.pages.range(address / PAGE_BYTES..end.div_ceil(PAGE_BYTES)) {
            let first = page * PAGE_BYTES;
            let (start, stop) = (address.max(first), end.min(first + PAGE_BYTES));
            let source = &from[(start - first) as usize..(stop - first) as usize];
            bytes[(start - address) as usize..(stop - address) as usize].copy_from_slice(source);
        }
        bytes
    }

    /// Makes a sparse file with this content at `path`, in place of what is there.
    pub fn write_file(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(self.size_bytes)?;
        self.pages().try_for_each(|(address, bytes)| file.write_all_at(bytes, address))
    }

    /// A device in memory with this content.
    pub fn to_device(&self) -> crate::Result<MemoryDevice> {
        let device = MemoryDevice::new(self.size_bytes);
        self.pages().try_for_each(|(address, bytes)| device.write_at(address, bytes))?;
        Ok(device)
    }

    /// The pages that are not zero, with their addresses; the last is cut at the end of the device.
    pub fn pages(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.pages.iter().map(|(page, bytes)| {
            let address = page * PAGE_BYTES;
            (address, &bytes[..PAGE_BYTES.min(self.size_bytes - address) as usize])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sawmill_testkit::Dice;

    #[test]
    fn an_image_reads_as_the_flat_bytes_it_stands_for() {
        let mut dice = Dice::new(1);
        let mut flat = vec![0_u8; 50_000];
        let mut image = Image::new(flat.len() as u64);
        for _ in 0..400 {
            let from = dice.below(flat.len() as u64) as usize;
            let length = dice.below((flat.len() - from) as u64 + 1) as usize;
            if dice.one_in(3) {
                flat[from..from + length].fill(0);
                image.zero(from as u64, length as u64);
            } else {
                let bytes = dice.bytes(length);
                flat[from..from + length].copy_from_slice(&bytes);
                image.write(from as u64, &bytes);
            }
            let whole = image.read(0, flat.len());
            assert!(whole == flat);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        image.write_file(&path).unwrap();
        assert!(std::fs::read(&path).unwrap() == flat);
        assert!(Image::read_file(&path).unwrap().read(0, flat.len()) == flat);
    }

    #[test]
    fn what_is_past_the_end_is_dropped() {
        let mut image = Image::new(6000);
        image.write(5998, b"last");
        image.zero(20_000, 4096);
        image.write(20_000, b"far");
        assert_eq!(image.read(5998, 4), b"la\0\0");
        image.zero(5999, u64::MAX);
        assert_eq!(image.read(5998, 2), b"l\0");
    }

    #[test]
    fn a_clone_keeps_its_bytes_when_the_original_changes() {
        let mut image = Image::new(8192);
        image.write(0, b"before");
        let kept = image.clone();
        image.write(0, b"after!");
        assert_eq!(kept.read(0, 6), b"before");
    }
}

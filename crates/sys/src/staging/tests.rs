//! The ring and its file: slots, spans, what the next process finds.

use rustix::fs::FileType;

use super::*;

fn ring(capacity: u64, position: u64) -> (tempfile::TempDir, Arc<Ring>, Consumer) {
    let folder = tempfile::tempdir().unwrap();
    let file = StagingFile::create(&folder.path().join("staging"), capacity).unwrap();
    let (ring, consumer) = file.into_ring(position, &[]);
    (folder, ring, consumer)
}

fn put(ring: &Ring, fill: u8, bytes: u64) -> Result<FillProof, ReserveError> {
    let (mut slot, ()) = ring.reserve(bytes, |_, _| ())?;
    slot.fill(fill);
    Ok(slot.publish())
}

#[test]
fn slots_are_contiguous_over_the_seam_and_readable_until_given_up() {
    let (_folder, ring, mut consumer) = ring(8192, 4096);
    let first = put(&ring, 1, 5000).unwrap();
    assert_eq!(put(&ring, 2, 5000), Err(ReserveError::Staging));
    assert_eq!(consumer.bytes(&Span::of(&first)), &[1u8; 5000][..]);
    consumer.declare_written(Span::of(&first));
    let mut back = vec![0; 5000];
    assert_eq!(ring.read(&first, 0, &mut back), 0);
    let second = put(&ring, 2, 5000).unwrap();
    assert!(ring.read(&first, 0, &mut back) >= 1808, "the first slot's memory was given up");
    assert_eq!(ring.read(&second, 0, &mut back), 0);
    assert_eq!(back, vec![2; 5000]);
}

#[test]
fn of_a_slot_given_up_in_part_the_rest_is_still_read() {
    let (_folder, ring, mut consumer) = ring(8192, 0);
    let first = put(&ring, 1, 6000).unwrap();
    consumer.declare_written(Span::of(&first).split_to(4096));
    let second = put(&ring, 2, 6000).unwrap();
    let mut back = vec![0; 6000];
    let given_up = ring.read(&first, 0, &mut back);
    assert!((3808..=4096).contains(&given_up), "what was written may go, and no more: {given_up}");
    assert!(back[given_up..].iter().all(|byte| *byte == 1));
    assert_eq!(ring.read(&second, 0, &mut back), 0);
}

#[test]
fn the_journal_limit_stops_reservations_before_the_ring_is_full() {
    let (_folder, ring, _consumer) = ring(8192, 0);
    ring.set_position_max(1000);
    assert_eq!(put(&ring, 1, 1001), Err(ReserveError::Journal));
    put(&ring, 1, 1000).unwrap();
    ring.set_position_max(2000);
    put(&ring, 1, 1000).unwrap();
}

#[test]
fn padding_ends_at_a_whole_block_and_is_not_repeated() {
    let (_folder, ring, _consumer) = ring(16384, 0);
    assert!(ring.reserve_to_block(80, |_, _| ()).unwrap().is_none());
    put(&ring, 1, 4090).unwrap();
    let (slot, at) = ring.reserve_to_block(80, |position, _| position).unwrap().unwrap();
    assert_eq!(
        (at, slot.len()),
        (4090, 4102),
        "six bytes do not hold a header, so one more block is padded"
    );
    assert!(ring.reserve_to_block(80, |_, _| ()).unwrap().is_none());
}

#[test]
fn memory_that_is_kept_makes_room_for_padding_and_for_no_slot() {
    let (_folder, ring, mut consumer) = ring(16384, 0);
    let first = put(&ring, 1, 10_000).unwrap();
    put(&ring, 2, 6_300).unwrap();
    consumer.declare_written(Span::of(&first));
    ring.keep_from(0);
    assert_eq!(put(&ring, 3, 100), Err(ReserveError::Staging));
    let (slot, at) = ring.reserve_to_block(100, |position, _| position).unwrap().unwrap();
    assert_eq!((at, at + slot.len() as u64), (16_300, 20_480));
    assert_eq!(ring.low(), 4096, "no more than padding needs");
    ring.keep_from(u64::MAX);
    put(&ring, 3, 100).unwrap();
}

#[test]
fn what_a_dead_process_left_can_be_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("staging");
    let file = StagingFile::create(&path, 8192).unwrap();
    let (ring, mut consumer) = file.into_ring(4096, b"header");
    put(&ring, 9, 6000).unwrap();
    consumer.declare_sync_failed(4096);
    drop((ring, consumer));
    let mut again = StagingFile::open(&path).unwrap().unwrap();
    assert!(again.sync_failed());
    assert_eq!(again.synced(), 0, "no sync was reported");
    assert_eq!(&again.header()[..6], b"header");
    assert_eq!(again.written(), 4096);
    let mut back = vec![0; 6000];
    again.copy_out(4096, &mut back);
    assert_eq!(back, vec![9; 6000]);
    assert!(StagingFile::open(&folder.path().join("absent")).unwrap().is_none());
}

/// Bytes 4096 to 4120 of the file of [`ring`].
fn live_words(folder: &tempfile::TempDir) -> Vec<u8> {
    std::fs::read(folder.path().join("staging")).unwrap()[4096..4120].to_vec()
}

#[test]
fn the_live_words_have_their_documented_bytes() {
    let (folder, ring, mut consumer) = ring(16384, 0x1000);
    let first = put(&ring, 1, 4096).unwrap();
    let second = put(&ring, 2, 4352).unwrap();
    consumer.declare_written(Span::of(&first));
    consumer.declare_synced(0x2000);
    consumer.declare_written(Span::of(&second));
    let (written, synced) = ([0, 0x31, 0, 0, 0, 0, 0, 0], [0, 0x20, 0, 0, 0, 0, 0, 0]);
    assert_eq!(live_words(&folder), [written, [0; 8], synced].concat());
    consumer.declare_sync_failed(0x3000);
    let (written, failed) = ([0, 0x30, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(live_words(&folder), [written, failed, synced].concat());
}

#[test]
fn memory_that_another_user_may_have_made_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("staging");
    let expect_refusal = |what: &str| {
        let error = StagingFile::open(&path).map(drop).expect_err(what);
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{what}: {error}");
    };
    drop(StagingFile::create(&path, 8192).unwrap().into_ring(4096, b"header"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    expect_refusal("others may read it");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let other = folder.path().join("other");
    std::fs::hard_link(&path, &other).unwrap();
    expect_refusal("it has a second name");
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&other, &path).unwrap();
    expect_refusal("a link leads elsewhere");
    std::fs::remove_file(&path).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        .unwrap();
    expect_refusal("no regular file, and it is not waited for");
    if rustix::process::geteuid().is_root() {
        std::fs::rename(&other, &path).unwrap();
        std::os::unix::fs::chown(&path, Some(61_002), None).unwrap();
        expect_refusal("another user's");
    }
}

#[test]
fn after_a_failed_sync_memory_keeps_what_was_written_and_not_synced() {
    let (_folder, ring, mut consumer) = ring(8192, 0);
    let first = put(&ring, 1, 4096).unwrap();
    let second = put(&ring, 2, 4096).unwrap();
    consumer.declare_written(Span::of(&first));
    consumer.declare_synced(4096);
    consumer.declare_written(Span::of(&second));
    consumer.declare_sync_failed(4096);
    assert_eq!(ring.written(), 4096, "the second is to be written again");
    put(&ring, 3, 4096).unwrap();
    assert_eq!(
        put(&ring, 4, 4096).err(),
        Some(ReserveError::Staging),
        "its memory is not given up"
    );
    consumer.declare_sync_failed(0);
    assert_eq!(ring.written(), 4096, "what was given up cannot be taken back");
}

#[test]
fn parallel_writers_get_disjoint_slots_and_every_byte_arrives() {
    let (_folder, ring, mut consumer) = ring(1 << 16, 0);
    let order: Mutex<Vec<(u64, u8, u64)>> = Mutex::new(Vec::new());
    let (sender, receiver) = std::sync::mpsc::channel::<FillProof>();
    std::thread::scope(|scope| {
        for writer in 1..=4u8 {
            let (ring, order, sender) = (&ring, &order, sender.clone());
            scope.spawn(move || {
                let mut sent = 0u64;
                while sent < 2000 {
                    let bytes = 100 + sent % 300;
                    let head =
                        |position, _: &mut [u8]| order.lock().push((position, writer, bytes));
                    match ring.reserve(bytes, head) {
                        Ok((mut slot, ())) => {
                            slot.fill(writer);
                            let slot = slot.publish();
                            let mut back = vec![0; bytes as usize];
                            let given_up = ring.read(&slot, 0, &mut back);
                            assert!(back[given_up..].iter().all(|b| *b == writer));
                            sender.send(slot).unwrap();
                            sent += 1;
                        }
                        Err(_) => std::thread::yield_now(),
                    }
                }
            });
        }
        scope.spawn(move || {
            let total: u64 = 4 * (0..2000u64).map(|sent| 100 + sent % 300).sum::<u64>();
            let mut done = 0;
            while done < total {
                match receiver.recv().unwrap() {
                    slot if slot.position() == done => {
                        done = slot.end();
                        consumer.declare_written(Span::of(&slot));
                    }
                    slot => sender.send(slot).unwrap(),
                }
            }
        });
    });
    let mut end = 0;
    for (position, _, bytes) in order.into_inner() {
        assert_eq!(position, end, "positions follow the order of reservation");
        end = position + bytes;
    }
}

#[test]
fn preallocated_memory_is_taken_once_and_only_as_it_was_allocated() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let folder = tempfile::tempdir().unwrap();
    let (spare, path) = (folder.path().join("spare"), folder.path().join("staging"));
    let take = |bytes| StagingFile::take_spare(&spare, &path, bytes).unwrap();
    assert!(take(8192).is_none(), "nothing was preallocated");
    StagingFile::preallocate(&spare, 8192).unwrap();
    let inode = std::fs::metadata(&spare).unwrap().ino();
    let (ring, _consumer) =
        take(8192).expect("as large as it was preallocated").into_ring(4096, b"header");
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), inode);
    put(&ring, 1, 5000).unwrap();
    assert!(take(8192).is_none(), "it was taken");
    for (what, bytes, mode) in [("another size", 16384, 0o600), ("others may look", 8192, 0o644)] {
        StagingFile::preallocate(&spare, 8192).unwrap();
        std::fs::set_permissions(&spare, std::fs::Permissions::from_mode(mode)).unwrap();
        assert!(take(bytes).is_none(), "{what}");
        assert!(!spare.exists(), "{what}: it would be in the way forever");
    }
    let other_path = folder.path().join("elsewhere");
    StagingFile::preallocate(&other_path, 8192).unwrap();
    std::os::unix::fs::symlink(&other_path, &spare).unwrap();
    assert!(take(8192).is_none(), "a link leads elsewhere");
    std::fs::hard_link(&other_path, &spare).unwrap();
    assert!(take(8192).is_none(), "another name of a file in use");
    assert!(other_path.exists() && !path.exists());
    // What is preallocated meanwhile, under the old name, is another file.
    StagingFile::preallocate(&spare, 8192).unwrap();
    let (ring, _consumer) = take(8192).unwrap().into_ring(4096, b"header");
    StagingFile::preallocate(&spare, 8192).unwrap();
    put(&ring, 1, 5000).unwrap();
    let in_use = StagingFile::open(&path).map(drop).unwrap_err();
    assert_eq!(in_use.kind(), io::ErrorKind::WouldBlock, "a process has it open");
    ring.unlock();
    let mut staging_file = StagingFile::open(&path).unwrap().expect("what was staged has a name");
    assert!(staging_file.header().starts_with(b"header"));
}

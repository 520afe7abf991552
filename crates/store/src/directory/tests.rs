//! The directory store where it differs from others: files, folders, permissions, races.

use std::sync::Barrier;

use super::*;
use crate::{Blocking, Class, PutOutcome, StoreOptions, open};

struct Folder {
    temporary: tempfile::TempDir,
    store: Arc<crate::Client>,
}

fn folder() -> Folder {
    let temporary = tempfile::tempdir().unwrap();
    let store = open(temporary.path().to_str().unwrap(), StoreOptions::default()).unwrap();
    Folder { temporary, store }
}

impl Folder {
    fn calls(&self) -> Blocking<'_> {
        Blocking(&*self.store)
    }

    fn shared(&self) -> DirectoryState {
        DirectoryState::new(self.temporary.path().to_owned())
    }
}

fn all() -> WantedBytes {
    WantedBytes { range: None, bytes_max: 1 << 20 }
}

#[test]
fn a_file_that_claims_more_than_asked_for_is_damaged_and_takes_no_memory() {
    let folder = folder();
    let path = folder.temporary.path().join("huge");
    File::create(&path).unwrap().set_len(4 << 40).unwrap();
    assert_eq!(kind(folder.calls().get("huge", None, Class::Read)), StoreErrorKind::Damaged);
    assert_eq!(kind(folder.shared().get("huge", &all())), StoreErrorKind::Damaged);
    let wide = WantedBytes { range: Some(0..2 << 40), ..all() };
    assert_eq!(kind(folder.shared().get("huge", &wide)), StoreErrorKind::Damaged);
    assert_eq!(folder.calls().get("huge", Some(7..9), Class::Read).unwrap(), [0, 0][..]);
    File::options().write(true).open(&path).unwrap().set_len((1 << 20) + 1).unwrap();
    assert_eq!(kind(folder.shared().get("huge", &all())), StoreErrorKind::Damaged);
    File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    assert_eq!(folder.shared().get("huge", &all()).unwrap().len(), 1 << 20);
}

#[test]
fn a_pipe_under_a_key_fails_a_get_at_once_and_lets_no_put_succeed() {
    let folder = folder();
    let fifo = rustix::fs::FileType::Fifo;
    let path = folder.temporary.path().join("pipe");
    rustix::fs::mknodat(CWD, &path, fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    for range in [None, Some(0..10)] {
        let error = folder.calls().get("pipe", range, Class::Read).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Damaged);
        assert!(error.to_string().contains("not a file"), "{error}");
    }
    let put = folder.calls().put("pipe", Bytes::from_static(b"ours"), Class::Upload);
    assert_eq!(put.unwrap(), PutOutcome::Taken);
    assert_eq!(folder.calls().list("", Class::Read).unwrap(), []);
}

fn kind<T: std::fmt::Debug>(outcome: Result<T>) -> StoreErrorKind {
    outcome.unwrap_err().kind()
}

#[test]
fn of_sixteen_threads_that_create_one_key_exactly_one_wins() {
    let folder = folder();
    for round in 0..20 {
        let key = format!("race/{round}/object");
        let barrier = Barrier::new(16);
        let winners: Vec<u8> = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..16u8)
                .map(|racer| {
                    let (key, barrier, shared) = (&key, &barrier, folder.shared());
                    scope.spawn(move || {
                        barrier.wait();
                        let creation = shared.create(key, &[racer; 5000]).unwrap();
                        (creation == Creation::Created).then_some(racer)
                    })
                })
                .collect();
            racers.into_iter().filter_map(|racer| racer.join().unwrap()).collect()
        });
        assert_eq!(winners.len(), 1, "{winners:?}");
        let found = folder.calls().get(&key, None, Class::Read).unwrap();
        assert_eq!(found, vec![winners[0]; 5000]);
    }
}

#[test]
fn a_file_system_without_nameless_files_is_served_by_names_and_links() {
    let folder = folder();
    let shared = folder.shared();
    let path = folder.temporary.path().join("object");
    shared.link_named(&path, b"first").unwrap();
    let error = shared.link_named(&path, b"second").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    assert_eq!(fs::read(&path).unwrap(), b"first");
    assert_eq!(fs::read_dir(folder.temporary.path().join(NAMELESS)).unwrap().count(), 0);
    assert_eq!(folder.calls().list("", Class::Read).unwrap().len(), 1);
}

#[test]
fn files_that_dead_processes_left_are_swept_and_fresh_ones_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let [old, fresh] = ["old", "fresh"].map(|name| folder.path().join(name));
    fs::write(&fresh, b"").unwrap();
    let long_ago = std::time::SystemTime::now() - NAMELESS_AGE_MAX * 2;
    File::create(&old).unwrap().set_modified(long_ago).unwrap();
    sweep(folder.path());
    assert!(!old.exists() && fresh.exists());
}

#[test]
fn a_root_that_does_not_exist_is_empty_and_is_made_by_the_first_put() {
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path().join("not/yet/there");
    let store = open(&format!("file://{}", root.display()), StoreOptions::default()).unwrap();
    let calls = Blocking(&*store);
    assert_eq!(kind(calls.get("a/b", None, Class::Read)), StoreErrorKind::NotFound);
    assert_eq!(calls.list("", Class::Read).unwrap(), []);
    calls.delete(vec!["a/b".to_owned()], Class::Background).unwrap();
    assert!(!root.exists());
    calls.put("a/b", Bytes::from_static(b"x"), Class::Upload).unwrap();
    assert_eq!(fs::read(root.join("a/b")).unwrap(), b"x");
}

/// A store that has one object, and a place to move its root to.
fn root_to_move() -> (tempfile::TempDir, PathBuf, PathBuf, DirectoryState) {
    let temporary = tempfile::tempdir().unwrap();
    let [root, away] = ["root", "away"].map(|name| temporary.path().join(name));
    let shared = DirectoryState::new(root.clone());
    shared.create("a/b", b"x").unwrap();
    (temporary, root, away, shared)
}

/// Every call fails with `Unavailable`, and the text names the root and what to do.
fn assert_unavailable(shared: &DirectoryState, root: &Path) {
    let outcomes = [
        shared.get("a/b", &all()).map(drop),
        shared.get("never/there", &all()).map(drop),
        shared.create("a/c", b"x").map(drop),
        shared.create("new/d", b"x").map(drop),
        shared.list("").map(drop),
        shared.list("a").map(drop),
        shared.delete(&["a/b".to_owned()]),
    ];
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
        let text = error.to_string();
        assert!(text.contains(root.to_str().unwrap()) && text.contains("put it back"), "{text}");
    }
}

fn assert_works(shared: &DirectoryState) {
    assert_eq!(shared.get("a/b", &all()).unwrap(), "x");
    assert_eq!(kind(shared.get("a/c", &all())), StoreErrorKind::NotFound);
    assert_eq!(shared.list("").unwrap().len(), 1);
    assert_eq!(shared.create("new/d", b"x").unwrap(), Creation::Created);
    shared.delete(&["a/b".to_owned()]).unwrap();
    assert_eq!(kind(shared.get("a/b", &all())), StoreErrorKind::NotFound);
}

#[test]
fn a_root_that_vanished_is_unavailable_and_not_made_again_until_it_is_back() {
    let (_temporary, root, away, shared) = root_to_move();
    fs::rename(&root, &away).unwrap();
    assert_unavailable(&shared, &root);
    assert!(!root.exists());
    fs::rename(&away, &root).unwrap();
    assert_works(&shared);
}

#[test]
fn folders_without_end_take_no_more_memory() {
    let (_temporary, root, _, shared) = root_to_move();
    for number in 0..40 {
        let folder = root.join(format!("map/{number}"));
        shared.settle(&folder).unwrap();
        assert!(folder.is_dir());
        assert!(shared.durable.lock().folders.len() <= FOLDERS_MAX);
    }
}

#[test]
fn a_root_that_vanishes_in_the_middle_of_a_put_is_not_made_again() {
    let (_temporary, root, away, shared) = root_to_move();
    fs::rename(&root, &away).unwrap();
    // The steps of a put after its check of the root.
    shared.durable.lock().folders.clear();
    let error = shared.create_in(&root.join("new"), &root.join("new/d"), b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(!root.exists());
}

#[test]
fn a_root_that_was_exchanged_is_unavailable_and_the_other_one_is_left_alone() {
    let (_temporary, root, away, shared) = root_to_move();
    fs::rename(&root, &away).unwrap();
    fs::create_dir(&root).unwrap();
    assert_unavailable(&shared, &root);
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    fs::remove_dir(&root).unwrap();
    fs::write(&root, b"a file").unwrap();
    assert_unavailable(&shared, &root);
    fs::remove_file(&root).unwrap();
    fs::rename(&away, &root).unwrap();
    assert_works(&shared);
}

#[test]
fn a_root_is_known_from_the_first_call_that_finds_it() {
    let first_calls: [fn(&DirectoryState); 4] = [
        |shared| drop(shared.get("a/b", &all()).unwrap()),
        |shared| drop(shared.get("a/c", &all()).unwrap_err()),
        |shared| drop(shared.list("").unwrap()),
        |shared| shared.delete(&[]).unwrap(),
    ];
    for first_call in first_calls {
        let (_temporary, root, away, _) = root_to_move();
        let shared = DirectoryState::new(root.clone());
        first_call(&shared);
        fs::rename(&root, &away).unwrap();
        assert_unavailable(&shared, &root);
        assert!(!root.exists());
    }
}

#[test]
fn large_bodies_in_aligned_memory_come_back_whole_at_any_length() {
    let folder = folder();
    let lengths =
        [DIRECT_BYTES_MIN, DIRECT_BYTES_MIN + 1, 3 * DIRECT_BYTES_MAX + 2 * BLOCK_BYTES - 1];
    for length in lengths {
        let room: Vec<u8> = (0..length + BLOCK_BYTES).map(|at| (at / 251 + at) as u8).collect();
        let start = room.as_ptr().align_offset(BLOCK_BYTES);
        let body = Bytes::from(room).slice(start..start + length);
        assert_eq!(body.as_ptr() as usize % BLOCK_BYTES, 0);
        let key = format!("large/{length}");
        let outcome = folder.calls().put(&key, body.clone(), Class::Upload).unwrap();
        assert_eq!(outcome, PutOutcome::Created);
        assert!(
            folder.calls().get(&key, None, Class::Read).unwrap() == body,
            "{length} bytes differ"
        );
    }
}

#[test]
fn a_folder_that_was_removed_is_made_again() {
    let folder = folder();
    let put = |key| folder.calls().put(key, Bytes::from_static(b"x"), Class::Upload);
    put("a/b/1").unwrap();
    fs::remove_dir_all(folder.temporary.path().join("a")).unwrap();
    assert_eq!(put("a/b/2").unwrap(), PutOutcome::Created);
}

#[test]
fn a_key_that_begins_another_is_invalid_and_not_taken() {
    let folder = folder();
    let put = |key| folder.calls().put(key, Bytes::from_static(b"x"), Class::Upload);
    put("a/b").unwrap();
    assert_eq!(kind(put("a")), StoreErrorKind::Invalid);
    assert_eq!(kind(put("a/b/c")), StoreErrorKind::Invalid);
    folder.calls().delete(vec!["a".to_owned()], Class::Background).unwrap();
    assert_eq!(folder.calls().get("a/b", None, Class::Read).unwrap(), "x");
}

#[test]
fn foreign_names_are_not_listed() {
    let folder = folder();
    let root = folder.temporary.path();
    fs::create_dir(root.join("lost+found")).unwrap();
    fs::write(root.join("lost+found/x"), b"").unwrap();
    fs::write(root.join(".hidden"), b"").unwrap();
    std::os::unix::fs::symlink("/", root.join("loop")).unwrap();
    folder.calls().put("mine", Bytes::from_static(b"x"), Class::Upload).unwrap();
    let listed = folder.calls().list("", Class::Read).unwrap();
    assert_eq!(listed, [ObjectInfo { key: "mine".to_owned(), size_bytes: 1 }]);
}

#[test]
fn a_folder_that_may_not_be_written_or_entered_is_denied() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    folder.calls().put("a/b", Bytes::from_static(b"x"), Class::Upload).unwrap();
    let set_mode =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    set_mode(folder.temporary.path(), 0o555);
    set_mode(&folder.temporary.path().join("a"), 0o000);
    let shared = folder.shared();
    let nobody = std::thread::spawn(move || {
        // Permission bits do not bind root; a thread can change its own user alone.
        if rustix::process::geteuid().is_root() {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        }
        let outcomes = [
            shared.create("c", b"x").map(drop),
            shared.create("d/e", b"x").map(drop),
            shared.get("a/b", &all()).map(drop),
            shared.list("").map(drop),
            shared.delete(&["a/b".to_owned()]),
        ];
        outcomes.map(|outcome| outcome.unwrap_err())
    });
    for error in nobody.join().unwrap() {
        assert_eq!(error.kind(), StoreErrorKind::Denied, "{error}");
        assert!(error.to_string().contains("check owner and mode"), "{error}");
    }
    set_mode(&folder.temporary.path().join("a"), 0o755);
    set_mode(folder.temporary.path(), 0o755);
}

#[test]
fn a_file_system_with_nameless_files_needs_no_folder_for_temporary_names() {
    let folder = folder();
    let able = nameless(folder.temporary.path()).is_ok();
    folder.calls().put("a", Bytes::from_static(b"x"), Class::Upload).unwrap();
    assert_eq!(folder.temporary.path().join(NAMELESS).exists(), !able);
}

#[test]
fn every_failure_of_a_file_system_has_its_kind() {
    let table = [
        (Errno::ACCESS, StoreErrorKind::Denied),
        (Errno::ROFS, StoreErrorKind::Denied),
        (Errno::NOSPC, StoreErrorKind::Unavailable),
        (Errno::IO, StoreErrorKind::Unavailable),
        (Errno::STALE, StoreErrorKind::Unavailable),
        (Errno::MFILE, StoreErrorKind::Unavailable),
        (Errno::NAMETOOLONG, StoreErrorKind::Invalid),
    ];
    for (errno, kind) in table {
        assert_eq!(failure("open", Path::new("/x"), errno.into()).kind(), kind, "{errno}");
    }
}

#[test]
fn thirty_two_reads_run_side_by_side() {
    let folder = folder();
    // 32 calls meet inside the store's threads; fewer threads would never get past the barrier.
    let directory = Directory::new(folder.temporary.path().to_owned());
    let barrier = Arc::new(Barrier::new(32));
    let calls = (0..32).map(|_| {
        let barrier = Arc::clone(&barrier);
        directory.run(move |_| {
            barrier.wait();
            Ok(())
        })
    });
    let met = crate::runtime::runtime().unwrap().block_on(futures_util::future::join_all(calls));
    assert_eq!(met.into_iter().filter(Result::is_ok).count(), 32);
}

//! ext4, XFS and btrfs live on a volume: made, filled, checked, and the same files found again
//! after the server stopped and the volume was attached on another machine; and after `kill -9` in
//! the middle.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use sawmill_testkit::Dice;
use sawmill_tests::bridge::Bridge;
use sawmill_tests::machine::{command, require_mount, run};
use sawmill_tests::on_each_store;
use sawmill_tests::requires;
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::TestBed;

on_each_store!(
    ext4_keeps_its_files_on_another_machine,
    xfs_keeps_its_files_on_another_machine,
    btrfs_keeps_its_files_on_another_machine,
    ext4_keeps_synced_files_through_kill_nine,
    xfs_keeps_synced_files_through_kill_nine,
    btrfs_keeps_synced_files_through_kill_nine,
);

fn ext4_keeps_its_files_on_another_machine(store: &StoreUnderTest) {
    move_between_machines(store, &EXT4);
}

fn xfs_keeps_its_files_on_another_machine(store: &StoreUnderTest) {
    move_between_machines(store, &XFS);
}

fn btrfs_keeps_its_files_on_another_machine(store: &StoreUnderTest) {
    move_between_machines(store, &BTRFS);
}

fn ext4_keeps_synced_files_through_kill_nine(store: &StoreUnderTest) {
    kill_in_the_middle(store, &EXT4);
}

fn xfs_keeps_synced_files_through_kill_nine(store: &StoreUnderTest) {
    kill_in_the_middle(store, &XFS);
}

fn btrfs_keeps_synced_files_through_kill_nine(store: &StoreUnderTest) {
    kill_in_the_middle(store, &BTRFS);
}

/// A file system: how to make and how to check it without changing it.
struct FileSystem {
    make: &'static [&'static str],
    check: &'static [&'static str],
}

const EXT4: FileSystem = FileSystem { make: &["mkfs.ext4", "-q", "-F"], check: &["e2fsck", "-fn"] };
const XFS: FileSystem =
    FileSystem { make: &["mkfs.xfs", "-q", "-f"], check: &["xfs_repair", "-n"] };
const BTRFS: FileSystem =
    FileSystem { make: &["mkfs.btrfs", "-q", "-f"], check: &["btrfs", "check", "--readonly"] };

impl FileSystem {
    fn make(&self, bridge: &Bridge) {
        run(command(self.make[0]).args(&self.make[1..]).arg(bridge.device()));
    }

    fn check(&self, bridge: &Bridge) {
        run(command(self.check[0]).args(&self.check[1..]).arg(bridge.device()));
    }
}

/// Files with their contents.
type Files = Vec<(String, Vec<u8>)>;

fn fill(root: &Path, dice: &mut Dice, from: usize, count: usize) -> Files {
    let mut files = Files::new();
    for n in from..from + count {
        let length = 1 + dice.below(if n % 10 == 0 { 4 << 20 } else { 64 << 10 }) as usize;
        let (name, bytes) = (format!("file-{n}"), dice.bytes(length));
        let mut file = File::create(root.join(&name)).expect("a new file");
        file.write_all(&bytes).expect("room for the file");
        file.sync_all().expect("fsync");
        files.push((name, bytes));
    }
    // The directory too: the names are part of what was synced.
    File::open(root).and_then(|folder| folder.sync_all()).expect("fsync of the folder");
    files
}

fn verify(root: &Path, files: &Files) {
    for (name, bytes) in files {
        let found = std::fs::read(root.join(name))
            .unwrap_or_else(|error| panic!("{name} is lost: {error}"));
        assert!(found == *bytes, "{name} has other contents");
    }
}

fn move_between_machines(store: &StoreUnderTest, file_system: &FileSystem) {
    requires!(require_mount());
    let mut dice = Dice::seeded("file_systems");
    let bed = TestBed::new(store);
    bed.create("disk", "512M", &[]);
    let server = bed.serve("disk").start();
    let mut bridge = Bridge::new(&server.uri());
    file_system.make(&bridge);
    let root = bridge.mount();
    let mut files = fill(&root, &mut dice, 0, 60);
    for (name, _) in files.drain(..20) {
        std::fs::remove_file(root.join(name)).expect("an old file");
    }
    files.extend(fill(&root, &mut dice, 60, 20));
    bridge.unmount();
    file_system.check(&bridge);
    drop(bridge);
    let _ = server.stop().ok();

    // A machine that has nothing but the store. The first one ended in order, so nothing needs
    // accepting.
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").start();
    let mut bridge = Bridge::new(&server.uri());
    file_system.check(&bridge);
    let root = bridge.mount();
    verify(&root, &files);
    bridge.unmount();
    drop(bridge);
    let _ = server.stop().ok();
}

fn kill_in_the_middle(store: &StoreUnderTest, file_system: &FileSystem) {
    requires!(require_mount());
    let mut dice = Dice::seeded("file_systems");
    let bed = TestBed::new(store);
    bed.create("disk", "512M", &["--segment-bytes", "1M"]);
    let server = bed.serve("disk").start();
    let mut bridge = Bridge::new(&server.uri());
    file_system.make(&bridge);
    let root = bridge.mount();
    let files = fill(&root, &mut dice, 0, 25);
    // Something that is still on its way when the server dies.
    std::fs::write(root.join("unsynced"), dice.bytes(8 << 20)).expect("room for one more file");
    server.kill();
    drop(bridge);

    let server = bed.serve("disk").start();
    let mut bridge = Bridge::new(&server.uri());
    // Mounting replays the file system's own journal; then it must be clean.
    let root = bridge.mount();
    verify(&root, &files);
    bridge.unmount();
    file_system.check(&bridge);
    drop(bridge);
    let _ = server.stop().ok();
}

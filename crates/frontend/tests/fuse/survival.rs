//! Deaths of servers and mount holders, and hand-offs between processes, under programs that see no
//! error.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use sawmill_device::ErrorKind;
use sawmill_frontend::fuse::{FuseDoor, FuseOptions, MountHolderOptions};

use crate::process::{SOCKET, Server};
use crate::setting::{memory, needs_mounts, pattern, run, wait_until};

/// fio on a file or device, continuously verifying what it writes.
struct Load(Child);

impl Load {
    fn start(target: &str, folder: &Path) -> Self {
        let fio = Command::new("fio")
            .args([
                "--name=verify",
                "--size=8M",
                "--bs=4k",
                "--iodepth=32",
                "--ioengine=libaio",
                "--direct=1",
            ])
            .args(["--rw=randwrite", "--verify=crc32c", "--do_verify=1", "--verify_backlog=256"])
            .args(["--verify_fatal=1", "--time_based", "--runtime=600", "--fdatasync=64"])
            .args(["--output-format=terse", "--output=fio.log"])
            .arg(format!("--filename={target}"))
            .current_dir(folder)
            .stderr(Stdio::piped())
            .spawn();
        Load(fio.expect("no fio: run tests/setup/prepare.sh test"))
    }

    fn runs(&mut self) -> bool {
        self.0.try_wait().expect("a child").is_none()
    }

    /// Stops it cleanly, with a last verification; no error may have occurred.
    fn stop(mut self) {
        assert!(self.runs(), "fio ended by itself: it met an error");
        run("kill", &["-INT", &self.0.id().to_string()]);
        let ended = self.0.wait().expect("it ends");
        // fio exits with 128 if it was interrupted and found no error.
        assert!(ended.success() || ended.code() == Some(128), "fio: {ended}");
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// How many requests a server has seen.
fn write_count(server: &mut Server) -> u64 {
    number(&server.request("counts"), "writes")
}

fn number(counts: &str, name: &str) -> u64 {
    let (_, rest) = counts.split_once(&format!("{name}: ")).expect("it is counted");
    rest.split([',', ' ']).next().and_then(|digits| digits.parse().ok()).expect("a number")
}

#[test]
fn a_server_killed_under_load_on_a_loop_device_is_only_a_pause() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &["--loop"]);
    let device = server.address.clone();
    let mut load = Load::start(&device, place.path());
    let mut resent = 0;
    let mut deaths = 0;
    // Ten deaths, and more until a request was in flight at one of them.
    while deaths < 10 || resent == 0 {
        deaths += 1;
        assert!(deaths <= 100, "no death met a request in flight");
        wait_until("some load", || write_count(&mut server) > 500);
        server.kill();
        server = Server::start_kept(place.path(), &["--loop"]);
        assert_eq!(server.address, device, "the same loop device");
        wait_until("the load goes on", || write_count(&mut server) > 100);
        let counts = server.request("counts");
        resent += number(&counts, "resent");
        assert_eq!(number(&counts, "errors"), 0);
        assert!(load.runs());
    }
    load.stop();
    server.stop();
    assert!(!place.path().join(SOCKET).exists(), "the mount holder has ended");
}

#[test]
fn a_server_killed_under_load_on_the_file_is_only_a_pause() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &[]);
    let file = server.address.clone();
    let mut load = Load::start(&file, place.path());
    for _ in 0..5 {
        wait_until("some load", || write_count(&mut server) > 500);
        server.kill();
        server = Server::start_kept(place.path(), &[]);
        assert!(load.runs());
    }
    wait_until("the load goes on", || write_count(&mut server) > 500);
    load.stop();
    server.stop();
}

#[test]
fn a_mount_handed_from_process_to_process_under_load_is_only_a_pause() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &["--loop"]);
    let device = server.address.clone();
    let mut load = Load::start(&device, place.path());
    for _ in 0..10 {
        let mut next = Server::stand_by(place.path(), &["--loop"]);
        wait_until("some load", || write_count(&mut server) > 500);
        server.release();
        next.go();
        server = next;
        assert_eq!(server.address, device, "the same loop device");
        let counts = server.request("counts");
        assert_eq!(
            (number(&counts, "resent"), number(&counts, "errors")),
            (0, 0),
            "nothing was left open"
        );
        assert!(load.runs());
    }
    load.stop();
    server.stop();
}

#[test]
fn a_file_system_and_its_files_survive_the_servers_death() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &["--loop"]);
    let device = server.address.clone();
    run("mkfs.ext4", &["-q", &device]);
    let mounted = place.path().join("ext4");
    std::fs::create_dir(&mounted).expect("a folder");
    run("mount", &[&device, mounted.to_str().expect("UTF-8")]);
    for n in 0..5 {
        let (file, bytes) = (mounted.join(n.to_string()), pattern(n, 700_000));
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| {
                std::fs::write(&file, &bytes)?;
                std::fs::File::open(&file)?.sync_all()
            });
            server.kill();
            server = Server::start_kept(place.path(), &["--loop"]);
            writing.join().expect("no panic").expect("the file system waited");
        });
        assert!(std::fs::read(&file).expect("there") == bytes);
    }
    run("umount", &[mounted.to_str().expect("UTF-8")]);
    run("e2fsck", &["-f", "-n", &device]);
    server.stop();
}

#[test]
fn a_mount_holder_is_small_and_ends_with_its_mount() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &[]);
    let mount_holder = mount_holder(place.path()).expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{mount_holder}/status")).expect("it runs");
    let resident = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or("0 kB");
    let resident: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number");
    assert!(resident < 1024, "{resident} KiB of memory of its own");
    let socket = place.path().join(SOCKET);
    let mode = std::fs::metadata(&socket).expect("it listens").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    server.kill();
    run("umount", &["-f", "-l", server.mountpoint().to_str().expect("UTF-8")]);
    wait_until("the mount holder has seen it", || !socket.exists());
}

#[test]
fn a_mount_holder_gives_nothing_to_other_users() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &[]);
    let open = std::fs::Permissions::from_mode(0o777);
    for path in [place.path().to_owned(), place.path().join(SOCKET)] {
        std::fs::set_permissions(path, open.clone()).expect("ours");
    }
    let script = "
import socket, struct, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
try:
    give = b'\\x02SAWMHAND' + struct.pack('<QQ', 1, 0)
    s.send(b'SWM1' + struct.pack('<IQ', 0, len(give)) + give)
    sys.exit(len(s.recv(100)))
except ConnectionError:
    sys.exit(0)";
    let mut asking = Command::new("/usr/bin/python3");
    asking.args(["-c", script]).arg(place.path().join(SOCKET)).uid(65_534).gid(65_534);
    assert!(asking.status().expect("Python runs").success(), "something was given");
    asking.uid(0).gid(0);
    assert!(!asking.status().expect("Python runs").success(), "root gets it");
    server.stop();
}

/// The mount holder's process, if one holds something: it has the socket as its standard input.
fn mount_holder(place: &Path) -> Option<String> {
    let (sockets, path) =
        (std::fs::read_to_string("/proc/net/unix").expect("a list"), place.join(SOCKET));
    // Accepted connections are listed under the same path.
    let lines = sockets.lines().filter(|line| line.ends_with(path.to_str().expect("UTF-8")));
    let inode =
        |line: &str| line.split_whitespace().nth(6).map(|inode| format!("socket:[{inode}]").into());
    let sockets: Vec<PathBuf> = lines.filter_map(inode).collect();
    let is_it = |process: &Path| {
        // Of all other processes, read only the names: some cannot be inspected while they wait.
        let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
        let input = || std::fs::read_link(process.join("fd/0")).unwrap_or_default();
        let mut files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let mut holds =
            || files.any(|file| std::fs::read_link(file.path()).is_ok_and(|at| at == *"/dev/fuse"));
        name.trim_end() == "fuse_memory" && sockets.contains(&input()) && holds()
    };
    let processes = std::fs::read_dir("/proc").expect("a list").flatten().map(|entry| entry.path());
    let found = processes.filter(|path| path.join("comm").exists()).find(|path| is_it(path))?;
    found.file_name()?.to_str().map(str::to_owned)
}

/// Kills the running mount holder, and returns its process id.
fn kill_mount_holder(place: &Path) -> String {
    let mount_holder = mount_holder(place).expect("the mount holder listens");
    run("kill", &["-9", &mount_holder]);
    mount_holder
}

#[test]
fn a_mount_holder_that_dies_is_replaced_while_its_server_lives() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &["--loop"]);
    let device = server.address.clone();
    let mut load = Load::start(&device, place.path());
    for hand_over in [false, true, false] {
        if hand_over {
            let mut next = Server::stand_by(place.path(), &["--loop"]);
            server.release();
            next.go();
            server = next;
        }
        // The second one was started by this server as a replacement.
        for _ in 0..2 {
            let dead = kill_mount_holder(place.path());
            wait_until("another mount holder", || {
                mount_holder(place.path()).is_some_and(|another| another != dead)
            });
        }
        wait_until("some load", || write_count(&mut server) > 100);
        server.kill();
        server = Server::start_kept(place.path(), &["--loop"]);
        assert_eq!(server.address, device, "what the mount holder knew of is the same loop device");
        assert!(load.runs());
    }
    load.stop();
    server.stop();
    assert_eq!(mount_holder(place.path()), None, "one that was ended is not replaced");
}

#[test]
fn a_dead_mount_holder_and_a_dead_server_leave_a_place_that_can_be_used_again() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &[]);
    kill_mount_holder(place.path());
    server.kill();
    let mut again = Server::start_kept(place.path(), &[]);
    std::fs::OpenOptions::new()
        .write(true)
        .open(&again.address)
        .and_then(|file| file.write_all_at(b"alive", 0))
        .expect("served");
    again.stop();
}

#[test]
fn a_file_is_closed_and_programs_are_started_without_a_server() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &[]);
    let file = std::fs::OpenOptions::new().write(true).open(&server.address).expect("served");
    file.write_all_at(b"before", 0).expect("served");
    server.kill();
    let (sender, receiver) = std::sync::mpsc::channel();
    let closing = std::thread::spawn(move || {
        // Executing a program first closes the descriptors that it must not inherit.
        run("true", &[]);
        drop(file);
        sender.send(()).expect("a receiver waits");
    });
    wait_until("the file is closed", || receiver.try_recv().is_ok());
    closing.join().expect("no panic");
    Server::start_kept(place.path(), &[]).stop();
}

#[test]
fn a_stat_of_the_mountpoint_does_not_wait_for_a_dead_server() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &[]);
    server.kill();
    assert!(std::fs::metadata(server.mountpoint()).expect("known").is_dir());
    std::fs::create_dir_all(server.mountpoint()).expect("it is there");
    Server::start_kept(place.path(), &[]).stop();
}

#[test]
fn a_mount_whose_users_wait_is_not_taken_for_another() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start_kept(place.path(), &[]);
    server.kill();
    let mount_holder =
        MountHolderOptions { socket: place.path().join(SOCKET), command: vec!["false".into()] };
    let elsewhere = place.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).expect("a folder");
    let options =
        FuseOptions { mount_holder: Some(mount_holder), ..FuseOptions::new(&elsewhere, "disk") };
    let error = FuseDoor::mount(options, memory()).err().expect("it must not mount");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("start it with that mountpoint"), "{error}");
    // Without its mount holder, the mount is not touched either, because its users wait.
    let error = FuseDoor::mount(FuseOptions::new(server.mountpoint(), "disk"), memory()).err();
    let error = error.expect("it must not mount");
    assert!(
        error.kind() == ErrorKind::InUse && error.to_string().contains("mount holder holds it"),
        "{error}"
    );
    Server::start_kept(place.path(), &[]).stop();
}

#[test]
fn a_mount_holder_that_does_not_come_up_is_an_error_and_leaves_no_mount() {
    needs_mounts!();
    let place = tempfile::tempdir().expect("a temporary folder");
    let socket = place.path().join(SOCKET);
    let mountpoint = place.path().join("mount");
    std::fs::create_dir(&mountpoint).expect("a folder");
    for command in [vec!["false".into()], vec!["/no/such/program".into()], Vec::new()] {
        let mount_holder = Some(MountHolderOptions { socket: socket.clone(), command });
        let options = FuseOptions { mount_holder, ..FuseOptions::new(&mountpoint, "disk") };
        assert!(FuseDoor::mount(options, memory()).is_err());
        assert_eq!(std::fs::read_dir(&mountpoint).expect("not mounted").count(), 0);
    }
}

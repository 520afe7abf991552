//! The example as a process of its own, which can be killed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use sawmill_frontend::fuse::LoopDevice;

/// The argument of `--mount-holder`, relative to a server's folder.
pub(crate) const SOCKET: &str = "mount holder.sock";
const NOBODY: u32 = 65_534;

/// The example's program, built beside this test.
pub(crate) fn program() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a program");
    let folder = test.parent().and_then(Path::parent).expect("in a folder of the build");
    let program = folder.join("examples/fuse_memory");
    assert!(
        program.is_file(),
        "{}: build it: cargo build --example fuse_memory",
        program.display()
    );
    program
}

/// A server of `PLACE/bytes` at `PLACE/mount`.
pub(crate) struct Server {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    place: PathBuf,
    pub(crate) address: String,
}

impl Server {
    /// Starts one and waits until its door is open.
    pub(crate) fn start(place: &Path, arguments: &[&str]) -> Self {
        let mut server = Self::spawn(place, arguments, None);
        server.address = server.line();
        server
    }

    pub(crate) fn start_kept(place: &Path, arguments: &[&str]) -> Self {
        let socket = place.join(SOCKET);
        let socket = socket.to_str().expect("UTF-8");
        Self::start(place, &[arguments, &["--mount-holder", socket]].concat())
    }

    /// Starts one that waits for [`Server::go`].
    pub(crate) fn stand_by(place: &Path, arguments: &[&str]) -> Self {
        let socket = place.join(SOCKET);
        let socket = socket.to_str().expect("UTF-8");
        let mut server = Self::spawn(
            place,
            &[arguments, &["--mount-holder", socket, "--standby"]].concat(),
            None,
        );
        assert_eq!(server.line(), "standing by");
        server
    }

    pub(crate) fn start_as_nobody(place: &Path) -> Self {
        chown(place, Some(NOBODY), Some(NOBODY)).expect("root may");
        let mut server = Self::spawn(place, &[], Some(NOBODY));
        server.address = server.line();
        server
    }

    fn spawn(place: &Path, arguments: &[&str], user: Option<u32>) -> Self {
        let mountpoint = place.join("mount");
        if std::fs::create_dir(&mountpoint).is_ok()
            && let Some(user) = user
        {
            chown(&mountpoint, Some(user), Some(user)).expect("root may");
        }
        let mut program = program();
        if user.is_some() {
            // A place that unprivileged users can reach.
            let copy = place.join("program");
            std::fs::copy(&program, &copy).expect("room for a program");
            std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o755)).expect("ours");
            program = copy;
        }
        let mut command = Command::new(program);
        command
            .arg(place.join("bytes"))
            .arg(crate::setting::SIZE.to_string())
            .arg(&mountpoint)
            .args(arguments);
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Server { child, input, output, place: place.to_owned(), address: String::new() }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it speaks");
        line.trim_end().to_owned()
    }

    pub(crate) fn mountpoint(&self) -> PathBuf {
        self.place.join("mount")
    }

    pub(crate) fn loop_device(&self) -> LoopDevice {
        let number = self.address.strip_prefix("/dev/loop").expect("a loop device");
        LoopDevice::numbered(number.parse().expect("a number"))
    }

    /// Sends a line and returns the answer.
    pub(crate) fn request(&mut self, line: &str) -> String {
        let input = self.input.as_mut().expect("open");
        writeln!(input, "{line}").expect("it listens");
        self.line()
    }

    /// Opens the door of one that stood by.
    pub(crate) fn go(&mut self) {
        self.address = self.request("go");
        assert!(self.address.starts_with('/'), "it opened nothing");
    }

    /// Kills it as the OOM killer would.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }

    /// Stops it cleanly.
    pub(crate) fn stop(&mut self) {
        assert_eq!(self.request("stop"), "stopped");
        assert!(self.child.wait().expect("it ends").success());
    }

    /// Leaves the mount to the mount holder.
    pub(crate) fn release(&mut self) {
        let reply = self.request("let-go");
        assert!(reply.starts_with("let go after"), "{reply}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.input.take();
        if std::thread::panicking() {
            let _ = self.child.kill();
            // Programs that wait for a server must not wait forever.
            let mountpoint = self.mountpoint();
            for device in LoopDevice::attached_below(&mountpoint) {
                let _ = device.detach();
            }
            let _ = Command::new("umount")
                .args(["-f", "-l"])
                .arg(mountpoint)
                .stderr(Stdio::null())
                .status();
        }
        let _ = self.child.wait();
    }
}

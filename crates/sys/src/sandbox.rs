//! A program that reads untrusted data: without network, and with resource limits. Not here: which
//! program, and with which environment.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::UnshareFlags;

/// The resource limits of a program.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Address space, in bytes.
    pub memory_bytes: u64,
    /// Open files.
    pub files: u64,
    /// Time on a core.
    pub cpu_s: u64,
    /// The longest file it may write; none: any.
    pub file_bytes: Option<u64>,
    /// Whether it has the network of this machine; otherwise it gets an empty one of its own.
    pub has_network: bool,
}

/// Gives the program these limits, no core dump and no new privileges. If the kernel does not allow
/// it a network of its own, starting it fails: see [`is_no_network`].
pub fn restrict(command: &mut Command, bounds: Bounds) -> &mut Command {
    let enter = move || {
        bound(Resource::As, bounds.memory_bytes)?;
        bound(Resource::Nofile, bounds.files)?;
        bound(Resource::Cpu, bounds.cpu_s)?;
        bound(Resource::Core, 0)?;
        bounds.file_bytes.map_or(Ok(()), |bytes| bound(Resource::Fsize, bytes))?;
        rustix::thread::set_no_new_privs(true)?;
        if !bounds.has_network {
            leave_network()?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only system calls are made, which touch no memory of this
    // process; no lock is taken and nothing is allocated.
    unsafe { command.pre_exec(enter) }
}

/// Whether a program failed to start only because it cannot have a network of its own here.
#[must_use]
pub fn is_no_network(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let reasons = [Errno::PERM, Errno::NOSPC, Errno::USERS, Errno::INVAL, Errno::NOSYS];
    reasons.iter().any(|reason| error.raw_os_error() == Some(reason.raw_os_error()))
}

fn bound(resource: Resource, most: u64) -> io::Result<()> {
    let now = rustix::process::getrlimit(resource).maximum;
    let most = Some(now.map_or(most, |now| now.min(most)));
    Ok(setrlimit(resource, Rlimit { current: most, maximum: most })?)
}

fn leave_network() -> io::Result<()> {
    // SAFETY: this process has one thread, which runs another program next; neither file table nor
    // memory is unshared.
    let unshare = |flags| unsafe { rustix::thread::unshare_unsafe(flags) };
    // Without the privilege, this succeeds where users may create user namespaces.
    match unshare(UnshareFlags::NEWNET) {
        Ok(()) => Ok(()),
        Err(_) => Ok(unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNET)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        memory_bytes: 1 << 30,
        files: 17,
        cpu_s: 60,
        file_bytes: Some(0),
        has_network: true,
    };

    #[test]
    fn a_restricted_program_has_its_bounds() {
        let mut command = Command::new("sh");
        let command = command.args(["-c", "ulimit -n; ulimit -v; ulimit -c; ulimit -t; ulimit -f"]);
        let output = restrict(command, BOUNDS).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "17\n1048576\n0\n60\n0\n");
    }

    #[test]
    fn a_restricted_program_sees_no_network_but_an_idle_one() {
        let mut command = Command::new("cat");
        let bounds = Bounds { has_network: false, ..BOUNDS };
        match restrict(command.arg("/proc/self/net/route"), bounds).output() {
            Ok(output) => assert!(String::from_utf8(output.stdout).unwrap().lines().count() <= 1),
            Err(error) => assert!(is_no_network(&error), "{error}"),
        }
    }
}

//! A program that outlives the one that starts it. Not here: how long it does.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Gives the program a POSIX session of its own: no terminal, and no signal to ours, ends it.
pub fn detach(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only a system call is made, which touches no memory of this
    // process; no lock is taken and nothing is allocated.
    unsafe { command.pre_exec(|| Ok(rustix::process::setsid().map(|_| ())?)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_leads_its_own_session() {
        let mut command = Command::new("sh");
        let output =
            detach(command.args(["-c", "cut -d' ' -f1,6 /proc/$$/stat"])).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (pid, session) = text.trim().split_once(' ').unwrap();
        assert_eq!(pid, session);
    }
}

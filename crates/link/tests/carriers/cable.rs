//! A cable: two network namespaces of the test's own, with a veth pair between.
//!
//! Invariant: everything that was made is removed, even if the test fails.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sawmill_testkit::skip;

static CABLES: AtomicU32 = AtomicU32::new(0);

/// An end of the cable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    A,
    B,
}

/// Two namespaces; in each an interface "cable", with the addresses 10.97.0.1 (A) and 10.97.0.2
/// (B).
pub(crate) struct Cable {
    name: String,
}

impl Cable {
    /// Makes a cable. None, with the test counted as skipped, if this process is not permitted to.
    pub(crate) fn of_mtu(mtu_bytes: usize) -> Option<Cable> {
        let number = CABLES.fetch_add(1, Ordering::Relaxed);
        let cable = Cable { name: format!("smc{}n{number}", std::process::id()) };
        if !rustix::process::geteuid().is_root() {
            skip("only root makes network namespaces");
            return None;
        }
        let (a, b) = (cable.space(End::A), cable.space(End::B));
        let outcome =
            [&a, &b].iter().try_for_each(|space| ip(&["netns", "add", space])).and_then(|()| {
                let veth = [
                    "-n", &a, "link", "add", "cable", "type", "veth", "peer", "name", "cable",
                    "netns", &b,
                ];
                ip(&veth)
            });
        if let Err(reason) = outcome {
            skip(&format!("no cable between namespaces: {reason}"));
            return None;
        }
        for (end, address) in [(End::A, "10.97.0.1/24"), (End::B, "10.97.0.2/24")] {
            cable.link(end, &["mtu", &mtu_bytes.to_string(), "up"]);
            let space = cable.space(end);
            ip(&["-n", &space, "link", "set", "lo", "up"]).expect("up");
            ip(&["-n", &space, "addr", "add", address, "dev", "cable"]).expect("an address");
        }
        Some(cable)
    }

    fn space(&self, end: End) -> String {
        format!("{}{end:?}", self.name)
    }

    /// `ip link set cable ...` at this end.
    pub(crate) fn link(&self, end: End, words: &[&str]) {
        let mut all = vec!["-n".to_owned(), self.space(end)];
        all.extend(
            ["link", "set", "dev", "cable"].iter().chain(words).map(|&word| word.to_owned()),
        );
        ip(&all).expect("the link is set");
    }

    /// The output of `ip link show` for the interface at this end.
    pub(crate) fn interface_state(&self, end: End) -> String {
        let words = ["-n", &self.space(end), "link", "show", "dev", "cable"];
        let output = Command::new("ip").args(words).output().expect("ip runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Adds an interface at this end, with this many queues in each direction.
    pub(crate) fn add_pair_of_queues(&self, end: End, name: &str, queues: u32) {
        let (space, queues) = (self.space(end), queues.to_string());
        let link =
            ["-n", &space, "link", "add", name, "numtxqueues", &queues, "numrxqueues", &queues];
        ip(&[&link[..], &["type", "veth"]].concat()).expect("added");
        ip(&["-n", &space, "link", "set", "dev", name, "up"]).expect("up");
    }

    /// Limits the send rate of this end; at most `limit_bytes` queue. False, with the test counted
    /// as skipped, if `tc` cannot.
    pub(crate) fn slow_down(&self, end: End, rate: &str, limit_bytes: u32) -> bool {
        let (space, limit) = (self.space(end), limit_bytes.to_string());
        let words = ["-n", &space, "qdisc", "replace", "dev", "cable", "root"];
        let tbf = ["tbf", "rate", rate, "burst", "40000", "limit", &limit];
        let slowed = run("tc", words.iter().chain(&tbf));
        if let Err(reason) = &slowed {
            skip(&format!("tc cannot limit: {reason}"));
        }
        slowed.is_ok()
    }

    /// Removes the limit on the send rate of this end.
    pub(crate) fn hurry(&self, end: End) {
        run("tc", ["-n", &self.space(end), "qdisc", "del", "dev", "cable", "root"])
            .expect("removed");
    }

    /// Runs `what` on a thread in the end's namespace; sockets that it opens stay there.
    pub(crate) fn at<T: Send>(&self, end: End, what: impl FnOnce() -> T + Send) -> T {
        let space = File::open(format!("/run/netns/{}", self.space(end))).expect("the namespace");
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("moved");
                what()
            });
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for end in [End::A, End::B] {
            let _ = ip(&["netns", "del", &self.space(end)]);
        }
    }
}

fn ip(words: &[impl AsRef<str>]) -> Result<(), String> {
    run("ip", words.iter().map(AsRef::as_ref))
}

fn run(program: &str, words: impl IntoIterator<Item = impl AsRef<str>>) -> Result<(), String> {
    let words: Vec<String> = words.into_iter().map(|word| word.as_ref().to_owned()).collect();
    let output =
        Command::new(program).args(&words).output().map_err(|e| format!("{program}: {e}"))?;
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{program} {}: {message}", words.join(" ")))
    }
}

//! Questions of commands to a host: report the status, flush or end the device, replace its driver.
//!
//! Not here: ending the device and replacing its driver, which the program that has the host does
//! when it receives the event (`crates/sawmill/src/driving`, `client::own_host`).

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use sawmill_device::BlockDeviceExt;

use super::{Event, Host};
use crate::protocol::{Control, ControlFacts, ControlKind, PacketSocket};
use crate::request_holder::State;

const EIO: i32 = Errno::IO.raw_os_error();
const ENODEV: i32 = Errno::NODEV.raw_os_error();
const EOPNOTSUPP: i32 = Errno::OPNOTSUPP.raw_os_error();
const EINVAL: i32 = Errno::INVAL.raw_os_error();

impl Host {
    /// Answers one question.
    pub(super) fn answer(
        &self,
        control: &PacketSocket,
        question: &ControlFacts,
        files: Vec<OwnedFd>,
    ) {
        // Counted, because the host does not exit before the answers are sent (`wait_for_askers`).
        self.state.lock().open_questions += 1;
        self.answer_it(control, question, files);
        self.state.lock().open_questions -= 1;
        self.changed.notify_all();
    }

    fn answer_it(&self, control: &PacketSocket, question: &ControlFacts, files: Vec<OwnedFd>) {
        let ask = question.get("ask").unwrap_or_default();
        let answer = match ask {
            "status" => Ok(self.status()),
            "flush" => match self.device() {
                Some(device) => device
                    .flush()
                    .map(|()| ControlFacts::default())
                    .map_err(|error| (error.kind().errno(), error.to_string())),
                None => Err((ENODEV, "no driver has declared the device yet".to_owned())),
            },
            "end" => {
                (self.on_event)(Event::EndAsked(None));
                self.wait_for_end()
                    .map(|()| ControlFacts::default())
                    .map_err(|why| (EIO, why.to_string()))
            }
            "fail" => {
                (self.on_event)(Event::EndAsked(Some("it was requested".to_owned())));
                // Whoever asks for a failure expects one; the answer only says that the device has
                // ended.
                let _ = self.wait_for_end();
                Ok(ControlFacts::default())
            }
            "replace" if self.is_own() => {
                let text = "the driver of this device is its own host and starts no other: start \
                            the new one with SAWMILL_REPLACE=1, and it takes its place";
                Err((EOPNOTSUPP, text.to_owned()))
            }
            "replace" => {
                (self.on_event)(Event::ReplaceAsked);
                Ok(ControlFacts::default())
            }
            "hand_over" => self.begin_hand_over(files),
            _ => Err((
                EINVAL,
                format!("ask={ask}: a host knows status, flush, end, fail, replace and hand_over"),
            )),
        };
        let facts = match answer {
            Ok(facts) => ControlFacts::default().with("errno", 0).with("message", "").and(&facts),
            Err((errno, message)) => {
                ControlFacts::default().with("errno", errno).with("message", message)
            }
        };
        // If the other side is gone, it needs no answer.
        let _ = control.send(&Control::new(ControlKind::Answer, facts).encode(), &[]);
    }

    /// Whoever has the other end of the stream among `files` is to serve the device.
    fn begin_hand_over(&self, mut files: Vec<OwnedFd>) -> Result<ControlFacts, (i32, String)> {
        if !self.is_own() {
            let text = "the device has a host in another process: start the new driver without \
                        host=none, with replace=1";
            return Err((EOPNOTSUPP, text.to_owned()));
        }
        let stream = files.pop().ok_or((EINVAL, "ask=hand_over needs a socket".to_owned()))?;
        (self.on_event)(Event::HandOverAsked(Arc::new(UnixStream::from(stream))));
        Ok(ControlFacts::default())
    }

    fn status(&self) -> ControlFacts {
        let driver = self.state.lock().driver.clone();
        let state = match self.device.get().map(|device| device.holder.status().state) {
            None => "declared",
            Some(State::Waiting) => "waiting",
            Some(State::Running) => "running",
            Some(State::Ending) => "ending",
            Some(State::Ended) => "ended",
        };
        let mut facts = ControlFacts::default().with("name", &self.name).with("state", state);
        facts.add("host_pid", std::process::id());
        if self.is_own() {
            facts.add("driver_pid", std::process::id());
            facts.add("generation", self.generation.load(Ordering::SeqCst));
        }
        if let Some(driver) = driver {
            facts.add("driver_pid", driver.pid);
            facts.add("generation", driver.generation);
        }
        if let Some(options) = self.options() {
            facts = facts.and(&options.facts());
        }
        self.doors.get().map_or(facts.clone(), |doors| facts.and(doors))
    }
}

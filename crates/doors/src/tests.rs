//! All doors as one, with doors that only count what is asked of them.

use std::sync::mpsc::{Receiver, Sender, channel};

use sawmill_device::Result;
use sawmill_frontend::{DoorCounts, ExportStatus};

use super::*;

/// Reports each call to it. Becomes quiet only when all of its peers have been asked to as well.
struct Fake {
    name: &'static str,
    call_sender: Sender<String>,
    peers: Mutex<Vec<Sender<()>>>,
    peer_receiver: Mutex<Receiver<()>>,
    outcome: Option<ErrorKind>,
}

impl Fake {
    fn say(&self, what: &str) {
        self.call_sender.send(format!("{} {what}", self.name)).unwrap();
    }
}

impl Door for Fake {
    fn kind(&self) -> &'static str {
        "fake"
    }

    fn address(&self) -> String {
        self.name.to_owned()
    }

    fn export(&self, _name: &str) -> ExportStatus {
        ExportStatus { address: self.address(), peers: Vec::new() }
    }

    fn counts(&self) -> DoorCounts {
        DoorCounts::default()
    }

    fn quiesce(&self, patience: Duration) -> Result<Box<dyn QuietDoor>> {
        let peers = self.peers.lock();
        peers.iter().for_each(|peer| peer.send(()).unwrap());
        for _ in 0..peers.len() {
            let failure = |_| Error::new(ErrorKind::Unavailable, "alone");
            self.peer_receiver.lock().recv_timeout(patience).map_err(failure)?;
        }
        self.say("quiet");
        match self.outcome {
            None => {
                Ok(Box::new(FakeQuiet { name: self.name, call_sender: self.call_sender.clone() }))
            }
            Some(kind) => Err(Error::new(kind, "as was wanted")),
        }
    }

    fn resized(&self) -> Result<()> {
        let text = "users of this door see a new size only after they reopen it";
        Err(Error::new(ErrorKind::Refused, text))
    }

    fn stop(&self, how: Stop) {
        self.say(if how == Stop::Now { "stops now" } else { "stops" });
    }
}

/// See [`Fake`].
struct FakeQuiet {
    name: &'static str,
    call_sender: Sender<String>,
}

impl QuietDoor for FakeQuiet {
    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        Ok(vec![DoorPiece::new("piece").with("of", self.name)])
    }

    fn release(self: Box<Self>) {
        self.call_sender.send(format!("{} let go", self.name)).unwrap();
    }

    fn resume(self: Box<Self>) {
        self.call_sender.send(format!("{} resumes", self.name)).unwrap();
    }
}

/// Doors by name, what they show, and how quieting them ends.
fn doors(fakes: &[(&'static str, &[&str], Option<ErrorKind>)]) -> (Doors, Receiver<String>) {
    let (call_sender, receiver) = channel();
    let (sender, peer_receivers): (Vec<_>, Vec<_>) = fakes.iter().map(|_| channel()).unzip();
    let doors = Doors::default();
    for (index, (&(name, shows, outcome), peer_receiver)) in
        fakes.iter().zip(peer_receivers).enumerate()
    {
        let mut peers = sender.clone();
        peers.remove(index);
        let (call_sender, peers, peer_receiver) =
            (call_sender.clone(), Mutex::new(peers), Mutex::new(peer_receiver));
        let door = Arc::new(Fake { name, call_sender, peers, peer_receiver, outcome });
        let shows = shows.iter().map(|&name| name.to_owned()).collect();
        let plan = DoorPlan::parse("ublk").unwrap();
        let (quiet, claim) = (Mutex::default(), Mutex::default());
        doors.open.write().push(Arc::new(OpenDoor { plan, shows, door, quiet, claim }));
    }
    (doors, receiver)
}

fn sorted(receiver: &Receiver<String>) -> Vec<String> {
    let mut calls: Vec<_> = receiver.try_iter().collect();
    calls.sort();
    calls
}

const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn doors_are_quieted_side_by_side() {
    let (doors, receiver) =
        doors(&[("a", &["oak"], None), ("b", &["oak"], None), ("c", &["ash"], None)]);
    doors.quiesce(PATIENCE).unwrap();
    assert_eq!(sorted(&receiver), ["a quiet", "b quiet", "c quiet"]);
}

#[test]
fn a_door_that_cannot_be_quiet_is_named() {
    let failing = Some(ErrorKind::Unavailable);
    let (doors, receiver) = doors(&[("a", &["oak"], None), ("b", &["oak"], failing)]);
    let error = doors.quiesce(PATIENCE).unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().contains("b: ")),
        (ErrorKind::Unavailable, true),
        "{error}"
    );
    assert_eq!(doors.all().len(), 2);
    drop(sorted(&receiver));
    doors.resume_but(&[]);
    assert_eq!(sorted(&receiver), ["a resumes"], "b has resumed by itself");
}

#[test]
fn a_door_that_has_ended_is_left_behind_and_stops_no_hand_off() {
    let ended = Some(ErrorKind::Closed);
    let (doors, _hear) = doors(&[("a", &["oak"], ended), ("b", &["oak"], None)]);
    doors.quiesce(PATIENCE).unwrap();
    let handed = doors.hand_over().unwrap();
    assert_eq!(
        handed.iter().map(|piece| piece.what.as_str()).collect::<Vec<_>>(),
        ["door", "piece"]
    );
    assert_eq!(handed[1].fact("of").unwrap(), "b");
}

#[test]
fn doors_of_what_is_away_stay_quiet_and_are_left_as_by_a_killed_process() {
    let (doors, receiver) =
        doors(&[("a", &["oak"], None), ("b", &["ash"], None), ("c", &["oak", "ash"], None)]);
    doors.quiesce(PATIENCE).unwrap();
    drop(sorted(&receiver));
    doors.resume_but(&["ash"]);
    assert_eq!(sorted(&receiver), ["a resumes", "c resumes"]);
    doors.resume_but(&["ash"]);
    assert_eq!(sorted(&receiver), Vec::<String>::new(), "they are not quiet any more");
    doors.leave(&["ash"]);
    assert_eq!(
        sorted(&receiver),
        ["b let go", "c stops now"],
        "a missing answer is not waited for"
    );
    assert_eq!(doors.addresses("oak"), [("fake", "a".to_owned())]);
}

#[test]
fn a_door_that_is_slow_to_be_taken_over_and_is_lost_holds_up_no_other() {
    let (theirs, receiver) = doors(&[("a", &["oak"], None), ("b", &["oak"], None)]);
    theirs.quiesce(PATIENCE).unwrap();
    drop(sorted(&receiver));
    let handed = std::mem::take(&mut *theirs.open.write());
    let slow_first: Vec<Option<Arc<OpenDoor>>> =
        std::iter::once(None).chain(handed.into_iter().map(Some)).collect();
    let receiver = Mutex::new(receiver);
    let calls = Mutex::new(Vec::new());
    let ours = Doors::default();
    let failed = ours.take_over_with(slow_first, |door| match door {
        Some(door) => Ok(Arc::into_inner(door).expect("there is no other reference")),
        None => {
            let others = (0..2).map_while(|_| receiver.lock().recv_timeout(PATIENCE).ok());
            calls.lock().extend(others);
            Err(Error::new(ErrorKind::Unavailable, "lost"))
        }
    });
    assert_eq!(failed.len(), 1);
    calls.lock().sort();
    assert_eq!(*calls.lock(), ["a resumes", "b resumes"], "before the first is given up");
    let addresses: Vec<String> = ours.all().iter().map(|open| open.door.address()).collect();
    assert_eq!(addresses, ["a", "b"], "in their order");
}

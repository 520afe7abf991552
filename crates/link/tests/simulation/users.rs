//! The users of the target's devices in a story: initiators that come and go, each with its own
//! links.
//!
//! Invariant: a seat has one user at a time; packets of its former users may still arrive. Not
//! here: their requests (`load`), faults (`story`).

use std::ops::Range;
use std::sync::{Arc, Mutex};

use sawmill_link::carrier::{Peer, Sender};
use sawmill_link::clock::Clock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{PreSharedKey, Security};

use crate::network::{Dice, FalseSender, Network, Side, WorldClock};

/// Users at a time.
pub(crate) const USERS_MAX: usize = 3;

/// The users besides the first writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UserMix {
    /// None.
    Alone,
    /// One that only reads.
    Reader,
    /// Another writer.
    Writers,
    /// Others, which take over one after the other.
    Heirs,
}

/// What all users share.
pub(crate) struct Setting {
    pub(crate) clock: Arc<WorldClock>,
    pub(crate) network: Arc<Mutex<Network>>,
    /// Links of a user.
    pub(crate) links: usize,
    pub(crate) packet_bytes: usize,
    pub(crate) secure: bool,
    pub(crate) places: u16,
    pub(crate) place_bytes: u32,
    pub(crate) rekey_bytes: u64,
}

impl Setting {
    pub(crate) fn security(&self) -> Security {
        if self.secure {
            Security::Key(PreSharedKey::from_bytes([7; 32]))
        } else {
            Security::Insecure
        }
    }

    /// The end of a link that sends to this side.
    pub(crate) fn sender(&self, link: usize, to: Side, run: Option<u64>) -> Arc<dyn Sender> {
        Arc::new(FalseSender {
            network: Arc::clone(&self.network),
            clock: Arc::clone(&self.clock),
            to,
            link,
            packet_bytes_max: self.packet_bytes,
            run,
        })
    }
}

/// A user.
pub(crate) struct User {
    pub(crate) number: u64,
    pub(crate) seat: usize,
    pub(crate) mode: OpenMode,
    pub(crate) initiator: Arc<Initiator>,
    pub(crate) devices: Vec<RemoteDevice>,
    /// Another user takes over: requests of this one may fail from now on.
    pub(crate) leaves: bool,
    /// By device: whether another user has taken it over.
    pub(crate) barred: Vec<bool>,
    /// For how long nothing got through any of its links.
    pub(crate) cut_ns: u64,
}

impl User {
    /// A user in this seat, with all links and no device yet.
    pub(crate) fn new(
        setting: &Setting,
        number: u64,
        seat: usize,
        mode: OpenMode,
        dice: &mut Dice,
    ) -> Self {
        let mut ids = Dice::new(dice.next());
        let options = InitiatorOptions {
            name: "story".into(),
            places: setting.places,
            place_bytes: setting.place_bytes,
            timeout_s: 0,
            rekey_bytes: setting.rekey_bytes,
            ..InitiatorOptions::default()
        };
        let world: Arc<dyn Clock> = Arc::<WorldClock>::clone(&setting.clock);
        let random = Box::new(move || ids.next());
        let initiator = Initiator::new(options, setting.security(), setting.links, world, random);
        let (devices, barred) = (Vec::new(), Vec::new());
        let user =
            User { number, seat, mode, initiator, devices, leaves: false, barred, cut_ns: 0 };
        (0..setting.links).for_each(|link| user.add_route(setting, link));
        user
    }

    /// Its links among all.
    pub(crate) fn links(&self, setting: &Setting) -> Range<usize> {
        self.seat * setting.links..(self.seat + 1) * setting.links
    }

    pub(crate) fn add_route(&self, setting: &Setting, link: usize) {
        let all = self.seat * setting.links + link;
        setting.network.lock().expect("one thread").dead[all] = false;
        self.initiator.add_route(link, setting.sender(all, Side::Target, None), peer(), None);
    }

    pub(crate) fn lose_route(&self, setting: &Setting, link: usize) {
        setting.network.lock().expect("one thread").dead[self.seat * setting.links + link] = true;
        self.initiator.lose_route(link);
    }

    pub(crate) fn is_reader(&self) -> bool {
        self.mode.read_only
    }
}

pub(crate) fn peer() -> Peer {
    Peer::Ethernet([0; 6])
}

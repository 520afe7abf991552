//! The faults of a story.
//!
//! Invariant: every fault ends by itself or with the story's peace. Not here: the judge (`oracle`).

use sawmill_link::initiator::OpenMode;

use crate::network::Faults;
use crate::story::{MS, Story};
use crate::users::{USERS_MAX, UserMix};

/// Longer than a target waits for a silent initiator.
const SILENCE_NS: u64 = 130_000 * MS;

impl Story {
    pub(crate) fn choose_faults(&mut self) {
        for link in 0..self.setting.links * USERS_MAX {
            let faults = Faults {
                lose_permille: [0, 5, 100][self.dice.below(3) as usize],
                double_permille: [0, 20, 200][self.dice.below(3) as usize],
                damage_permille: [0, 5, 50][self.dice.below(3) as usize],
                full_permille: [0, 20, 300][self.dice.below(3) as usize],
                delay_ns_max: [0, MS / 10, 30 * MS][self.dice.below(3) as usize],
            };
            self.setting.network.lock().expect("one thread").faults[link] = faults;
        }
    }

    /// Causes a random fault.
    pub(crate) fn cause_fault(&mut self) {
        let who = self.dice.below(self.users.len() as u64) as usize;
        let link = self.dice.below(self.setting.links as u64) as usize;
        let kinds = if self.user_mix == UserMix::Heirs { 18 } else { 13 };
        match self.dice.below(kinds) {
            0..3 => self.cut(who, link),
            3..5 => self.kill_link(who, link),
            5..7 => self.choose_faults(),
            7..9 => self.restart(false),
            9 => {
                self.outcome.reconnections += 1;
                self.log(&format!("{} reconnects", self.users[who].number));
                self.users[who].initiator.reconnect();
            }
            10 => self.silence(),
            11 => {
                self.log("an eavesdropper replays packets");
                let (now, packets) = (self.now_ns(), self.dice.below(60));
                self.setting.network.lock().expect("one thread").replay(now, packets);
            }
            12 => self.restart(true),
            _ => self.take_over(),
        }
    }

    fn cut(&mut self, who: usize, link: usize) {
        self.outcome.partitions += 1;
        let long = self.dice.below(3000 * MS);
        self.log(&format!("link {link} of {} is cut for {} ms", self.users[who].number, long / MS));
        let until = self.now_ns() + long;
        let all = self.users[who].seat * self.setting.links + link;
        self.setting.network.lock().expect("one thread").cut_until_ns[all] = until;
    }

    fn kill_link(&mut self, who: usize, link: usize) {
        self.outcome.link_deaths += 1;
        self.log(&format!("link {link} of {} dies", self.users[who].number));
        self.users[who].lose_route(&self.setting, link);
        for _ in 0..self.dice.below(50) {
            self.step();
        }
        self.log("it comes back");
        self.users[who].add_route(&self.setting, link);
    }

    fn silence(&mut self) {
        self.outcome.partitions += 1;
        self.log("no packet arrives for longer than a target waits");
        let until = self.now_ns() + SILENCE_NS;
        self.setting.network.lock().expect("one thread").cut_until_ns.fill(until);
        while self.now_ns() < until {
            self.step();
        }
    }

    /// Restarts the target's process, or after a power cut its machine, which loses its memory.
    fn restart(&mut self, power_cut: bool) {
        self.log(if power_cut { "the power fails" } else { "the target is killed" });
        self.setting.network.lock().expect("one thread").target_run += 1;
        self.disks.iter().for_each(|disk| disk.forsaken());
        self.listen();
        self.outcome.restarts += 1;
        if power_cut {
            self.outcome.power_cuts += 1;
            self.power_cut();
        }
        self.new_target();
    }

    /// A new user takes the devices over; their former user does not know, and goes on.
    fn take_over(&mut self) {
        self.end_leavers();
        self.outcome.taken_over += 1;
        let used_seats: Vec<usize> = self.users.iter().map(|user| user.seat).collect();
        let seat = (0..USERS_MAX).find(|seat| !used_seats.contains(seat)).expect("a seat is free");
        self.log("a user takes over");
        self.enter(seat, OpenMode { take_over: true, ..OpenMode::default() });
    }

    /// Ends the users that were cut off.
    pub(crate) fn end_leavers(&mut self) {
        for user in self.users.extract_if(.., |user| user.leaves) {
            user.initiator.close();
        }
        self.listen();
    }
}

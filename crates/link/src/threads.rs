//! The receiving threads: one for each link of an initiator, and one for each carrier and each
//! stream of a target.
//!
//! A thread receives a burst of packets, sends what they led to in full packets, and then checks
//! the timers. A carrier that fails is opened again, with growing pauses, for as long as its
//! initiator lives; a UDP socket is used on. Of several threads at one address, the first always
//! follows the timers, and another for a second after it took a packet.
//!
//! Invariants: threads end when their owner is dropped, and are waited for. (A thread whose own
//! answer drops the owner ends after that answer.) A thread never sleeps longer than a second, and
//! one that follows the timers only a few milliseconds while something is in flight.
//!
//! Not here: what packets mean (`initiator`, `target`), sockets (`carrier`).

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::carrier::{
    Carrier, LinkAddress, Peer, SAID_NS, SharedAddress, TargetListener, Waker, reach,
};
use crate::clock::{Clock, MS, SECOND, SteadyClock};
use crate::initiator::Initiator;
use crate::source::PacketSource;
use crate::streams::{STRANGER_NS_MAX, STREAMS_MAX, Stream, Streams};
use crate::target::{Arrival, Target};

/// The longest wait while something is in flight, and the longest wait at all.
const LIVELY_WAIT_NS_MAX: u64 = 5 * MS;
const WAIT_NS_MAX: u64 = SECOND;
/// The longest time to connect a stream, and the pauses between attempts to open a carrier. They
/// are short because nothing reports that an interface has come up, and an interface that comes and
/// goes must be caught while it is up.
const REACH_TIME_MAX: Duration = Duration::from_secs(3);
const REOPEN_PAUSE_MIN: Duration = Duration::from_millis(100);
const REOPEN_PAUSE_MAX: Duration = Duration::from_millis(250);
const _: () = assert!(REOPEN_PAUSE_MAX.as_nanos() * 10 < SAID_NS as u128);
/// The longest time for a target to learn that exports are closed.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(2);
/// The most connections in one burst.
const TOUCHED_MAX: usize = 64;

/// A stop flag, with what to wake for it.
#[derive(Default)]
struct Stop {
    stopped: AtomicBool,
    wakers: Mutex<Vec<Weak<Waker>>>,
    pause: Mutex<()>,
    resume: Condvar,
}

impl Stop {
    fn is_set(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    fn listen(&self, waker: &Arc<Waker>) {
        let mut wakers = self.wakers.lock();
        wakers.retain(|waker| waker.strong_count() > 0);
        let waker = Arc::downgrade(waker);
        // A carrier that is used on after an error has been here before.
        if !wakers.iter().any(|known| known.ptr_eq(&waker)) {
            wakers.push(waker);
        }
    }

    fn set(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wakers.lock().iter().filter_map(Weak::upgrade).for_each(|waker| waker.wake());
        let _pause = self.pause.lock();
        self.resume.notify_all();
    }

    /// Waits, or returns early if it is time to stop.
    fn pause(&self, most: Duration) {
        let mut pause = self.pause.lock();
        if !self.is_set() {
            self.resume.wait_for(&mut pause, most);
        }
    }
}

/// Threads, and how to end them.
struct Threads {
    stop: Arc<Stop>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    fn spawn(
        &mut self,
        name: String,
        run: impl FnOnce(Arc<Stop>) + Send + 'static,
    ) -> io::Result<()> {
        let stop = Arc::clone(&self.stop);
        self.threads.push(thread::Builder::new().name(name).spawn(move || run(stop))?);
        Ok(())
    }

    /// Starts a thread of a target for each carrier.
    fn spawn_receivers(
        &mut self,
        target: &Arc<Target>,
        carriers: Vec<Carrier>,
        address: &LinkAddress,
        shared: &Arc<SharedAddress>,
    ) -> io::Result<()> {
        for (index, carrier) in carriers.into_iter().enumerate() {
            let (target, shared) = (Arc::clone(target), Arc::clone(shared));
            let address = address.clone();
            let timers = if index == 0 { Timers::Always } else { Timers::AfterPackets };
            self.spawn(format!("link-{address}"), move |stop| {
                let receiving = Receiving { target: &target, stop: &stop, timers };
                receiving.keep_listening(carrier, &address, &shared);
            })?;
        }
        Ok(())
    }

    fn include_current(&self) -> bool {
        let current = thread::current().id();
        self.threads.iter().any(|thread| thread.thread().id() == current)
    }

    /// Stops the threads and waits for all of them, except the calling one.
    fn end(&mut self) {
        self.stop.set();
        for thread in self.threads.drain(..) {
            if sawmill_sys::join_unless_own(thread).is_err() {
                tracing::error!("link: a receiving thread died");
            }
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.end();
    }
}

/// The threads of an initiator. Dropping this closes its exports and ends the threads; after that,
/// its devices answer nothing.
pub struct InitiatorThreads {
    initiator: Arc<Initiator>,
    threads: Threads,
}

impl InitiatorThreads {
    /// Starts `initiator` with these links, in this order.
    pub fn new(initiator: Arc<Initiator>, addresses: &[LinkAddress]) -> io::Result<Self> {
        let mut threads = Threads { stop: Arc::default(), threads: Vec::new() };
        for (index, address) in addresses.iter().enumerate() {
            let (initiator, address) = (Arc::clone(&initiator), address.clone());
            threads.spawn(format!("link-{index}"), move |stop| {
                keep_link(&initiator, index, &address, &stop);
            })?;
        }
        Ok(InitiatorThreads { initiator, threads })
    }

    /// The initiator.
    #[must_use]
    pub fn initiator(&self) -> &Arc<Initiator> {
        &self.initiator
    }
}

impl Drop for InitiatorThreads {
    fn drop(&mut self) {
        let closing = self.initiator.close_exports();
        // A thread of ours would wait for answers that it must receive itself.
        let is_own = self.threads.include_current();
        if self.initiator.status().connected && !is_own {
            let start = Instant::now();
            let remaining = || LEAVE_TIME_MAX.saturating_sub(start.elapsed());
            // Without an answer in time, the target drops us after its silence limit, as if we had
            // died.
            closing.iter().for_each(|answer| drop(answer.wait(remaining())));
        }
        self.initiator.close();
    }
}

/// How long a thread may wait: until `deadline_ns`, and only briefly while something is in flight.
fn wait_of(deadline_ns: u64, lively: bool) -> Duration {
    let most = if lively { LIVELY_WAIT_NS_MAX } else { WAIT_NS_MAX };
    Duration::from_nanos(deadline_ns.saturating_sub(SteadyClock.now_ns()).min(most))
}

/// How long a receiver may look for packets before it sleeps: not for strangers.
fn spin_time(most: Duration, is_lively: bool) -> Duration {
    if is_lively { most } else { Duration::ZERO }
}

/// Opens the carrier of link `index`, again after each failure, and receives.
fn keep_link(initiator: &Arc<Initiator>, index: usize, address: &LinkAddress, stop: &Stop) {
    let mut pause = REOPEN_PAUSE_MIN;
    let mut last_message = String::new();
    while !stop.is_set() {
        let error = match reach(address, REACH_TIME_MAX) {
            Ok((carrier, peer)) => {
                if !last_message.is_empty() {
                    tracing::info!("link {index} ({address}): reopened");
                    last_message.clear();
                }
                pause = REOPEN_PAUSE_MIN;
                receive_for_initiator(initiator, index, carrier, peer, stop)
            }
            Err(error) => error,
        };
        initiator.lose_route(index);
        if stop.is_set() {
            return;
        }
        if last_message != error.to_string() {
            last_message = error.to_string();
            tracing::warn!("link {index} ({address}): {last_message}");
        }
        stop.pause(pause);
        pause = (pause * 2).min(REOPEN_PAUSE_MAX);
        initiator.tick();
    }
}

fn receive_for_initiator(
    initiator: &Arc<Initiator>,
    index: usize,
    mut carrier: Carrier,
    peer: Peer,
    stop: &Stop,
) -> io::Error {
    let waker = carrier.receiver.waker();
    stop.listen(&waker);
    initiator.add_waker(index, Arc::clone(&waker));
    initiator.add_route(index, Arc::clone(&carrier.sender), peer, Some(waker));
    while !stop.is_set() {
        let is_lively = initiator.is_lively();
        let wait = wait_of(initiator.deadline_ns(), is_lively);
        carrier.receiver.set_spin_time_max(spin_time(initiator.spin_time_max(), is_lively));
        let mut has_begun = false;
        let woken = carrier.receiver.receive(
            Some(wait),
            initiator.is_blocked(index),
            &mut |peer, packet| {
                if !std::mem::replace(&mut has_begun, true) {
                    initiator.begin_burst();
                }
                initiator.receive(peer, packet);
            },
        );
        match has_begun {
            true => initiator.end_burst(),
            false => initiator.tick(),
        }
        if let Err(error) = woken {
            return error;
        }
    }
    io::Error::other("stopped on request")
}

/// The threads of a target. Dropping this ends them and the target's connections.
pub struct Listener {
    target: Arc<Target>,
    threads: Threads,
    /// Accepted streams, which have threads of their own.
    streams: Arc<Mutex<Streams<Threads>>>,
    addresses: Vec<String>,
}

impl Listener {
    /// Makes `target` reachable at these addresses, with this many receiving threads for each UDP
    /// or Ethernet one.
    pub fn new(
        target: Arc<Target>,
        addresses: &[LinkAddress],
        receivers: usize,
    ) -> io::Result<Self> {
        let mut threads = Threads { stop: Arc::default(), threads: Vec::new() };
        let streams: Arc<Mutex<Streams<Threads>>> = Arc::default();
        let mut reachable_addresses = Vec::new();
        for address in addresses {
            let shared_address = Arc::new(SharedAddress::new(address.clone(), receivers));
            match shared_address.listen()? {
                TargetListener::Packets(carriers) => {
                    reachable_addresses.push(address.to_string());
                    threads.spawn_receivers(&target, carriers, address, &shared_address)?;
                }
                TargetListener::Streams(listener) => {
                    let local = listener.local()?;
                    reachable_addresses.push(format!("tcp:{local}"));
                    let (target, streams) = (Arc::clone(&target), Arc::clone(&streams));
                    let waker = listener.waker();
                    threads.stop.listen(&waker);
                    threads.spawn(format!("link-{address}"), move |stop| {
                        let _waker = waker;
                        accept(&target, &listener, &streams, &stop);
                    })?;
                }
            }
        }
        Ok(Listener { target, threads, streams, addresses: reachable_addresses })
    }

    /// The addresses where it is reachable.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// The target.
    #[must_use]
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.target.close();
        self.threads.end();
        self.streams.lock().clear();
        // Also ends connections that were made again before the threads ended. Devices may be
        // closed once the target is gone.
        self.target.close();
    }
}

fn accept(
    target: &Arc<Target>,
    listener: &crate::carrier::StreamListener,
    streams: &Mutex<Streams<Threads>>,
    stop: &Stop,
) {
    while !stop.is_set() {
        let accepted = listener.accept(Some(Duration::from_nanos(WAIT_NS_MAX)));
        let mut streams = streams.lock();
        streams.retain(|threads| threads.threads.iter().any(|thread| !thread.is_finished()));
        match accepted {
            Ok(Some((sender, receiver, from))) => {
                let source = PacketSource::of_ip(from.ip());
                let Ok(evicted_stream) = streams.make_room(source) else {
                    tracing::debug!(
                        "link: {STREAMS_MAX} streams are open; refused one from {from}"
                    );
                    continue;
                };
                // It is a stranger's stream, so its thread is not in a device, and ends
                // immediately.
                drop(evicted_stream);
                let is_known = Arc::new(AtomicBool::new(false));
                let mut carrier =
                    Carrier { sender: Arc::new(sender), receiver: Box::new(receiver) };
                let target = Arc::clone(target);
                let mut threads = Threads { stop: Arc::default(), threads: Vec::new() };
                let thread_is_known = Arc::clone(&is_known);
                let spawned = threads.spawn(format!("link-{from}"), move |stop| {
                    let receiving =
                        Receiving { target: &target, stop: &stop, timers: Timers::Always };
                    let error = receiving.receive(&mut carrier, Some(&thread_is_known));
                    tracing::debug!("link: stream from {from}: {error}");
                });
                match spawned {
                    Ok(()) => streams.push(Stream { threads, source, is_known }),
                    Err(error) => {
                        tracing::error!(
                            "link: cannot start a thread for a stream from {from}: {error}"
                        )
                    }
                }
            }
            Ok(None) => {}
            Err(error) => {
                drop(streams);
                tracing::warn!("link: cannot accept a stream: {error}");
                stop.pause(REOPEN_PAUSE_MIN);
            }
        }
    }
}

/// Which timers end the waits of a thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Timers {
    Always,
    /// All timers, but only for a second after it took a packet. The first thread of the address
    /// follows them always.
    AfterPackets,
}

/// A receiving thread of a target.
struct Receiving<'a> {
    target: &'a Arc<Target>,
    stop: &'a Stop,
    timers: Timers,
}

impl Receiving<'_> {
    /// Receives, and opens the carrier again when it fails: an interface that was down may come
    /// back.
    fn keep_listening(&self, carrier: Carrier, address: &LinkAddress, shared: &SharedAddress) {
        let (mut carrier, mut pause) = (Some(carrier), REOPEN_PAUSE_MIN);
        while !self.stop.is_set() {
            let error = match &mut carrier {
                Some(open) => {
                    pause = REOPEN_PAUSE_MIN;
                    let error = self.receive(open, None);
                    if shared.reopens() {
                        carrier = None;
                    }
                    error
                }
                None => match shared.listen_again() {
                    Ok(Some(again)) => {
                        shared.recovered();
                        tracing::info!("link {address}: reopened");
                        carrier = Some(again);
                        continue;
                    }
                    Ok(None) => return,
                    Err(error) => error,
                },
            };
            if self.stop.is_set() {
                return;
            }
            let message = error.to_string();
            if shared.is_news(&message, SteadyClock.now_ns()) {
                tracing::warn!("link {address}: {message}; trying again");
            }
            self.stop.pause(pause);
            pause = (pause * 2).min(REOPEN_PAUSE_MAX);
        }
    }

    fn wait(&self, is_lively: bool) -> Duration {
        match self.timers {
            Timers::AfterPackets if !is_lively => Duration::from_nanos(WAIT_NS_MAX),
            _ => wait_of(self.target.deadline_ns(), is_lively),
        }
    }

    /// Receives until the carrier fails or it is time to stop. A stranger's stream has limited
    /// time; `is_known` is set when it is no longer a stranger's.
    fn receive(&self, carrier: &mut Carrier, is_known: Option<&AtomicBool>) -> io::Error {
        let Receiving { target, stop, .. } = *self;
        let began_at_ns = SteadyClock.now_ns();
        let waker = carrier.receiver.waker();
        stop.listen(&waker);
        let sender = Arc::clone(&carrier.sender);
        let mut touched: Vec<u64> = Vec::with_capacity(TOUCHED_MAX);
        let (mut lively_until_ns, mut next_tick_at_ns) = (0, 0);
        while !stop.is_set() {
            let is_lively = SteadyClock.now_ns() < lively_until_ns;
            carrier.receiver.set_spin_time_max(spin_time(target.spin_time_max(), is_lively));
            let blocked = target.is_blocked(&sender);
            let mut is_taken = false;
            let on_packet = &mut |peer: &Peer, packet: &mut [u8]| {
                if let Some(connection) = Target::connection_of(packet)
                    && !touched.contains(&connection)
                    && touched.len() < TOUCHED_MAX
                    && target.begin_burst(connection)
                {
                    touched.push(connection);
                }
                let from = Arrival { sender: &sender, waker: Some(&waker), peer };
                is_taken |= target.receive(from, packet);
            };
            let woken = carrier.receiver.receive(Some(self.wait(is_lively)), blocked, on_packet);
            let now = SteadyClock.now_ns();
            let is_stranger = !is_taken && lively_until_ns == 0;
            if is_stranger && is_known.is_some() && now - began_at_ns > STRANGER_NS_MAX {
                touched.drain(..).for_each(|connection| target.end_burst(connection));
                return io::Error::other("it carried no packet of any connection");
            }
            // Anyone can repeat a packet, so only one that was taken says whose thread this is.
            if is_taken {
                is_known.iter().for_each(|is_known| is_known.store(true, Ordering::Relaxed));
                lively_until_ns = now + SECOND;
            }
            touched.drain(..).for_each(|connection| target.end_burst(connection));
            // However busy one connection is, the timers of the others must run.
            if woken.as_ref().is_ok_and(|woken| woken.packets == 0) || now >= next_tick_at_ns {
                next_tick_at_ns = now + LIVELY_WAIT_NS_MAX;
                target.tick();
            }
            if let Err(error) = woken {
                return error;
            }
        }
        io::Error::other("stopped on request")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carrier::{Burst, Receiver, Sender, StreamListener, WakeReasons};
    use crate::session::{Security, unguessable};
    use crate::target::TargetOptions;

    /// Fails once, and then ends its thread.
    struct FailingReceiver {
        calls: Arc<Mutex<u32>>,
        stop: Arc<Stop>,
        waker: Arc<Waker>,
    }

    impl Receiver for FailingReceiver {
        fn receive(
            &mut self,
            _: Option<Duration>,
            _: bool,
            _: &mut dyn FnMut(&Peer, &mut [u8]),
        ) -> io::Result<WakeReasons> {
            let mut calls = self.calls.lock();
            *calls += 1;
            if *calls == 1 {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            self.stop.set();
            Ok(WakeReasons::default())
        }

        fn set_spin_time_max(&mut self, _: Duration) {}

        fn waker(&self) -> Arc<Waker> {
            Arc::clone(&self.waker)
        }
    }

    struct SilentSender;

    impl Sender for SilentSender {
        fn packet_bytes_max(&self, _: &Peer) -> usize {
            1500
        }

        fn send(&self, _: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
            Ok(burst.len() - from)
        }
    }

    fn target() -> Arc<Target> {
        let options = TargetOptions::default();
        Target::new(options, Security::Insecure, Arc::new(SteadyClock), unguessable())
    }

    fn waker() -> Arc<Waker> {
        let any = ([127, 0, 0, 1], 0).into();
        StreamListener::open(any, None).expect("a listener").waker()
    }

    #[test]
    fn a_udp_socket_whose_receiver_failed_is_used_on_since_links_may_send_by_it() {
        // Nobody can open it.
        let address: LinkAddress = "udp:192.0.2.1:9".parse().expect("an address");
        let shared = SharedAddress::new(address.clone(), 2);
        let (stop, calls) = (Arc::<Stop>::default(), Arc::<Mutex<u32>>::default());
        let receiver = FailingReceiver { calls: calls.clone(), stop: stop.clone(), waker: waker() };
        let carrier = Carrier { sender: Arc::new(SilentSender), receiver: Box::new(receiver) };
        let receiving = Receiving { target: &target(), stop: &stop, timers: Timers::Always };
        let late_stop = Arc::clone(&stop);
        thread::spawn(move || {
            thread::sleep(Duration::from_secs(20));
            late_stop.set();
        });
        receiving.keep_listening(carrier, &address, &shared);
        assert_eq!(*calls.lock(), 2);
    }
}

//! Each list of waiting work says what bounds it: channels, queues, and shared lists.
//!
//! Invariant: a shared list of a name that no rule knows is a fault until it says "Bounded by"
//! above its field, or stands in [`NO_QUEUES`] with its reason.
//!
//! Not here: the limits that doors state (`rules`).

use super::rules::production;
use super::tidy::none;

/// What a field that is a queue of waiting work looks like, shared or not.
const QUEUES: [&str; 15] = [
    "VecDeque<",
    "FlaggedList<",
    "Vec<Request>",
    "Vec<Waiter>",
    "Vec<Waiting>",
    "Vec<FlushWaiter>",
    "Vec<StoredWaiter>",
    "Vec<SyncSender<",
    "Vec<Event>",
    "Vec<Ordered>",
    "Vec<(Duration, Job)>",
    "Map<u64, Waiting>",
    "Map<u64, Push>",
    "Map<u64, Reading>",
    "Map<u64, (Request",
];

/// Shared lists that are no queues of work: the file, the field, and what they hold.
const NO_QUEUES: [(&str, &str, &str); 17] = [
    ("crates/device/src/memory.rs", "shards", "the pages of a disk"),
    ("crates/driver/src/client/lane.rs", "open", "the commands of a lane, as many as its queue"),
    ("crates/frontend/src/fuse/channel.rs", "spares", "a buffer for each worker"),
    ("crates/frontend/src/fuse/server.rs", "workers", "the threads of a door"),
    ("crates/frontend/src/ublk/worker.rs", "workers", "the threads of a process"),
    ("crates/link/src/initiator/places.rs", "free", "the places of a connection"),
    ("crates/link/src/target/mod.rs", "connections", "at most `connections_max`"),
    ("crates/link/src/target/served.rs", "open_exports", "the exports of a connection"),
    ("crates/link/src/threads.rs", "wakers", "the threads of an end"),
    ("crates/sawmill/src/admin/mod.rs", "sockets", "the addresses of the configuration"),
    ("crates/doors/src/lib.rs", "open", "the doors of a process, opened by its user"),
    ("crates/sawmill/src/driving/child.rs", "alive", "the processes of one driver"),
    ("crates/sys/src/arena.rs", "free", "the gaps of a memory of fixed size"),
    ("crates/sys/src/attached.rs", "lent", "disjoint ranges of a memory of fixed size"),
    ("crates/volume/src/cache/mod.rs", "owners", "the volumes whose frames a cache has"),
    ("crates/volume/src/engine/mailbox.rs", "list", "what the fields of `FlaggedList` say"),
    ("crates/volume/src/read/ahead.rs", "streams", "the newest readers, a fixed number"),
];

/// The name and type of the field that a line declares.
fn field(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line,
    };
    let (name, kind) = line.strip_suffix(',')?.split_once(": ")?;
    let is_name = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    is_name.then_some((name, kind))
}

/// Whether the comment right above a line says what bounds the list in it.
fn is_bounded(lines: &[String], at: usize) -> bool {
    let comment = lines[..at].iter().rev().take_while(|above| above.trim().starts_with("//"));
    comment.into_iter().any(|above| above.contains("ounded by"))
}

/// Whether a type is a list behind a lock.
fn is_shared_list(kind: &str) -> bool {
    let lists = ["Vec<", "Deque<", "Map<", "Set<", "Heap<"];
    ["Mutex<", "RwLock<"].iter().any(|lock| {
        kind.split_once(lock).is_some_and(|(_, held)| lists.iter().any(|list| held.contains(list)))
    })
}

#[test]
fn every_channel_has_a_bound_or_says_what_bounds_it() {
    let mut faults = Vec::new();
    for (path, lines) in production() {
        for (at, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let is_unbounded = (code.contains("channel()") || code.contains("mpsc::channel::<"))
                && !code.contains("oneshot");
            let above = &lines[at.saturating_sub(2)..at];
            if is_unbounded && !above.iter().any(|above| above.contains("ounded by")) {
                faults.push(format!("{path}:{}: {}", at + 1, line.trim()));
            }
        }
    }
    none(&faults);
}

#[test]
fn every_list_of_waiting_work_says_what_bounds_it() {
    let (mut faults, mut known) = (Vec::new(), Vec::new());
    for (path, lines) in production() {
        for (at, line) in lines.iter().enumerate() {
            let Some((name, kind)) = field(line) else { continue };
            let is_queue = QUEUES.iter().any(|queue| kind.contains(queue));
            if !(is_queue || is_shared_list(kind)) || is_bounded(&lines, at) {
                continue;
            }
            let is_known =
                |(file, field, _): &&(&str, &str, &str)| (*file, *field) == (&*path, name);
            match NO_QUEUES.iter().find(is_known) {
                Some(row) if !is_queue => known.push(row),
                _ => faults.push(format!("{path}:{}: {}", at + 1, line.trim())),
            }
        }
    }
    let gone = NO_QUEUES.iter().filter(|row| !known.contains(row));
    faults.extend(gone.map(|(file, field, _)| format!("{file} has no such list `{field}`")));
    none(&faults);
}

#[test]
fn a_shared_list_is_found_whatever_it_holds() {
    let shared = |line: &str| field(line).is_some_and(|(_, kind)| is_shared_list(kind));
    assert!(shared("    pub(super) roster: Mutex<Vec<Arc<Queue>>>,"));
    assert!(shared("    held: Arc<RwLock<BTreeMap<u64, Claim>>>,"));
    assert!(!shared("    state: Mutex<State>,") && !shared("    names: Vec<Mutex<State>>,"));
    assert_eq!(field("    pub count_max: usize,"), Some(("count_max", "usize")));
}

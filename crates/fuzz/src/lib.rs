//! The fuzz targets: one function per place where Sawmill reads bytes from outside.
//!
//! Invariants: each ends, uses no more memory than its input justifies, and checks every promise
//! about accepted input.
//!
//! The targets are used twice: by `tests/` (the corpora and seeded mutations of them, in every
//! `make test`) and by `libfuzzer/` (guided by coverage, for any length of time: `make fuzz`). Each
//! runs its input as it is, and again with lengths, counts and checksums corrected ([`mend`]),
//! because blind mutations never get past a checksum.
//!
//! Modules: [`objects`] (the decoders of `crates/format`, the link's apart), [`journal_image`] (a
//! journal's bytes to a scan), [`store_image`] (a store's objects to the stored part of recovery),
//! [`store_answers`] (a cloud's HTTP to the store's client), [`nbd`] (a client's bytes to a
//! server), [`hand_over`] and [`door_facts`] (pieces of doors from another process), [`vhost`] (a
//! guest's memory and a frontend's bytes to a vhost-user door), [`nbd_client`] (a server's bytes to
//! the client), [`link`] (a peer's packets to their decoders), [`link_peer`] (the same to a target
//! and to an initiator), [`stream`] (a peer's TCP stream), [`machines`] (the file of a target's
//! machines), [`text`] (sizes, durations, URLs, addresses), [`kernel`] (requests by FUSE and ublk),
//! [`driver`] (packets and chunks of drivers), [`driver_host`] (a driver's packets to a host),
//! [`image_headers`] (disk images to import), [`trace`] (block traces of other tools),
//! [`write_log`] (recordings of other programs to the crash checker), [`mutate`] (changes by seed).
//!
//! Not here: what the engine does with good input.
#![forbid(unsafe_code)]

mod door_facts;
mod driver;
mod driver_host;
mod hand_over;
mod image_headers;
mod journal_image;
mod kernel;
mod link;
mod link_peer;
mod machines;
mod mend;
pub mod mutate;
mod nbd;
mod nbd_client;
mod objects;
mod store_answers;
pub mod store_image;
mod stream;
mod text;
mod trace;
mod vhost;
mod write_log;

/// One place where bytes come from outside.
pub struct Target {
    /// Its name, and that of its folder in `corpus/`.
    pub name: &'static str,
    /// Takes any bytes; panics when something does not hold.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 32] = [
    Target { name: "segment", run: objects::segment },
    Target { name: "checkpoint", run: objects::checkpoint },
    Target { name: "map_part", run: objects::map_part },
    Target { name: "small_objects", run: objects::small },
    Target { name: "journal_image", run: journal_image::run },
    Target { name: "store_image", run: store_image::run },
    Target { name: "store_answers", run: store_answers::run },
    Target { name: "nbd_handshake", run: nbd::handshake },
    Target { name: "nbd_transmission", run: nbd::transmission },
    Target { name: "vhost_messages", run: vhost::messages },
    Target { name: "vhost_ring", run: vhost::ring },
    Target { name: "hand_over", run: hand_over::run },
    Target { name: "door_facts", run: door_facts::run },
    Target { name: "mount_holder", run: door_facts::mount_holder },
    Target { name: "link_packet", run: link::packet },
    Target { name: "link_greeting", run: link::greeting },
    Target { name: "link_control", run: link::controls },
    Target { name: "link_target", run: link_peer::target },
    Target { name: "link_initiator", run: link_peer::initiator },
    Target { name: "link_stream", run: stream::run },
    Target { name: "link_machines", run: machines::run },
    Target { name: "packed_write", run: link::packed },
    Target { name: "text", run: text::run },
    Target { name: "fuse_request", run: kernel::fuse },
    Target { name: "ublk_request", run: kernel::ublk },
    Target { name: "driver_packet", run: driver::packet },
    Target { name: "driver_chunk", run: driver::chunk },
    Target { name: "driver_host", run: driver_host::run },
    Target { name: "nbd_client", run: nbd_client::run },
    Target { name: "image_headers", run: image_headers::run },
    Target { name: "trace", run: trace::run },
    Target { name: "write_log", run: write_log::run },
];

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
//! machines, and a key file), [`server`] (requests to the admin server, hand-off messages,
//! configuration files), [`text`] (sizes, durations, URLs, addresses), [`kernel`] (requests by FUSE
//! and ublk), [`driver`] (packets and chunks of drivers), [`driver_host`] (a driver's packets to a
//! host), [`image_headers`] (disk images to import), [`trace`] (block traces of other tools),
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
mod server;
mod store_answers;
pub mod store_image;
mod stream;
mod text;
mod trace;
mod vhost;
mod write_log;

/// One place where bytes come from outside.
pub struct FuzzTarget {
    /// Its name, and that of its folder in `corpus/`.
    pub name: &'static str,
    /// Takes any bytes; panics when something does not hold.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [FuzzTarget; 39] = [
    FuzzTarget { name: "segment", run: objects::segment },
    FuzzTarget { name: "checkpoint", run: objects::checkpoint },
    FuzzTarget { name: "map_part", run: objects::map_part },
    FuzzTarget { name: "small_objects", run: objects::small },
    FuzzTarget { name: "journal_image", run: journal_image::run },
    FuzzTarget { name: "store_image", run: store_image::run },
    FuzzTarget { name: "store_answers", run: store_answers::run },
    FuzzTarget { name: "nbd_handshake", run: nbd::handshake },
    FuzzTarget { name: "nbd_transmission", run: nbd::transmission },
    FuzzTarget { name: "vhost_messages", run: vhost::messages },
    FuzzTarget { name: "vhost_ring", run: vhost::ring },
    FuzzTarget { name: "hand_over", run: hand_over::run },
    FuzzTarget { name: "door_facts", run: door_facts::run },
    FuzzTarget { name: "mount_holder", run: door_facts::mount_holder },
    FuzzTarget { name: "link_packet", run: link::packet },
    FuzzTarget { name: "link_greeting", run: link::greeting },
    FuzzTarget { name: "link_control", run: link::controls },
    FuzzTarget { name: "link_target", run: link_peer::target },
    FuzzTarget { name: "link_initiator", run: link_peer::initiator },
    FuzzTarget { name: "link_stream", run: stream::run },
    FuzzTarget { name: "link_machines", run: machines::run },
    FuzzTarget { name: "key_file", run: machines::key_file },
    FuzzTarget { name: "ethernet_frame", run: link::frame },
    FuzzTarget { name: "packed_write", run: link::packed },
    FuzzTarget { name: "text", run: text::run },
    FuzzTarget { name: "fuse_request", run: kernel::fuse },
    FuzzTarget { name: "ublk_request", run: kernel::ublk },
    FuzzTarget { name: "driver_packet", run: driver::packet },
    FuzzTarget { name: "driver_chunk", run: driver::chunk },
    FuzzTarget { name: "driver_host", run: driver_host::run },
    FuzzTarget { name: "nbd_client", run: nbd_client::run },
    FuzzTarget { name: "image_headers", run: image_headers::run },
    FuzzTarget { name: "trace", run: trace::run },
    FuzzTarget { name: "write_log", run: write_log::run },
    FuzzTarget { name: "admin_request", run: server::admin_request },
    FuzzTarget { name: "control_request", run: server::control_request },
    FuzzTarget { name: "control_answer", run: server::control_answer },
    FuzzTarget { name: "hand_off_message", run: server::hand_off_message },
    FuzzTarget { name: "config_file", run: server::config_file },
];

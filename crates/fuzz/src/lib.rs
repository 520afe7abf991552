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
//! [`nbd`] (a client's bytes to a server), [`hand_over`] (pieces of doors from another process),
//! [`vhost`] (a guest's memory and a frontend's bytes to a vhost-user door), [`nbd_client`] (a
//! server's bytes to the client), [`link`] (a peer's packets to their decoders), [`link_peer`] (the
//! same to a target and to an initiator), [`text`] (sizes, durations and URLs), [`kernel`]
//! (requests by FUSE and ublk), [`driver`] (packets of drivers), [`image_headers`] (disk images to
//! import), [`write_log`] (recordings of other programs to the crash checker), [`mutate`] (changes
//! by seed).
//!
//! Not here: what the engine does with good input.
#![forbid(unsafe_code)]

mod driver;
mod hand_over;
mod image_headers;
mod journal_image;
mod kernel;
mod link;
mod link_peer;
mod mend;
pub mod mutate;
mod nbd;
mod nbd_client;
mod objects;
pub mod store_image;
mod text;
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
pub const TARGETS: [Target; 24] = [
    Target { name: "segment", run: objects::segment },
    Target { name: "checkpoint", run: objects::checkpoint },
    Target { name: "map_part", run: objects::map_part },
    Target { name: "small_objects", run: objects::small },
    Target { name: "journal_image", run: journal_image::run },
    Target { name: "store_image", run: store_image::run },
    Target { name: "nbd_handshake", run: nbd::handshake },
    Target { name: "nbd_transmission", run: nbd::transmission },
    Target { name: "vhost_messages", run: vhost::messages },
    Target { name: "vhost_ring", run: vhost::ring },
    Target { name: "hand_over", run: hand_over::run },
    Target { name: "link_packet", run: link::packet },
    Target { name: "link_greeting", run: link::greeting },
    Target { name: "link_control", run: link::controls },
    Target { name: "link_target", run: link_peer::target },
    Target { name: "link_initiator", run: link_peer::initiator },
    Target { name: "packed_write", run: link::packed },
    Target { name: "text", run: text::run },
    Target { name: "fuse_request", run: kernel::fuse },
    Target { name: "ublk_request", run: kernel::ublk },
    Target { name: "driver_packet", run: driver::packet },
    Target { name: "nbd_client", run: nbd_client::run },
    Target { name: "image_headers", run: image_headers::run },
    Target { name: "write_log", run: write_log::run },
];

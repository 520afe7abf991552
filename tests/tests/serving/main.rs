//! Disks of one server with an honest store: doors, commands, clients, hand-offs.
//!
//! Not here: what needs a machine to itself (`idle`, `torture`, `verify_crash` and others have
//! programs of their own).

mod bench_replay;
mod collect;
mod commands;
mod cuts;
mod database;
mod discard;
mod doors;
mod doors_moved;
mod file_systems;
mod handoff;
mod handoff_midway;
mod hostile_clients;
mod import_export;
mod import_hostile;
mod lifecycle;
mod memory;
mod nbd_client;
mod real_clients;
mod replicate;
mod resize_rename;
mod simulate;
mod warming;

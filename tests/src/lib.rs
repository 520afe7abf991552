//! The harness of the black-box tests: it starts the real binary, drives it as its users do, and
//! checks what is left after a crash.
//!
//! Modules: `machine` (what this machine can do, running programs, waiting for a condition),
//! `store` (a folder, a MinIO of our own or a liar), `dishonest` (the liar), `proxy` (faults
//! between the server and its store), `test_bed` (one simulated machine: its store, its state, its
//! commands), `server` (a running `sawmill serve`), `successor` (programs that take over from it,
//! or pretend to), `bad_disk` (a journal disk that fails), `load` (a stamped load that can be cut
//! off at any moment), `bridge` (a file system on a volume), `postgres` (a database in a folder),
//! `follower` (a copier that follows), `linked` (both ends of a link), `driven` (a device whose
//! driver is another program), `examples` (the drivers that every language has), `compiled`
//! (programs in C), `torture` (kills, faults, losses, copies, clocks, containers and rivals without
//! end). From the crash checker (`crates/verify`): `nbd` (a client that pipelines), `stamp` (blocks
//! that identify their write, and the judge of crash images).
//!
//! Not here: the tests; each behavior is one file in `tests/`. The only crate of the product that
//! is used here is the crash checker, which, like a user, sees devices only through their doors. Of
//! the tests only `stores/contract` uses another one: the store's client against a real server.
#![forbid(unsafe_code)]

pub mod bad_disk;
pub mod bridge;
pub mod compiled;
pub mod dishonest;
pub mod driven;
pub mod examples;
pub mod follower;
pub mod golang;
pub mod linked;
pub mod load;
pub mod machine;
pub mod postgres;
pub mod proxy;
pub mod server;
pub mod store;
pub mod successor;
pub mod test_bed;
pub mod torture;

pub use sawmill_verify::{nbd, stamp};

/// Makes one test per store of each named function, which takes a [`store::StoreUnderTest`].
///
/// `on_each_store!(a, b)` gives `folder::a`, `folder::b`, `minio::a` and `minio::b`.
#[macro_export]
macro_rules! on_each_store {
    ($($name:ident),+ $(,)?) => {
        mod folder {
            $(#[test]
            fn $name() {
                super::$name(&$crate::store::folder());
            })+
        }
        mod minio {
            $(#[test]
            fn $name() {
                super::$name(&$crate::store::minio());
            })+
        }
    };
}

/// Returns from a test, counted as skipped, if this machine cannot run it.
#[macro_export]
macro_rules! requires {
    ($ability:expr) => {
        if let Err(why) = $ability {
            $crate::machine::skip(&why);
            return;
        }
    };
}

//! The contract of a block device, numbered. Each clause has a test in `conformance`. That `submit`
//! never blocks on I/O (D1) and that `geometry` is cheap (D10) no suite can show. What a flush
//! survives (D4) and what a restart finds (D8) each durable device tests itself. `NbdDevice` and
//! `Plain` answer a change only after what is behind them did, and leave both to it. `Cache` and
//! `Batch` answer before that; their tests compare what is behind them with a model:
//!
//! - **D4** `Volume`:
//!   `power_cut::flushed_writes_survive_power_cuts_and_the_volume_is_a_cut`,
//!   `life::flushed_writes_survive_the_loss_of_memory`,
//!   `life::stored_flushes_survive_the_loss_of_the_machine`
//! - **D4** `FileDevice`:
//!   `file_device::a_flush_and_a_write_with_fua_sync_the_file`,
//!   `file_device::a_sync_that_failed_is_never_tried_again`
//! - **D4** `Target`:
//!   `worlds::no_write_is_lost_or_done_again_and_nothing_hangs_whatever_the_network_does`,
//!   `reservations::a_flush_whose_failure_was_lost_does_not_succeed_at_the_next_target`
//! - **D4** `Cache`:
//!   `model::half_a_million_requests_agree_with_a_vector_of_bytes`
//! - **D4** `Batch`:
//!   `hazards::each_read_flush_and_final_byte_agrees_with_the_model_in_any_order`
//! - **D8** `Volume`:
//!   `real_clients::overlapping_writes_in_flight_end_the_same_for_every_reader_and_after_a_restart`
//! - **D8** `FileDevice`:
//!   `file_device::overlapping_writes_end_the_same_when_the_file_is_opened_again`
//! - **D8** `Target`:
//!   `worlds::no_write_is_lost_or_done_again_and_nothing_hangs_whatever_the_network_does`
//! - **D8** `Cache`:
//!   `model::late_answers_in_any_order_and_failures_change_nothing_about_that`
//! - **D8** `Batch`:
//!   `hazards::each_read_flush_and_final_byte_agrees_with_the_model_in_any_order`

use crate::{Geometry, Request};

/// A block device: anything that can answer requests for ranges of bytes.
///
/// # The contract
///
/// - **D1** `submit` never blocks on I/O and never panics; it consumes the request. The outcome
///   goes through the request, exactly once, on any thread, possibly before `submit` returns.
/// - **D2** A request dropped unanswered answers itself with an error of kind `Internal`. A device
///   that is dropped answers what it has taken. The last reference to a device may be dropped
///   inside an answer, on one of the device's own threads.
/// - **D3** A read returns, for every byte, the newest write completed before the read was
///   submitted, or one that overlaps the read in time. A byte never written reads as zero.
/// - **D4** A flush that completes makes every write, discard and write-zeroes *completed* before
///   the flush was submitted as durable as the device promises. A write with FUA completes only
///   when it itself is.
/// - **D5** Addresses and lengths are bytes; any in-range, non-empty range up to
///   `request_bytes_max` is accepted, aligned or not. The bytes around a write keep their values.
/// - **D6** A request that reaches past the end, has length zero (other than flush), is longer than
///   the limit, or is of an unsupported operation is answered with `Invalid` and changes nothing.
/// - **D7** A write to a read-only device is answered with `ReadOnly` and changes nothing.
/// - **D8** Of two overlapping writes, one not completed before the other was submitted, either may
///   win, but the outcome is the same for every later reader, also after a restart.
/// - **D9** A range written with zeroes reads as zeroes. A discarded range reads as zeroes or as
///   before.
/// - **D10** `geometry` is constant between two resizes and cheap to call.
/// - **D11** The answer to an allocation query covers the range exactly, in runs that are not
///   empty. A run without data reads as zeroes.
pub trait BlockDevice: Send + Sync {
    /// Size, granularity, limits and abilities.
    fn geometry(&self) -> Geometry;

    /// Takes a request and answers it through itself (D1).
    fn submit(&self, request: Request);
}

impl<D: BlockDevice + ?Sized> BlockDevice for std::sync::Arc<D> {
    fn geometry(&self) -> Geometry {
        (**self).geometry()
    }

    fn submit(&self, request: Request) {
        (**self).submit(request);
    }
}

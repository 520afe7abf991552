//! The batch layer as a holder of requests: for each queue a lane of writes and a lane of reads.
//!
//! Lane `2 q` carries the chunks, flushes and ranges of queue `q`, lane `2 q + 1` its reads.
//!
//! Invariant: a command that was fetched for a former driver is marked `again`.
//!
//! Not here: what the commands mean (`deliver`).

use std::sync::Arc;

use sawmill_device::{Error, Operation, Result};
use sawmill_sys::Arena;

use super::{Batch, Delivery, RangeCommand};
use crate::protocol::{Command, CommandKind};
use crate::request_holder::{CommandLanes, FetchState, HolderStatus, RequestHolder};

impl Batch {
    fn write_command(&self, queue: usize, delivery: Delivery) -> Option<Command> {
        let command = match delivery {
            Delivery::Chunk(chunk) => Command {
                length: chunk.length() as u64,
                offset: chunk.offset() as u64,
                entries: chunk.entries().len() as u64,
                horizon: chunk.horizon(),
                // As of now and not of the closing of the chunk: the newer it is, the more the
                // driver can forget.
                floor: self.ordinals.lock().floor(),
                ..Command::new(CommandKind::Chunk, chunk.number)
            },
            Delivery::Flush(number) => Command::new(CommandKind::Flush, number),
            Delivery::Range(RangeCommand { number, operation, address, length, no_unmap }) => {
                let is_zeroes = operation == Operation::WriteZeroes;
                let kind = if is_zeroes { CommandKind::WriteZeroes } else { CommandKind::Discard };
                Command {
                    address,
                    length,
                    no_unmap: is_zeroes && no_unmap,
                    ..Command::new(kind, number)
                }
            }
            Delivery::End => return None,
        };
        // By number, because repeated items keep theirs and new ones have higher ones.
        let again = command.number <= self.queues[queue].writes.lock().again_number;
        Some(Command { again, ..command })
    }
}

impl CommandLanes for Batch {
    fn lanes_per_queue(&self) -> usize {
        2
    }

    fn pin_thread(&self, queue: usize) {
        if self.options.tie_queues {
            self.cores.pin_thread(queue);
        }
    }

    fn memory(&self, lane: usize) -> Arc<Arena> {
        let (writes, reads) = self.memory_of(lane / 2);
        if lane.is_multiple_of(2) { writes } else { reads }
    }

    fn fetch(&self, lane: usize, commands: &mut Vec<Command>, most: usize) -> FetchState {
        let queue = lane / 2;
        if lane.is_multiple_of(2) {
            // Only the first is waited for. Whatever else is there goes in the same packet.
            let mut delivery = self.fetch_write(queue);
            while let Some(item) = delivery {
                let Some(command) = self.write_command(queue, item) else {
                    return FetchState::Ended;
                };
                commands.push(command);
                delivery = if commands.len() < most { self.fetch_write_now(queue) } else { None };
            }
        } else {
            let mut item = self.fetch_read(queue);
            while let Some(read) = item {
                let again = read.number <= self.queues[queue].reads.lock().again_number;
                commands.push(Command {
                    again,
                    address: read.address,
                    length: read.length,
                    offset: read.offset as u64,
                    ..Command::new(CommandKind::Read, read.number)
                });
                item = if commands.len() < most { self.fetch_read_now(queue) } else { None };
            }
        }
        if !commands.is_empty() {
            FetchState::Commands
        } else if self.state_cell.is_paused() {
            FetchState::Paused
        } else {
            FetchState::Ended
        }
    }

    fn answer(&self, lane: usize, number: u64, outcome: Result<()>) -> Result<()> {
        if lane.is_multiple_of(2) {
            self.acknowledge_write(lane / 2, number, outcome)
        } else {
            self.acknowledge_read(lane / 2, number, outcome)
        }
    }

    fn has_commands(&self, lane: usize) -> bool {
        let queue = &self.queues[lane / 2];
        let is_writes = lane.is_multiple_of(2);
        if is_writes {
            !queue.writes.lock().fetched.is_empty()
        } else {
            !queue.reads.lock().fetched.is_empty()
        }
    }
}

impl RequestHolder for Batch {
    fn start(&self) -> Result<()> {
        Batch::start(self)
    }

    fn pause(&self) {
        self.state_cell.pause();
        self.notify();
    }

    fn recover(&self) -> Result<()> {
        Batch::recover(self);
        Ok(())
    }

    fn begin_end(&self) {
        Batch::begin_end(self);
    }

    fn fail_waiting(&self, error: &Error) {
        Batch::fail_waiting(self, error);
    }

    fn end_now(&self, error: &Error) {
        Batch::end_now(self, error);
    }

    fn status(&self) -> HolderStatus {
        let state = Batch::state(self);
        let is_drained = Batch::is_drained(self);
        let oldest = |queue: &super::Queue| {
            let writes = queue.writes.lock().fetched.values().map(|(_, since)| *since).min();
            let reads = queue.reads.lock().fetched.values().map(|(_, _, since)| *since).min();
            writes.into_iter().chain(reads).min()
        };
        let oldest_fetched_at = self.queues.iter().filter_map(oldest).min();
        HolderStatus { state, is_drained, oldest_fetched_at }
    }
}

//! The operations of a device, and their replies. Not here: the request that carries it
//! ([`Request`](crate::Request)).

use crate::Result;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Fill the exchange's buffer with the bytes of the range.
    Read,
    /// Store the exchange's bytes at the range.
    Write,
    /// Make all completed writes durable. Address and length are zero.
    Flush,
    /// The range is no longer needed.
    Discard,
    /// Make the range read as zeroes.
    WriteZeroes,
    /// Bring the range near (a hint).
    Prefetch,
    /// Say which parts of the range hold data.
    Allocation,
}

impl Operation {
    /// Each of them, in the order of their declaration.
    pub const ALL: [Operation; 7] = [
        Operation::Read,
        Operation::Write,
        Operation::Flush,
        Operation::Discard,
        Operation::WriteZeroes,
        Operation::Prefetch,
        Operation::Allocation,
    ];
}

/// Modifiers of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Complete only when this very write is durable (force unit access).
    pub fua: bool,
    /// Write-zeroes keeps the space allocated, if the device distinguishes that.
    pub no_unmap: bool,
}

/// One run of an allocation answer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Length of the run.
    pub length: u64,
    /// Whether the run holds data; a run without data reads as zeroes.
    pub data: bool,
}

/// The reply to a successful request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done; for a read, the exchange's buffer is filled.
    Done,
    /// The allocation of the range, in address order, covering it exactly.
    Allocation(Vec<Allocation>),
}

/// How a request ended.
pub type Outcome = Result<Reply>;

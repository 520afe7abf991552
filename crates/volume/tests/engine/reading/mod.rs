//! Reads of stored data, what is fetched ahead of them, and what stays local.

mod ahead;
mod staying_local;

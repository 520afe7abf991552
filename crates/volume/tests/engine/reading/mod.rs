//! Reads of stored data, and what is fetched ahead of them.

mod ahead;

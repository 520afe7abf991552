//! Reads of stored data, what is fetched ahead of them, what warms the cache, and what stays local.

mod ahead;
mod boot_sets;
mod staying_local;
mod warming;

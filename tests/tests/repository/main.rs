//! What a machine can check of the repository itself: its rules, its words, its units.

mod arrows;
mod causes;
mod circles;
mod decoders;
mod folders;
mod lengths;
mod line_counts;
mod measured;
mod names;
mod nesting;
mod promises;
mod queues;
mod rules;
mod statics;
mod supply_chain;
mod tidy;
mod traits;
mod units;

//! What a machine can check of the repository itself: its rules, its words, its units.

mod causes;
mod circles;
mod folders;
mod lengths;
mod line_counts;
mod measured;
mod nesting;
mod rules;
mod supply_chain;
mod tidy;
mod units;

//! What a machine can check of the repository itself: its rules, its words, its units.

mod tidy;
mod units;

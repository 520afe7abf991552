pub mod object;
pub mod journal;

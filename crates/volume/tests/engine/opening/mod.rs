//! What an attach asks of the store: how often it waits, and what it makes of the answers while
//! somebody else is active.

mod round_trips;
mod undisturbed;

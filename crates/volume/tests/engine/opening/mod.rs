//! What an attach asks of the store: how often it waits, and what it makes of the answers while
//! somebody else is active; and what it leaves for later.

mod held_map;
mod round_trips;
mod undisturbed;

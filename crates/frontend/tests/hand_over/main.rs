//! What goes from one process to another when doors are handed over: messages with open files, and
//! parcels.

mod parcel;
mod passing;

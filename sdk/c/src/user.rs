//! The pointer that a program hands over with its functions, for itself.
//!
//! Invariant: it is passed on to the program's functions and nowhere else; nothing here reads what
//! it points to. Not here: the functions that get it (`driver`, `bdus`).

use std::ffi::c_void;

/// `void *user` of `sawmill.h`, `void *private_data` of `bdus.h`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserPointer(*mut c_void);

// SAFETY: the headers say that functions are called by several threads with this pointer, and
// nothing here reads through it.
unsafe impl Send for UserPointer {}
// SAFETY: a shared reference to it gives the pointer's value, which anyone may copy.
unsafe impl Sync for UserPointer {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_the_layout_of_the_pointer_in_the_headers() {
        assert_eq!(size_of::<UserPointer>(), size_of::<*mut c_void>());
        assert_eq!(align_of::<UserPointer>(), align_of::<*mut c_void>());
    }
}

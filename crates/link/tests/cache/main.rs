//! The byte-granular cache as its users and the device below see it.

#[cfg(test)]
mod below;
#[cfg(test)]
mod byte_granular;
#[cfg(test)]
mod conformance;
#[cfg(test)]
mod copies;
#[cfg(test)]
mod failures;
#[cfg(test)]
mod model;
#[cfg(test)]
mod policies;
#[cfg(test)]
mod unpack;

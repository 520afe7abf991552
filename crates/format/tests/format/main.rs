//! Tests of the formats as a reader of `docs/format/` would put them: pages, golden vectors, rules,
//! properties, and a second reader in another language; and the headers of foreign images.

#[cfg(test)]
mod boot;
#[cfg(test)]
mod encoders;
#[cfg(test)]
mod images;
#[cfg(test)]
mod link;
#[cfg(test)]
mod link_properties;
mod names;
#[cfg(test)]
mod newest;
#[cfg(test)]
mod packed;
#[cfg(test)]
mod pages;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod reader;
#[cfg(test)]
mod rules;
#[cfg(test)]
mod samples;
#[cfg(test)]
mod superblock;
#[cfg(test)]
mod vectors;

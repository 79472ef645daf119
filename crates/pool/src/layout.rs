//! What the bytes of a pool are: the on-media format, checked lines and words, and names.

pub(crate) mod contents;
pub mod format;
pub mod line;
pub mod name;
pub mod word;

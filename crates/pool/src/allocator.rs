//! Where objects lie: hosts divide the data space into chunks, and each host divides its chunks into extents.

pub(crate) mod chunks;
pub(crate) mod extents;

//! What others have published, beside what is predicted of it, and the range that follows. Figures that only `polder-dev` prints are judged
//! there.

pub mod fabrics;
pub(crate) mod fit;
pub(crate) mod margin;
pub(crate) mod published;
pub(crate) mod range;

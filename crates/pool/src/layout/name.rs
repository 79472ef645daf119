//! Names of objects: POSIX-like, hashed to 128 bits.

use std::fmt;

use xxhash_rust::xxh3::xxh3_128;

use crate::PoolError;

/// The longest name in bytes.
pub const MAX_NAME_BYTES: usize = 255;

/// A name that an object may have: absolute, in parts that are neither empty nor `.` or `..`, without control characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a>(&'a str);

impl<'a> Name<'a> {
    /// Checks `text`.
    ///
    /// # Errors
    /// [`PoolError::Name`] with what is wrong.
    pub fn parse(text: &'a str) -> Result<Self, PoolError> {
        let refuse = |why| Err(PoolError::Name { name: text.chars().take(300).collect(), why });
        if !text.starts_with('/') {
            return refuse("does not begin with /");
        }
        if text.len() > MAX_NAME_BYTES {
            return refuse("is too long");
        }
        if text.contains(char::is_control) {
            return refuse("holds a control character");
        }
        match text[1..].split('/').find(|part| matches!(*part, "" | "." | "..")) {
            Some("") => refuse("has an empty part"),
            Some(_) => refuse("has a part . or .."),
            None => Ok(Self(text)),
        }
    }

    /// The name.
    #[must_use]
    pub const fn as_str(&self) -> &'a str {
        self.0
    }

    /// What directory entries hold of it.
    #[must_use]
    pub fn hash(&self) -> u128 {
        xxh3_128(self.0.as_bytes())
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(text: &str) -> Option<&'static str> {
        match Name::parse(text) {
            Err(PoolError::Name { why, .. }) => Some(why),
            _ => None,
        }
    }

    #[test]
    fn names_are_absolute_paths_of_up_to_255_bytes() {
        for text in ["/a", "/train/weights.0", "/ä/…", "/...", "/.hidden", &format!("/{}", "x".repeat(254))]
        {
            assert_eq!(why(text), None, "{text}");
        }
        assert_eq!(why(""), Some("does not begin with /"));
        assert_eq!(why("a/b"), Some("does not begin with /"));
        assert_eq!(why("/"), Some("has an empty part"));
        assert_eq!(why("/a//b"), Some("has an empty part"));
        assert_eq!(why("/a/"), Some("has an empty part"));
        assert_eq!(why("/a/./b"), Some("has a part . or .."));
        assert_eq!(why("/.."), Some("has a part . or .."));
        for text in ["/a\0", "/a\nb", "/\x1b[2J", "/a\u{9b}"] {
            assert_eq!(why(text), Some("holds a control character"), "{text:?}");
        }
        assert_eq!(why(&format!("/{}", "x".repeat(255))), Some("is too long"));
    }
}

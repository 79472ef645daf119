//! Names of objects: POSIX-like, hashed to 128 bits.

use std::fmt;

use twox_hash::XxHash3_128;

use crate::PoolError;

/// The longest name in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// The longest note in bytes, and the longest name and note together: what the lines hold that the longest name needs.
pub(crate) const MAX_NOTE_BYTES: usize = 255;
pub(crate) const MAX_TEXT_BYTES: usize = 288;

/// A name that an object may have: absolute, in parts that are neither empty nor `.` or `..`, without control characters. A new
/// object may get a note beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a> {
    text: &'a str,
    note: &'a str,
}

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
            None => Ok(Self { text, note: "" }),
        }
    }

    /// The same name, with what a new object says beside it.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when both together are too long.
    pub(crate) fn with_note(self, note: &'a str) -> Result<Self, PoolError> {
        if note.len() > MAX_NOTE_BYTES || self.text.len() + note.len() > MAX_TEXT_BYTES {
            let (bytes, name) = (note.len(), self.text.len());
            return Err(PoolError::Argument {
                what: "what the pool keeps of dtype and shape",
                value: format!("{bytes} bytes beside a name of {name}"),
                expected: "together at most 288 bytes, and 255 without the name; shorten the names of fields, or the object's",
            });
        }
        Ok(Self { note, ..self })
    }

    /// The name.
    #[must_use]
    pub const fn as_str(&self) -> &'a str {
        self.text
    }

    /// What a new object says beside its name.
    pub(crate) const fn note(&self) -> &'a str {
        self.note
    }

    /// What directory entries hold of it.
    #[must_use]
    pub fn hash(&self) -> u128 {
        XxHash3_128::oneshot(self.text.as_bytes())
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text)
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

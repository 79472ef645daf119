//! Types that files and requests have as text, and counts and lists as they are printed.

/// Has serde read a type from what it is parsed from, and write what it is displayed as; the type says so by
/// `try_from = "String", into = "String"`.
macro_rules! as_text {
    ($text:ty) => {
        impl TryFrom<String> for $text {
            type Error = <Self as std::str::FromStr>::Err;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$text> for String {
            fn from(it: $text) -> Self {
                it.to_string()
            }
        }
    };
}

/// 16,384 for 16384.
#[must_use]
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// 1 layer, 1,024 layers.
#[must_use]
pub fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(count), if count == 1 { "" } else { "s" })
}

/// 1 accelerator, 1,024 accelerators.
#[must_use]
pub fn accelerators(count: u32) -> String {
    counted(count.into(), "accelerator")
}

/// `a, b and c`.
#[must_use]
pub fn listed(words: &[&str]) -> String {
    match words {
        [most @ .., last] if !most.is_empty() => format!("{} and {last}", most.join(", ")),
        _ => words.concat(),
    }
}

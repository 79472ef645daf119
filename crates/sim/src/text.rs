//! Types that files and requests have as text.

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

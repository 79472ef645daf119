//! Pages that need nothing else: the figures stand in them, and are drawn by their scripts.

use std::time::SystemTime;

use polder_platform::{printable, shell_word};
use serde_json::Value;

use crate::Failure;

/// A page of this body, which needs nothing else: with the head, the style and the tools that all pages have, its title and its figures, and
/// at its end what made it and when.
pub(super) fn filled(body: &str, title: &str, data: &Value) -> Result<String, Failure> {
    let data = serde_json::to_string(data)?.replace('<', "\\u003c");
    let day = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let day = day.split('T').next().unwrap_or_default();
    let made = format!("polder {}, {day}: {}", env!("CARGO_PKG_VERSION"), command());
    let page = [include_str!("head.html"), body].concat();
    // What stands between two signs is a name, and what is put there is not looked at again.
    let pieces = page.split('@').enumerate().map(|(at, piece)| match (at % 2, piece) {
        (0, text) => text.to_owned(),
        (_, "TITLE") => plain(title),
        (_, "DATA") => data.clone(),
        (_, "TOOLS") => include_str!("tools.js").to_owned(),
        (_, "MADE") => plain(&made),
        (_, name) => unreachable!("a page has no {name}"),
    });
    Ok(pieces.collect())
}

/// The command as it was given, such that a shell takes it again.
fn command() -> String {
    let words = std::env::args_os().skip(1).map(|word| shell_word(&printable(&word.to_string_lossy())));
    let name = std::env::args_os().next().map(std::path::PathBuf::from);
    let is_alone = name.is_some_and(|path| path.file_name().is_some_and(|file| file == "polder-plan"));
    let name = if is_alone { "polder-plan" } else { "polder" };
    std::iter::once(name.into()).chain(words).collect::<Vec<_>>().join(" ")
}

/// Text as a page shows it. Names may be paths, and a path may hold anything.
fn plain(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

//! What a process logs on stderr.

use std::fmt;
use std::io::IsTerminal;
use std::str::FromStr;

use tracing::Subscriber;
use tracing_subscriber::Layer;
pub use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// A level, or levels by module such as `polder_pool=debug`, with commas between them.
#[derive(Clone, Debug, PartialEq)]
pub struct LogFilter(Targets);

impl LogFilter {
    /// Nothing below this level.
    #[must_use]
    pub fn level(level: LevelFilter) -> Self {
        Self(Targets::new().with_default(level))
    }

    /// Writes to stderr what passes, until the process ends. A subscriber that the program has already stays.
    pub fn start(&self) {
        drop(tracing_subscriber::registry().with(self.layer()).try_init());
    }

    /// A layer that writes to stderr what passes, as a part of a larger subscriber.
    #[must_use]
    pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        let stderr = tracing_subscriber::fmt::layer();
        stderr.with_writer(std::io::stderr).with_ansi(is_colour_wanted()).with_filter(self.0.clone())
    }
}

impl FromStr for LogFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: String| {
            format!("not a log filter ({why}); write a level, or filters such as polder_pool=debug")
        };
        let targets = text.parse::<Targets>().map_err(|error| wrong(error.to_string()))?;
        // A word alone would be a target of which everything is logged: a level that is misspelt would log nothing.
        let is_wrong = |word: &&str| !word.contains('=') && word.parse::<LevelFilter>().is_err();
        match text.split(',').map(str::trim).find(is_wrong) {
            Some(word) => Err(wrong(format!(
                "{} is no level: off, error, warn, info, debug or trace",
                polder_platform::quoted(word)
            ))),
            None => Ok(Self(targets)),
        }
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(to)
    }
}

/// Whether logs may have colours: stderr is a terminal, and `NO_COLOR` is not set.
fn is_colour_wanted() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_levels_by_module_and_a_misspelt_level_is_refused() {
        for text in ["debug", "polder_pool=debug", "warn,polder_pool=trace", "OFF"] {
            let filter: LogFilter = text.parse().unwrap();
            assert_eq!(filter.to_string().parse::<LogFilter>().unwrap(), filter, "{text}");
        }
        for text in ["warm", "info,polder_pool", "polder_pool=loud"] {
            assert!(text.parse::<LogFilter>().unwrap_err().contains("not a log filter"), "{text}");
        }
    }
}

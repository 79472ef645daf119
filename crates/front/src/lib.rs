//! What every command of Polder has: one line for a failure, output that may be closed, and logs.
//!
//! A front begins with `#[macro_use(println, print, eprintln)] extern crate polder_front;`, so that nothing that it prints panics.
#![forbid(unsafe_code)]

/// As the standard macro, which panics where stdout cannot be written to.
#[macro_export]
macro_rules! println {
    () => { $crate::print(format_args!("\n")) };
    ($($words:tt)*) => { $crate::print(format_args!("{}\n", format_args!($($words)*))) };
}

/// As [`println`], without the end of the line.
#[macro_export]
macro_rules! print {
    ($($words:tt)*) => { $crate::print(format_args!($($words)*)) };
}

/// As the standard macro, which panics where stderr cannot be written to.
#[macro_export]
macro_rules! eprintln {
    ($($words:tt)*) => { $crate::complain(format_args!("{}\n", format_args!($($words)*))) };
}

mod output;

use std::error::Error;
use std::ffi::OsString;
use std::fmt;
use std::net::AddrParseError;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::process::ExitCode;

use clap::FromArgMatches;

pub use output::{Teller, complain, print, replace, unwritten};

/// Why a command failed: one line, for people.
#[derive(Debug)]
pub struct Failure(pub String);

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What it says again may be long, and hold what a terminal takes as a command.
        for (index, line) in self.0.split('\n').enumerate() {
            let end = if index > 0 { "\n" } else { "" };
            write!(f, "{end}{}", polder_platform::quoted_words(line))?;
        }
        Ok(())
    }
}

/// Bytes of a word in what clap says. A longer one was given.
const LONGEST_WORD: usize = 200;

/// Parses the words of a command line and runs what they ask for. A failure is one line on stderr, behind `polder: `.
pub fn main<A: FromArgMatches>(
    command: clap::Command,
    words: impl IntoIterator<Item = OsString>,
    run: impl FnOnce(A) -> Result<ExitCode, Failure>,
) -> ExitCode {
    // `polder ... | head` ends quietly.
    sigpipe::reset();
    let parsed = command.try_get_matches_from(words).and_then(|matches| A::from_arg_matches(&matches));
    let ended = output::caught(|| match parsed {
        Ok(asked) => run(asked),
        // Help as well.
        Err(error) => {
            let code = if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
            let mut help = error.render().to_string();
            let plain = expected(&error);
            if let Some((why, expected)) = &plain {
                help = help.replacen(&format!(": {why}"), &format!(": {expected}"), 1);
            }
            if plain.is_some()
                || help.lines().flat_map(|line| line.split(' ')).any(|word| word.len() > LONGEST_WORD)
            {
                help.lines().for_each(|line| eprintln!("{}", polder_platform::quoted_words(line)));
                return Ok(code);
            }
            match error.print() {
                Err(failed) if !error.use_stderr() => Err(output::unwritten(&failed)),
                _ => Ok(code),
            }
        }
    });
    ended.unwrap_or_else(|failure| {
        eprintln!("polder: {failure}");
        ExitCode::FAILURE
    })
}

/// What the parser of a number says of a word that is none, in Rust's terms, and what to say in its place.
fn expected(error: &clap::Error) -> Option<(String, String)> {
    let source = error.source()?;
    let why = source.to_string();
    let expected = match source.downcast_ref::<ParseIntError>().map(ParseIntError::kind) {
        Some(IntErrorKind::PosOverflow) => "expected a smaller number".to_owned(),
        Some(_) => "expected a whole number".to_owned(),
        None if source.is::<ParseFloatError>() => "expected a number such as 0.5".to_owned(),
        None if source.is::<AddrParseError>() => "expected an address such as 127.0.0.1:9586".to_owned(),
        None => {
            let (_, range) = why.split_once(" is not in ")?;
            let (low, high) = range.split_once("..")?;
            match high.trim_start_matches('=') {
                "" | "18446744073709551615" => format!("expected {low} or more"),
                high => format!("expected {low} to {high}"),
            }
        }
    };
    Some((why, expected))
}

#[cfg(test)]
mod tests {
    use clap::{Arg, Command, value_parser};

    use super::*;

    #[test]
    fn a_word_that_is_no_number_is_told_what_is_expected() {
        fn parse(parser: impl Into<clap::builder::ValueParser>, word: &str) -> String {
            let command = Command::new("test").arg(Arg::new("id").value_parser(parser.into()));
            expected(&command.try_get_matches_from(["test", word]).unwrap_err()).unwrap().1
        }
        assert_eq!(parse(value_parser!(u16), "x"), "expected a whole number");
        assert_eq!(parse(value_parser!(u16), "70000"), "expected 0 to 65535");
        assert_eq!(parse(value_parser!(u64), &"9".repeat(30)), "expected a smaller number");
        assert_eq!(parse(value_parser!(u64).range(1..), "0"), "expected 1 or more");
        assert_eq!(parse(value_parser!(u16).range(1..=64), "0"), "expected 1 to 64");
        assert_eq!(parse(value_parser!(usize), "x"), "expected a whole number");
        assert_eq!(parse(value_parser!(f64), "x"), "expected a number such as 0.5");
        assert_eq!(
            parse(value_parser!(std::net::SocketAddr), "x"),
            "expected an address such as 127.0.0.1:9586"
        );
    }

    #[test]
    fn a_failure_says_again_no_more_than_the_beginning_of_a_long_word() {
        let said = Failure(format!("{}: no such file\nmake one", "x".repeat(5000))).to_string();
        assert_eq!(said, format!("{}… (5000 bytes): no such file\nmake one", "x".repeat(200)));
    }
}

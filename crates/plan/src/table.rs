//! What is printed: tables and words that are no wider than the terminal, and numbers of three digits.

use std::collections::BTreeSet;
use std::io::{IsTerminal, stdout};

use polder_sim::grouped;

/// Prints rows of cells, each column as wide as its widest: the first to the left, the others to the right. Columns for which a terminal has
/// no room follow below, beside the first column again.
pub fn print(rows: &[Vec<String>]) {
    lines(rows, width()).iter().for_each(|line| println!("{line}"));
}

/// The first row of a table: the names of its columns, with a bar between them.
pub fn head(names: &str) -> Vec<String> {
    names.split('|').map(|name| name.trim().to_owned()).collect()
}

/// Prints words, and what a terminal has no room for on indented lines below.
pub fn print_wrapped(words: &str) {
    wrapped(words, width()).iter().for_each(|line| println!("{line}"));
}

/// The columns of the terminal, or those that COLUMNS names; `None` where neither is there and nothing is too wide.
fn width() -> Option<usize> {
    let named = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let own = || rustix::termios::tcgetwinsize(stdout()).ok().map(|size| size.ws_col.into());
    named.or_else(|| stdout().is_terminal().then(own).flatten()).filter(|columns| *columns > 0)
}

fn lines(rows: &[Vec<String>], most: Option<usize>) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let all = widths.iter().map(|width| width + 2).sum::<usize>().saturating_sub(2);
    let Some(most) = most.filter(|most| all > *most && columns > 2) else {
        return block(rows, &widths, 1..columns.max(1));
    };
    let names: BTreeSet<_> = rows.iter().filter_map(|row| row.first()).collect();
    if names.len() < rows.len() {
        // Parts of one row find each other by its number.
        let number = |(at, row): (usize, &Vec<String>)| {
            let name = row.first().map_or("", String::as_str);
            let first = if at == 0 { format!("   {name}") } else { format!("{at:<2} {name}") };
            std::iter::once(first).chain(row.iter().skip(1).cloned()).collect()
        };
        return lines(&rows.iter().enumerate().map(number).collect::<Vec<_>>(), Some(most));
    }
    let (mut printed, mut from) = (vec![], 1);
    while from < columns {
        let (mut until, mut wide) = (from, widths[0]);
        while until < columns && (until == from || wide + 2 + widths[until] <= most) {
            wide += 2 + widths[until];
            until += 1;
        }
        if from > 1 {
            printed.push(String::new());
        }
        printed.extend(block(rows, &widths, from..until));
        from = until;
    }
    printed
}

/// The first column with some others.
fn block(rows: &[Vec<String>], widths: &[usize], columns: std::ops::Range<usize>) -> Vec<String> {
    let line = |row: &Vec<String>| {
        let first = row.first().map(|cell| format!("{cell:<0$}", widths[0]));
        let others = row.iter().zip(widths).skip(columns.start).take(columns.len());
        let cells = first.into_iter().chain(others.map(|(cell, width)| format!("{cell:>width$}")));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn wrapped(words: &str, most: Option<usize>) -> Vec<String> {
    let most = most.unwrap_or(usize::MAX);
    let text = words.trim_start();
    let indent = &words[..words.len() - text.len()];
    let (mut lines, mut line) = (vec![], String::new());
    for word in text.split(' ') {
        if line.is_empty() {
            line = format!("{indent}{word}");
        } else if line.chars().count() + 1 + word.chars().count() > most {
            lines.push(std::mem::replace(&mut line, format!("{indent}  {word}")));
        } else {
            line = format!("{line} {word}");
        }
    }
    lines.push(line);
    lines
}

/// Three digits and no more: 0.00712, 1.71, 219, 1,120.
pub fn three(value: f64) -> String {
    let rounded: f64 = format!("{value:.2e}").parse().unwrap_or(value);
    match rounded >= 1000.0 {
        true => grouped(rounded as u64),
        false => format!("{rounded:.0$}", decimals(value)),
    }
}

/// How many digits after the point three digits of a figure have.
pub fn decimals(value: f64) -> usize {
    let written = format!("{value:.2e}");
    let exponent = written.rsplit_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok());
    (2 - exponent.filter(|_| value != 0.0).unwrap_or(2)).clamp(0, 12) as usize
}

/// A size of an access, most of which are powers of two.
pub fn access_size(bytes: f64) -> String {
    let units = [("MiB", 1048576.0), ("KiB", 1024.0)];
    match units.into_iter().find(|(_, scale)| bytes >= *scale && bytes % scale == 0.0) {
        Some((unit, scale)) => format!("{} {unit}", bytes / scale),
        None if bytes < 1e4 => format!("{bytes} B"),
        None => size(bytes),
    }
}

/// Three digits of a size.
pub fn size(bytes: f64) -> String {
    let units = [("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)];
    let (unit, scale) = units.into_iter().find(|(_, scale)| bytes >= 0.9995 * scale).unwrap_or(("B", 1.0));
    format!("{} {unit}", digits(bytes / scale))
}

/// Three digits of a time.
pub fn time(seconds: f64) -> String {
    match seconds * 1e9 {
        0.0 => "0".into(),
        ns if ns < 999.5 => format!("{} ns", digits(ns)),
        ns if ns < 999_500.0 => format!("{} us", digits(ns / 1e3)),
        ns if ns < 1e9 => format!("{} ms", digits(ns / 1e6)),
        ns => format!("{} s", digits(ns / 1e9)),
    }
}

/// Three digits.
pub fn digits(value: f64) -> String {
    match value {
        it if it >= 99.95 => format!("{it:.0}"),
        it if it >= 9.995 => format!("{it:.1}"),
        it => format!("{it:.2}"),
    }
}

/// From the least to the most, three digits of each.
pub fn span(range: [f64; 2]) -> String {
    let [least, most] = range.map(three);
    if least == most { least } else { format!("{least} to {most}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_are_three_of_any_size() {
        let shown = [0.0, 0.007_123, 0.869, 1.7121, 9.996, 99.96, 219.4, 999.6, 1117.0, 123_456.0].map(three);
        assert_eq!(
            shown,
            ["0", "0.00712", "0.869", "1.71", "10.0", "100", "219", "1,000", "1,120", "123,000"]
        );
        assert_eq!((span([1.0, 2.0]), span([1.001, 1.002])), ("1.00 to 2.00".into(), "1.00".into()));
    }

    #[test]
    fn what_a_terminal_has_no_room_for_follows_below_and_nothing_is_cut_elsewhere() {
        let row = |cells: [&str; 4]| cells.map(String::from).to_vec();
        let rows =
            [row(["of", "one", "two", "three"]), row(["a", "1", "22", "333"]), row(["b", "4", "5", "6"])];
        assert_eq!(lines(&rows, None), ["of  one  two  three", "a     1   22    333", "b     4    5      6"]);
        assert_eq!(lines(&rows, Some(19)), lines(&rows, None));
        let narrow =
            ["of  one  two", "a     1   22", "b     4    5", "", "of  three", "a     333", "b       6"];
        assert_eq!(lines(&rows, Some(18)), narrow);
        assert_eq!(lines(&rows, Some(1)).len(), 3 * 3 + 2, "a column stands, however wide");
        let alike =
            [row(["of", "one", "two", "three"]), row(["a", "1", "22", "333"]), row(["a", "4", "5", "6"])];
        assert_eq!(lines(&alike, Some(18))[..2], ["   of  one  two", "1  a     1   22"]);
        assert_eq!(lines(&alike, None)[1], "a     1   22    333");
        assert_eq!(lines(&[], Some(1)), [""; 0]);
    }

    #[test]
    fn words_are_broken_between_words_alone() {
        assert_eq!(wrapped("  one two three", Some(9)), ["  one two", "    three"]);
        assert_eq!(wrapped("incomprehensible", Some(3)), ["incomprehensible"]);
        assert_eq!(wrapped("one  two", None), ["one  two"]);
    }
}

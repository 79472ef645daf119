//! docs/options.md: every command with its options, as clap has them.

use std::fmt::Write;
use std::fs;

use clap::{Arg, Command, CommandFactory};

use crate::Cli;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/options.md");
const HEAD: &str = "# Options\n\nEvery command of `polder` with its arguments and options, as `--help` prints them. This page is made from the \
                    command: `POLDER_BLESS=1 cargo test -p polder-cli options` writes it again.\n";

/// A text as a cell of a table: outside of code, `<` would begin a tag.
fn cell(text: &str) -> String {
    let pieces = text.split('`').enumerate();
    let cells =
        pieces.map(|(at, piece)| if at % 2 == 0 { piece.replace('<', "&lt;") } else { format!("`{piece}`") });
    cells.collect::<String>().replace('|', "\\|").replace('\n', " ")
}

/// An option or an argument with its values, in code.
fn spelled(argument: &Arg) -> String {
    let takes = argument.get_action().takes_values();
    let names = argument.get_value_names().into_iter().flatten().filter(|_| takes);
    let values = names.map(|name| name.as_str()).collect::<Vec<_>>().join(" ");
    match argument.get_long() {
        Some(long) if takes => format!("`--{long} {values}`"),
        Some(long) => format!("`--{long}`"),
        None => format!("`{values}`"),
    }
}

fn row(argument: &Arg) -> String {
    let mut what = argument.get_help().map_or_else(String::new, |help| cell(&help.to_string()));
    let possible: Vec<_> =
        argument.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if argument.get_action().takes_values() && !possible.is_empty() {
        write!(what, ": {}", possible.join(", ")).expect("a string takes it");
    }
    let defaults: Vec<_> =
        argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if argument.get_action().takes_values() && !defaults.is_empty() {
        write!(what, " [default: {}]", defaults.join(",")).expect("a string takes it");
    }
    let needed = if argument.is_required_set() { " (required)" } else { "" };
    format!("| {}{needed} | {what} |\n", spelled(argument))
}

/// A command's part of the page, and those of its commands, which take the options that `inherited` gives.
fn page(command: &Command, path: &str, inherited: &str, into: &mut String) {
    write!(into, "\n## {path}\n").expect("a string takes it");
    if let Some(text) = command.get_about() {
        write!(into, "\n{}.\n", cell(&text.to_string())).expect("a string takes it");
    }
    let own = |argument: &&Arg| {
        !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
    };
    let rows: String = command.get_arguments().filter(own).map(row).collect::<String>() + inherited;
    if !rows.is_empty() {
        write!(
            into,
            "
| option | what it does |
|---|---|
{rows}"
        )
        .expect("a string takes it");
    }
    // What all commands take stands once, with the first.
    let global =
        command.get_arguments().filter(own).filter(|option| option.is_global_set() && path != "polder");
    let inherited = global.map(row).collect::<String>() + inherited;
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        page(inner, &format!("{path} {}", inner.get_name()), &inherited, into);
    }
}

#[test]
fn the_page_of_options_is_what_the_command_says() {
    let mut made = HEAD.to_owned();
    page(&Cli::command(), "polder", "", &mut made);
    match std::env::var_os("POLDER_BLESS") {
        Some(_) => fs::write(PAGE, made).unwrap(),
        None => assert!(
            fs::read_to_string(PAGE).is_ok_and(|page| page == made),
            "docs/options.md is out of date; run POLDER_BLESS=1 cargo test -p polder-cli options"
        ),
    }
}

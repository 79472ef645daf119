//! `polder-plan`: the commands of `polder plan` alone.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

/// Predicts what a step takes before anything is bought or run.
#[derive(Parser)]
#[command(name = "polder-plan", version)]
struct Cli {
    #[command(flatten)]
    arguments: polder_plan::Arguments,
}

fn main() -> ExitCode {
    polder_front::main(Cli::command(), std::env::args_os(), |cli: Cli| polder_plan::run(&cli.arguments))
}

//! What commands print and write: files never over what was read, and tables in which no spreadsheet finds a formula.

use std::path::{Path, PathBuf};

use clap::Args;
use csv::{ReaderBuilder, StringRecord, Writer, WriterBuilder};
use polder_platform::was_read;
use serde::Serialize;

use crate::Failure;

/// How a command prints.
#[derive(Args)]
pub(super) struct Json {
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

impl Json {
    /// Prints what was found, as JSON or in words.
    pub(super) fn print(&self, found: &impl Serialize, words: impl FnOnce()) -> Result<(), Failure> {
        match self.json {
            true => println!("{}", serde_json::to_string(found)?),
            false => words(),
        }
        Ok(())
    }
}

/// How a command with a table and a drawing prints and writes.
#[derive(Args)]
pub(super) struct Outputs {
    #[command(flatten)]
    pub(super) json: Json,
    /// Write all figures as CSV.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    csv: Option<PathBuf>,
    /// Write a page that draws them.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    html: Option<PathBuf>,
}

impl Outputs {
    /// The files that are asked for.
    pub(super) fn files(&self) -> [Option<&Path>; 2] {
        [self.csv.as_deref(), self.html.as_deref()]
    }

    /// Writes the table, if it is asked for.
    pub(super) fn table(&self, csv: impl FnOnce() -> Result<String, Failure>) -> Result<(), Failure> {
        self.csv.as_deref().map_or(Ok(()), |path| write(path, &csv()?))
    }

    /// Writes the page, if it is asked for.
    pub(super) fn page(&self, page: impl FnOnce() -> Result<String, Failure>) -> Result<(), Failure> {
        self.html.as_deref().map_or(Ok(()), |path| write(path, &page()?))
    }
}

/// Where a path leads, also when no file is there yet.
fn place(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().or_else(|| {
        let folder = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(folder.canonicalize().ok()?.join(path.file_name()?))
    })
}

/// Refuses one file for two outputs.
pub(super) fn expect_own_files(outputs: &[Option<&Path>]) -> Result<(), Failure> {
    let mut rest = outputs.iter().copied().flatten();
    while let Some(path) = rest.next() {
        let is_same = |other: &Path| other == path || place(other).is_some_and(|at| place(path) == Some(at));
        if rest.clone().any(is_same) {
            let path = path.display();
            return Err(Failure(format!(
                "{path}: two outputs would be written to it; name another file for one"
            )));
        }
    }
    Ok(())
}

/// Writes a file.
pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    expect_output(path)?;
    std::fs::write(path, text)
        .map_err(|error| Failure(format!("{}: cannot write it: {error}", path.display())))
}

/// Refuses a file that this command has read.
pub(super) fn expect_output(path: &Path) -> Result<(), Failure> {
    match was_read(path) {
        true => Err(Failure(format!(
            "{}: cannot write it: this command has read it, and would replace it; name another file",
            path.display()
        ))),
        false => Ok(()),
    }
}

/// The text of a table. A cell that a spreadsheet would compute has an apostrophe before it, unless it is a number.
pub(super) fn escaped_csv(table: Writer<Vec<u8>>) -> Result<String, Failure> {
    let text = table.into_inner()?;
    let mut writer = WriterBuilder::new().flexible(true).from_writer(vec![]);
    for record in ReaderBuilder::new().has_headers(false).flexible(true).from_reader(&text[..]).records() {
        let cell = |cell: &str| match cell.starts_with(['=', '+', '-', '@']) && cell.parse::<f64>().is_err() {
            true => format!("'{cell}"),
            false => cell.to_owned(),
        };
        writer.write_record(&record?.iter().map(cell).collect::<StringRecord>())?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_begins_like_a_formula_only_if_it_is_a_number() {
        let mut table = Writer::from_writer(vec![]);
        table
            .write_record(["name", "=1+1", "@cmd", "-x", "+y", "-0.5", "+3", "-inf", "a=b", "1e-3"])
            .unwrap();
        let text = escaped_csv(table).unwrap();
        assert_eq!(text, "name,'=1+1,'@cmd,'-x,'+y,-0.5,+3,-inf,a=b,1e-3\n");
    }
}

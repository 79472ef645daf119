//! Files that commands write: never over what was read, and tables in which no spreadsheet finds a formula.

use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Writer, WriterBuilder};
use polder_platform::was_read;

use crate::Failure;

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
pub(super) fn harmless(table: Writer<Vec<u8>>) -> Result<String, Failure> {
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
        let text = harmless(table).unwrap();
        assert_eq!(text, "name,'=1+1,'@cmd,'-x,'+y,-0.5,+3,-inf,a=b,1e-3\n");
    }
}

//! Text tables: a first column to the left, the others to the right.

/// Prints rows of cells, each column as wide as its widest.
pub(super) fn print(rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for row in rows {
        let cells = row.iter().enumerate().map(|(column, cell)| match column {
            0 => format!("{cell:<0$}", widths[0]),
            _ => format!("{cell:>0$}", widths[column]),
        });
        println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}

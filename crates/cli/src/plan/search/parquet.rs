//! What a search has found as Parquet: the columns of its CSV, with their types.

use std::io::Write;
use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int32Type};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::Type;
use polder_sim::{Cell, NUMBERS, cells};

use super::{Point, SITE};

/// Rows that are written at once.
const GROUP: usize = 1 << 14;

/// Writes a row for each layout: names as text, counts without a sign in 32 bits, figures in 64.
pub(super) fn write(found: &[Point<'_>], out: impl Write + Send) -> Result<()> {
    let Some(first) = found.first() else { return Ok(()) };
    let names: Vec<_> = first.columns().map(|(name, _)| name).collect();
    let column = |name: &str, physical, logical| {
        let column = Type::primitive_type_builder(name, physical).with_repetition(Repetition::REQUIRED);
        column.with_logical_type(logical).build().map(Arc::new)
    };
    let text = |name: &str| column(name, Physical::BYTE_ARRAY, Some(LogicalType::String));
    let count = |name: &str| column(name, Physical::INT32, Some(LogicalType::integer(32, false)));
    let site = SITE.iter().map(|name| match *name {
        "accelerators" | "sequence" | "fill" => count(name),
        _ => text(name),
    });
    let layout = NUMBERS.iter().zip(cells(&first.layout)).map(|(name, cell)| match cell {
        Cell::Count(_) => count(name),
        Cell::Flag(_) => column(name, Physical::BOOLEAN, None),
        Cell::Choice(_) => text(name),
    });
    let figures = names.iter().map(|name| column(name, Physical::DOUBLE, None));
    let fields = site.into_iter().chain(layout).chain(figures).collect::<Result<_>>()?;
    let schema = Type::group_type_builder("layouts").with_fields(fields).build()?;
    let properties = WriterProperties::builder().set_created_by("polder".into()).build();

    let mut writer = SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties))?;
    for rows in found.chunks(GROUP) {
        let mut group = writer.next_row_group()?;
        fill::<ByteArrayType, _>(&mut group, rows.iter().map(|point| ByteArray::from(point.platform)))?;
        fill::<ByteArrayType, _>(&mut group, rows.iter().map(|point| ByteArray::from(point.kind)))?;
        // The same 32 bits.
        fill::<Int32Type, _>(&mut group, rows.iter().map(|point| point.accelerators.cast_signed()))?;
        fill::<Int32Type, _>(&mut group, rows.iter().map(|point| point.sequence.cast_signed()))?;
        fill::<ByteArrayType, _>(&mut group, rows.iter().map(|point| ByteArray::from(point.rack)))?;
        fill::<Int32Type, _>(&mut group, rows.iter().map(|point| point.fill.cast_signed()))?;
        let orders = rows.iter().map(|point| ByteArray::from(point.order.to_string().into_bytes()));
        fill::<ByteArrayType, _>(&mut group, orders)?;
        let layouts: Vec<_> = rows.iter().map(|point| cells(&point.layout)).collect();
        for index in 0..NUMBERS.len() {
            fill_cells(&mut group, &layouts.iter().map(|row| &row[index]).collect::<Vec<_>>())?;
        }
        let figures: Vec<Vec<_>> =
            rows.iter().map(|point| point.columns().map(|(_, figure)| figure).collect()).collect();
        for index in 0..names.len() {
            fill::<DoubleType, _>(&mut group, figures.iter().map(|row| row[index]))?;
        }
        group.close()?;
    }
    writer.close()?;
    Ok(())
}

/// Writes the next column of a group, of cells that are all of one kind.
fn fill_cells<W: Write + Send>(group: &mut SerializedRowGroupWriter<'_, W>, cells: &[&Cell]) -> Result<()> {
    let flags = cells.iter().filter_map(|cell| if let Cell::Flag(it) = cell { Some(*it) } else { None });
    let counts = cells
        .iter()
        .filter_map(|cell| if let Cell::Count(it) = cell { Some(it.cast_signed()) } else { None });
    let choices = cells.iter().filter_map(|cell| {
        if let Cell::Choice(it) = cell { Some(ByteArray::from(it.as_str())) } else { None }
    });
    match cells.first() {
        Some(Cell::Flag(_)) => fill::<BoolType, _>(group, flags),
        Some(Cell::Count(_)) => fill::<Int32Type, _>(group, counts),
        Some(Cell::Choice(_)) | None => fill::<ByteArrayType, _>(group, choices),
    }
}

/// Writes the next column of a group.
fn fill<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    values: impl Iterator<Item = T::T>,
) -> Result<()> {
    let Some(mut column) = group.next_column()? else { unreachable!("the schema has it") };
    column.typed::<T>().write_batch(&values.collect::<Vec<_>>(), None, None)?;
    column.close()
}

#[cfg(test)]
mod tests {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::RowAccessor;
    use polder_sim::{Layout, Margin, Order, Step};

    use super::*;

    #[test]
    fn rows_come_back_from_however_many_groups() {
        let scratch = polder_mem::testing::Scratch::new();
        let path = scratch.path().join("many.parquet");
        let layout = r#"{"tp": 8, "dp": 2, "batch": 4294967295, "zero": "gradients", "flash": true}"#;
        let layout: Layout = serde_json::from_str(layout).unwrap();
        let point = |place: usize| Point {
            platform: if place < GROUP { "first" } else { "second" },
            kind: "simulated",
            accelerators: 16,
            sequence: 2048,
            rack: "ours",
            fill: 16,
            order: Order::default(),
            layout,
            step: Step { total_s: place as f64, ..Step::default() },
            range_s: [0.0; 2],
            costs: None,
            note: None,
            margin: Margin::of("none").unwrap(),
        };
        let points: Vec<_> = (0..GROUP + 3).map(point).collect();
        write(&points, std::fs::File::create(&path).unwrap()).unwrap();
        let file = SerializedFileReader::new(std::fs::File::open(&path).unwrap()).unwrap();
        assert_eq!(file.num_row_groups(), 2);
        let rows = file.get_row_iter(None).unwrap().map(Result::unwrap);
        let mut count = 0;
        for (place, row) in rows.enumerate() {
            assert_eq!(row.get_double(SITE.len() + NUMBERS.len()).unwrap(), place as f64);
            assert_eq!(row.get_string(0).unwrap() == "first", place < GROUP);
            assert_eq!(row.get_uint(SITE.len() + 6).unwrap(), u32::MAX, "the batch");
            assert_eq!(
                (row.get_string(SITE.len() + 12).unwrap().as_str(), row.get_bool(SITE.len() + 11).unwrap()),
                ("gradients", true)
            );
            count += 1;
        }
        assert_eq!(count, GROUP + 3);
    }
}

//! What a search has found as CSV.

use polder_sim::{Cell, NUMBERS, cells};

use super::super::written::escaped_csv;
use super::{Point, SITE};
use crate::Failure;

/// A line for each layout: where it was looked at, how it is cut, all figures of its step, and what it costs.
pub(super) fn csv(points: &[Point<'_>]) -> Result<String, Failure> {
    let mut writer = ::csv::Writer::from_writer(vec![]);
    let names: Vec<_> = points.iter().take(1).flat_map(Point::columns).map(|(name, _)| name).collect();
    writer.write_record(SITE.into_iter().chain(NUMBERS).chain(names))?;
    for point in points {
        let Point { platform, kind, accelerators, sequence, rack, fill, order, layout, .. } = point;
        let site = [(*platform).into(), (*kind).into(), accelerators.to_string(), sequence.to_string()];
        let site = site.into_iter().chain([(*rack).into(), fill.to_string(), order.to_string()]);
        let layout = cells(layout).map(|cell| match cell {
            Cell::Count(count) => count.to_string(),
            Cell::Flag(is_so) => is_so.to_string(),
            Cell::Choice(which) => which,
        });
        let figures = point.columns().map(|(_, figure)| figure.to_string());
        writer.write_record(site.chain(layout).chain(figures))?;
    }
    escaped_csv(writer)
}

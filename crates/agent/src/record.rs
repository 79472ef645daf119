//! Records of runs, as `polder agent run --record` writes them: a line for each round.

use polder_place::pages::RecordedRound;

/// Bytes that no machine has, so that sums of a few hold.
const MOST_BYTES: u64 = 1 << 60;

/// The rounds of a record.
///
/// # Errors
/// The first line that is no round, and why; the last one may be cut short by its writer's end.
///
/// ```
/// assert!(polder_agent::read_record("").unwrap().is_empty());
/// assert!(polder_agent::read_record("{\"round\":1").unwrap_err().starts_with("line 1, column 10: "));
/// ```
pub fn read_record(text: &str) -> Result<Vec<RecordedRound>, String> {
    let round = |(index, line): (usize, &str)| {
        let line_number = index + 1;
        let round: RecordedRound = serde_json::from_str(line).map_err(|error| {
            let (said, column) = (error.to_string(), error.column());
            let what = said.strip_suffix(&format!(" at line 1 column {column}")).unwrap_or(&said);
            format!("line {line_number}, column {column}: {what}")
        })?;
        let most = round.services.iter().map(|view| view.seen.fast.max(view.seen.slow)).max();
        match most.filter(|bytes| *bytes >= MOST_BYTES) {
            Some(bytes) => Err(format!("line {line_number}: no machine has {bytes} bytes")),
            None => Ok(round),
        }
    };
    text.lines().enumerate().map(round).collect()
}

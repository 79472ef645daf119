//! docs/format.md says what the code says.

/// The sources whose tables describe bytes in the pool.
const SOURCES: &[&str] = &[
    "layout/format",
    "membership/view",
    "keeper/owner",
    "membership",
    "directory/entry",
    "object",
    "ring",
    "ring/summary",
    "channel",
    "endpoint/place",
    "endpoint/wire",
    "window/place",
    "objects/owned",
    "objects/private",
    "group/join",
    "group/progress",
    "group/signature",
    "service/order",
    "service/place",
    "service/session",
    "storage",
    "storage/manifest",
    "kv",
    "kv/wire",
];

#[test]
fn every_table_of_the_format_stands_on_its_page() {
    let root = env!("CARGO_MANIFEST_DIR");
    let read =
        |path: String| std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let page = read(format!("{root}/../../docs/format.md"));
    for source in SOURCES {
        let code = read(format!("{root}/src/{source}.rs"));
        let rows: Vec<_> = code.lines().filter_map(|line| line.strip_prefix("//! |")).collect();
        assert!(!rows.is_empty(), "{source}.rs has no table");
        for row in rows {
            assert!(
                page.lines().any(|line| line == format!("|{row}")),
                "docs/format.md lacks, from {source}.rs: |{row}"
            );
        }
    }
}

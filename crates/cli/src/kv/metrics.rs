//! `polder kv metrics`: what the caches of a pool hold, for Prometheus.
//!
//! A look reads the lines of all blocks. So it is taken every few seconds, however often somebody asks. The first must succeed. After one that
//! fails, `polder_kv_up` is all that is told, until one succeeds.

use std::fmt::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polder_attach::settings::Settings;
use polder_pool::kv::{CacheStat, PartStat};

use super::caches;
use crate::Failure;
use crate::agent::{serve, signals};

const PERIOD: Duration = Duration::from_secs(5);

/// Runs `polder kv metrics`.
pub(super) fn run(settings: &Settings, listen: SocketAddr) -> Result<ExitCode, Failure> {
    let stop = signals()?;
    let look = || caches(settings, None).map(|(_, caches)| caches);
    let last = Arc::new(Mutex::new(Arc::<str>::from(text(Some(&look()?)))));
    let told = Arc::clone(&last);
    serve(listen, Box::new(move || Arc::clone(&told.lock().unwrap_or_else(PoisonError::into_inner))))?;
    let mut was_up = true;
    while stop.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
        let found = look();
        *last.lock().unwrap_or_else(PoisonError::into_inner) = text(found.as_deref().ok()).into();
        if let (true, Err(Failure(why))) = (was_up, &found) {
            eprintln!("polder: {why}; looking again every {} s", PERIOD.as_secs());
        }
        was_up = found.is_ok();
    }
    Ok(ExitCode::SUCCESS)
}

/// A series: its labels and its value.
type Series = (String, u64);

/// What a look found, or that it failed, in the format of OpenMetrics.
fn text(found: Option<&[CacheStat]>) -> String {
    let up = u8::from(found.is_some());
    let up = format!(
        "# HELP polder_kv_up 1 where the last look at the pool succeeded.\n# TYPE polder_kv_up gauge\npolder_kv_up {up}\n"
    );
    up + &found.map(families).unwrap_or_default() + "# EOF\n"
}

fn families(caches: &[CacheStat]) -> String {
    let of_cache = |value: fn(&CacheStat) -> u64| {
        caches.iter().map(|cache| (label("cache", &cache.name), value(cache))).collect::<Vec<Series>>()
    };
    let of_host = |value: fn(&PartStat) -> Option<u64>| {
        let parts = caches.iter().flat_map(|cache| cache.hosts.iter().map(move |part| (cache, part)));
        let labels =
            |cache: &CacheStat, host: u16| format!("{},host=\"{host}\"", label("cache", &cache.name));
        parts
            .filter_map(|(cache, part)| Some((labels(cache, part.host), value(part)?)))
            .collect::<Vec<Series>>()
    };
    let of_identity = |value: fn(&polder_pool::kv::IdentityStat) -> u64| {
        let all =
            caches.iter().flat_map(|cache| cache.identities.iter().map(move |identity| (cache, identity)));
        let labels = |cache: &CacheStat, hash: &str| {
            format!("{},{}", label("cache", &cache.name), label("identity", hash))
        };
        all.map(|(cache, identity)| (labels(cache, &identity.hash), value(identity))).collect::<Vec<Series>>()
    };
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, series: Vec<Series>| {
        let total = if kind == "counter" { "_total" } else { "" };
        let samples: String = series
            .iter()
            .map(|(labels, value)| format!("polder_kv_{name}{total}{{{labels}}} {value}\n"))
            .collect();
        write!(text, "# HELP polder_kv_{name} {help}.\n# TYPE polder_kv_{name} {kind}\n{samples}")
            .expect("a string takes all");
    };
    family(
        "budget_bytes",
        "gauge",
        "Bytes that the slabs of a cache may take",
        of_cache(|cache| cache.budget),
    );
    family("claimed_bytes", "gauge", "Bytes that a host's slabs take", of_host(|part| Some(part.claimed)));
    family("host_blocks", "gauge", "Blocks in a host's slabs", of_host(|part| Some(part.blocks)));
    family("puts", "counter", "Blocks that a host has put", of_host(|part| Some(part.puts)));
    family("evictions", "counter", "Blocks of a host that made room", of_host(|part| Some(part.evictions)));
    family("hits", "counter", "Blocks that a host's processes have read", of_host(|part| Some(part.hits)));
    family("misses", "counter", "Blocks that were not there", of_host(|part| Some(part.misses)));
    family(
        "oldest_seconds",
        "gauge",
        "Age of the oldest block of a host",
        of_host(|part| part.oldest_seconds),
    );
    family("pinned", "gauge", "Blocks of a host that processes have pinned", of_host(|part| part.pinned));
    family(
        "wants_room",
        "gauge",
        "1 while a host gets no slab",
        of_host(|part| Some(part.wants_room.into())),
    );
    family(
        "gone",
        "gauge",
        "1 while a host is gone and others may have its room",
        of_host(|part| Some(part.gone.into())),
    );
    family("blocks", "gauge", "Blocks of an identity", of_identity(|identity| identity.blocks));
    family("bytes", "gauge", "Bytes of an identity's blocks", of_identity(|identity| identity.bytes));
    text
}

/// A label, with what its value may not hold written otherwise.
fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    format!("{name}=\"{value}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_series_has_its_labels_and_a_name_cannot_break_out_of_one() {
        let json = r#"{"name":"a\"} 1\nb","budget":100,"claimed":70,"blocks":3,"bytes":30,
            "identities":[{"hash":"00ff","text":"{}","blocks":3,"bytes":30}],
            "hosts":[{"host":2,"blocks":3,"claimed":70,"puts":9,"evictions":6,"hits":5,"misses":4,"oldest_seconds":77,"pinned":1,"wants_room":true},
                {"host":3,"blocks":0,"claimed":0,"puts":0,"evictions":0,"hits":1,"misses":0,"gone":true}]}"#;
        let text = text(Some(&[serde_json::from_str(json).unwrap()]));
        let name = r#"cache="a\"} 1\nb""#;
        for line in [
            "polder_kv_up 1".to_owned(),
            format!("polder_kv_budget_bytes{{{name}}} 100"),
            format!("polder_kv_claimed_bytes{{{name},host=\"2\"}} 70"),
            format!("polder_kv_puts_total{{{name},host=\"2\"}} 9"),
            format!("polder_kv_evictions_total{{{name},host=\"2\"}} 6"),
            format!("polder_kv_hits_total{{{name},host=\"3\"}} 1"),
            format!("polder_kv_misses_total{{{name},host=\"2\"}} 4"),
            format!("polder_kv_oldest_seconds{{{name},host=\"2\"}} 77"),
            format!("polder_kv_pinned{{{name},host=\"2\"}} 1"),
            format!("polder_kv_wants_room{{{name},host=\"2\"}} 1"),
            format!("polder_kv_gone{{{name},host=\"2\"}} 0"),
            format!("polder_kv_gone{{{name},host=\"3\"}} 1"),
            format!("polder_kv_bytes{{{name},identity=\"00ff\"}} 30"),
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        assert_eq!(text.lines().filter(|line| line.starts_with("# TYPE")).count(), 14);
        assert!(!text.contains("oldest_seconds{cache=\"a\\\"} 1\\nb\",host=\"3\""), "it has no block");
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn after_a_look_that_failed_nothing_is_told_but_that() {
        let told = text(None);
        assert!(told.ends_with("# TYPE polder_kv_up gauge\npolder_kv_up 0\n# EOF\n"), "{told}");
        assert_eq!(told.lines().count(), 4);
    }
}

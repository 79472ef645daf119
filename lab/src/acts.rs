//! What a process of a host in a rack does in the pool: each is a command of the guest, with the settings of its environment.

use std::process::ExitCode;
use std::sync::Arc;

use polder_attach::session::Session;
use polder_attach::settings::Settings;
use polder_lab::hosts::Part;
use polder_mem::Memory;
use polder_pool::group::{Group, GroupOptions};
use polder_pool::wait::Patience;
use polder_pool::{Pool, PoolError};

use polder_lab::check::Failed;

/// The group in which one host waits for the other.
const PAIR: &str = "/pair";
/// Bytes of an object that outlives its host.
const BYTES: usize = 5000;

/// Does what `words` say, and prints how it went.
pub(crate) fn run(words: &[&str]) -> ExitCode {
    match act(words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn act(words: &[&str]) -> Result<(), Failed> {
    let settings = Settings::load(Settings::default()).map_err(text)?;
    let session = Session::open(&settings).map_err(text)?;
    {
        let pool = session.pool();
        let host = pool.member().host;
        println!("attached as host {host}");
        match words {
            ["play", name] => {
                let part = Part::ALL.into_iter().find(|part| part.name() == *name);
                part.ok_or_else(|| format!("there is no part {name}"))?.play(pool, host);
                Ok(())
            }
            ["make", name] => make(pool, name).map_err(text),
            ["look", name] => look(pool, name),
            ["wait"] => wait(pool).map_err(text),
            _ => Err(format!("an act is none of play, make, look and wait: {words:?}")),
        }
    }
}

/// Makes an object that others look at.
fn make<M: Memory>(pool: &Arc<Pool<M>>, name: &str) -> Result<(), PoolError> {
    let object = pool.create(name, BYTES as u64)?;
    object.write_at(pool.memory(), 0, &contents(name))?;
    pool.close(object);
    println!("made {name}");
    Ok(())
}

/// Holds an object's bytes against what its name says that they are.
fn look<M: Memory>(pool: &Arc<Pool<M>>, name: &str) -> Result<(), Failed> {
    let object = pool.open(name).map_err(text)?;
    let mut found = vec![0; BYTES];
    object.read_at(pool.memory(), 0, &mut found).map_err(text)?;
    pool.close(object);
    match found == contents(name) {
        true => {
            println!("{name} holds what was written");
            Ok(())
        }
        false => Err(format!("{name} holds other bytes than were written")),
    }
}

fn contents(name: &str) -> Vec<u8> {
    (0..BYTES).map(|index| (index * 7 + index / 251 + name.len()) as u8).collect()
}

/// Meets the other host. Then host 0 waits for host 1, which does nothing any more.
fn wait<M: Memory>(pool: &Arc<Pool<M>>) -> Result<(), PoolError> {
    let options = GroupOptions {
        timeout: pool.member().timeout,
        patience: Patience::SHARED,
        ..GroupOptions::default()
    };
    let mut pair = Group::join(Arc::clone(pool), PAIR, pool.member().host.into(), 2, options, None)?;
    println!("they have met");
    if pair.rank() == 0 {
        return pair.barrier();
    }
    loop {
        std::thread::park();
    }
}

fn text(error: impl std::fmt::Display) -> Failed {
    error.to_string()
}

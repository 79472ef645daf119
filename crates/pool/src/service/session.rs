//! How the processes of a service meet, agree on an exchange, and part.
//!
//! They are ranks of a group, `NAME`: the clients, then the proxies. Client 0 tells the group what is exchanged from now on. Each
//! process makes its part, the object `NAME/EXCHANGE/NUMBER`, and holds those of the others open, so that none is another object's
//! before the last reader has let go.
//!
//! # Own words of the identity of a part
//! | word | what |
//! |---|---|
//! | 4 | the exchange |
//! | 5 | how many clients there are |
//! | 6 | how many clients and proxies there are |
//!
//! # What client 0 tells
//! Words: 1 and how many shards, or 0 for the end; 1 if the shards of the first layers go first, 256 more if proxies keep an
//! optimizer's state, and 65536 more for each moment of it; how many emulated links; the bytes of a window, or 0. Then for each shard: bits 0..32 tensor, bits 32..48 proxy,
//! and bits 48..64 the group of its settings; its first byte in the tensor; its bytes; the name of its type, 0-padded. Then for each
//! emulated link: the nanoseconds of a shard, bytes a second, 0, 0.

use std::sync::Arc;

use polder_kernels::Dtype;
use polder_mem::Memory;
use polder_schedule::{Exchange, Shard, ShardOrder};

use super::place::state_line;
use super::{Agreement, Client, EmulatedLink, MOMENTS, Proxy, ServiceOptions};
use crate::deviation::Deviation;
use crate::group::{Group, GroupOptions, Interrupt, JoinedGroup, Mark, RankPlace};
use crate::line;
use crate::object::Object;
use crate::owned::{self, Identity, Kind};
use crate::{Pool, PoolError};

/// Waits so long for what client 0 tells next: a job may do something else for hours, and a client that dies ends the wait.
const AGES: std::time::Duration = std::time::Duration::from_secs(100 * 365 * 24 * 3600);

/// Bytes of staging of each process: a group tells no more than what is exchanged, so that little is enough for the most ranks.
const STAGING: u64 = 64 << 10;

/// Bytes of one shard or link in what client 0 tells.
const ROW: usize = 32;
/// Bytes of what it tells first.
pub(super) const HEAD: usize = 32;

/// What a proxy says that it has done, and in which process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyStat {
    /// Its host.
    pub host: u16,
    /// Its process id on that host.
    pub pid: u32,
    /// Steps that it has summed in this exchange.
    pub steps: u64,
    /// Shards that it has summed.
    pub shards: u64,
    /// Bytes of sums that it has written.
    pub bytes: u64,
    /// Whether it lives.
    pub alive: bool,
}

/// A process of a service, of whichever kind.
struct Session<M: Memory> {
    // Left after the parts are given back.
    parts: Held<M>,
    group: JoinedGroup<M>,
    name: String,
    clients: usize,
    exchanges: u64,
    options: ServiceOptions,
}

/// The parts that this process holds open. Dropping it gives them back.
struct Held<M: Memory> {
    pool: Arc<Pool<M>>,
    own: Option<Object>,
    others: Vec<Object>,
}

impl<M: Memory> Held<M> {
    fn release(&mut self) {
        self.others.drain(..).for_each(|other| self.pool.close(other));
        if let Some(own) = self.own.take() {
            self.pool.abandon(own);
        }
    }
}

impl<M: Memory> Drop for Held<M> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<M: Memory> Session<M> {
    fn join(
        pool: Arc<Pool<M>>,
        name: &str,
        number: usize,
        (clients, proxies): (usize, u16),
        (options, staging_bytes): (ServiceOptions, u64),
        interrupt: Option<Interrupt>,
    ) -> Result<Self, PoolError> {
        let ServiceOptions { timeout, patience, .. } = options;
        let of_group = GroupOptions { staging_bytes, timeout, patience, ..GroupOptions::default() };
        let size = clients + usize::from(proxies);
        let group = Group::join(Arc::clone(&pool), name, number, size, of_group, interrupt)?;
        let GroupOptions { epoch, silence, .. } = *group.options();
        let options = ServiceOptions { epoch, silence, ..options };
        let parts = Held { pool, own: None, others: vec![] };
        Ok(Self { parts, group, name: name.to_owned(), clients, exchanges: 0, options })
    }

    fn set_timeout(&mut self, timeout: std::time::Duration) {
        self.options.timeout = timeout;
        self.group.set_timeout(timeout);
    }

    /// What client 0 tells; it gives what is told. `None` is the end.
    fn tell(&mut self, told: Option<&Agreement>) -> Result<Option<Agreement>, PoolError> {
        let proxies = (self.group.size() - self.clients) as u16;
        let mut head = [0; HEAD];
        let mut rows = vec![];
        if let Some(Agreement { exchange, dtypes, links, groups, moments }) = told {
            head[..8].copy_from_slice(&(exchange.shards().len() as u64 + 1).to_le_bytes());
            head[8] = u8::from(exchange.order() == ShardOrder::FirstLayersFirst);
            head[9] = u8::from(!groups.is_empty());
            head[10..12].copy_from_slice(&moments.to_le_bytes());
            head[16..24].copy_from_slice(&(links.len() as u64).to_le_bytes());
            head[24..].copy_from_slice(&exchange.asked_window_bytes().to_le_bytes());
            let groups = groups.iter().copied().chain(std::iter::repeat(0));
            let shards = exchange.shards().iter().zip(dtypes).zip(groups);
            rows = shards.flat_map(|((shard, dtype), group)| encode(shard, *dtype, group)).collect();
            let link = |link: &EmulatedLink| encode_words([link.latency_ns, link.bytes_per_second, 0, 0]);
            rows.extend(links.iter().flat_map(link));
        }
        self.group.broadcast(0, Dtype::U8, &mut head)?;
        let Some(told) = Told::read(&head)? else { return Ok(None) };
        rows.resize(told.row_bytes(), 0);
        self.group.broadcast(0, Dtype::U8, &mut rows)?;
        told.agreement(&rows, proxies).map(Some)
    }

    /// Parts from the others at the end of the service, of which client 0 has `told`. Nothing of it is left in the pool then, but for
    /// the extents of the group. No process awaits anything more of a proxy, so that its death ends nothing: what it leaves goes as
    /// what every killed process leaves.
    fn part(&mut self, told: Result<(), PoolError>) -> Result<(), PoolError> {
        self.parts.release();
        match told.and_then(|()| self.group.barrier()) {
            Err(PoolError::PeerDead { peer, .. })
                if peer.rank.is_some_and(|rank| rank as usize >= self.clients)
                    && !Deviation::IdleProxyIsMissed.is_on() =>
            {
                Ok(())
            }
            ended => ended,
        }
    }

    /// Makes this process's part of what was agreed on, and finds those of the others.
    fn meet(&mut self, agreed: &Agreement) -> Result<Vec<RankPlace>, PoolError> {
        self.exchanges += 1;
        let places = agreed.places();
        let bytes = |number: usize| places.bytes(number.checked_sub(self.clients).map(|proxy| proxy as u16));
        let (number, counts) =
            (self.group.rank(), [self.exchanges, self.clients as u64, self.group.size() as u64]);
        let pool = Arc::clone(&self.parts.pool);
        let name = |number: usize| format!("{}/{}/{number}", self.name, self.exchanges);
        let own = owned::create(&pool, &name(number), bytes(number), Kind::Part, counts)?;
        let mut held = Held { pool: Arc::clone(&pool), own: Some(own), others: vec![] };
        self.group.barrier()?;
        let mut members = self.group.members().to_vec();
        for (other, member) in members.iter_mut().enumerate() {
            let object = match &held.own {
                Some(own) if other == number => own,
                _ => {
                    let opened = pool.open(&name(other));
                    if let Err(PoolError::NotFound { .. }) = &opened
                        && !Deviation::MissingPartIsTheError.is_on()
                    {
                        // It has given up on another since it was here; the group says on which.
                        self.group.expect_going_on(other)?;
                    }
                    held.others.push(opened?);
                    held.others.last().expect("it was pushed")
                }
            };
            let identity = Identity::read(&pool, object, Kind::Part)?;
            let is_theirs = (identity.process.host, identity.process.pid) == (member.host, member.pid);
            if !is_theirs || identity.own != counts || object.bytes() != bytes(other) {
                return Err(PoolError::Corrupt { offset: object.at(), what: "part of a service" });
            }
            (member.at, member.bytes) = (object.at(), object.bytes());
        }
        // All hold all: a process that leaves from here on takes nothing away.
        if let Err(error) = self.group.barrier() {
            // Others may have passed it, and look at the parts alone from there on.
            let words = [gave_up_with(&error, number).word(), 0, 0, 0, 0, 0, 0];
            if !Deviation::GivesUpInSilence.is_on() {
                line::publish(pool.memory(), state_line(members[number].at), &words);
            }
            return Err(error);
        }
        self.parts = held;
        Ok(members)
    }
}

/// What process `own` says of its end, which an error of the group was.
fn gave_up_with(error: &PoolError, own: usize) -> Mark {
    let mark = match error {
        PoolError::Timeout { peer, .. } => peer.rank.map(|rank| Mark::late(rank as usize)),
        PoolError::PeerDead { peer, .. } => peer.rank.map(|rank| Mark::dead(rank as usize)),
        _ => None,
    };
    mark.unwrap_or_else(|| Mark::own(own))
}

/// What client 0 tells first: how many rows follow, and what holds for all of them.
pub(super) struct Told {
    shards: usize,
    links: usize,
    order: ShardOrder,
    has_groups: bool,
    moments: u16,
    window_bytes: u64,
}

impl Told {
    /// What the words of the head say; `None` is the end.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for more than there can be.
    pub(super) fn read(head: &[u8; HEAD]) -> Result<Option<Self>, PoolError> {
        let Some(shards) = word_of(head, 0).checked_sub(1) else { return Ok(None) };
        let links = word_of(head, 2);
        if shards > Exchange::MOST_SHARDS as u64 || links > u64::from(Exchange::MOST_PROXIES) {
            return Err(refused(format!("{shards} shards and {links} links"), "fewer and larger shards"));
        }
        let order = if head[8] == 1 { ShardOrder::FirstLayersFirst } else { ShardOrder::FirstInFirstOut };
        let (shards, links, window_bytes) = (shards as usize, links as usize, word_of(head, 3));
        if window_bytes > Exchange::MOST_BYTES {
            return Err(refused(format!("windows of {window_bytes} bytes"), "smaller ones"));
        }
        let moments = u16::from_le_bytes([head[10], head[11]]);
        if usize::from(moments) > MOMENTS {
            return Err(refused(format!("{moments} moments"), "as many as an optimizer has"));
        }
        Ok(Some(Self { shards, links, order, has_groups: head[9] == 1, moments, window_bytes }))
    }

    /// Bytes of all rows.
    pub(super) const fn row_bytes(&self) -> usize {
        (self.shards + self.links) * ROW
    }

    /// What the rows say.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for shards that no such service can sum, or elements of an unknown type.
    pub(super) fn agreement(&self, rows: &[u8], proxies: u16) -> Result<Agreement, PoolError> {
        let (shards, links) = rows.split_at(self.shards * ROW);
        let group = |row: &[u8]| (word_of(row, 0) >> 48) as u16;
        let groups = if self.has_groups { shards.chunks_exact(ROW).map(group).collect() } else { vec![] };
        let exchange = Exchange::new(shards.chunks_exact(ROW).map(decode).collect(), proxies)
            .map_err(|error| refused(error.to_string(), "shards that the proxies of this service can sum"))?;
        let link =
            |row: &[u8]| EmulatedLink { latency_ns: word_of(row, 0), bytes_per_second: word_of(row, 1) };
        let links = links.chunks_exact(ROW).map(link).collect();
        let dtypes = shards.chunks_exact(ROW).map(dtype_of).collect::<Option<_>>();
        let dtypes = dtypes
            .ok_or_else(|| refused("one of unknown elements".into(), "one Polder for all processes"))?;
        let exchange = exchange.ordered(self.order).windowed(self.window_bytes);
        Ok(Agreement { exchange, dtypes, links, groups, moments: self.moments })
    }
}

fn refused(value: String, expected: &'static str) -> PoolError {
    PoolError::Argument { what: "the exchange", value, expected }
}

fn encode(shard: &Shard, dtype: Dtype, group: u16) -> [u8; ROW] {
    let first = u64::from(shard.tensor) | u64::from(shard.proxy) << 32 | u64::from(group) << 48;
    let mut name = [0; 8];
    name[..dtype.name().len()].copy_from_slice(dtype.name().as_bytes());
    encode_words([first, shard.start, shard.bytes, u64::from_le_bytes(name)])
}

/// The type of a shard's elements, by what is told of it.
fn dtype_of(row: &[u8]) -> Option<Dtype> {
    let name = row[ROW - 8..].split(|byte| *byte == 0).next().unwrap_or_default();
    str::from_utf8(name).ok().and_then(Dtype::named)
}

fn decode(row: &[u8]) -> Shard {
    let [first, start, bytes] = [0, 1, 2].map(|index| word_of(row, index));
    Shard { tensor: first as u32, proxy: (first >> 32) as u16, start, bytes }
}

fn encode_words(words: [u64; ROW / 8]) -> [u8; ROW] {
    let mut row = [0; ROW];
    row.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    row
}

fn word_of(bytes: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(bytes[index * 8..][..8].try_into().expect("eight bytes"))
}

/// A client that has joined a service. Dropping it leaves the service.
pub struct ClientSession<M: Memory> {
    client: Option<Client<M>>,
    session: Session<M>,
}

impl<M: Memory> ClientSession<M> {
    /// Joins the service `name` as client `client` of `clients`, and returns when all clients and all `proxies` have joined. Waits of
    /// this call ask `interrupt` whether to give up.
    ///
    /// # Errors
    /// Those of [`Group::join`].
    pub fn join(
        pool: Arc<Pool<M>>,
        name: &str,
        client: usize,
        (clients, proxies): (usize, u16),
        options: ServiceOptions,
        interrupt: Option<Interrupt>,
    ) -> Result<Self, PoolError> {
        Self::join_staging(pool, name, client, (clients, proxies), (options, STAGING), interrupt)
    }

    /// As [`ClientSession::join`], with options and bytes of staging, which are the same for all processes.
    pub(crate) fn join_staging(
        pool: Arc<Pool<M>>,
        name: &str,
        client: usize,
        (clients, proxies): (usize, u16),
        options: (ServiceOptions, u64),
        interrupt: Option<Interrupt>,
    ) -> Result<Self, PoolError> {
        if client >= clients || proxies == 0 {
            let value = format!("client {client} of {clients}, {proxies} proxies");
            let expected = "clients count from 0, and there is a proxy";
            return Err(PoolError::Argument { what: "the service", value, expected });
        }
        let session = Session::join(pool, name, client, (clients, proxies), options, interrupt)?;
        Ok(Self { client: None, session })
    }

    /// Exchanges from now on what `agreed` says, alike on all clients, which all call it between two steps. Waits ask `interrupt`
    /// whether to give up.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when it differs from that of client 0; those of [`Pool::create`] and of a group's operations.
    pub fn begin(
        &mut self,
        agreed: &Agreement,
        interrupt: Option<Interrupt>,
    ) -> Result<&mut Client<M>, PoolError> {
        self.end();
        let told = self.session.tell(Some(agreed))?;
        if told.as_ref() != Some(agreed) {
            let value = format!("one of {} shards here", agreed.exchange.shards().len());
            let expected = "the same on all clients: as client 0 has it";
            return Err(PoolError::Argument { what: "the exchange", value, expected });
        }
        let members = self.session.meet(agreed)?;
        let Session { parts, group, clients, options, .. } = &self.session;
        let (memory, number) = (parts.pool.memory().clone(), group.rank());
        let client = Client::over(memory, members, *clients, number, Arc::new(agreed.clone()), *options)?;
        let client = self.client.insert(client);
        if let Some(interrupt) = interrupt {
            client.on_wait(interrupt);
        }
        Ok(client)
    }

    /// Changes how long one wait for others may take, from the next exchange on.
    pub fn set_timeout(&mut self, timeout: std::time::Duration) {
        self.session.set_timeout(timeout);
    }

    /// The client of the current exchange.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when none has begun.
    pub fn client(&mut self) -> Result<&mut Client<M>, PoolError> {
        self.client.as_mut().ok_or(PoolError::Argument {
            what: "the service",
            value: "without an exchange".into(),
            expected: "begin one first",
        })
    }

    /// What each proxy has done in the current exchange, which is nothing before the first.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub fn stat(&mut self) -> Result<Vec<ProxyStat>, PoolError> {
        let Session { group, clients, .. } = &self.session;
        let stat = |(proxy, member): (u16, &RankPlace)| {
            let ([steps, shards, bytes], alive) = match &self.client {
                Some(client) => client.summed_by(proxy)?,
                None => ([0; 3], !group.has_died(clients + usize::from(proxy))?),
            };
            Ok(ProxyStat { host: member.host, pid: member.pid, steps, shards, bytes, alive })
        };
        (0..).zip(&group.members()[*clients..]).map(stat).collect()
    }

    /// Ends the service, which all clients do: the proxies end too.
    ///
    /// # Errors
    /// Those of a group's operations.
    pub fn leave(mut self) -> Result<(), PoolError> {
        self.end();
        let told = self.session.tell(None).map(drop);
        self.session.part(told)
    }

    fn end(&mut self) {
        if let Some(mut client) = self.client.take() {
            client.leave();
        }
    }
}

impl<M: Memory> Drop for ClientSession<M> {
    fn drop(&mut self) {
        self.end();
    }
}

/// A proxy that has joined a service. Dropping it leaves the service.
pub struct ProxySession<M: Memory>(Session<M>);

impl<M: Memory> ProxySession<M> {
    /// Joins the service `name` as proxy `proxy` of `proxies`, and returns when all clients and proxies have joined. Waits ask
    /// `interrupt` whether to give up.
    ///
    /// # Errors
    /// Those of [`Group::join`].
    pub fn join(
        pool: Arc<Pool<M>>,
        name: &str,
        proxy: u16,
        (clients, proxies): (usize, u16),
        options: ServiceOptions,
        interrupt: Option<Interrupt>,
    ) -> Result<Self, PoolError> {
        Self::join_staging(pool, name, proxy, (clients, proxies), (options, STAGING), interrupt)
    }

    /// As [`ProxySession::join`], with options and bytes of staging, which are the same for all processes.
    pub(crate) fn join_staging(
        pool: Arc<Pool<M>>,
        name: &str,
        proxy: u16,
        (clients, proxies): (usize, u16),
        options: (ServiceOptions, u64),
        interrupt: Option<Interrupt>,
    ) -> Result<Self, PoolError> {
        if proxy >= proxies || clients == 0 {
            let value = format!("proxy {proxy} of {proxies}, {clients} clients");
            let expected = "proxies count from 0, and there is a client";
            return Err(PoolError::Argument { what: "the service", value, expected });
        }
        let number = clients + usize::from(proxy);
        Session::join(pool, name, number, (clients, proxies), options, interrupt).map(Self)
    }

    /// Changes how long one wait for others may take, from the next exchange on.
    pub fn set_timeout(&mut self, timeout: std::time::Duration) {
        self.0.set_timeout(timeout);
    }

    /// Sums, exchange after exchange, until client 0 ends the service. `interrupt` makes what the waits of an exchange ask.
    ///
    /// # Errors
    /// Those of [`Proxy::serve`] and of a group's operations.
    pub fn serve(mut self, interrupt: impl Fn() -> Option<Interrupt>) -> Result<(), PoolError> {
        let Self(session) = &mut self;
        loop {
            session.group.set_timeout(AGES);
            let Some(agreed) = session.tell(None)? else { break };
            session.group.set_timeout(session.options.timeout);
            let members = session.meet(&agreed)?;
            let proxy = (session.group.rank() - session.clients) as u16;
            let memory = session.parts.pool.memory().clone();
            let mut proxy =
                Proxy::over(memory, members, session.clients, proxy, Arc::new(agreed), session.options)?;
            if let Some(interrupt) = interrupt() {
                proxy.on_wait(interrupt);
            }
            proxy.serve()?;
        }
        session.part(Ok(()))
    }
}

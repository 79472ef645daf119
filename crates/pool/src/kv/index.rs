//! The table of a process's own index of a cache: where the block of each key lies, and what each slot holds.
//!
//! It takes 20 bytes a slot, and 7 to 14 a block for a table of slots by key.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Seated;
use twox_hash::XxHash3_64;

use super::slabs::Slab;
use super::wire::{SLAB_IS_GONE, Slot};
use crate::object::Object;

/// Where a block was when its host last said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) host: u16,
    pub(super) slot: Slot,
    /// The low bits of the generation.
    pub(super) generation: u32,
}

/// A slot of a host, small: of each block there is one in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(Rust, packed)]
struct Seat {
    host: u8,
    slot: u32,
}

const _: () = assert!(size_of::<Seat>() == 5 && size_of::<Known>() == 20);

impl Seat {
    const fn new(host: u16, slot: Slot) -> Self {
        Self { host: host as u8, slot: slot.word() }
    }

    const fn slot(self) -> Slot {
        Slot::of(self.slot)
    }
}

/// What a slot was last known to hold.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    key: [u32; 4],
    /// The low bits of the generation, [`SLAB_IS_GONE`] where it holds nothing.
    generation: u32,
}

impl Known {
    fn key(&self) -> u128 {
        let [a, b, c, d] = self.key.map(u128::from);
        a | b << 32 | c << 64 | d << 96
    }

    fn of(key: u128, generation: u32) -> Self {
        Self { key: std::array::from_fn(|at| (key >> (32 * at)) as u32), generation }
    }
}

/// A slab, and what its slots hold.
#[derive(Debug)]
struct KnownSlab {
    slab: Slab,
    slots: Box<[Known]>,
}

/// A block that is not found by its key yet.
#[derive(Debug)]
pub(super) struct Unseated {
    hash: u64,
    key: [u32; 4],
    seat: Seat,
}

/// What is known of a host.
#[derive(Debug, Default)]
pub(super) struct Peer {
    /// Its object, once it is there.
    pub(super) part: Option<Object>,
    /// The sequence number of the line of its log that is read next.
    pub(super) cursor: u64,
    slabs: Vec<Option<KnownSlab>>,
    /// Slots that hold a block.
    blocks: u64,
}

impl Peer {
    fn slot(&mut self, slot: Slot) -> Option<&mut Known> {
        let slab = self.slabs.get_mut(slot.slab() as usize)?.as_mut()?;
        slab.slots.get_mut(slot.index() as usize)
    }
}

/// Counts of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Counts {
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// Copies that were made void by the second look, or by a checksum.
    pub(super) void: u64,
}

/// The index.
#[derive(Debug)]
pub(super) struct Replica {
    /// Where the block of each key is. Of two blocks of one key the one that was heard of last counts: both are right.
    seats: HashTable<Seat>,
    pub(super) peers: Vec<Peer>,
    /// So that no host knows which keys meet in the table.
    seed: u64,
    /// Whether another host has asked for a slab, and this process has not answered.
    pub(super) is_asked: bool,
    pub(super) counts: Counts,
}

/// What the slot holds that a seat names: every seat's slab is known.
fn known(peers: &[Peer], seat: Seat) -> Known {
    let slab = &peers[usize::from(seat.host)].slabs[seat.slot().slab() as usize];
    slab.as_ref().map_or(Known::default(), |slab| slab.slots[seat.slot().index() as usize])
}

fn hash_of(seed: u64, key: u128) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, &key.to_le_bytes())
}

impl Replica {
    pub(super) fn new(hosts: u16) -> Self {
        let peers = (0..hosts).map(|_| Peer::default()).collect();
        let seed = RandomState::new().hash_one(0);
        Self { seats: HashTable::new(), peers, seed, is_asked: false, counts: Counts::default() }
    }

    /// Makes room for so many blocks more.
    pub(super) fn reserve(&mut self, blocks: usize) {
        let Self { seats, peers, seed, .. } = self;
        seats.reserve(blocks, |seat| hash_of(*seed, known(peers, *seat).key()));
    }

    fn seat(&self, key: u128) -> Option<Seat> {
        self.seats.find(hash_of(self.seed, key), |seat| known(&self.peers, *seat).key() == key).copied()
    }

    /// Where the block of a key is.
    pub(super) fn place(&self, key: u128) -> Option<Place> {
        let seat = self.seat(key)?;
        let generation = known(&self.peers, seat).generation;
        Some(Place { host: seat.host.into(), slot: seat.slot(), generation })
    }

    /// How many blocks are known.
    pub(super) fn len(&self) -> usize {
        self.seats.len()
    }

    /// Bytes that it takes in this process's memory.
    pub(super) fn bytes(&self) -> u64 {
        let slabs = self.peers.iter().flat_map(|peer| &peer.slabs);
        let slots: usize =
            slabs.flatten().map(|slab| size_of_val(&*slab.slots) + size_of::<KnownSlab>()).sum();
        (self.seats.allocation_size() + slots) as u64
    }

    /// How many slots of a host are known to hold a block.
    pub(super) fn blocks_of(&self, host: u16) -> u64 {
        self.peers[usize::from(host)].blocks
    }

    /// Forgets a place where a block was not, unless the key has another by now.
    pub(super) fn forget(&mut self, key: u128, place: Place) {
        if self.place(key) == Some(place) {
            self.unseat(key, Seat::new(place.host, place.slot));
        }
    }

    /// A key is no longer at a seat, if it was.
    fn unseat(&mut self, key: u128, seat: Seat) {
        if let Ok(found) = self.seats.find_entry(hash_of(self.seed, key), |other| *other == seat) {
            found.remove();
        }
    }

    /// A slab was given up: its number may be another's by now.
    pub(super) fn forget_slab(&mut self, host: u16, number: u32) {
        let slab = self.peers[usize::from(host)].slabs.get(number as usize);
        let slots = slab.and_then(Option::as_ref).map_or(0, |slab| slab.slots.len());
        (0..slots as u32).for_each(|index| self.set(host, Slot::new(number, index), None));
        if let Some(slab) = self.peers[usize::from(host)].slabs.get_mut(number as usize) {
            *slab = None;
        }
    }

    /// Keeps where a slab of a host is.
    pub(super) fn know(&mut self, host: u16, number: u32, slab: Slab) {
        if self.slab(host, number) == Some(slab) {
            return;
        }
        self.forget_slab(host, number);
        let slabs = &mut self.peers[usize::from(host)].slabs;
        if slabs.len() <= number as usize {
            slabs.resize_with(number as usize + 1, || None);
        }
        let slots = vec![Known::default(); slab.head.slots as usize].into();
        slabs[number as usize] = Some(KnownSlab { slab, slots });
    }

    pub(super) fn slab(&self, host: u16, number: u32) -> Option<Slab> {
        let slab = self.peers[usize::from(host)].slabs.get(number as usize)?;
        slab.as_ref().map(|known| known.slab)
    }

    /// The objects that it holds open.
    pub(super) fn parts(&self) -> impl Iterator<Item = &Object> {
        self.peers.iter().filter_map(|peer| peer.part.as_ref())
    }

    /// A slot of a host holds this block from now on, or none; nothing where its slab is not known.
    pub(super) fn set(&mut self, host: u16, slot: Slot, holds: Option<(u128, u32)>) {
        if let Some(holds) = self.fill(host, slot, holds) {
            self.take_seat(holds.key(), Seat::new(host, slot));
        }
    }

    /// As [`Replica::set`], but the block is found by its key only from the next [`Replica::seat_all`] on.
    pub(super) fn set_unseated(
        &mut self,
        host: u16,
        slot: Slot,
        holds: Option<(u128, u32)>,
        into: &mut Vec<Unseated>,
    ) {
        if let Some(holds) = self.fill(host, slot, holds) {
            let hash = hash_of(self.seed, holds.key());
            into.push(Unseated { hash, key: holds.key, seat: Seat::new(host, slot) });
        }
    }

    /// Has blocks found by their keys, in the order in which the table has them: one by one they would each touch other pages.
    pub(super) fn seat_all(&mut self, unseated: &mut Vec<Unseated>) {
        let mask = self.seats.capacity().next_power_of_two() as u64 - 1;
        unseated.sort_unstable_by_key(|block| block.hash & mask);
        for Unseated { key, seat, .. } in unseated.drain(..) {
            self.take_seat(Known { key, generation: SLAB_IS_GONE }.key(), seat);
        }
    }

    /// Notes what a slot holds from now on; what that is, where it is a block. Nothing where its slab is not known.
    fn fill(&mut self, host: u16, slot: Slot, holds: Option<(u128, u32)>) -> Option<Known> {
        let (seat, peer) = (Seat::new(host, slot), &mut self.peers[usize::from(host)]);
        let before = std::mem::take(peer.slot(slot)?);
        if before.generation != SLAB_IS_GONE {
            peer.blocks -= 1;
            self.unseat(before.key(), seat);
        }
        let (key, generation) = holds.filter(|(_, generation)| *generation != SLAB_IS_GONE)?;
        let (holds, peer) = (Known::of(key, generation), &mut self.peers[usize::from(host)]);
        peer.blocks += 1;
        *peer.slot(slot)? = holds;
        Some(holds)
    }

    fn take_seat(&mut self, key: u128, seat: Seat) {
        let Self { seats, peers, seed, .. } = self;
        let key_at = |seat: &Seat| known(peers, *seat).key();
        let hash = |seat: &Seat| hash_of(*seed, key_at(seat));
        match seats.entry(hash_of(*seed, key), |seat| key_at(seat) == key, hash) {
            Seated::Occupied(mut other) => *other.get_mut() = seat,
            Seated::Vacant(free) => _ = free.insert(seat),
        }
    }
}

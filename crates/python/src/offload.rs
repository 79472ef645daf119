//! What `polder.offload` is made of: placements, the fused step over states in several tiers, and saved activations.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use polder_kernels::{Factor, Gradients, PIECE, Piece, Work, step};
use polder_mem::{Buffer, DiskRates, PAGE, PendingTransfer, TRANSFER_BYTES, TierError, TierFile, disk_rates};
use polder_place::{Placement, Policy, Problem};
use polder_platform::Platform;
use pyo3::prelude::*;
use serde_json::json;

use crate::errors::{argument, plain};
use crate::optimizer::{Settings, slice, update_of};

fn of_tier(error: TierError) -> PyErr {
    plain("TierError", error.to_string())
}

fn unplaced(error: impl std::fmt::Display) -> PyErr {
    plain("PlacementError", error.to_string())
}

/// Places by a policy, or checks the fractions of a placement, and says what each phase takes; JSON in and out.
#[pyfunction]
pub(crate) fn offload_place(problem: &str, policy: &str, fractions: Option<&str>) -> PyResult<String> {
    let problem: Problem = serde_json::from_str(problem).map_err(unplaced)?;
    let placement = match fractions {
        Some(given) => {
            let placement = Placement { fractions: serde_json::from_str(given).map_err(unplaced)? };
            problem.check().and_then(|()| problem.check_placement(&placement)).map_err(unplaced)?;
            placement
        }
        None => problem.place(policy.parse::<Policy>().map_err(unplaced)?).map_err(unplaced)?,
    };
    let links: Vec<_> = problem.phases.iter().map(|phase| problem.links(phase, &placement)).collect();
    let answer =
        json!({ "fractions": placement.fractions, "seconds": problem.seconds(&placement), "links": links });
    Ok(answer.to_string())
}

/// Of a folder's disk: free bytes, and bytes a second that are read and written.
#[pyfunction]
pub(crate) fn offload_disk(
    py: Python<'_>,
    folder: PathBuf,
    nbytes: usize,
    rounds: usize,
) -> PyResult<(u64, f64, f64)> {
    let measured = py.detach(|| disk_rates(&folder, nbytes, rounds)).map_err(of_tier)?;
    let DiskRates { free, read, write } = measured;
    Ok((free, read, write))
}

/// A tier of a platform's file: its name, folder, capacity and rates.
type Described = (String, Option<String>, f64, f64, f64);

/// Tiers of a platform: the host's memory, then disks.
#[pyfunction]
pub(crate) fn offload_tiers(platform: &str) -> PyResult<Vec<Described>> {
    let loaded = Platform::load(platform).map_err(|error| argument(error.to_string()))?;
    let memory = loaded
        .sharing
        .as_ref()
        .map(|it| it.memory)
        .or_else(|| loaded.rack.values().next().map(|rack| rack.host.memory));
    let Some(memory) = memory else {
        return Err(argument(format!("{platform}: expected the memory of a host; `polder probe` writes it")));
    };
    let dram = ("dram".to_owned(), None, memory.capacity.value(), memory.read.value(), memory.write.value());
    let disks = loaded.disk.iter().map(|(name, it)| {
        (name.clone(), Some(it.folder.clone()), it.capacity.value(), it.read.value(), it.write.value())
    });
    Ok(std::iter::once(dram).chain(disks).collect())
}

/// Elements of both moments that go to or from a disk together.
const TOGETHER: usize = TRANSFER_BYTES / 8;
/// Transfers that are under way at most, and so the memory that stages them.
const STAGED: usize = 6;

/// Moments of an optimizer in a range of elements: the first ones in memory, by NUMA node, the others on a disk.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct States(Mutex<Moments>);

struct Moments {
    kept: Vec<Kept>,
    in_memory: usize,
    on_disk: usize,
    disk: Option<TierFile>,
    staging: Vec<Buffer>,
}

/// Moments in memory.
struct Kept {
    begin: usize,
    elements: usize,
    moments: [Buffer; 2],
}

/// A tensor: where its elements begin among all, the addresses of parameters and gradients, how many, settings, step.
type Tensor = (usize, usize, usize, usize, Settings, f64);

#[pymethods]
impl States {
    /// `kept` lists elements in memory with the NUMA node that each is bound to.
    #[new]
    #[pyo3(signature = (kept, on_disk=0, folder=None))]
    fn new(kept: Vec<(usize, Option<usize>)>, on_disk: usize, folder: Option<PathBuf>) -> PyResult<Self> {
        let sizes = kept.iter().map(|(elements, _)| *elements).chain([on_disk]);
        if sizes.clone().any(|elements| !elements.is_multiple_of(PAGE / 4)) {
            return Err(argument(format!("states are placed in whole pages of {} elements", PAGE / 4)));
        }
        let mut segments = vec![];
        let mut begin = 0;
        for (elements, node) in kept {
            let moment = || -> Result<Buffer, TierError> {
                let mut buffer = Buffer::new(4 * elements)?;
                node.map_or(Ok(()), |node| buffer.bind(node))?;
                Ok(buffer)
            };
            segments.push(Kept {
                begin,
                elements,
                moments: [moment().map_err(of_tier)?, moment().map_err(of_tier)?],
            });
            begin += elements;
        }
        let folder = folder.unwrap_or_default();
        let disk =
            (on_disk > 0).then(|| TierFile::create(Path::new(&folder), 8 * on_disk as u64)).transpose();
        let staging = (0..if on_disk > 0 { STAGED } else { 0 })
            .map(|_| Buffer::new(TRANSFER_BYTES))
            .collect::<Result<_, _>>();
        Ok(Self(Mutex::new(Moments {
            kept: segments,
            in_memory: begin,
            on_disk,
            disk: disk.map_err(of_tier)?,
            staging: staging.map_err(of_tier)?,
        })))
    }

    /// Steps the optimizer over every tensor; they stand in the order of where they begin. Gradients are divided by
    /// `scale` and multiplied by `factor`.
    fn step(
        &self,
        py: Python<'_>,
        tensors: Vec<Tensor>,
        scale: f32,
        factor: f32,
        threads: usize,
    ) -> PyResult<()> {
        py.detach(|| self.lock().step(&tensors, Factor { scale, clip: factor }, threads))
    }

    /// Copies moments of `elements` elements from `begin` on to addresses.
    fn save(
        &self,
        py: Python<'_>,
        begin: usize,
        mean: usize,
        square: usize,
        elements: usize,
    ) -> PyResult<()> {
        self.copy(py, begin, [mean, square], elements, false)
    }

    /// Copies moments of `elements` elements from `begin` on from addresses.
    fn load(
        &self,
        py: Python<'_>,
        begin: usize,
        mean: usize,
        square: usize,
        elements: usize,
    ) -> PyResult<()> {
        self.copy(py, begin, [mean, square], elements, true)
    }

    /// Bytes on each NUMA node, as the kernel says; none for pages that were never touched.
    fn nodes(&self) -> PyResult<Vec<(Option<usize>, usize)>> {
        let mut bytes = std::collections::BTreeMap::new();
        for buffer in self.lock().kept.iter().flat_map(|it| &it.moments) {
            let nodes = buffer.nodes().map_err(|error| plain("TierError", format!("move_pages: {error}")))?;
            nodes.into_iter().for_each(|node| *bytes.entry(node).or_insert(0) += PAGE);
        }
        Ok(bytes.into_iter().collect())
    }

    /// Bytes of the file, and of the memory that stages it.
    fn on_disk(&self) -> (u64, usize) {
        let moments = self.lock();
        (moments.disk.as_ref().map_or(0, TierFile::size), moments.staging.len() * TRANSFER_BYTES)
    }
}

impl States {
    /// Copies moments of `elements` elements from `begin` on, from addresses or to them.
    fn copy(
        &self,
        py: Python<'_>,
        begin: usize,
        [mean, square]: [usize; 2],
        elements: usize,
        is_load: bool,
    ) -> PyResult<()> {
        // SAFETY: the front passes tensors of as many elements, which it holds for the length of the call.
        let [mean, square] = unsafe { [slice(mean, elements)?, slice(square, elements)?] };
        py.detach(|| {
            self.lock().pass(begin, elements, is_load, |at, kept_mean, kept_square| {
                for (kept, theirs) in [(kept_mean, &mut *mean), (kept_square, &mut *square)] {
                    let theirs = &mut theirs[at..at + kept.len()];
                    if is_load { kept.copy_from_slice(theirs) } else { theirs.copy_from_slice(kept) }
                }
            })
        })
    }

    fn lock(&self) -> MutexGuard<'_, Moments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a step does to the moments of a range: of each tensor that has elements there, a piece.
fn work_of<'a>(
    tensors: &[Tensor],
    begin: usize,
    mut mean: &'a mut [f32],
    mut square: &'a mut [f32],
    stripe: usize,
) -> PyResult<Vec<Work<'a>>> {
    let (end, mut done) = (begin + mean.len(), begin);
    let first = tensors.partition_point(|it| it.0 + it.3 <= begin);
    let mut work = vec![];
    for (at, parameters, gradients, elements, settings, number) in
        tensors[first..].iter().take_while(|it| it.0 < end)
    {
        // Both ends are multiples of `PIECE` from the tensor's beginning, or the tensor's own.
        let (from, to) = ((*at).max(begin), (at + elements).min(end));
        // SAFETY: the front passes contiguous tensors of as many elements, which it holds for the length of the call.
        let [parameters, gradients] = unsafe {
            [slice(parameters + 4 * (from - at), to - from)?, slice(gradients + 4 * (from - at), to - from)?]
        };
        let (mean, square) =
            (behind(&mut mean, from - done, to - from), behind(&mut square, from - done, to - from));
        done = to;
        let piece = Piece { parameters, gradients: Gradients::F32(gradients), mean, square, copy: None };
        work.push(Work { update: update_of(settings, *number)?, piece, stripe });
    }
    Ok(work)
}

/// Takes `count` elements that begin after `skipped` out of a slice, and leaves what comes after them.
fn behind<'a>(slice: &mut &'a mut [f32], skipped: usize, count: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(slice)[skipped..].split_at_mut(count);
    *slice = rest;
    taken
}

impl Moments {
    fn step(&mut self, tensors: &[Tensor], factor: Factor, threads: usize) -> PyResult<()> {
        let mut failed = None;
        let whole = self.in_memory + self.on_disk;
        if tensors.iter().any(|it| !it.0.is_multiple_of(PIECE) || it.0 + it.3 > whole) {
            return Err(argument(format!(
                "expected tensors that begin at multiples of {PIECE} elements and end by {whole}"
            )));
        }
        if self.disk.is_none() {
            // All at once, so that threads work on every tier all the time.
            let mut work = vec![];
            for (stripe, kept) in self.kept.iter_mut().enumerate() {
                let [mean, square] = &mut kept.moments;
                work.extend(work_of(tensors, kept.begin, floats(mean), floats(square), stripe)?);
            }
            return step(work, factor, threads).map_err(|error| argument(error.to_string()));
        }
        self.each(0, whole, true, |begin, mean, square| {
            let done = work_of(tensors, begin, mean, square, 0)
                .and_then(|work| step(work, factor, threads).map_err(|error| argument(error.to_string())));
            if let Err(error) = done {
                failed.get_or_insert(error);
            }
        })?;
        failed.map_or(Ok(()), Err)
    }

    /// Calls `f` with the moments of a range, piece by piece, and where in the range each begins.
    fn pass(
        &mut self,
        begin: usize,
        elements: usize,
        write: bool,
        mut f: impl FnMut(usize, &mut [f32], &mut [f32]),
    ) -> PyResult<()> {
        if begin + elements > self.in_memory + self.on_disk {
            return Err(argument(format!("expected elements up to {}", self.in_memory + self.on_disk)));
        }
        self.each(begin, begin + elements, write, |at, mean, square| {
            let (from, to) = (at.max(begin), (at + mean.len()).min(begin + elements));
            f(from - begin, &mut mean[from - at..to - at], &mut square[from - at..to - at]);
        })
    }

    /// Calls `f` with every piece that has elements of a range: its beginning and its moments. Pieces on disk are read
    /// ahead, and written back behind, while those in memory have their turn.
    fn each(
        &mut self,
        begin: usize,
        end: usize,
        write: bool,
        mut f: impl FnMut(usize, &mut [f32], &mut [f32]),
    ) -> PyResult<()> {
        let mut kept: VecDeque<(usize, usize, usize)> = VecDeque::new();
        for (index, segment) in self.kept.iter().enumerate() {
            let pieces = (0..segment.elements)
                .step_by(TOGETHER)
                .map(|at| (index, at, TOGETHER.min(segment.elements - at)));
            kept.extend(
                pieces
                    .filter(|(_, at, count)| segment.begin + at < end && segment.begin + at + count > begin),
            );
        }
        let pieces = (0..self.on_disk).step_by(TOGETHER).map(|at| (at, TOGETHER.min(self.on_disk - at)));
        let first = self.in_memory;
        let mut far: VecDeque<(usize, usize)> =
            pieces.filter(|(at, count)| first + at < end && first + at + count > begin).collect();
        let (mut reading, mut writing) =
            (VecDeque::<(usize, usize, PendingTransfer)>::new(), VecDeque::<PendingTransfer>::new());
        let mut ready: Option<(usize, usize, Buffer)> = None;
        loop {
            while let (Some(disk), Some(_)) = (&self.disk, far.front()) {
                let Some(buffer) = self.staging.pop() else { break };
                if let Some((at, count)) = far.pop_front() {
                    reading.push_back((
                        at,
                        count,
                        disk.read(8 * at as u64, 8 * count, buffer).map_err(of_tier)?,
                    ));
                }
            }
            if ready.is_none()
                && let Some((at, count, transfer)) = reading.pop_front()
            {
                // With nothing else to do, waits.
                if kept.is_empty() {
                    ready = Some((at, count, transfer.wait().map_err(of_tier)?));
                } else {
                    match transfer.poll().map_err(of_tier)? {
                        Ok(buffer) => ready = Some((at, count, buffer)),
                        Err(transfer) => reading.push_front((at, count, transfer)),
                    }
                }
            }
            if let Some((at, count, mut buffer)) = ready.take() {
                let (mean, square) = halves(&mut buffer[..8 * count]);
                f(first + at, mean, square);
                match (&self.disk, write) {
                    (Some(disk), true) => {
                        writing.push_back(disk.write(8 * at as u64, 8 * count, buffer).map_err(of_tier)?);
                    }
                    _ => self.staging.push(buffer),
                }
            } else if let Some((index, at, count)) = kept.pop_front() {
                let Kept { begin, moments: [mean, square], .. } = &mut self.kept[index];
                f(*begin + at, &mut floats(mean)[at..at + count], &mut floats(square)[at..at + count]);
            } else if reading.is_empty() && far.is_empty() {
                break;
            }
            // The next read needs a buffer that a write has.
            while let Some(transfer) = writing.pop_front() {
                if kept.is_empty() && self.staging.is_empty() && reading.is_empty() {
                    self.staging.push(transfer.wait().map_err(of_tier)?);
                    continue;
                }
                match transfer.poll().map_err(of_tier)? {
                    Ok(buffer) => self.staging.push(buffer),
                    Err(transfer) => {
                        writing.push_front(transfer);
                        break;
                    }
                }
            }
        }
        for transfer in writing {
            self.staging.push(transfer.wait().map_err(of_tier)?);
        }
        Ok(())
    }
}

/// Bytes of a page-aligned buffer as numbers.
fn floats(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: every pattern of bits is a float, and the middle of what is aligned to pages is all of it.
    let (before, floats, after) = unsafe { bytes.align_to_mut::<f32>() };
    debug_assert!(before.is_empty() && after.is_empty());
    floats
}

/// The means and the squares of a piece as it lies on a disk.
fn halves(bytes: &mut [u8]) -> (&mut [f32], &mut [f32]) {
    let floats = floats(bytes);
    floats.split_at_mut(floats.len() / 2)
}

/// Tensors that a forward pass saves for the backward pass: of each a part stays in memory and the rest goes to a disk,
/// while computation goes on.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Saved(Mutex<Slots>);

struct Slots {
    disk: Option<TierFile>,
    /// The part of each tensor that stays in memory.
    kept: f64,
    slots: Vec<Option<Slot>>,
    live: usize,
    used: u64,
    most: (usize, u64),
    memory: usize,
    writing: VecDeque<(usize, usize)>,
    idle: Vec<Buffer>,
    /// Buffers that there are, and the most that there were.
    buffers: usize,
    most_buffers: usize,
}

struct Slot {
    bytes: usize,
    memory: Vec<u8>,
    parts: Vec<Part>,
}

/// A piece of a tensor on a disk.
struct Part {
    offset: u64,
    bytes: usize,
    state: Where,
}

enum Where {
    Writing(PendingTransfer),
    OnDisk,
    Reading(PendingTransfer),
    Here(Buffer),
}

/// Buffers of saved tensors that are written or read at once, at most.
const IN_FLIGHT: usize = 8;

#[pymethods]
impl Saved {
    /// `kept` is the part of each tensor that stays in memory; the disk has room for `nbytes`.
    #[new]
    #[pyo3(signature = (kept, nbytes=0, folder=None))]
    fn new(kept: f64, nbytes: u64, folder: Option<PathBuf>) -> PyResult<Self> {
        let folder = folder.unwrap_or_default();
        let disk = (nbytes > 0).then(|| TierFile::create(&folder, nbytes)).transpose().map_err(of_tier)?;
        Ok(Self(Mutex::new(Slots {
            disk,
            kept,
            slots: vec![],
            live: 0,
            used: 0,
            most: (0, 0),
            memory: 0,
            writing: VecDeque::new(),
            idle: vec![],
            buffers: 0,
            most_buffers: 0,
        })))
    }

    /// Takes a copy of the bytes at an address, and returns the number by which they come back.
    fn put(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<usize> {
        // SAFETY: the front passes a contiguous tensor of as many bytes, which it holds for the length of the call.
        let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) };
        py.detach(|| self.lock().put(bytes)).map_err(of_tier)
    }

    /// Copies what `put` took to an address. The slot before it, which is needed next, is read meanwhile.
    fn take(&self, py: Python<'_>, slot: usize, address: usize, nbytes: usize) -> PyResult<()> {
        // SAFETY: as in `put`, and the front has just made the tensor.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, nbytes) };
        py.detach(|| self.lock().take(slot, bytes)).map_err(of_tier)
    }

    /// Gives the room of a slot back.
    fn free(&self, slot: usize) {
        self.lock().free(slot);
    }

    /// The most bytes at once in memory and on the disk, and those of buffers between them.
    fn most(&self) -> (usize, u64, usize) {
        let slots = self.lock();
        (slots.most.0, slots.most.1, slots.most_buffers * TRANSFER_BYTES)
    }
}

impl Saved {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slots {
    fn put(&mut self, bytes: &[u8]) -> Result<usize, TierError> {
        let kept = match self.disk {
            Some(_) => ((bytes.len() as f64 * self.kept) as usize / PAGE * PAGE).min(bytes.len()),
            None => bytes.len(),
        };
        let (memory, far) = bytes.split_at(kept);
        let index = self.slots.len();
        self.memory += memory.len();
        self.live += 1;
        self.slots.push(Some(Slot { bytes: bytes.len(), memory: memory.to_vec(), parts: vec![] }));
        for (number, part) in far.chunks(TRANSFER_BYTES).enumerate() {
            let mut buffer = self.buffer()?;
            buffer[..part.len()].copy_from_slice(part);
            let whole = part.len().next_multiple_of(PAGE);
            let offset = self.used;
            let (Some(disk), Some(Some(slot))) = (&self.disk, self.slots.get_mut(index)) else { break };
            let transfer = disk.write(offset, whole, buffer)?;
            slot.parts.push(Part { offset, bytes: part.len(), state: Where::Writing(transfer) });
            self.used += whole as u64;
            self.writing.push_back((index, number));
        }
        self.most = (self.most.0.max(self.memory), self.most.1.max(self.used));
        Ok(index)
    }

    /// A buffer for the next transfer: an idle one, a new one, or that of the oldest write.
    fn buffer(&mut self) -> Result<Buffer, TierError> {
        if let Some(buffer) = self.idle.pop() {
            return Ok(buffer);
        }
        while self.writing.len() >= IN_FLIGHT {
            let Some((slot, part)) = self.writing.pop_front() else { break };
            let Some(Some(slot)) = self.slots.get_mut(slot) else { continue };
            let Some(part) = slot.parts.get_mut(part) else { continue };
            match std::mem::replace(&mut part.state, Where::OnDisk) {
                Where::Writing(transfer) => return transfer.wait(),
                other => part.state = other,
            }
        }
        self.buffers += 1;
        self.most_buffers = self.most_buffers.max(self.buffers);
        Buffer::new(TRANSFER_BYTES)
    }

    /// Takes a buffer back, and keeps as many as are in flight at once.
    fn give(&mut self, buffer: Buffer) {
        match self.idle.len() < IN_FLIGHT {
            true => self.idle.push(buffer),
            false => self.buffers -= 1,
        }
    }

    /// Starts to read what of a slot is on the disk.
    fn fetch(&mut self, index: usize) -> Result<(), TierError> {
        let count = match self.slots.get(index) {
            Some(Some(slot)) => slot.parts.len(),
            _ => return Ok(()),
        };
        for part in 0..count {
            let is_far = matches!(self.part(index, part), Some(Part { state: Where::OnDisk, .. }));
            if let Some(it) = self.part(index, part)
                && matches!(it.state, Where::Writing(_))
                && let Where::Writing(transfer) = std::mem::replace(&mut it.state, Where::OnDisk)
            {
                // What was just written need not be read.
                it.state = Where::Here(transfer.wait()?);
            } else if is_far {
                let buffer = self.buffer()?;
                let (offset, whole) = match self.part(index, part) {
                    Some(it) => (it.offset, it.bytes.next_multiple_of(PAGE)),
                    None => continue,
                };
                let Some(disk) = &self.disk else { continue };
                let transfer = disk.read(offset, whole, buffer)?;
                if let Some(it) = self.part(index, part) {
                    it.state = Where::Reading(transfer);
                }
            }
        }
        Ok(())
    }

    fn part(&mut self, slot: usize, part: usize) -> Option<&mut Part> {
        self.slots.get_mut(slot)?.as_mut()?.parts.get_mut(part)
    }

    fn take(&mut self, index: usize, bytes: &mut [u8]) -> Result<(), TierError> {
        self.fetch(index)?;
        if let Some(before) = (0..index).rev().find(|it| self.slots[*it].is_some()) {
            self.fetch(before)?;
        }
        let Some(Some(slot)) = self.slots.get_mut(index) else { return Ok(()) };
        assert_eq!(slot.bytes, bytes.len(), "a saved tensor comes back as large as it went");
        bytes[..slot.memory.len()].copy_from_slice(&slot.memory);
        let mut at = slot.memory.len();
        let mut done = vec![];
        for part in &mut slot.parts {
            let buffer = match std::mem::replace(&mut part.state, Where::OnDisk) {
                Where::Reading(transfer) | Where::Writing(transfer) => transfer.wait()?,
                Where::Here(buffer) => buffer,
                Where::OnDisk => continue,
            };
            bytes[at..at + part.bytes].copy_from_slice(&buffer[..part.bytes]);
            at += part.bytes;
            done.push(buffer);
        }
        done.into_iter().for_each(|buffer| self.give(buffer));
        Ok(())
    }

    fn free(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        self.memory -= slot.memory.len();
        for part in slot.parts {
            // The next write to this place must not overtake one that nobody needs any more.
            match part.state {
                Where::Writing(transfer) | Where::Reading(transfer) => {
                    // What failed is lost with the slot.
                    if let Ok(buffer) = transfer.wait() {
                        self.give(buffer);
                    }
                }
                Where::Here(buffer) => self.give(buffer),
                Where::OnDisk => {}
            }
        }
        self.live -= 1;
        if self.live == 0 {
            self.slots.clear();
            self.writing.clear();
            self.used = 0;
        }
    }
}

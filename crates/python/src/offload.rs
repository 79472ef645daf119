//! What `polder.offload` is made of: placements, the fused step over states in several tiers, and saved activations.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use polder_kernels::{Factor, Gradients, PIECE, Piece, Work, step};
use polder_mem::{
    Buffer, DiskRates, PAGE, PendingTransfer, Range as Pages, TRANSFER_BYTES, TierError, TierFile, disk_rates,
};
use polder_place::{Placement, Policy, Problem};
use polder_platform::{LocalTier, Platform};
use pyo3::prelude::*;
use serde_json::json;

use crate::errors::{argument, plain};
use crate::optimizer::{ARRAYS, Settings, expect_apart, slice, update_of};
use crate::range::{Place, Range, located, of_tier};

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

/// Bytes of memory that this process may still take, as the host and its cgroups say; `read` returns the text of a file.
#[pyfunction]
pub(crate) fn available_memory(read: &Bound<'_, PyAny>) -> PyResult<u64> {
    let text = |path: &str| read.call1((path,)).ok()?.extract().ok();
    polder_linux::available_memory(text)
        .ok_or_else(|| plain("TierError", "/proc/meminfo: expected MemAvailable".to_owned()))
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

/// A tier of a platform's file: its name, folder, node, device, capacity and rates.
type Described = (String, Option<String>, Option<u32>, Option<String>, f64, f64, f64);

/// Tiers of a platform: the host's memory, other memory, then disks. Rates are those of so many threads, where they were
/// measured.
#[pyfunction]
#[pyo3(signature = (platform, threads=None))]
pub(crate) fn offload_tiers(platform: &str, threads: Option<u32>) -> PyResult<Vec<Described>> {
    let loaded = Platform::load(platform).map_err(|error| argument(error.to_string()))?;
    let memory = loaded
        .sharing
        .as_ref()
        .map(|it| it.memory)
        .or_else(|| loaded.rack.values().next().map(|rack| rack.host.memory));
    let Some(memory) = memory else {
        return Err(argument(format!("{platform}: expected the memory of a host; `polder probe` writes it")));
    };
    let rates = |of: &LocalTier| {
        let (read, write) = of.rates(threads);
        (read.value(), write.value())
    };
    let (read, write) =
        loaded.local_tiers.get("dram").map_or((memory.read.value(), memory.write.value()), rates);
    let dram = ("dram".to_owned(), None, None, None, memory.capacity.value(), read, write);
    let near = loaded.local_tiers.iter().filter(|(name, _)| *name != "dram").map(|(name, it)| {
        let (read, write) = rates(it);
        (name.clone(), None, it.node, it.device.clone(), it.capacity.value(), read, write)
    });
    let disks = loaded.disk.iter().map(|(name, it)| {
        let folder = Some(it.folder.clone());
        (name.clone(), folder, None, None, it.capacity.value(), it.read.value(), it.write.value())
    });
    Ok(std::iter::once(dram).chain(near).chain(disks).collect())
}

/// Elements whose moments go to or from a disk together.
const TOGETHER: usize = TRANSFER_BYTES / 8;
/// Transfers that are under way at most, and so the memory that stages them.
const STAGED: usize = 6;

/// Moments of an optimizer in a range of elements: the first ones in memory, by tier, the others on disks.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct States(Mutex<Moments>);

struct Moments {
    /// Means and squares of what is in memory, each in one range; of Lion there are no squares.
    memory: [Pages; 2],
    /// How many moments there are, 1 or 2.
    count: usize,
    /// Where each stripe of it begins, and how many elements it has.
    stripes: Vec<(usize, usize)>,
    in_memory: usize,
    on_disk: usize,
    disks: Vec<Disk>,
    staging: Vec<Buffer>,
    missed: Vec<String>,
}

/// Moments on a disk.
struct Disk {
    /// Elements on the disks before it.
    begin: usize,
    elements: usize,
    file: TierFile,
}

/// A tensor: where its elements begin among all, the addresses of parameters and gradients, how many, settings, step.
type Tensor = (usize, usize, usize, usize, Settings, f64);

#[pymethods]
impl States {
    /// `kept` lists elements in memory with the node or device of each, `files` elements on disks with the folder of each.
    /// `moments` is how many there are of an element, 1 or 2.
    #[new]
    #[pyo3(signature = (kept, files=vec![], moments=2))]
    fn new(
        py: Python<'_>,
        kept: Vec<(usize, Option<Place>)>,
        files: Vec<(usize, PathBuf)>,
        moments: usize,
    ) -> PyResult<Self> {
        if !(1..=2).contains(&moments) {
            return Err(argument(format!("expected 1 or 2 moments, found {moments}")));
        }
        let sizes =
            kept.iter().map(|(elements, _)| *elements).chain(files.iter().map(|(elements, _)| *elements));
        if sizes.clone().any(|elements| !elements.is_multiple_of(PAGE / 4)) {
            return Err(argument(format!("states are placed in whole pages of {} elements", PAGE / 4)));
        }
        py.detach(|| Moments::new(&kept, files, moments)).map(|it| Self(Mutex::new(it))).map_err(of_tier)
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

    /// Bytes in each place of memory, as the kernel says.
    fn r#where(&self) -> PyResult<Vec<(String, usize)>> {
        let moments = self.lock();
        located(moments.memory.iter().take(moments.count)).map_err(of_tier)
    }

    /// Why stripes lie in memory of the kernel's choice: their tiers had no room.
    fn missed(&self) -> Vec<String> {
        self.lock().missed.clone()
    }

    /// Bytes of each file, and of the memory that stages them.
    fn on_disk(&self) -> (Vec<u64>, usize) {
        let moments = self.lock();
        (moments.disks.iter().map(|it| it.file.size()).collect(), moments.staging.len() * TRANSFER_BYTES)
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
        let squares = if self.lock().count == 2 { elements } else { 0 };
        // SAFETY: the front passes tensors of as many elements, which it holds for the length of the call.
        let [mean, square] = unsafe { [slice(mean, elements)?, slice(square, squares)?] };
        py.detach(|| {
            self.lock().pass(begin, elements, is_load, |at, kept_mean, kept_square| {
                let both = [(kept_mean, &mut *mean), (kept_square, &mut *square)];
                for (kept, theirs) in both.into_iter().filter(|(kept, _)| !kept.is_empty()) {
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
        let skipped = from - done;
        let (mean, square) = (behind(&mut mean, skipped, to - from), behind(&mut square, skipped, to - from));
        done = to;
        let piece = Piece { parameters, gradients: Gradients::F32(gradients), mean, square, copy: None };
        work.push(Work { update: update_of(settings, *number)?, piece, stripe });
    }
    Ok(work)
}

/// Takes `count` elements that begin after `skipped` out of a slice, and leaves what comes after them. Of an empty slice it
/// takes nothing.
fn behind<'a>(slice: &mut &'a mut [f32], skipped: usize, count: usize) -> &'a mut [f32] {
    if slice.is_empty() {
        return &mut [];
    }
    let (taken, rest) = std::mem::take(slice)[skipped..].split_at_mut(count);
    *slice = rest;
    taken
}

impl Moments {
    fn new(
        kept: &[(usize, Option<Place>)],
        files: Vec<(usize, PathBuf)>,
        count: usize,
    ) -> Result<Self, TierError> {
        let (mut stripes, mut in_memory) = (vec![], 0);
        for (elements, _) in kept {
            stripes.push((in_memory, *elements));
            in_memory += elements;
        }
        let squares = if count == 2 { in_memory } else { 0 };
        let mut memory = [Pages::new(4 * in_memory)?, Pages::new(4 * squares)?];
        let mut missed = vec![];
        for ((begin, elements), (_, place)) in stripes.iter().zip(kept) {
            for pages in memory.iter_mut().take(count).filter(|_| *elements > 0) {
                match place.as_ref().map_or(Ok(()), |it| it.put(pages, 4 * begin, 4 * elements)) {
                    // What does not fit stays where the kernel puts it.
                    Err(error) if error.is_full() => missed.push(error.to_string()),
                    done => done?,
                }
            }
        }
        let (mut disks, mut on_disk) = (vec![], 0);
        for (elements, folder) in files.into_iter().filter(|(elements, _)| *elements > 0) {
            let file = TierFile::create(&folder, (4 * count * elements) as u64)?;
            disks.push(Disk { begin: on_disk, elements, file });
            on_disk += elements;
        }
        let buffers = if on_disk > 0 { STAGED } else { 0 };
        let staging = (0..buffers).map(|_| Buffer::new(TRANSFER_BYTES)).collect::<Result<_, _>>()?;
        Ok(Self { memory, count, stripes, in_memory, on_disk, disks, staging, missed })
    }

    fn step(&mut self, tensors: &[Tensor], factor: Factor, threads: usize) -> PyResult<()> {
        expect_apart(tensors.iter().enumerate().flat_map(|(tensor, &(_, p, g, elements, ..))| {
            [(p, 4 * elements, true, tensor, ARRAYS[0]), (g, 4 * elements, false, tensor, ARRAYS[1])]
        }))?;
        let mut failed = None;
        let whole = self.in_memory + self.on_disk;
        if tensors.iter().any(|it| !it.0.is_multiple_of(PIECE) || it.0 + it.3 > whole) {
            return Err(argument(format!(
                "expected tensors that begin at multiples of {PIECE} elements and end by {whole}"
            )));
        }
        if self.disks.is_empty() {
            self.check()?;
            // All at once, so that threads work on every tier all the time.
            let (mut mean, mut square) = kept_moments(&mut self.memory, self.count, 0, self.in_memory);
            let mut work = vec![];
            for (stripe, (begin, elements)) in self.stripes.iter().enumerate() {
                let (mean, square) = (behind(&mut mean, 0, *elements), behind(&mut square, 0, *elements));
                work.extend(work_of(tensors, *begin, mean, square, stripe)?);
            }
            return step(work, factor, threads).map_err(|error| argument(error.to_string()));
        }
        let (Some(first), Some(last)) = (tensors.first(), tensors.last()) else { return Ok(()) };
        self.each(first.0, last.0 + last.3, true, |begin, mean, square| {
            let done = work_of(tensors, begin, mean, square, 0)
                .and_then(|work| step(work, factor, threads).map_err(|error| argument(error.to_string())));
            if let Err(error) = done {
                failed.get_or_insert(error);
            }
        })?;
        failed.map_or(Ok(()), Err)
    }

    /// Whether all memory that is mapped is still there.
    fn check(&self) -> PyResult<()> {
        self.memory.iter().try_for_each(Pages::check).map_err(of_tier)
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
            let mut square = square;
            f(from - begin, &mut mean[from - at..to - at], behind(&mut square, from - at, to - from));
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
        self.check()?;
        // A transfer that failed has kept its buffer.
        while self.staging.len() < if self.on_disk > 0 { STAGED } else { 0 } {
            self.staging.push(Buffer::new(TRANSFER_BYTES).map_err(of_tier)?);
        }
        let (mut reading, mut writing) = (VecDeque::new(), VecDeque::new());
        let done = self.move_each(begin, end, write, &mut f, &mut reading, &mut writing);
        // After an error a transfer may be under way: what the next call writes must not be overtaken by it.
        for (.., transfer) in reading {
            let _ = transfer.wait();
        }
        for transfer in writing {
            let _ = transfer.wait();
        }
        done
    }

    /// What [`Moments::each`] does. Transfers that are under way are left in the queues only after an error.
    fn move_each(
        &mut self,
        begin: usize,
        end: usize,
        write: bool,
        f: &mut impl FnMut(usize, &mut [f32], &mut [f32]),
        reading: &mut VecDeque<(usize, usize, usize, PendingTransfer)>,
        writing: &mut VecDeque<PendingTransfer>,
    ) -> PyResult<()> {
        // Bytes of an element on a disk.
        let (first, width) = (self.in_memory, 4 * self.count);
        let mut kept: VecDeque<(usize, usize)> = self
            .stripes
            .iter()
            .flat_map(|(at, elements)| pieces(*at, *elements))
            .filter(|(at, count)| *at < end && at + count > begin)
            .collect();
        let mut far: VecDeque<(usize, usize, usize)> = in_turn(&self.disks)
            .into_iter()
            .filter(|(_, at, count)| first + at < end && first + at + count > begin)
            .collect();
        let mut ready: Option<(usize, usize, usize, Buffer)> = None;
        loop {
            while let Some((index, at, count)) = far.front().copied() {
                let Some(buffer) = self.staging.pop() else { break };
                far.pop_front();
                let Disk { begin, file, .. } = &self.disks[index];
                let transfer =
                    file.read((width * (at - begin)) as u64, width * count, buffer).map_err(of_tier)?;
                reading.push_back((index, at, count, transfer));
            }
            if ready.is_none()
                && let Some((index, at, count, transfer)) = reading.pop_front()
            {
                // With nothing else to do, waits.
                if kept.is_empty() {
                    ready = Some((index, at, count, transfer.wait().map_err(of_tier)?));
                } else {
                    match transfer.poll().map_err(of_tier)? {
                        Ok(buffer) => ready = Some((index, at, count, buffer)),
                        Err(transfer) => reading.push_front((index, at, count, transfer)),
                    }
                }
            }
            if let Some((index, at, count, mut buffer)) = ready.take() {
                let (mean, square) = floats(&mut buffer[..width * count]).split_at_mut(count);
                f(first + at, mean, square);
                if write {
                    let Disk { begin, file, .. } = &self.disks[index];
                    let transfer = file.write((width * (at - begin)) as u64, width * count, buffer);
                    writing.push_back(transfer.map_err(of_tier)?);
                } else {
                    self.staging.push(buffer);
                }
            } else if let Some((at, count)) = kept.pop_front() {
                let (mean, square) = kept_moments(&mut self.memory, self.count, at, count);
                f(at, mean, square);
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
        while let Some(transfer) = writing.pop_front() {
            self.staging.push(transfer.wait().map_err(of_tier)?);
        }
        Ok(())
    }
}

/// What of elements from `begin` on goes together.
fn pieces(begin: usize, elements: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..elements).step_by(TOGETHER).map(move |at| (begin + at, TOGETHER.min(elements - at)))
}

/// Pieces of all disks: the number of each one's disk, its beginning and its elements. Disks take turns, so that all work
/// until the last has done its part.
fn in_turn(disks: &[Disk]) -> Vec<(usize, usize, usize)> {
    let mut all: Vec<(f64, (usize, usize, usize))> = vec![];
    for (index, disk) in disks.iter().enumerate() {
        for (at, count) in pieces(disk.begin, disk.elements) {
            all.push(((at - disk.begin) as f64 / disk.elements as f64, (index, at, count)));
        }
    }
    all.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    all.into_iter().map(|(_, piece)| piece).collect()
}

/// Means and squares of elements in memory; of one moment no squares.
fn kept_moments(
    memory: &mut [Pages; 2],
    moments: usize,
    at: usize,
    count: usize,
) -> (&mut [f32], &mut [f32]) {
    let [mean, square] = memory;
    let square = if moments == 2 { elements_of(square, at, count) } else { &mut [] };
    (elements_of(mean, at, count), square)
}

/// Elements of a range of numbers.
fn elements_of(pages: &mut Pages, at: usize, count: usize) -> &mut [f32] {
    assert!(4 * (at + count) <= pages.bytes(), "elements inside the range");
    // SAFETY: inside the range, aligned, of any bits, and borrowed with the range, whose address nothing else has.
    unsafe { std::slice::from_raw_parts_mut(pages.address().cast::<f32>().add(at), count) }
}

/// Bytes of a page-aligned buffer as numbers.
fn floats(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: every pattern of bits is a float, and the middle of what is aligned to pages is all of it.
    let (before, floats, after) = unsafe { bytes.align_to_mut::<f32>() };
    debug_assert!(before.is_empty() && after.is_empty());
    floats
}

/// Tensors that a forward pass saves for the backward pass, each cut over tiers. What goes to disks is under way while
/// computation goes on.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Saved(Mutex<Slots>);

struct Slots {
    /// The part of each tensor that stays in memory of the allocator.
    kept: f64,
    arenas: Vec<Arena>,
    files: Vec<SavedFile>,
    slots: Vec<Option<Slot>>,
    live: usize,
    memory: usize,
    most_memory: usize,
    writing: VecDeque<(usize, usize)>,
    idle: Vec<Buffer>,
    /// Buffers that there are, and the most that there were.
    buffers: usize,
    most_buffers: usize,
}

/// Memory of a tier, which tensors fill one after another until all are gone.
struct Arena {
    /// The part of each tensor that lies here.
    part: f64,
    range: Py<Range>,
    used: usize,
    most: usize,
}

impl Arena {
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.range.get().lock()
    }
}

/// A disk, which is filled in the same way.
struct SavedFile {
    part: f64,
    file: TierFile,
    used: u64,
    most: u64,
}

#[derive(Default)]
struct Slot {
    bytes: usize,
    memory: Vec<u8>,
    /// Arena, place and bytes of each piece there.
    near: Vec<(usize, usize, usize)>,
    /// File, place and bytes of what goes to each disk.
    far: Vec<(usize, u64, usize)>,
    parts: Vec<Part>,
}

impl Slot {
    /// Bytes that go to disks.
    fn far_bytes(&self) -> usize {
        self.far.iter().map(|(.., bytes)| bytes).sum()
    }
}

/// A piece of a tensor on a disk.
struct Part {
    file: usize,
    offset: u64,
    bytes: usize,
    state: Where,
}

enum Where {
    Writing(PendingTransfer),
    /// A transfer failed, or is being waited for.
    Lost,
    OnDisk,
    Reading(PendingTransfer),
    Here(Buffer),
}

/// A slot, the range, place and bytes of each of its pieces in memory, and its bytes on disks.
type Reserved = (usize, Vec<(usize, usize, usize)>, usize);

/// Bytes that a part of a tensor takes of a disk.
fn pages_of(bytes: usize) -> u64 {
    bytes.next_multiple_of(PAGE) as u64
}

/// Bytes of a cache line: tensors in an arena begin at one.
const LINE_BYTES: usize = 64;

/// Buffers of saved tensors that are written or read at once, at most.
const IN_FLIGHT: usize = 8;

#[pymethods]
impl Saved {
    /// `kept` is the part of each tensor that stays in memory of the allocator. Of ranges in tiers the part of each, and of disks
    /// the part, the bytes and the folder.
    #[new]
    #[pyo3(signature = (kept, near=vec![], files=vec![]))]
    fn new(
        py: Python<'_>,
        kept: f64,
        near: Vec<(f64, Py<Range>)>,
        files: Vec<(f64, u64, PathBuf)>,
    ) -> PyResult<Self> {
        let near = near.into_iter().filter(|it| it.0 > 0.0);
        let arenas = near.map(|(part, range)| Arena { part, range, used: 0, most: 0 }).collect();
        let make = || -> Result<Self, TierError> {
            let files = files.into_iter().filter(|it| it.0 > 0.0).map(|(part, bytes, folder)| {
                TierFile::create(&folder, bytes).map(|file| SavedFile { part, file, used: 0, most: 0 })
            });
            Ok(Self(Mutex::new(Slots {
                kept,
                arenas,
                files: files.collect::<Result<_, _>>()?,
                slots: vec![],
                live: 0,
                memory: 0,
                most_memory: 0,
                writing: VecDeque::new(),
                idle: vec![],
                buffers: 0,
                most_buffers: 0,
            })))
        };
        py.detach(make).map_err(of_tier)
    }

    /// Takes a copy of the bytes at an address, and returns the number by which they come back; none if a tier has no room.
    fn put(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<Option<usize>> {
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

    /// As `put`, of bytes that the caller copies: the number, the range, place and bytes of each piece in memory, which come first,
    /// and how many bytes are left, for `write`. There is none for memory of the allocator.
    fn reserve(&self, py: Python<'_>, nbytes: usize) -> PyResult<Option<Reserved>> {
        let reserve = || -> Result<Option<Reserved>, TierError> {
            let mut slots = self.lock();
            let Some(index) = slots.reserve(nbytes)? else { return Ok(None) };
            let Some(Some(slot)) = slots.slots.get(index) else { return Ok(None) };
            assert!(slot.memory.is_empty(), "a GPU copies from ranges");
            Ok(Some((index, slot.near.clone(), slot.far_bytes())))
        };
        py.detach(reserve).map_err(of_tier)
    }

    /// Writes the bytes of a slot that go to disks, and lie at an address.
    fn write(&self, py: Python<'_>, slot: usize, address: usize, nbytes: usize) -> PyResult<()> {
        // SAFETY: as in `put`.
        let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) };
        py.detach(|| self.lock().write(slot, bytes)).map_err(of_tier)
    }

    /// Starts to read the bytes of a slot that are on disks.
    fn fetch(&self, py: Python<'_>, slot: usize) -> PyResult<()> {
        py.detach(|| self.lock().fetch(slot)).map_err(of_tier)
    }

    /// Copies the bytes of a slot that are on disks to an address.
    fn read(&self, py: Python<'_>, slot: usize, address: usize, nbytes: usize) -> PyResult<()> {
        // SAFETY: as in `take`.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, nbytes) };
        let read = || {
            let mut slots = self.lock();
            slots.fetch(slot)?;
            slots.read(slot, bytes)
        };
        py.detach(read).map_err(of_tier)
    }

    /// Gives the room of a slot back.
    fn free(&self, slot: usize) {
        self.lock().free(slot);
    }

    /// The most bytes at once in memory, in each other tier of memory and on each disk, and those of buffers between them.
    fn most(&self) -> (usize, Vec<usize>, Vec<u64>, usize) {
        let slots = self.lock();
        let near = slots.arenas.iter().map(|it| it.most).collect();
        let far = slots.files.iter().map(|it| it.most).collect();
        (slots.most_memory, near, far, slots.most_buffers * TRANSFER_BYTES)
    }

    /// Bytes of tiers of memory in each place, as the kernel says.
    fn r#where(&self) -> PyResult<Vec<(String, usize)>> {
        let slots = self.lock();
        let pages: Vec<_> = slots.arenas.iter().map(Arena::pages).collect();
        located(pages.iter().map(|it| &**it)).map_err(of_tier)
    }
}

impl Saved {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slots {
    /// Bytes of a tensor in memory, in each arena and on each disk: whole pages, and the largest has the rest.
    fn cut(&self, bytes: usize) -> Vec<usize> {
        let parts: Vec<f64> = std::iter::once(self.kept)
            .chain(self.arenas.iter().map(|it| it.part))
            .chain(self.files.iter().map(|it| it.part))
            .collect();
        let mut cut: Vec<_> = parts.iter().map(|part| (bytes as f64 * part) as usize / PAGE * PAGE).collect();
        let largest =
            (0..parts.len()).max_by(|one, other| parts[*one].total_cmp(&parts[*other])).unwrap_or(0);
        cut[largest] += bytes - cut.iter().sum::<usize>().min(bytes);
        cut
    }

    fn put(&mut self, bytes: &[u8]) -> Result<Option<usize>, TierError> {
        let Some(index) = self.reserve(bytes.len())? else { return Ok(None) };
        match self.fill(index, bytes) {
            Ok(()) => Ok(Some(index)),
            Err(error) => {
                // Its number is returned to no caller, so its room goes back here.
                self.free(index);
                Err(error)
            }
        }
    }

    /// A slot with room for so many bytes in every tier; none if one has no room.
    fn reserve(&mut self, bytes: usize) -> Result<Option<usize>, TierError> {
        if self.live == 0 {
            // A device that has gone is found before its memory is used in this step.
            self.arenas.iter().try_for_each(|it| it.pages().check())?;
        }
        let cut = self.cut(bytes);
        let (near, far) = cut[1..].split_at(self.arenas.len());
        let has_room = self.arenas.iter().zip(near).all(|(it, part)| it.used + part <= it.range.get().size())
            && self.files.iter().zip(far).all(|(it, part)| it.used + pages_of(*part) <= it.file.size());
        if !has_room {
            return Ok(None);
        }
        let mut slot = Slot { bytes, memory: vec![0; cut[0]], ..Slot::default() };
        self.memory += cut[0];
        self.most_memory = self.most_memory.max(self.memory);
        for (number, (arena, part)) in self.arenas.iter_mut().zip(near).enumerate() {
            slot.near.push((number, arena.used, *part));
            arena.used += part.next_multiple_of(LINE_BYTES);
            arena.most = arena.most.max(arena.used);
        }
        for (number, (saved, part)) in self.files.iter_mut().zip(far).enumerate() {
            slot.far.push((number, saved.used, *part));
            saved.used += pages_of(*part);
            saved.most = saved.most.max(saved.used);
        }
        self.live += 1;
        self.slots.push(Some(slot));
        Ok(Some(self.slots.len() - 1))
    }

    /// Copies a tensor into the places of its slot.
    fn fill(&mut self, index: usize, bytes: &[u8]) -> Result<(), TierError> {
        let Some(Some(slot)) = self.slots.get_mut(index) else { return Ok(()) };
        let (memory, mut rest) = bytes.split_at(slot.memory.len());
        slot.memory.copy_from_slice(memory);
        for (arena, begin, count) in &slot.near {
            let (part, after) = rest.split_at(*count);
            rest = after;
            self.arenas[*arena].pages().copy_in(*begin, part);
        }
        self.write(index, rest)
    }

    /// Starts to write what of a slot goes to disks.
    fn write(&mut self, index: usize, bytes: &[u8]) -> Result<(), TierError> {
        let Some(Some(slot)) = self.slots.get(index) else { return Ok(()) };
        assert_eq!(slot.far_bytes(), bytes.len(), "as many bytes as go to disks");
        let mut rest = bytes;
        for (file, mut offset, count) in slot.far.clone() {
            let (far, after) = rest.split_at(count);
            rest = after;
            for part in far.chunks(TRANSFER_BYTES) {
                let mut buffer = self.buffer()?;
                buffer[..part.len()].copy_from_slice(part);
                let whole = part.len().next_multiple_of(PAGE);
                let Some(Some(slot)) = self.slots.get_mut(index) else { break };
                let transfer = self.files[file].file.write(offset, whole, buffer)?;
                self.writing.push_back((index, slot.parts.len()));
                slot.parts.push(Part { file, offset, bytes: part.len(), state: Where::Writing(transfer) });
                offset += whole as u64;
            }
        }
        Ok(())
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
            match std::mem::replace(&mut part.state, Where::Lost) {
                Where::Writing(transfer) => {
                    let buffer = transfer.wait()?;
                    part.state = Where::OnDisk;
                    return Ok(buffer);
                }
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
                && let Where::Writing(transfer) = std::mem::replace(&mut it.state, Where::Lost)
            {
                // What was just written need not be read.
                it.state = Where::Here(transfer.wait()?);
            } else if is_far {
                let buffer = self.buffer()?;
                let (file, offset, whole) = match self.part(index, part) {
                    Some(it) => (it.file, it.offset, it.bytes.next_multiple_of(PAGE)),
                    None => continue,
                };
                let transfer = self.files[file].file.read(offset, whole, buffer)?;
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
        let Some(Some(slot)) = self.slots.get(index) else { return Ok(()) };
        assert_eq!(slot.bytes, bytes.len(), "a saved tensor comes back as large as it went");
        let (memory, mut rest) = bytes.split_at_mut(slot.memory.len());
        memory.copy_from_slice(&slot.memory);
        for (arena, begin, count) in &slot.near {
            let (part, after) = rest.split_at_mut(*count);
            rest = after;
            self.arenas[*arena].pages().copy_out(*begin, part);
        }
        self.read(index, rest)
    }

    /// Copies what of a slot is on disks, and was fetched.
    fn read(&mut self, index: usize, bytes: &mut [u8]) -> Result<(), TierError> {
        let Some(Some(slot)) = self.slots.get_mut(index) else { return Ok(()) };
        assert_eq!(slot.far_bytes(), bytes.len(), "as many bytes as are on disks");
        let mut at = 0;
        let mut done = vec![];
        for part in &mut slot.parts {
            let buffer = match std::mem::replace(&mut part.state, Where::Lost) {
                Where::Reading(transfer) | Where::Writing(transfer) => transfer.wait()?,
                Where::Here(buffer) => buffer,
                Where::OnDisk | Where::Lost => return Err(TierError::Lost),
            };
            part.state = Where::OnDisk;
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
                Where::OnDisk | Where::Lost => {}
            }
        }
        self.live -= 1;
        if self.live == 0 {
            self.slots.clear();
            self.writing.clear();
            self.arenas.iter_mut().for_each(|it| it.used = 0);
            self.files.iter_mut().for_each(|it| it.used = 0);
        }
    }
}

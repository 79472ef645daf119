//! What `polder.offload` is made of: placements, the fused step over states in several tiers, and saved activations.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use polder_kernels::Factor;
use polder_offload::{self as offload, DiskRates, Moments, MostSaved, Reserved, disk_rates, expect_apart};
use polder_place::{Placement, Policy, Problem};
use polder_platform::{LocalTier, Platform};
use pyo3::prelude::*;
use serde_json::json;

use crate::errors::{argument, plain};
use crate::optimizer::{ARRAYS, Settings, slice, update_of};
use crate::range::{GivenPlace, Range, named, of_step, of_tier};

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
        .map(|tier| tier.memory)
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
    let near = loaded.local_tiers.iter().filter(|(name, _)| *name != "dram").map(|(name, tier)| {
        let (read, write) = rates(tier);
        (name.clone(), None, tier.node, tier.device.clone(), tier.capacity.value(), read, write)
    });
    let disks = loaded.disk.iter().map(|(name, tier)| {
        let folder = Some(tier.folder.clone());
        (name.clone(), folder, None, None, tier.capacity.value(), tier.read.value(), tier.write.value())
    });
    Ok(std::iter::once(dram).chain(near).chain(disks).collect())
}

/// Moments of an optimizer in a range of elements: the first ones in memory, by tier, the others on disks.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct States(Mutex<Moments>);

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
        kept: Vec<(usize, Option<GivenPlace>)>,
        files: Vec<(usize, PathBuf)>,
        moments: usize,
    ) -> PyResult<Self> {
        let kept: Vec<_> =
            kept.into_iter().map(|(elements, place)| (elements, place.map(Into::into))).collect();
        let made = py.detach(|| Moments::new(&kept, &files, moments)).map_err(of_step)?;
        Ok(Self(Mutex::new(made)))
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
        expect_apart(tensors.iter().enumerate().flat_map(|(tensor, &(_, p, g, elements, ..))| {
            [(p, 4 * elements, true, tensor, ARRAYS[0]), (g, 4 * elements, false, tensor, ARRAYS[1])]
        }))
        .map_err(of_step)?;
        let tensor = |(begin, parameters, gradients, elements, settings, number): Tensor| {
            // SAFETY: the front passes contiguous tensors of as many elements, which it holds for the length of the call. Those that are written
            // lie apart from all others.
            let [parameters, gradients] =
                unsafe { [slice(parameters, elements)?, slice(gradients, elements)?] };
            Ok(offload::Tensor { begin, parameters, gradients, update: update_of(&settings, number)? })
        };
        let mut tensors = tensors.into_iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
        let factor = Factor { scale, clip: factor };
        py.detach(|| self.lock().step(&mut tensors, factor, threads)).map_err(of_step)
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
        // SAFETY: the front passes tensors of as many elements, which it holds for the length of the call.
        let [mean, square] = unsafe { self.arrays([mean, square], elements)? };
        py.detach(|| self.lock().save(begin, mean, square)).map_err(of_step)
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
        // SAFETY: the front passes tensors of as many elements, which it holds for the length of the call.
        let [mean, square] = unsafe { self.arrays([mean, square], elements)? };
        py.detach(|| self.lock().load(begin, mean, square)).map_err(of_step)
    }

    /// Bytes in each place of memory, as the kernel says.
    fn r#where(&self) -> PyResult<Vec<(String, usize)>> {
        self.lock().locate().map(named).map_err(of_tier)
    }

    /// Why stripes lie in memory of the kernel's choice: their tiers had no room.
    fn missed(&self) -> Vec<String> {
        self.lock().missed().to_vec()
    }

    /// Bytes of each file, and of the memory that stages them.
    fn on_disk(&self) -> (Vec<u64>, usize) {
        self.lock().on_disk()
    }
}

impl States {
    /// As many means and squares as there are elements, at addresses; of one moment there are no squares.
    ///
    /// # Safety
    /// As for [`slice`].
    unsafe fn arrays<'a>(&self, [mean, square]: [usize; 2], elements: usize) -> PyResult<[&'a mut [f32]; 2]> {
        let squares = if self.lock().count() == 2 { elements } else { 0 };
        // SAFETY: this function's contract.
        unsafe { Ok([slice(mean, elements)?, slice(square, squares)?]) }
    }

    fn lock(&self) -> MutexGuard<'_, Moments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tensors that a forward pass saves for the backward pass, each cut over tiers. What goes to disks is under way while
/// computation goes on.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Saved {
    tensors: Mutex<offload::Saved>,
    /// Kept, because Python is told when one goes.
    _ranges: Vec<Py<Range>>,
}

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
        let ranges = near.iter().map(|(part, range)| (*part, Arc::clone(range.get().pages()))).collect();
        let made = py.detach(|| offload::Saved::new(kept, ranges, &files)).map_err(of_tier)?;
        Ok(Self { tensors: Mutex::new(made), _ranges: near.into_iter().map(|(_, range)| range).collect() })
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
    #[expect(clippy::type_complexity, reason = "a tuple for Python")]
    fn reserve(
        &self,
        py: Python<'_>,
        nbytes: usize,
    ) -> PyResult<Option<(usize, Vec<(usize, usize, usize)>, usize)>> {
        let reserved = py.detach(|| self.lock().reserve(nbytes)).map_err(of_tier)?;
        Ok(reserved.map(|Reserved { slot, near, far_bytes }| (slot, near, far_bytes)))
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
        py.detach(|| self.lock().read(slot, bytes)).map_err(of_tier)
    }

    /// Gives the room of a slot back.
    fn free(&self, slot: usize) {
        self.lock().free(slot);
    }

    /// The most bytes at once in memory, in each other tier of memory and on each disk, and those of buffers between them.
    fn most(&self) -> (usize, Vec<usize>, Vec<u64>, usize) {
        let MostSaved { memory, near, far, buffers } = self.lock().most();
        (memory, near, far, buffers)
    }

    /// Bytes of the buffers between memory and disks that a step fills.
    fn staging(&self) -> usize {
        self.lock().staging()
    }

    /// Bytes of tiers of memory in each place, as the kernel says.
    fn r#where(&self) -> PyResult<Vec<(String, usize)>> {
        self.lock().locate().map(named).map_err(of_tier)
    }
}

impl Saved {
    fn lock(&self) -> MutexGuard<'_, offload::Saved> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

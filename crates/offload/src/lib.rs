//! What moves the tensors of a training step at run time, between a host's own memory and the tiers beside it.
//!
//! A tier is a NUMA node, a dax device or a folder on a disk. [`Range`] is one virtual range whose pieces lie in tiers of memory.
//! [`TierFile`] is a file that is read and written by direct I/O. [`Moments`] are the states of an optimizer in all of them, with the
//! step over them; [`Saved`] are the activations between a forward pass and its backward pass. `polder_place` says what goes where.
//!
//! ```
//! use polder_kernels::{Adam, Factor};
//! use polder_offload::{Moments, PAGE, Tensor};
//!
//! let folder = std::env::current_dir()?;
//! let mut moments = Moments::new(&[(PAGE / 4, None)], &[(PAGE / 4, folder)], 2)?;
//! let adam = Adam { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, is_decoupled: true };
//! let (mut parameters, gradients) = (vec![1.0; PAGE / 2], vec![0.5; PAGE / 2]);
//! let tensor = Tensor { begin: 0, parameters: &mut parameters, gradients: &gradients, update: adam.update(1.0) };
//! moments.step(&mut [tensor], Factor { scale: 1.0, clip: 1.0 }, 1)?;
//! assert!(parameters.iter().all(|it| (it - 0.9).abs() < 1e-6));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod apart;
mod buffer;
mod error;
mod moments;
mod numa;
mod range;
mod saved;
#[cfg(test)]
mod testing;
mod tier;

pub use apart::{Array, expect_apart};
pub use buffer::{Buffer, HUGE_PAGE, PAGE};
pub use error::{StepError, TierError};
pub use moments::{Moments, Tensor};
pub use numa::move_pages;
pub use range::{Location, Place, Range, located};
pub use saved::{MostSaved, Reserved, Saved};
pub use tier::{DiskRates, PendingTransfer, TRANSFER_BYTES, TierFile, disk_rates};

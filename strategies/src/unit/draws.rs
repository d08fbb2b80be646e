//! Random numbers that are drawn again.
//!
//! Burn's generator of a device belongs to the process and cannot be asked for its state, but it can be
//! given one. A unit that recomputes gives it a seed before its first run, and the same before its second.

use std::cell::Cell;

use burn::tensor::{Device, Distribution, Tensor};
use pyroclast_kernels::interop;

use super::UnitCell;

/// Seeds that follow from one another, without asking a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seeds {
    base: u64,
    count: u64,
}

impl Seeds {
    pub(crate) fn new(base: u64) -> Self {
        Self { base, count: 0 }
    }

    /// The next seed.
    pub(crate) fn next(&mut self) -> u64 {
        self.count += 1;
        // SplitMix64's finalizer.
        let mut seed = self.base.wrapping_add(self.count.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        seed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        seed = (seed ^ (seed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        seed ^ (seed >> 31)
    }
}

thread_local! {
    /// Within a run that may be repeated: where the seeds of units inside come from.
    static WITHIN: Cell<Option<Seeds>> = const { Cell::new(None) };
}

/// The random numbers of one run.
#[derive(Clone, Debug)]
pub(super) struct Draws {
    device: Device,
    /// None for a unit that draws nothing: others of the process may be drawing.
    seed: Option<u64>,
}

impl Draws {
    /// For a run of a unit that begins.
    pub(super) fn of(cell: &UnitCell, device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let seed = cell.draws().then(|| next_seed(cell, &device));
        Self { device, seed }
    }

    /// Runs `f` with these numbers.
    pub(super) fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        let Some(seed) = self.seed else { return f() };
        let _restore = Restore(WITHIN.replace(Some(Seeds::new(seed))));
        self.device.seed(seed);
        f()
    }

    /// Runs `f` with these numbers once more, and goes on with others.
    pub(super) fn again<R>(&self, cell: &UnitCell, f: impl FnOnce() -> R) -> R {
        if self.seed.is_none() {
            return f();
        }
        let onward = next_seed(cell, &self.device);
        let result = self.run(f);
        self.device.seed(onward);
        result
    }
}

/// From the run within which the unit runs, from its training run, or else out of the generator.
fn next_seed(cell: &UnitCell, device: &Device) -> u64 {
    if let Some(mut seeds) = WITHIN.get() {
        let seed = seeds.next();
        WITHIN.set(Some(seeds));
        return seed;
    }
    cell.installed().and_then(|installed| installed.run.next_seed()).unwrap_or_else(|| draw(device))
}

/// Goes back when dropped, also when a run panics.
struct Restore(Option<Seeds>);

impl Drop for Restore {
    fn drop(&mut self) {
        WITHIN.set(self.0);
    }
}

/// A seed out of the device's generator.
fn draw(device: &Device) -> u64 {
    let numbers = Tensor::<1>::random([4], Distribution::Default, device);
    let mut seed = 0u64;
    // A device that fails here fails in all that follows, which says so.
    let _ = interop::read_all(vec![numbers], |_, values| {
        seed = values.to_f32().iter().fold(0, |seed, value| {
            (seed ^ u64::from(value.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
    });
    seed
}

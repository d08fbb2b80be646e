//! How a pass over a flat slice is cut up: fixed blocks over threads, vectors inside a block.

use pulp::Arch;

/// Elements per unit of work. Large enough to amortise a task switch, small enough (256 KiB of
/// `f32`) that a block's operands share the second-level cache.
pub(crate) const BLOCK: usize = 1 << 16;

/// Runs `body` with the widest instruction set of this processor. `body` must be `#[inline(always)]`
/// all the way down, so that it is compiled for that instruction set.
#[inline]
pub fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(body)
}

//! Copies of memory, by which the limit that memory sets to everything else is measured.
//!
//! An ordinary store first reads the line that it writes to, so a copy through the caches moves
//! three bytes for each one copied. A non-temporal store does not, and leaves the caches to others;
//! it loses where the copy is read again soon.

use rayon::prelude::*;

use crate::parallel::BLOCK;

/// How a copy writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Through the caches.
    Normal,
    /// Past the caches.
    NonTemporal(NonTemporal),
}

/// Proof that this processor has non-temporal stores: there is a value only where it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonTemporal(Width);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    #[cfg(target_arch = "x86_64")]
    Avx,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl NonTemporal {
    /// The widest non-temporal stores of this processor; `None` if it has none that this crate
    /// knows, which are those of AVX and AVX-512.
    #[must_use]
    pub fn detect() -> Option<Self> {
        Self::all().into_iter().next_back()
    }

    /// All that this processor has, narrowest first.
    fn all() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let widths = [
                (Width::Avx, is_x86_feature_detected!("avx")),
                (Width::Avx512, is_x86_feature_detected!("avx512f")),
            ];
            widths.into_iter().filter(|(_, has)| *has).map(|(width, _)| Self(width)).collect()
        }
        #[cfg(not(target_arch = "x86_64"))]
        Vec::new()
    }

    /// The instruction set that they belong to.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Width::Avx => "AVX",
            #[cfg(target_arch = "x86_64")]
            Width::Avx512 => "AVX-512",
        }
    }

    fn copy(self, target: &mut [f32], source: &[f32]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Width::Avx => x86::copy_avx(target, source),
            #[cfg(target_arch = "x86_64")]
            Width::Avx512 => x86::copy_avx512(target, source),
        }
    }
}

/// Copies `source` to `target` on this thread.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy(target: &mut [f32], source: &[f32], stores: Stores) {
    assert_eq!(target.len(), source.len(), "copy: lengths should agree");
    // Block by block: given a large slice at once, C libraries change to non-temporal stores by
    // themselves.
    for (target, source) in target.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
        copy_block(target, source, stores);
    }
}

/// Copies `source` to `target` on all threads of the current pool.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy_on_all_threads(target: &mut [f32], source: &[f32], stores: Stores) {
    assert_eq!(target.len(), source.len(), "copy: lengths should agree");
    target
        .par_chunks_mut(BLOCK)
        .zip(source.par_chunks(BLOCK))
        .for_each(|(target, source)| copy_block(target, source, stores));
}

fn copy_block(target: &mut [f32], source: &[f32], stores: Stores) {
    match stores {
        Stores::Normal => target.copy_from_slice(source),
        Stores::NonTemporal(stores) => stores.copy(target, source),
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm_sfence, _mm256_loadu_ps, _mm256_stream_ps, _mm512_loadu_ps, _mm512_stream_ps,
    };

    /// For a [`NonTemporal`](super::NonTemporal) of this width only.
    pub(super) fn copy_avx(target: &mut [f32], source: &[f32]) {
        // SAFETY: a value of this width exists only where AVX was detected.
        unsafe { stream_avx(target, source) }
    }

    /// For a [`NonTemporal`](super::NonTemporal) of this width only.
    pub(super) fn copy_avx512(target: &mut [f32], source: &[f32]) {
        // SAFETY: a value of this width exists only where AVX-512F was detected.
        unsafe { stream_avx512(target, source) }
    }

    #[target_feature(enable = "avx")]
    fn stream_avx(target: &mut [f32], source: &[f32]) {
        let (target, source) = aligned::<8>(target, source);
        for (t, s) in target.iter_mut().zip(source) {
            // SAFETY: both are 32 bytes, and `t` starts at a multiple of that.
            unsafe { _mm256_stream_ps(t.as_mut_ptr(), _mm256_loadu_ps(s.as_ptr())) }
        }
        // Streamed numbers become visible in order only with this.
        _mm_sfence();
    }

    #[target_feature(enable = "avx512f")]
    fn stream_avx512(target: &mut [f32], source: &[f32]) {
        let (target, source) = aligned::<16>(target, source);
        for (t, s) in target.iter_mut().zip(source) {
            // SAFETY: both are 64 bytes, and `t` starts at a multiple of that.
            unsafe { _mm512_stream_ps(t.as_mut_ptr(), _mm512_loadu_ps(s.as_ptr())) }
        }
        // Streamed numbers become visible in order only with this.
        _mm_sfence();
    }

    /// The part that can be streamed: whole vectors, the target's aligned. The numbers before and
    /// after them are copied here.
    fn aligned<'a, const LANES: usize>(
        target: &'a mut [f32],
        source: &'a [f32],
    ) -> (&'a mut [[f32; LANES]], &'a [[f32; LANES]]) {
        let head = target.as_ptr().align_offset(LANES * size_of::<f32>()).min(target.len());
        let (target_head, target) = target.split_at_mut(head);
        let (source_head, source) = source.split_at(head);
        let (target, target_tail) = target.as_chunks_mut();
        let (source, source_tail) = source.as_chunks();
        target_head.copy_from_slice(source_head);
        target_tail.copy_from_slice(source_tail);
        (target, source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way to write that this machine has.
    fn all_stores() -> Vec<Stores> {
        let streaming = NonTemporal::all().into_iter().map(Stores::NonTemporal);
        [Stores::Normal].into_iter().chain(streaming).collect()
    }

    #[test]
    fn copies_are_equal_at_any_length_and_alignment() {
        type Copy = fn(&mut [f32], &[f32], Stores);
        let copies: [Copy; 2] = [copy, copy_on_all_threads];
        for len in [0, 1, 7, 8, 15, 16, 17, 31, 33, 1009, BLOCK - 1, BLOCK, 2 * BLOCK + 19] {
            for (before, after) in [(0, 0), (1, 0), (0, 1), (3, 5), (15, 16), (17, 2)] {
                let source: Vec<f32> = (0..before + len + after).map(|i| i as f32).collect();
                let ways =
                    copies.iter().flat_map(|copy| all_stores().into_iter().map(move |s| (copy, s)));
                for (copy, stores) in ways {
                    let mut target = vec![-1.0; after + len + before];
                    copy(&mut target[after..][..len], &source[before..][..len], stores);
                    let what = format!("{stores:?}, {len} numbers, from {before} to {after}");
                    assert_eq!(target[after..][..len], source[before..][..len], "{what}");
                    let rest = target[..after].iter().chain(&target[after + len..]);
                    assert!(rest.into_iter().all(|v| *v == -1.0), "{what}: wrote outside");
                }
            }
        }
    }

    #[test]
    fn the_widest_stores_are_chosen() {
        assert_eq!(NonTemporal::detect(), NonTemporal::all().last().copied());
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            assert_eq!(NonTemporal::detect().map(NonTemporal::name), Some("AVX-512"));
        }
    }
}

//! Which part of a flat buffer belongs to which rank.

use std::ops::Range;

/// The part of a buffer of `len` elements that `rank` of `world` owns.
///
/// All shards have `ceil(len / world)` elements, except that the last ones may be short or empty.
/// This is the only place that decides ownership: ring chunks, optimizer shards, norms and
/// checkpoints all ask here.
///
/// # Panics
///
/// If `rank >= world`.
#[must_use]
pub fn shard(len: usize, world: usize, rank: usize) -> Range<usize> {
    assert!(rank < world, "shard: rank {rank} of world {world}");
    let size = len.div_ceil(world);
    (rank * size).min(len)..((rank + 1) * size).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_the_buffer_in_rank_order() {
        for world in 1..=9 {
            for len in (0..30).chain([1000, 1009]) {
                let mut end = 0;
                for rank in 0..world {
                    let shard = shard(len, world, rank);
                    assert_eq!(shard.start, end, "len {len}, rank {rank} of {world}");
                    assert!(shard.len() <= len.div_ceil(world));
                    end = shard.end;
                }
                assert_eq!(end, len);
            }
        }
    }

    #[test]
    fn a_multiple_of_the_world_is_split_evenly() {
        assert!((0..4).all(|rank| shard(12, 4, rank).len() == 3));
        assert_eq!(shard(2, 4, 3), 2..2);
    }
}

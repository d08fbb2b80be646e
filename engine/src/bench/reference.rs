//! What a collective must return, element by element, from its definition.

use burn::tensor::{bf16, f16};
use pyroclast_strategies::{Element, shard::shard};

use super::Collective;

/// A type that is measured.
pub(super) trait Number: Element {
    /// A whole number in this type, as the type rounds or wraps it.
    fn whole(value: u32) -> Self;
}

macro_rules! number {
    ($type:ty, $convert:expr) => {
        impl Number for $type {
            fn whole(value: u32) -> Self {
                $convert(value)
            }
        }
    };
}

number!(f32, |value| value as f32);
number!(f64, f64::from);
number!(f16, |value| f16::from_f32(value as f32));
number!(bf16, |value| bf16::from_f32(value as f32));
number!(i32, |value| value as i32);
number!(i64, i64::from);
number!(u8, |value| value as u8);

/// Who looks at which buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) world: usize,
    /// Elements of a buffer.
    pub(super) len: usize,
}

/// What a rank brings: whole numbers from 0 to 10, so that sums over any world are exact in the
/// types that partial results travel in; scrambled, so that a range in a wrong place is noticed.
fn input(rank: usize, index: usize) -> u32 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (rank as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    (mixed.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 40) as u32 % 11
}

/// Makes `buffer` what its rank brings.
pub(super) fn fill<T: Number>(buffer: &mut [T], rank: usize) {
    for (index, value) in buffer.iter_mut().enumerate() {
        *value = T::whole(input(rank, index));
    }
}

impl Collective {
    /// What the element at `index` must be afterwards; `None` where it is unspecified.
    fn expected(self, index: usize, place: Place) -> Option<u32> {
        let Place { rank, world, len } = place;
        let sum = || (0..world).map(|rank| input(rank, index)).sum();
        // Shards have equal lengths, apart from the last ones.
        let size = len.div_ceil(world);
        match self {
            Self::AllReduce => Some(sum()),
            Self::ReduceScatter => shard(len, world, rank).contains(&index).then(sum),
            Self::AllGather => Some(input(index / size, index)),
            Self::Broadcast => Some(input(0, index)),
            Self::Reduce => (rank == 0).then(sum),
            Self::AllToAll => Some(input(index / size, rank * size + index % size)),
        }
    }

    /// The first element that is not what it must be, and what it should have been.
    pub(super) fn first_wrong<T: Number>(self, buffer: &[T], place: Place) -> Option<(usize, T)> {
        let is_right = |(index, value): (usize, &T)| {
            let expected = T::whole(self.expected(index, place)?);
            (*value != expected).then_some((index, expected))
        };
        buffer.iter().enumerate().find_map(is_right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_and_place_brings_its_own() {
        let of = |rank| (0..1000).map(|index| input(rank, index)).collect::<Vec<_>>();
        assert!(of(0).iter().all(|value| *value <= 10));
        assert_ne!(of(0), of(1));
        for shift in 1..100 {
            assert_ne!(of(0)[shift..], of(0)[..1000 - shift], "a shift by {shift} is noticed");
        }
    }

    #[test]
    fn results_follow_the_definitions() {
        let place = Place { rank: 1, world: 2, len: 4 };
        let expected = |collective: Collective| -> Vec<Option<u32>> {
            (0..4).map(|index| collective.expected(index, place)).collect()
        };
        let sum = |index| Some(input(0, index) + input(1, index));
        let of = |rank, index| Some(input(rank, index));
        assert_eq!(expected(Collective::AllReduce), [sum(0), sum(1), sum(2), sum(3)]);
        assert_eq!(expected(Collective::ReduceScatter), [None, None, sum(2), sum(3)]);
        assert_eq!(expected(Collective::AllGather), [of(0, 0), of(0, 1), of(1, 2), of(1, 3)]);
        assert_eq!(expected(Collective::Broadcast), [of(0, 0), of(0, 1), of(0, 2), of(0, 3)]);
        assert_eq!(expected(Collective::Reduce), [None; 4]);
        assert_eq!(expected(Collective::AllToAll), [of(0, 2), of(0, 3), of(1, 2), of(1, 3)]);
    }

    #[test]
    fn a_wrong_element_is_found_in_every_type() {
        fn check<T: Number>() {
            let place = Place { rank: 0, world: 1, len: 1000 };
            let mut buffer = vec![T::ZERO; 1000];
            fill(&mut buffer, 0);
            assert_eq!(Collective::AllReduce.first_wrong(&buffer, place), None);
            let kept = buffer[997];
            buffer[997] = T::whole(input(0, 997) + 1);
            assert_eq!(Collective::AllReduce.first_wrong(&buffer, place), Some((997, kept)));
        }
        check::<f32>();
        check::<f64>();
        check::<f16>();
        check::<bf16>();
        check::<i32>();
        check::<i64>();
        check::<u8>();
    }
}

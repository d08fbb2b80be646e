//! In which order a rank runs a plan's steps on the segments of their ranges.

use std::ops::Range;

use super::{Order, Phase, Plan, Step};

/// How many segments a wave's step is ahead of the next one: so many are under way while a rank
/// waits for the first of them.
const AHEAD: usize = 2;

/// One step on one segment of its range.
#[derive(Clone, Debug)]
pub struct Task<'a> {
    /// The step.
    pub step: &'a Step,
    /// The segment.
    pub range: Range<usize>,
}

impl Plan {
    /// What the rank does, in order, if ranges are cut into segments of `segment` elements, at least
    /// 1. The same on all ranks that cut alike.
    pub fn schedule(&self, segment: usize) -> impl Iterator<Item = Task<'_>> {
        self.phases.iter().flat_map(move |phase| phase.schedule(segment))
    }
}

impl Phase {
    fn schedule(&self, segment: usize) -> impl Iterator<Item = Task<'_>> {
        let steps = &self.steps;
        let longest = steps.iter().map(|step| segments(step, segment)).max().unwrap_or(0);
        let places: Box<dyn Iterator<Item = (usize, usize)>> = match self.order {
            Order::OneByOne => Box::new(
                (0..steps.len()).flat_map(move |step| (0..longest).map(move |k| (step, k))),
            ),
            Order::Wave => {
                let times = longest + AHEAD * steps.len();
                Box::new((0..times).flat_map(move |time| {
                    // The steps that are under way at that time.
                    let first = (time + 1).saturating_sub(longest).div_ceil(AHEAD);
                    let last = (time / AHEAD + 1).min(steps.len());
                    (first..last).map(move |s| (s, time - AHEAD * s))
                }))
            }
        };
        places
            .filter(move |(step, k)| *k < segments(&steps[*step], segment))
            .map(move |(step, k)| Task { step: &steps[step], range: cut(&steps[step], segment, k) })
    }
}

fn segments(step: &Step, segment: usize) -> usize {
    step.range().len().div_ceil(segment)
}

fn cut(step: &Step, segment: usize, k: usize) -> Range<usize> {
    let Range { start, end } = *step.range();
    let from = start + k * segment;
    from..(from + segment).min(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(order: Order) -> Vec<(usize, Range<usize>)> {
        let send = |to, range| Step::Send { to, range };
        let phase = Phase { order, steps: vec![send(0, 3..12), send(1, 0..0), send(2, 12..16)] };
        let to = |step: &Step| if let Step::Send { to, .. } = step { *to } else { usize::MAX };
        phase.schedule(4).map(|task| (to(task.step), task.range)).collect()
    }

    #[test]
    fn segments_cover_every_range_in_order() {
        let one_by_one = [(0, 3..7), (0, 7..11), (0, 11..12), (2, 12..16)];
        assert_eq!(ranges(Order::OneByOne), one_by_one);
        assert_eq!(ranges(Order::Wave), one_by_one, "two steps later, four segments later");
    }

    #[test]
    fn a_wave_begins_a_step_before_the_one_before_has_ended() {
        let step = |to| Step::Send { to, range: 0..5 };
        let phase = Phase { order: Order::Wave, steps: vec![step(0), step(1)] };
        let to = |step: &Step| if let Step::Send { to, .. } = step { *to } else { usize::MAX };
        let places: Vec<_> = phase.schedule(1).map(|t| (to(t.step), t.range.start)).collect();
        let (a, b) = (0, 1);
        assert_eq!(
            places,
            [(a, 0), (a, 1), (a, 2), (b, 0), (a, 3), (b, 1), (a, 4), (b, 2), (b, 3), (b, 4)]
        );
    }
}

//! Plans of few, large steps.

use super::{Action, Order, Pipeline, Plan, Step};

/// The same as [`all_reduce`](super::all_reduce) in fewer, larger steps: recursive doubling (Thakur,
/// Rabenseifner and Gropp, 2005). In each step two ranks exchange all they have; combining is
/// symmetric, so both get the same bits. Ranks beyond the largest power of two first hand their
/// numbers to a partner, and get the outcome from it.
#[must_use]
pub fn all_reduce_doubling(len: usize, world: usize, rank: usize) -> Plan {
    let pipeline = Pipeline { depth: 1, chunk: len };
    let power = if world.is_power_of_two() { world } else { world.next_power_of_two() / 2 };
    let whole = 0..len;
    let send = |to| Step::Send { to, range: whole.clone() };
    let receive =
        |from, action| Step::Receive { from, range: whole.clone(), action, forward: None };
    if rank >= power {
        let partner = rank - power;
        let steps = vec![send(partner), receive(partner, Action::Replace)];
        return Plan::new(Order::OneByOne, steps, pipeline);
    }
    let extra = Some(rank + power).filter(|extra| *extra < world);
    let mut steps: Vec<Step> =
        extra.map(|extra| receive(extra, Action::Finish)).into_iter().collect();
    for bit in (0..power.ilog2()).map(|bit| 1 << bit) {
        steps.extend([send(rank ^ bit), receive(rank ^ bit, Action::Finish)]);
    }
    steps.extend(extra.map(send));
    Plan::new(Order::OneByOne, steps, pipeline)
}

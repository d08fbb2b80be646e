//! Ranks that do not do the same are told which did what.

use super::*;
use crate::testing::{on_ranks, position, ways};
use crate::{Setup, Unused};

#[test]
fn ranks_that_run_different_units_are_told_which() {
    let device = device();
    for (name, setup) in &ways()[3..] {
        let outcomes = on_ranks(2, |group| {
            let (net, mut strategy) = DataParallel::new(Net::new(&device), group, setup)?;
            let order = if group.rank() == 0 { [0, 1, 2] } else { [0, 2, 1] };
            let loss = |net: &Net| {
                let x = net.first.forward(Tensor::<2>::ones([2, 3], &device));
                let x = order.iter().fold(x, |x, block| {
                    net.blocks[*block].forward(x, crate::testing::Block::forward)
                });
                net.last.forward(x).sum()
            };
            let forward = std::panic::AssertUnwindSafe(|| step((net, &mut strategy), &[&loss]));
            match std::panic::catch_unwind(forward) {
                Ok(outcome) => outcome.map(drop),
                Err(payload) => Err(payload.downcast_ref::<Error>().expect("an error").clone()),
            }
        });
        let messages: Vec<String> =
            outcomes.iter().map(|o| o.as_ref().expect_err("they differ").to_string()).collect();
        let told = messages.iter().any(|m| m.contains("for unit 2") && m.contains("for unit 3"));
        assert!(told, "{name}: {messages:?}");
    }
}

#[test]
fn ranks_that_run_different_numbers_of_micro_batches_are_told() {
    let device = device();
    for (name, setup) in ways() {
        let outcomes = on_ranks(2, |group| {
            let (mut net, strategy) = DataParallel::new(Net::new(&device), group, &setup)?;
            let count = 1 + group.rank();
            strategy.begin_step();
            for index in 0..count {
                net = strategy.begin_micro_batch(net, position(index, count), Counts::Yes)?;
                let forward = std::panic::AssertUnwindSafe(|| net.loss(2, &device).backward());
                let grads = std::panic::catch_unwind(forward).map_err(|payload| {
                    payload.downcast_ref::<Error>().expect("an error").clone()
                })?;
                net = strategy.collect(net, grads)?;
            }
            strategy.reduce().map(drop)
        });
        let messages: Vec<String> =
            outcomes.iter().map(|o| o.as_ref().expect_err("they differ").to_string()).collect();
        let told = |message: &String| match name {
            "ddp" | "zero1" => message.contains("ran 1 micro-batches") || message.contains("ran 2"),
            _ => message.contains("rank 0 is in") || message.contains("rank 1 is in"),
        };
        assert!(messages.iter().any(told), "{name}: {messages:?}");
    }
}

#[test]
fn ranks_may_use_different_units_where_weights_are_whole_and_unused_ones_are_allowed() {
    let device = device();
    let run = |setup: &Setup| {
        let setup = Setup { unused: Unused::Allow, optimizer: sgd().optimizer, ..setup.clone() };
        let ends = crate::testing::all_of(2, |group| {
            let (net, mut strategy) = DataParallel::new(Net::new(&device), group, &setup)?;
            // Each rank leaves out another block, and nobody uses the last.
            let used = group.rank();
            let loss = |net: &Net| {
                let x = net.first.forward(Tensor::<2>::ones([2, 3], &device));
                let x = net.blocks[used].forward(x, crate::testing::Block::forward);
                net.last.forward(x).sum()
            };
            Ok(bits(&step((net, &mut strategy), &[&loss, &loss])?))
        });
        assert_eq!(ends[0], ends[1]);
        ends.into_iter().next().expect("rank 0")
    };
    let before = bits(&Net::new(&device));
    let [(_, ddp), (_, zero1), (_, zero2), ..] = ways();
    let expected = run(&ddp);
    assert_eq!(run(&zero1), expected);
    // Two sums in another order.
    for ((path, got), (_, expected)) in run(&zero2).iter().zip(&expected) {
        let close = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 1e-6;
        assert!(got.iter().zip(expected).all(close), "{path}");
    }
    let changed = |path: &str| {
        let of = |bits: &[(String, Vec<u32>)]| bits.iter().find(|b| b.0 == path).cloned();
        of(&before) != of(&expected)
    };
    assert!(changed("blocks.0.up.weight") && changed("blocks.1.up.weight"));
    assert!(!changed("blocks.2.up.weight"), "nobody has used it");
}

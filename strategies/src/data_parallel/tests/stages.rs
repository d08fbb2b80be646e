//! What is sharded changes where numbers are, not what they are.

use super::*;
use pyroclast_kernels::numbers::Numbers;

use crate::layout::ALIGNMENT;
use crate::shard::shard;
use crate::testing::{all_of, position, ways};
use crate::{Optimizer, PieceOf, Setup, Stage, Traffic};

fn adamw() -> Optimizer {
    Optimizer::default()
}

fn plain_sgd() -> Optimizer {
    Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 }
}

/// What a rank ends with.
#[derive(Debug, PartialEq)]
struct End {
    /// On rank 0.
    bits: Vec<(String, Vec<u32>)>,
    norms: Vec<u64>,
    /// On rank 0: name, path and numbers.
    state: Vec<(&'static str, String, Vec<f32>)>,
    traffic: Traffic,
}

/// Trains for two steps of as many micro-batches on every rank of `world`.
fn train(world: usize, setup: &Setup, optimizer: Optimizer, micro_batches: usize) -> Vec<End> {
    let setup = Setup { optimizer, ..setup.clone() };
    all_of(world, |group| run(group, &setup, micro_batches))
}

fn run(group: &Arc<ProcessGroup>, setup: &Setup, count: usize) -> Result<End, Error> {
    let device = device();
    let (mut model, mut strategy) = DataParallel::new(Net::new(&device), group, setup)?;
    let before = group.traffic();
    let mut norms = vec![];
    for step in 0..2 {
        strategy.begin_step();
        for index in 0..count {
            model = strategy.begin_micro_batch(model, position(index, count), Counts::Yes)?;
            // Every rank and micro-batch has rows of its own.
            let rows = 1 + group.rank() + 2 * index + step;
            let grads = model.loss(rows, &device).backward();
            model = strategy.collect(model, grads)?;
        }
        norms.push(strategy.reduce()?.to_bits());
        model = strategy.step(model, 0.5, 0.01)?;
    }
    let after = group.traffic();
    let traffic =
        Traffic { messages: after.messages - before.messages, bytes: after.bytes - before.bytes };
    let state = strategy.state()?.into_iter();
    let state = state
        .map(|entry| (entry.name, entry.info.path.clone(), entry.values.as_slice().to_f32()))
        .collect();
    let mut named = strategy.parameters(&model)?;
    named.sort_by(|a, b| a.info.path.cmp(&b.info.path));
    let bits = |values: Numbers| values.as_slice().to_f32().iter().map(|v| v.to_bits()).collect();
    let bits = named.into_iter().map(|n| (n.info.path, bits(n.values))).collect();
    Ok(End { bits, norms, state, traffic })
}

fn without_traffic(ends: Vec<End>) -> Vec<End> {
    let no_traffic = Traffic::default();
    ends.into_iter().map(|end| End { traffic: no_traffic, ..end }).collect()
}

#[test]
fn all_ways_give_the_same_bits_with_one_micro_batch() {
    for world in 1..=4 {
        for optimizer in [plain_sgd(), adamw()] {
            let [(_, ddp), others @ ..] = ways();
            let ddp = without_traffic(train(world, &ddp, optimizer, 1));
            for (name, setup) in others {
                let other = without_traffic(train(world, &setup, optimizer, 1));
                assert_eq!(ddp, other, "{name}, world {world}, {optimizer:?}");
            }
            assert!(ddp.iter().all(|end| end.norms == ddp[0].norms));
            assert!(ddp[1..].iter().all(|end| end.state.is_empty()), "rank 0 alone has the state");
        }
    }
}

#[test]
fn several_micro_batches_give_the_same_bits_or_sums_in_another_order() {
    for world in [2, 3] {
        let ends = ways().map(|(_, setup)| without_traffic(train(world, &setup, plain_sgd(), 3)));
        let [ddp, zero1, zero2, others @ ..] = ends;
        assert_eq!(ddp, zero1, "world {world}");
        for other in others {
            assert_eq!(zero2, other, "world {world}");
        }
        for (a, b) in ddp[0].bits.iter().zip(&zero2[0].bits) {
            for (a, b) in a.1.iter().zip(&b.1) {
                let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
                assert!((a - b).abs() <= 1e-6 * a.abs().max(1.0), "world {world}: {a}, {b}");
            }
        }
    }
}

#[test]
fn each_way_sends_what_its_table_says() {
    let layout = Layout::of(&Net::new(&device()), 2).expect("a layout");
    let elements: usize = layout.units.iter().map(|unit| unit.len).sum();
    let root = layout.units[0].len;
    let units = layout.units.len();
    let last = layout.units[units - 1].len;
    // In two steps. The root stays gathered from forward to backward, and so does the last unit as soon as
    // it is known to be the last.
    let expected = |name: &str, a: usize| match name {
        "ddp" | "zero1" => 2 * 2 * elements,
        "zero2" => 2 * (a + 1) * elements,
        "shard_grad_op" => 2 * 2 * a * elements,
        _ => 2 * a * (3 * elements - root) - (2 * a - 1) * last,
    };
    for micro_batches in [1, 3] {
        for (name, setup) in ways() {
            for end in train(2, &setup, plain_sgd(), micro_batches) {
                // Half of the elements per pass on two ranks; what the ranks agree on comes on top.
                let agreed = 8 * (units + 1);
                let bytes = expected(name, micro_batches) / 2 * 4 + 2 * agreed;
                assert_eq!(end.traffic.bytes, bytes as u64, "{name}, {micro_batches}");
            }
        }
    }
    assert!(layout.units.iter().all(|unit| shard(unit.len, 2, 1).start.is_multiple_of(ALIGNMENT)));
}

#[test]
fn state_and_weights_can_be_restored_in_every_way() {
    let device = device();
    let setup = Setup { stage: Stage::Nothing, ..Setup::default() };
    let saved = train(2, &setup, adamw(), 1).remove(0);
    let state = |name: &str, path: &str| {
        let entry = saved.state.iter().find(|(n, p, _)| *n == name && p == path);
        entry.map(|(_, _, values)| Numbers::F32(values.clone()))
    };
    let weights = |path: &str| {
        let named = saved.bits.iter().find(|(known, _)| known == path);
        named.map(|(_, bits)| Numbers::F32(bits.iter().map(|b| f32::from_bits(*b)).collect()))
    };
    let of_states = saved.state.iter().map(|(_, _, values)| values.len());
    let elements: usize = saved.bits.iter().map(|(_, bits)| bits.len()).chain(of_states).sum();
    let continued = ways().map(|(_, setup)| {
        let ends = all_of(3, |group| {
            let (net, mut strategy) = DataParallel::new(Net::new(&device), group, &setup)?;
            let mut asked = 0;
            let mut source =
                |of: PieceOf, info: &crate::ParamInfo, range: std::ops::Range<usize>| {
                    asked += range.len();
                    let all = match of {
                        PieceOf::Weights => weights(&info.path),
                        PieceOf::State(name) => state(name, &info.path),
                    };
                    Ok(all.map(|all: Numbers| all.part(range).to_numbers()))
                };
            let net = strategy.restore(net, 2, &mut source)?;
            let loss = |net: &Net| net.loss(2 + group.rank(), &device);
            let net = step((net, &mut strategy), &[&loss])?;
            // Only rank 0 gets the whole of what is sharded.
            let net = strategy.whole(net)?;
            Ok((if group.rank() == 0 { bits(&net) } else { vec![] }, asked))
        });
        let asked: usize = ends.iter().map(|(_, asked)| asked).sum();
        assert_eq!(asked, elements, "every number is read once, by one rank");
        ends.into_iter().next().map(|(bits, _)| bits)
    });
    assert!(continued.iter().all(|end| *end == continued[0] && end.is_some()));
}

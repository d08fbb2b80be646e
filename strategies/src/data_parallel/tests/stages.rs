//! What is sharded changes where numbers are, not what they are.

use super::*;
use crate::layout::ALIGNMENT;
use crate::shard::shard;
use crate::{Optimizer, OptimizerSetup, Stage, Traffic};

const STAGES: [Stage; 3] = [Stage::Nothing, Stage::Optimizer, Stage::Gradients];

fn adamw() -> Optimizer {
    Optimizer::default()
}

fn plain_sgd() -> Optimizer {
    Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 }
}

/// What a rank ends with.
#[derive(Debug, PartialEq)]
struct End {
    bits: Vec<(String, Vec<u32>)>,
    norms: Vec<u64>,
    /// On rank 0: name, path and numbers.
    state: Vec<(&'static str, String, Vec<f32>)>,
    traffic: Traffic,
}

/// Trains for two steps of as many micro-batches on every rank of `world`.
fn train(world: usize, stage: Stage, optimizer: Optimizer, micro_batches: usize) -> Vec<End> {
    let setup = OptimizerSetup { stage, optimizer, ..OptimizerSetup::default() };
    thread::scope(|scope| {
        let threads: Vec<_> = memory::endpoints(world)
            .into_iter()
            .map(|endpoint| {
                let setup = &setup;
                scope.spawn(move || {
                    let group = Arc::new(ProcessGroup::new(endpoint, GroupOptions::default()));
                    run(&group, setup, micro_batches).expect("no rank should fail")
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    })
}

fn run(group: &Arc<ProcessGroup>, setup: &OptimizerSetup, count: usize) -> Result<End, Error> {
    let device = device();
    let (mut model, mut strategy) = DataParallel::new(Net::new(&device), group, setup)?;
    let before = group.traffic();
    let mut norms = vec![];
    for step in 0..2 {
        strategy.begin_step();
        for micro_batch in 0..count {
            let is_last = micro_batch + 1 == count;
            let place = if is_last { MicroBatch::Last } else { MicroBatch::Intermediate };
            strategy.begin_micro_batch(place, Counts::Yes);
            // Every rank and micro-batch has rows of its own.
            let rows = 1 + group.rank() + 2 * micro_batch + step;
            strategy.collect(&model, model.loss(rows, &device).backward())?;
        }
        norms.push(strategy.reduce()?.to_bits());
        model = strategy.step(model, 0.5, 0.01)?;
    }
    let after = group.traffic();
    let traffic =
        Traffic { messages: after.messages - before.messages, bytes: after.bytes - before.bytes };
    let state = strategy.state()?.into_iter();
    let state = state.map(|entry| (entry.name, entry.info.path.clone(), entry.values)).collect();
    Ok(End { bits: bits(&model), norms, state, traffic })
}

fn without_traffic(ends: Vec<End>) -> Vec<End> {
    let no_traffic = Traffic::default();
    ends.into_iter().map(|end| End { traffic: no_traffic, ..end }).collect()
}

#[test]
fn all_stages_give_the_same_bits_with_one_micro_batch() {
    for world in 1..=4 {
        for optimizer in [plain_sgd(), adamw()] {
            let [all, optimizer_sharded, gradients_sharded] =
                STAGES.map(|stage| without_traffic(train(world, stage, optimizer, 1)));
            assert_eq!(all, optimizer_sharded, "world {world}, {optimizer:?}");
            assert_eq!(all, gradients_sharded, "world {world}, {optimizer:?}");
            assert!(all.iter().all(|end| end.bits == all[0].bits && end.norms == all[0].norms));
            assert!(all[1..].iter().all(|end| end.state.is_empty()), "rank 0 alone has the state");
        }
    }
}

#[test]
fn several_micro_batches_give_the_same_bits_or_sums_in_another_order() {
    for world in [2, 3] {
        let [all, optimizer_sharded, gradients_sharded] =
            STAGES.map(|stage| without_traffic(train(world, stage, plain_sgd(), 3)));
        assert_eq!(all, optimizer_sharded, "world {world}");
        for (a, b) in all[0].bits.iter().zip(&gradients_sharded[0].bits) {
            for (a, b) in a.1.iter().zip(&b.1) {
                let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
                assert!((a - b).abs() <= 1e-6 * a.abs().max(1.0), "world {world}: {a}, {b}");
            }
        }
        assert!(gradients_sharded.iter().all(|end| end.bits == gradients_sharded[0].bits));
    }
}

#[test]
fn each_stage_sends_what_its_table_says() {
    let layout = Layout::of(&Net::new(&device()), 2).expect("a layout");
    let elements: usize = layout.units.iter().map(|unit| unit.len).sum();
    let units = layout.units.len();
    for (stage, micro_batches, passes) in [
        (Stage::Nothing, 1, 2),
        (Stage::Nothing, 3, 2),
        (Stage::Optimizer, 3, 2),
        (Stage::Gradients, 1, 2),
        (Stage::Gradients, 3, 4),
    ] {
        for end in train(2, stage, plain_sgd(), micro_batches) {
            // Half of the elements per pass on two ranks; the norm's sums are gathered as well.
            let sums = if stage == Stage::Nothing { 0 } else { 8 * units };
            let expected = 2 * (passes * elements / 2 * 4 + sums);
            assert_eq!(end.traffic.bytes, expected as u64, "{stage:?}, {micro_batches}");
        }
    }
    assert!(layout.units.iter().all(|unit| shard(unit.len, 2, 1).start.is_multiple_of(ALIGNMENT)));
}

#[test]
fn state_and_weights_can_be_restored_under_any_stage() {
    let device = device();
    let saved = train(2, Stage::Nothing, adamw(), 1).remove(0);
    let find = |name: &str, path: &str| {
        let entry = saved.state.iter().find(|(n, p, _)| *n == name && p == path);
        entry.map(|(_, _, values)| values.clone())
    };
    let numbers = |path: &str| {
        let named = saved.bits.iter().find(|(known, _)| known == path);
        named.map(|(_, bits)| bits.iter().map(|b| f32::from_bits(*b)).collect::<Vec<f32>>())
    };
    let continued = STAGES.map(|stage| {
        let setup = OptimizerSetup { stage, optimizer: adamw(), ..OptimizerSetup::default() };
        let ends: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = memory::endpoints(3)
                .into_iter()
                .map(|endpoint| {
                    let (setup, device, find, numbers) = (&setup, &device, &find, &numbers);
                    scope.spawn(move || {
                        let group = Arc::new(ProcessGroup::new(endpoint, GroupOptions::default()));
                        let net = Net::new(device);
                        let (net, mut strategy) = DataParallel::new(net, &group, setup)?;
                        let net = parameters::write(net, |info| numbers(&info.path))?;
                        let net = strategy.restore(net, 2, find)?;
                        let loss = |net: &Net| net.loss(2 + group.rank(), device);
                        let net = step((net, &mut strategy), &[&loss])?;
                        Ok::<_, Error>(bits(&net))
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("no panic").expect("no error")).collect()
        });
        assert!(ends.iter().all(|end| *end == ends[0]));
        ends.into_iter().next()
    });
    assert_eq!(continued[0], continued[1]);
    assert_eq!(continued[0], continued[2]);
}

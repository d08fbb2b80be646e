use std::sync::Arc;
use std::thread;

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};

use super::Unit;
use crate::group::{GroupOptions, ProcessGroup};
use crate::layout::{ALIGNMENT, Layout};
use crate::transport::memory;
use crate::{DataParallel, Error, MicroBatch, Optimizer, OptimizerSetup, parameters};

/// A block in the way of a transformer's: a residual around two layers.
#[derive(Module, Debug)]
struct Block {
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self { up: linear(4, 8, device), down: linear(8, 4, device) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(self.up.forward(x).tanh())
    }
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    blocks: Vec<Unit<Block>>,
    last: Linear,
}

fn linear(input: usize, output: usize, device: &Device) -> Linear {
    LinearConfig::new(input, output).init(device)
}

impl Net {
    fn new(device: &Device) -> Self {
        numbered(Self {
            first: linear(3, 4, device),
            blocks: (0..3).map(|_| Unit::new(Block::new(device))).collect(),
            last: linear(4, 2, device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.first.forward(x);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x, Block::forward));
        self.last.forward(x)
    }

    fn loss(&self, rows: usize, device: &Device) -> Tensor<1> {
        let numbers: Vec<f32> = (0..rows * 3).map(|i| (i % 11) as f32 * 0.2 - 1.0).collect();
        let x = Tensor::from_data(TensorData::new(numbers, [rows, 3]), device);
        self.forward(x).powi_scalar(2).mean()
    }
}

/// Initial numbers that do not come from the process-wide generator, which tests share.
fn numbered<M: Module>(model: M) -> M {
    let mut count = 0u32;
    let numbers = parameters::write(model, |info| {
        let len = info.shape.iter().product();
        let next = |_| {
            count += 1;
            f64::from(count * 37 % 101) as f32 / 101.0 - 0.5
        };
        Some((0..len).map(next).collect())
    });
    numbers.expect("as many numbers as the shape asks for")
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// Plain SGD: the change of a weight is its gradient.
fn sgd() -> OptimizerSetup {
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    OptimizerSetup { optimizer, groups: vec![] }
}

fn single() -> Arc<ProcessGroup> {
    Arc::new(ProcessGroup::single())
}

fn bits<M: Module>(model: &M) -> Vec<(String, Vec<u32>)> {
    let named = parameters::read(model).expect("f32 parameters");
    named
        .into_iter()
        .map(|n| (n.info.path, n.values.iter().map(|v| v.to_bits()).collect()))
        .collect()
}

fn step<M: Module>(
    (model, strategy): (M, &mut DataParallel),
    losses: &[&dyn Fn(&M) -> Tensor<1>],
) -> Result<M, Error> {
    strategy.begin_step();
    for (i, loss) in losses.iter().enumerate() {
        let is_last = i + 1 == losses.len();
        strategy.begin_micro_batch(if is_last {
            MicroBatch::Last
        } else {
            MicroBatch::Intermediate
        });
        let grads = loss(&model).backward();
        strategy.collect(&model, grads)?;
    }
    strategy.reduce()?;
    Ok(strategy.step(model, 1.0, 0.5))
}

#[test]
fn a_unit_leaves_no_trace_in_paths_and_records() {
    let device = device();
    let paths: Vec<String> = bits(&Net::new(&device)).into_iter().map(|(path, _)| path).collect();
    assert_eq!(paths[2], "blocks.0.up.weight");
    let layout = Layout::of(&Net::new(&device), 1).expect("a layout");
    let of_layout: Vec<&str> = layout.slots().map(|(_, slot)| slot.info.path.as_str()).collect();
    assert_eq!(of_layout[0], "first.weight");
    assert_eq!(layout.units.len(), 4);
    assert_eq!(layout.units[0].params.len(), 4, "first and last are the root unit's");
    assert_eq!(layout.units[2].params[0].info.path, "blocks.1.up.weight");
}

#[test]
fn gradients_through_units_are_plain_autodiffs_to_the_last_bit() {
    let device = device();
    let net = Net::new(&device);
    let plain = net.loss(5, &device).backward();
    let gradient = |param: &Param<Tensor<2>>| param.val().grad(&plain).expect("a gradient");
    let expected = |param: &Param<Tensor<2>>| {
        (param.val().inner() - gradient(param).mul_scalar(0.5)).into_data()
    };
    let (first, block) = (expected(&net.first.weight), expected(&net.blocks[1].module().up.weight));
    let (model, mut strategy) = DataParallel::new(net, &single(), &sgd()).expect("a strategy");
    let stepped =
        step((model, &mut strategy), &[&|net: &Net| net.loss(5, &device)]).expect("a step");
    stepped.first.weight.val().inner().into_data().assert_eq(&first, true);
    stepped.blocks[1].module().up.weight.val().inner().into_data().assert_eq(&block, true);
}

#[test]
fn micro_batches_accumulate() {
    let device = device();
    let run = |losses: &[&dyn Fn(&Net) -> Tensor<1>]| {
        let model = Net::new(&device);
        let (model, mut strategy) =
            DataParallel::new(model, &single(), &sgd()).expect("a strategy");
        let model = step((model, &mut strategy), losses).expect("a step");
        // A second step must not see the first one's gradients.
        parameters::read(&step((model, &mut strategy), losses).expect("a step")).expect("numbers")
    };
    let loss = |net: &Net| net.loss(5, &device);
    let accumulated = run(&[&loss, &loss, &loss]);
    let summed = run(&[&|net: &Net| net.loss(5, &device).mul_scalar(3.0)]);
    for (a, b) in accumulated.iter().zip(&summed) {
        let close = a.values.iter().zip(&b.values).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(close, "{}", a.info.path);
    }
}

#[test]
fn a_unit_that_runs_twice_gets_the_sum_of_both_gradients() {
    let device = device();
    let twice = |net: &Net| {
        let x = Tensor::<2>::ones([2, 4], &device);
        let once = net.blocks[0].forward(x, Block::forward);
        let unused = net.loss(1, &device).mul_scalar(0.0);
        net.blocks[0].forward(once, Block::forward).sum() + unused
    };
    let plain_net = Net::new(&device);
    let plain = twice(&plain_net).backward();
    let weight = plain_net.blocks[0].module().up.weight.val();
    let expected =
        weight.clone().inner() - weight.grad(&plain).expect("a gradient").mul_scalar(0.5);
    let (model, mut strategy) =
        DataParallel::new(Net::new(&device), &single(), &sgd()).expect("a strategy");
    let stepped = step((model, &mut strategy), &[&twice]).expect("a step");
    let got = stepped.blocks[0].module().up.weight.val().inner();
    let difference = (got - expected.clone()).abs().max().into_scalar::<f32>();
    assert!(difference < 1e-6, "{difference}");
}

#[test]
fn ranks_hold_the_same_bits_and_the_average_of_a_single_rank() {
    let device = device();
    // Every rank sees other rows; the single rank sees all of them.
    let rows = |net: &Net, ranks: std::ops::Range<usize>, world: usize| {
        let loss = |rank: usize| net.loss(2 + rank, &device);
        let sum = ranks.map(loss).reduce(|a, b| a + b).expect("a rank");
        sum.div_scalar(world as f64)
    };
    for world in [2, 3, 4] {
        let expected = {
            let (mut model, mut strategy) =
                DataParallel::new(Net::new(&device), &single(), &sgd()).expect("a strategy");
            for _ in 0..3 {
                let loss = |net: &Net| rows(net, 0..world, world);
                model = step((model, &mut strategy), &[&loss]).expect("a step");
            }
            parameters::read(&model).expect("numbers")
        };
        let initial = Net::new(&device);
        let ranks: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = memory::endpoints(world)
                .into_iter()
                .enumerate()
                .map(|(rank, endpoint)| {
                    // Each rank has leaves of its own; other ranks' numbers differ from rank 0's.
                    let net = Net {
                        first: initial.first.clone().fork(&device),
                        blocks: initial
                            .blocks
                            .iter()
                            .map(|unit| Unit::new(unit.module().clone().fork(&device)))
                            .collect(),
                        last: initial.last.clone().fork(&device),
                    };
                    let net = parameters::write(net, |info| {
                        let len = info.shape.iter().product();
                        (rank > 0).then(|| vec![rank as f32; len])
                    });
                    let (net, rows) = (net.expect("numbers"), &rows);
                    scope.spawn(move || {
                        let group = Arc::new(ProcessGroup::new(endpoint, GroupOptions::default()));
                        let (mut model, mut strategy) =
                            DataParallel::new(net, &group, &sgd()).expect("a strategy");
                        let mut history = Vec::new();
                        for _ in 0..3 {
                            let loss = |net: &Net| rows(net, rank..rank + 1, world);
                            model = step((model, &mut strategy), &[&loss]).expect("a step");
                            history.push(bits(&model));
                        }
                        (history, parameters::read(&model).expect("numbers"))
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
        });
        assert!(ranks.iter().all(|(history, _)| *history == ranks[0].0), "world {world}");
        for (expected, got) in expected.iter().zip(&ranks[0].1) {
            let close = expected.values.iter().zip(&got.values).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(close, "world {world}: {}", expected.info.path);
        }
    }
}

#[derive(Module, Debug)]
struct Normed {
    unit: Unit<NormedBlock>,
}

#[derive(Module, Debug)]
struct NormedBlock {
    layer: Linear,
    norm: BatchNorm,
}

#[test]
fn running_statistics_of_a_unit_are_the_models_own() {
    let device = device();
    let forward = |model: &Normed| {
        let numbers = (0..32).map(|v| v as f32).collect::<Vec<_>>();
        let x = Tensor::<2>::from_data(TensorData::new(numbers, [8, 4]), &device);
        model.unit.forward(x, |block, x| block.norm.forward(block.layer.forward(x))).sum()
    };
    let new = || {
        let norm = BatchNormConfig::new(4).init(&device);
        numbered(Normed { unit: Unit::new(NormedBlock { layer: linear(4, 4, &device), norm }) })
    };
    let mean = |model: &Normed| {
        model.unit.module().norm.running_mean.value_sync().without_autodiff().into_data()
    };
    let plain = new();
    let _ = forward(&plain).backward();
    let (model, mut strategy) = DataParallel::new(new(), &single(), &sgd()).expect("a strategy");
    let layout = strategy.layout();
    assert!(layout.slots().all(|(_, slot)| !slot.info.path.contains("running")));
    let stepped = step((model, &mut strategy), &[&forward]).expect("a step");
    mean(&stepped).assert_eq(&mean(&plain), true);
}

#[test]
fn frozen_parameters_stay_and_tied_ones_are_stored_once() {
    let device = device();
    let mut net = Net::new(&device);
    net.first = net.first.no_grad();
    // The same parameter in two units belongs to the root.
    let tied = net.blocks[0].module().up.clone();
    net.blocks[2] = Unit::new(Block { up: tied, down: linear(8, 4, &device) });
    let layout = Layout::of(&net, 3).expect("a layout");
    let root: Vec<&str> = layout.units[0].params.iter().map(|p| p.info.path.as_str()).collect();
    assert_eq!(root, ["blocks.0.up.weight", "blocks.0.up.bias", "last.weight", "last.bias"]);
    assert_eq!(layout.units[0].params[0].aliases, ["blocks.2.up.weight"]);

    let before = bits(&net.first);
    let plain = net.loss(4, &device).backward();
    let weight = net.blocks[0].module().up.weight.val();
    let expected =
        weight.clone().inner() - weight.grad(&plain).expect("a gradient").mul_scalar(0.5);
    let (model, mut strategy) = DataParallel::new(net, &single(), &sgd()).expect("a strategy");
    let stepped =
        step((model, &mut strategy), &[&|net: &Net| net.loss(4, &device)]).expect("a step");
    assert_eq!(bits(&stepped.first), before);
    for block in [0, 2] {
        let got = stepped.blocks[block].module().up.weight.val().inner();
        let difference = (got - expected.clone()).abs().max().into_scalar::<f32>();
        assert!(difference < 1e-6, "block {block}: {difference}");
    }
}

#[test]
fn ranges_are_aligned_and_do_not_overlap() {
    for world in [1, 2, 3, 4, 7] {
        let layout = Layout::of(&Net::new(&device()), world).expect("a layout");
        for unit in &layout.units {
            assert_eq!(unit.len % (world * ALIGNMENT), 0);
            let mut end = 0;
            for slot in &unit.params {
                assert_eq!(slot.range.start % ALIGNMENT, 0);
                assert!(slot.range.start >= end);
                assert_eq!(slot.range.len(), slot.info.shape.iter().product::<usize>());
                end = slot.range.end;
            }
            assert!(end <= unit.len);
        }
    }
}

#[test]
fn a_unit_belongs_to_one_run_at_a_time() {
    let device = device();
    let net = Net::new(&device);
    let (model, first) = DataParallel::new(net, &single(), &sgd()).expect("a strategy");
    let second = DataParallel::new(model.clone(), &single(), &sgd());
    assert_eq!(second.err(), Some(Error::UnitInUse));
    drop(first);
    assert!(DataParallel::new(model, &single(), &sgd()).is_ok(), "the first run has ended");
}

#[test]
fn parameters_without_a_gradient_are_left_alone_on_one_rank_and_refused_on_several() {
    let device = device();
    // The last layer and the blocks take no part in this loss.
    let partial = |net: &Net| net.first.forward(Tensor::<2>::ones([1, 3], &device)).sum();
    let net = Net::new(&device);
    let before = bits(&net.blocks[0]);
    let (model, mut strategy) = DataParallel::new(net, &single(), &sgd()).expect("a strategy");
    let stepped = step((model, &mut strategy), &[&partial]).expect("a step");
    assert_eq!(bits(&stepped.blocks[0]), before);

    let errors: Vec<Error> = thread::scope(|scope| {
        let threads: Vec<_> = memory::endpoints(2)
            .into_iter()
            .map(|endpoint| {
                let net = Net::new(&device);
                let partial = &partial;
                scope.spawn(move || {
                    let group = Arc::new(ProcessGroup::new(endpoint, GroupOptions::default()));
                    let (model, mut strategy) =
                        DataParallel::new(net, &group, &sgd()).expect("a strategy");
                    step((model, &mut strategy), &[partial]).expect_err("unused parameters")
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    });
    let message = errors[0].to_string();
    assert!(message.contains("last.weight") && message.contains("no_grad"), "{message}");
}

#[test]
fn ranks_with_different_models_are_told() {
    let device = device();
    let errors: Vec<Error> = thread::scope(|scope| {
        let threads: Vec<_> = memory::endpoints(3)
            .into_iter()
            .map(|endpoint| {
                let device = device.clone();
                scope.spawn(move || {
                    let group = Arc::new(ProcessGroup::new(endpoint, GroupOptions::default()));
                    let width = if group.rank() == 1 { 5 } else { 4 };
                    let net = linear(3, width, &device);
                    let error = DataParallel::new(net, &group, &sgd()).err();
                    error.inspect(|error| group.abort_signal().raise(group.rank(), error))
                })
            })
            .collect();
        let ended = threads.into_iter().map(|t| t.join().expect("no rank should panic"));
        ended.map(|error| error.expect("every rank is told")).collect()
    });
    assert_eq!(errors[1], Error::LayoutMismatch { rank: 1 });
    assert!(errors[0].to_string().starts_with("rank 1 failed: rank 1 built a model"));
}

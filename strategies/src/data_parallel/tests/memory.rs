//! What a rank holds, counted.

use burn::backend::Flex;
use burn::module::ParamId;
use burn::module::{Module, Param};
use std::sync::{Mutex, Weak};

use super::*;
use crate::memory::Category;
use crate::testing::{all_of, position, ways};
use crate::{Setup, Stage};

/// Padded elements: in all units, in the root, in the largest of the others.
fn sizes(layout: &Layout) -> (usize, usize, usize) {
    let lens: Vec<usize> = layout.units.iter().map(|unit| unit.len).collect();
    (lens.iter().sum(), lens[0], lens[1..].iter().copied().max().unwrap_or(0))
}

#[test]
fn a_rank_holds_what_the_formulas_of_zero_say() {
    let device = device();
    for world in 1..=4 {
        for (name, setup) in ways() {
            all_of(world, |group| {
                let (mut model, mut strategy) =
                    DataParallel::new(Net::new(&device), group, &setup)?;
                for _ in 0..2 {
                    strategy.begin_step();
                    for index in 0..2 {
                        model =
                            strategy.begin_micro_batch(model, position(index, 2), Counts::Yes)?;
                        let grads = model.loss(3, &device).backward();
                        model = strategy.collect(model, grads)?;
                    }
                    strategy.reduce()?;
                    model = strategy.step(model, 0.5, 0.01)?;
                }
                let (p, root, largest) = sizes(strategy.layout());
                let stage = if world == 1 { Stage::Nothing } else { setup.stage };
                // In f32: parameters, gradients, AdamW's state.
                let expected = match stage {
                    Stage::Nothing => 16 * p,
                    Stage::Optimizer => 8 * p + 8 * p / world,
                    Stage::Gradients => 4 * p + 12 * p / world,
                    Stage::Parameters => 16 * p / world,
                };
                let (live, peak) = (strategy.memory().live(), strategy.memory().peak());
                let held = live.total() - live.of(Category::Communication);
                assert_eq!(held, expected as u64, "{name}, world {world}");
                // While a step runs: the root, the unit that runs and the one gathered ahead; and the
                // gradients of two units.
                let whole = peak.by_category.of(Category::ParametersFull);
                let whole_steady = live.of(Category::ParametersFull);
                let ahead = if stage == Stage::Parameters {
                    let kept = if name == "shard_grad_op" { p } else { root + 2 * largest };
                    4 * kept
                } else {
                    0
                };
                assert!(whole <= whole_steady + ahead as u64, "{name}, world {world}: {whole}");
                let grads = peak.by_category.of(Category::Gradients);
                // What autodiff hands over, and the buffer that it is written to.
                let two = 2 * 4 * root.max(largest);
                assert!(grads <= live.of(Category::Gradients) + two as u64, "{name}: {grads}");
                assert_eq!(live.of(Category::Activations), 0);
                assert!(peak.by_category.of(Category::Activations) > 0);
                // Padding is what is aligned, and no more.
                let slots = strategy.layout().slots().count();
                let padding = p - strategy.layout().num_elements();
                let units = strategy.layout().units.len();
                assert!(padding < (slots + units * world) * crate::layout::ALIGNMENT);
                Ok(())
            });
        }
    }
}

#[test]
fn weights_are_stepped_where_they_are() {
    let device = device();
    let address = |net: &Net| {
        let tensor = net.blocks[0].module().up.weight.val().inner();
        let primitive = tensor.try_into_primitive::<Flex>().expect("on the CPU");
        primitive.bytes().as_ptr() as usize
    };
    let (net, mut strategy) =
        DataParallel::new(Net::new(&device), &single(), &sgd()).expect("a strategy");
    let before = address(&net);
    let loss = |net: &Net| net.loss(2, &device);
    let stepped = step((net, &mut strategy), &[&loss]).expect("a step");
    assert_eq!(address(&stepped), before, "nobody else holds the weights, so none are copied");
}

#[derive(Module, Debug)]
struct Wide {
    units: Vec<Unit<crate::testing::Block>>,
}

/// Blocks whose weights are of this width.
fn wide(width: usize, device: &burn::tensor::Device) -> Wide {
    let block = || {
        let (up, down) = (linear(4, width, device), linear(width, 4, device));
        Unit::new(crate::testing::Block { up, down })
    };
    crate::testing::numbered(Wide { units: vec![block(), block(), block()] })
}

#[test]
fn where_every_parameter_is_in_a_unit_one_and_those_ahead_are_whole() {
    use crate::{BackwardPrefetch, Gathering};
    let device = device();
    for (name, setup) in &ways()[3..5] {
        for ahead in [0, 1] {
            let gathering = Gathering {
                forward_prefetch: ahead == 1,
                backward_prefetch: match ahead {
                    0 => BackwardPrefetch::None,
                    _ => BackwardPrefetch::Pre,
                },
                ..setup.gathering
            };
            let setup = Setup { gathering, ..setup.clone() };
            all_of(3, |group| {
                let (mut model, mut strategy) =
                    DataParallel::new(wide(40, &device), group, &setup)?;
                for _ in 0..3 {
                    strategy.begin_step();
                    model = strategy.begin_micro_batch(model, MicroBatch::Last, Counts::Yes)?;
                    let x = Tensor::<2>::ones([2, 4], &device);
                    let forward = crate::testing::Block::forward;
                    let x = model.units.iter().fold(x, |x, unit| unit.forward(x, forward));
                    model = strategy.collect(model, x.sum().backward())?;
                    strategy.reduce()?;
                    model = strategy.step(model, 0.1, 0.1)?;
                }
                let (_, root, largest) = sizes(strategy.layout());
                let peak = strategy.memory().peak().by_category.of(Category::ParametersFull);
                assert_eq!(
                    (root, peak),
                    (0, ((1 + ahead) * 4 * largest) as u64),
                    "{name}, {ahead}"
                );
                Ok(())
            });
        }
    }
}

#[test]
fn no_gathered_weight_lives_between_forward_and_backward() {
    let device = device();
    // Without recomputation activations are kept, and weights are not.
    let (_, setup) = ways()[3].clone();
    // Small weights are copied out of the unit's buffer, large ones are views of it.
    for width in [5, 1 << 17] {
        all_of(2, |group| {
            let (mut model, mut strategy) = DataParallel::new(wide(width, &device), group, &setup)?;
            for _ in 0..2 {
                let weights: Arc<Mutex<Vec<Weak<_>>>> = Arc::default();
                strategy.begin_step();
                model = strategy.begin_micro_batch(model, MicroBatch::Last, Counts::Yes)?;
                let x = Tensor::<2>::ones([1, 4], &device);
                let x = model.units.iter().fold(x, |x, unit| {
                    let weights = Arc::clone(&weights);
                    unit.forward(x, move |block, x| {
                        for weight in [&block.up.weight, &block.down.weight] {
                            let tensor = weight.val().inner().try_into_primitive::<Flex>();
                            let data = tensor.expect("on the CPU").data_arc();
                            weights.lock().expect("no panic").push(Arc::downgrade(&data));
                        }
                        block.forward(x)
                    })
                });
                let alive = || {
                    let weights = weights.lock().expect("no panic");
                    weights.iter().filter(|weight| weight.strong_count() > 0).count()
                };
                // The last unit's are kept once it is known to be the last: nothing comes between.
                assert!(alive() <= 2, "{} after the forward pass", alive());
                let grads = x.sum().backward();
                model = strategy.collect(model, grads)?;
                assert_eq!(alive(), 0, "after the backward pass");
                strategy.reduce()?;
                model = strategy.step(model, 0.5, 0.01)?;
            }
            Ok(())
        });
    }
}

/// Which rank drew which parameter, in order.
type Drawn = Arc<Mutex<Vec<(usize, &'static str)>>>;

#[derive(Module, Debug)]
struct Lazy {
    first: Param<Tensor<1>>,
    units: Vec<Unit<LazyBlock>>,
    frozen: Param<Tensor<1>>,
    last: Param<Tensor<1>>,
}

#[derive(Module, Debug)]
struct LazyBlock {
    weight: Param<Tensor<1>>,
    bias: Param<Tensor<1>>,
}

/// A model that notes who draws its numbers.
fn lazy(rank: usize, drawn: &Drawn, device: &burn::tensor::Device) -> Lazy {
    let param = |name: &'static str, len: usize| {
        let drawn = Arc::clone(drawn);
        let draw = move |device: &burn::tensor::Device, grad: bool| {
            let mut drawn = drawn.lock().expect("no panic");
            drawn.push((rank, name));
            let number = drawn.len() as f32 + 100.0 * rank as f32;
            Tensor::<1>::full([len], number, device).set_require_grad(grad)
        };
        Param::uninitialized(ParamId::new(), draw, device.clone(), true, [len].into())
    };
    let block =
        |weight, bias| Unit::new(LazyBlock { weight: param(weight, 300), bias: param(bias, 3) });
    Lazy {
        first: param("first", 10),
        units: vec![block("w0", "b0"), block("w1", "b1")],
        frozen: param("frozen", 5).no_grad(),
        last: param("last", 20),
    }
}

#[test]
fn numbers_are_drawn_on_rank_0_alone_unit_by_unit_and_are_those_of_the_unsharded_model() {
    let device = device();
    let initial = |world: usize, setup: &Setup| {
        let drawn = Drawn::default();
        let ends = all_of(world, |group| {
            let model = lazy(group.rank(), &drawn, &device);
            let (model, strategy) = DataParallel::new(model, group, setup)?;
            let mut named = strategy.parameters(&model)?;
            named.sort_by(|a, b| a.info.path.cmp(&b.info.path));
            let (_, root, largest) = sizes(strategy.layout());
            let peak = strategy.memory().peak().by_category.of(Category::ParametersFull);
            if setup.stage == Stage::Parameters && world > 1 {
                assert!(peak <= 4 * (root + largest) as u64, "never the whole model: {peak}");
            }
            Ok(named)
        });
        let drawn = drawn.lock().expect("no panic").clone();
        (drawn, ends.into_iter().next().expect("rank 0"))
    };
    let expected = initial(1, &sgd());
    let order = ["first", "w0", "b0", "w1", "b1", "frozen", "last"];
    assert_eq!(expected.0, order.map(|name| (0, name)));
    for (name, setup) in ways() {
        let (drawn, values) = initial(3, &setup);
        assert_eq!(drawn, expected.0, "{name}");
        let numbers = |named: &[parameters::NamedValues]| -> Vec<(String, Vec<f32>)> {
            named.iter().map(|n| (n.info.path.clone(), n.values.as_slice().to_f32())).collect()
        };
        assert_eq!(numbers(&values), numbers(&expected.1), "{name}");
    }
}

//! Frozen parameters: gathered like others, but without gradients and optimizer state.

use std::sync::{Mutex, Weak};

use burn::backend::Flex;
use burn::nn::Linear;

use super::*;
use pyroclast_kernels::numbers::Numbers;

use crate::memory::Category;
use crate::testing::{all_of, numbered, ways};
use crate::{PieceOf, Setup, Stage};

#[derive(Module, Debug)]
struct Tuned {
    /// Outside of any unit.
    base: Linear,
    units: Vec<Unit<Adapted>>,
    /// A unit of which nothing is trained.
    fixed: Unit<Linear>,
}

#[derive(Module, Debug)]
struct Adapted {
    frozen: Linear,
    trained: Linear,
}

impl Tuned {
    fn new(device: &burn::tensor::Device) -> Self {
        let adapted = || {
            let (frozen, trained) = (linear(5, 5, device).no_grad(), linear(5, 5, device));
            Unit::new(Adapted { frozen, trained })
        };
        let base = linear(3, 5, device).no_grad();
        let fixed = Unit::new(linear(5, 2, device).no_grad());
        numbered(Self { base, units: vec![adapted(), adapted()], fixed })
    }

    fn forward(&self, seen: &Seen, x: Tensor<2>) -> Tensor<2> {
        let x = self.base.forward(x);
        let x = self.units.iter().fold(x, |x, unit| {
            let seen = seen.clone();
            unit.forward(x, move |layers, x| {
                seen.note(&layers.frozen);
                let x = layers.frozen.forward(x).tanh();
                layers.trained.forward(x.clone()).tanh() + x
            })
        });
        self.fixed.forward(x, |layer, x| layer.forward(x))
    }

    fn loss(&self, seen: &Seen, device: &burn::tensor::Device) -> Tensor<1> {
        self.forward(seen, Tensor::ones([2, 3], device)).powi_scalar(2).mean()
    }
}

/// The memory of frozen weights as units see it.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<Weak<dyn std::any::Any + Send + Sync>>>>);

impl Seen {
    fn note(&self, layer: &Linear) {
        assert!(!layer.weight.val().is_require_grad());
        let weight = layer.weight.val().without_autodiff().try_into_primitive::<Flex>();
        let data: Arc<dyn std::any::Any + Send + Sync> = weight.expect("on the CPU").data_arc();
        self.0.lock().expect("no panic").push(Arc::downgrade(&data));
    }

    fn alive(&self) -> usize {
        self.0.lock().expect("no panic").iter().filter(|seen| seen.strong_count() > 0).count()
    }
}

#[test]
fn frozen_parameters_are_sharded_and_cost_nothing_else() {
    let device = device();
    let seen = &Seen::default();
    let single = {
        let (model, mut strategy) =
            DataParallel::new(Tuned::new(&device), &single(), &sgd()).expect("a strategy");
        bits(&step((model, &mut strategy), &[&|m: &Tuned| m.loss(seen, &device)]).expect("a step"))
    };
    for world in [2, 3] {
        for (name, setup) in ways() {
            let setup = Setup { optimizer: sgd().optimizer, ..setup };
            let ranks = all_of(world, |group| {
                let seen = Seen::default();
                let (mut model, mut strategy) =
                    DataParallel::new(Tuned::new(&device), group, &setup)?;
                let units = &strategy.layout().units;
                let sum = |of: fn(&crate::UnitLayout) -> usize| units.iter().map(of).sum::<usize>();
                let (trained, frozen) = (sum(|unit| unit.len), sum(|unit| unit.frozen_len));
                let memory = strategy.memory().live();
                let state = if setup.stage == Stage::Nothing { trained } else { trained / world };
                // Momentum of SGD.
                assert_eq!(memory.of(Category::Optimizer), 4 * state as u64, "{name}");
                if setup.stage == Stage::Parameters {
                    assert!(frozen > 0 && units[0].len == 0 && units[0].frozen_len > 0);
                    let sharded = 4 * (trained + frozen) / world;
                    assert_eq!(memory.of(Category::ParametersSharded), sharded as u64, "{name}");
                    assert_eq!(memory.of(Category::ParametersFull), 0, "{name}");
                } else {
                    assert_eq!(frozen, 0, "{name}: they stay in the model");
                }
                strategy.begin_step();
                model = strategy.begin_micro_batch(model, MicroBatch::Last, Counts::Yes)?;
                let loss = model.loss(&seen, &device);
                if name == "full_shard" {
                    // Small weights are copied where they are used, so that nothing pins a unit.
                    assert_eq!(seen.alive(), 0, "frozen weights are kept for the backward pass");
                }
                let grads = loss.backward();
                model = strategy.collect(model, grads)?;
                strategy.reduce()?;
                model = strategy.step(model, 1.0 / world as f64, 0.5)?;
                // A pass without autodiff.
                model = strategy.begin_pass(model)?;
                let valid = model.valid();
                let x = Tensor::<2>::ones([2, 3], &device.clone().without_autodiff());
                let output = valid.forward(&Seen::default(), x).into_data();
                model = strategy.end_pass(model)?;
                let named = strategy.parameters(&model)?;
                let state = strategy.state()?.len();
                let whole = strategy.whole(model)?;
                let first = group.rank() == 0;
                assert_eq!(state, if first { 4 } else { 0 }, "state of what is trained alone");
                assert_eq!(named.len(), if first { 12 } else { 0 }, "{name}");
                Ok((first.then(|| bits(&whole)), output))
            });
            let mut got = ranks[0].0.clone().expect("the whole model");
            let mut expected = single.clone();
            got.sort();
            expected.sort();
            let close = |a: &u32, b: &u32| (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 1e-6;
            for ((path, got), (_, expected)) in got.iter().zip(&expected) {
                assert!(got.iter().zip(expected).all(|(a, b)| close(a, b)), "{name}: {path}");
                if path.contains("frozen") || path.contains("base") || path.contains("fixed") {
                    assert_eq!(got, expected, "{name}: {path}");
                }
            }
            assert!(ranks.iter().all(|(_, output)| *output == ranks[0].1), "{name}");
        }
    }
}

#[test]
fn frozen_parameters_are_restored() {
    let device = device();
    for (name, setup) in ways() {
        let ranks = all_of(2, |group| {
            let (model, mut strategy) = DataParallel::new(Tuned::new(&device), group, &setup)?;
            let mut source = |of: PieceOf, _: &crate::ParamInfo, range: std::ops::Range<usize>| {
                let value = if of == PieceOf::Weights { 2.0 } else { 0.0 };
                Ok(Some(Numbers::F32(vec![value; range.len()])))
            };
            let model = strategy.restore(model, 3, &mut source)?;
            let model = strategy.whole(model)?;
            Ok((group.rank() == 0).then(|| bits(&model)))
        });
        let named = ranks[0].clone().expect("the whole model");
        let two = 2f32.to_bits();
        assert!(named.iter().all(|(_, values)| values.iter().all(|v| *v == two)), "{name}");
    }
}

//! What a unit must not change: masks of Dropout, statistics of BatchNorm, gradients. And what it refuses.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear};
use burn::tensor::{Device, Tensor, TensorData};

use crate::testing::{Block, Net, all_of, bits, device, linear, numbered, sgd, single, step, ways};
use crate::unit::recompute::mark_for_test;
use crate::{DataParallel, Error, Setup, Unit, UnitPolicy};

/// Tests that draw from the process's generator take turns.
static GENERATOR: Mutex<()> = Mutex::new(());

fn recomputing() -> Setup {
    Setup { activation_checkpointing: UnitPolicy::All, ..sgd() }
}

#[derive(Module, Debug)]
struct Dropped {
    layer: Linear,
    dropout: Dropout,
    out: Linear,
}

impl Dropped {
    fn new(device: &Device) -> Self {
        let dropout = DropoutConfig::new(0.5).init();
        numbered(Self { layer: linear(4, 64, device), dropout, out: linear(64, 2, device) })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.out.forward(self.dropout.forward(self.layer.forward(x)))
    }
}

#[derive(Module, Debug)]
struct DroppedNet {
    unit: Unit<Dropped>,
}

fn dropped_loss(net: &DroppedNet, device: &Device) -> Tensor<1> {
    let x = Tensor::<2>::ones([3, 4], device);
    net.unit.forward(x, Dropped::forward).powi_scalar(2).mean()
}

fn expected<const D: usize>(
    param: &Param<Tensor<D>>,
    grads: &burn::tensor::Gradients,
) -> TensorData {
    let grad = param.val().grad(grads).expect("a gradient");
    (param.val().inner() - grad.mul_scalar(0.5)).into_data()
}

#[test]
fn a_unit_with_dropout_is_plain_autodiff() {
    let _turn = GENERATOR.lock();
    let device = device();
    let plain = Dropped::new(&device);
    device.seed(7);
    let grads = plain.forward(Tensor::ones([3, 4], &device)).powi_scalar(2).mean().backward();
    let expected = expected(&plain.layer.weight, &grads);
    let net = DroppedNet { unit: Unit::new(Dropped::new(&device)) };
    let (net, mut strategy) = DataParallel::new(net, &single(), &sgd()).expect("a strategy");
    device.seed(7);
    let loss = |net: &DroppedNet| dropped_loss(net, &device);
    let net = step((net, &mut strategy), &[&loss]).expect("a step");
    net.unit.module().layer.weight.val().inner().into_data().assert_eq(&expected, true);
}

#[test]
fn a_recomputed_unit_draws_the_same_mask_again() {
    let _turn = GENERATOR.lock();
    let device = device();
    for seed in 0..4 {
        let net = DroppedNet { unit: Unit::new(Dropped::new(&device)) };
        let (net, mut strategy) =
            DataParallel::new(net, &single(), &recomputing()).expect("a strategy");
        device.seed(seed);
        let before = net.unit.module().layer.weight.val().inner();
        let seen = Mutex::new(0.0);
        let loss = |net: &DroppedNet| {
            let loss = dropped_loss(net, &device);
            *seen.lock().expect("no panic") = loss.clone().inner().into_scalar::<f32>();
            loss
        };
        let stepped = step((net, &mut strategy), &[&loss]).expect("a step");
        // The plain model with the mask of the unit's first run: its gradients are of that mask, too.
        let plain = Dropped::new(&device);
        device.seed(seed);
        mark_for_test(&device);
        let loss = plain.forward(Tensor::ones([3, 4], &device)).powi_scalar(2).mean();
        let first_run = seen.into_inner().expect("no panic");
        assert_eq!(loss.clone().inner().into_scalar::<f32>(), first_run);
        let grads = loss.backward();
        let expected = expected(&plain.layer.weight, &grads);
        let after = stepped.unit.module().layer.weight.val().inner();
        assert!((after.clone() - before).abs().max().into_scalar::<f32>() > 0.0);
        after.into_data().assert_eq(&expected, true);
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

fn normed_loss(model: &Normed, device: &Device) -> Tensor<1> {
    let numbers = (0..32).map(|v| (v * v % 23) as f32).collect::<Vec<_>>();
    let x = Tensor::<2>::from_data(TensorData::new(numbers, [8, 4]), device);
    let y = model.unit.forward(x, |block, x| block.norm.forward(block.layer.forward(x)));
    y.powi_scalar(3).sum()
}

fn normed(device: &Device) -> Normed {
    let norm = BatchNormConfig::new(4).init(device);
    numbered(Normed { unit: Unit::new(NormedBlock { layer: linear(4, 4, device), norm }) })
}

fn statistics(model: &Normed) -> [TensorData; 2] {
    let norm = &model.unit.module().norm;
    [&norm.running_mean, &norm.running_var]
        .map(|state| state.value_sync().without_autodiff().into_data())
}

#[test]
fn statistics_of_a_unit_are_the_models_own_and_follow_a_step_once() {
    let device = device();
    let plain = normed(&device);
    let mut grads = vec![];
    for _ in 0..2 {
        grads.push(normed_loss(&plain, &device).backward());
    }
    let expected_statistics = statistics(&plain);
    let expected_weight = expected(&plain.unit.module().layer.weight, &grads[0]);
    for setup in [sgd(), recomputing()] {
        let (model, mut strategy) =
            DataParallel::new(normed(&device), &single(), &setup).expect("a strategy");
        assert!(strategy.layout().slots().all(|(_, slot)| !slot.info.path.contains("running")));
        let loss = |model: &Normed| normed_loss(model, &device);
        let stepped = step((model, &mut strategy), &[&loss]).expect("a step");
        let weight = stepped.unit.module().layer.weight.val().inner().into_data();
        weight.assert_eq(&expected_weight, true);
        // The same batch once more with the first weights: a learning rate of 0 would do, too.
        let (model, mut strategy) =
            DataParallel::new(normed(&device), &single(), &setup).expect("a strategy");
        let stepped = step((model, &mut strategy), &[&loss, &loss]).expect("a step");
        for (got, expected) in statistics(&stepped).iter().zip(&expected_statistics) {
            got.assert_eq(expected, true);
        }
    }
}

#[test]
fn statistics_are_rank_0s_in_every_way() {
    let device = device();
    let run = |setup: &Setup| {
        let ends = all_of(3, |group| {
            let (model, mut strategy) = DataParallel::new(normed(&device), group, setup)?;
            let scale = 1.0 + group.rank() as f64;
            let loss = |model: &Normed| normed_loss(model, &device).mul_scalar(scale);
            let model = step((model, &mut strategy), &[&loss])?;
            let model = strategy.synchronize_buffers(model)?;
            Ok(statistics(&model))
        });
        assert!(ends.iter().all(|end| *end == ends[0]));
        ends.into_iter().next().expect("rank 0")
    };
    let [(_, ddp), others @ ..] = ways();
    let expected = run(&ddp);
    for (name, setup) in others {
        assert_eq!(run(&setup), expected, "{name}");
    }
}

#[test]
fn checkpointing_alone_gives_plain_gradients() {
    let device = device();
    let plain = Net::new(&device);
    let grads = plain.loss(5, &device).backward();
    let mut recomputing = Net::new(&device);
    recomputing.blocks =
        recomputing.blocks.into_iter().map(Unit::with_activation_checkpointing).collect();
    let recomputed = recomputing.loss(5, &device).backward();
    let pairs = [
        (&plain.first.weight, &recomputing.first.weight),
        (&plain.blocks[1].module().up.weight, &recomputing.blocks[1].module().up.weight),
        (&plain.last.weight, &recomputing.last.weight),
    ];
    for (plain, recomputing) in pairs {
        let expected = plain.val().grad(&grads).expect("a gradient").into_data();
        let got = recomputing.val().grad(&recomputed).expect("a gradient").into_data();
        got.assert_eq(&expected, true);
    }
    // And in inference there is nothing to recompute.
    let out = recomputing.valid().forward(Tensor::ones([1, 3], &device.clone().without_autodiff()));
    assert!(!out.is_autodiff());
}

#[test]
fn a_captured_tensor_that_requires_a_gradient_is_refused() {
    let device = device();
    for setup in [sgd(), recomputing()] {
        let net = Net::new(&device);
        let (net, strategy) = DataParallel::new(net, &single(), &setup).expect("a strategy");
        let captures = AssertUnwindSafe(|| {
            let x = net.first.forward(Tensor::<2>::ones([2, 3], &device));
            let captured = x.clone();
            net.blocks[0].forward(x, move |block, x| block.forward(x) + captured.clone())
        });
        let payload = catch_unwind(captures).expect_err("the capture is refused");
        let error = payload.downcast_ref::<Error>().expect("an error");
        assert_eq!(*error, Error::CapturedTensor { unit: "Block" });
        assert!(error.to_string().contains("argument of `Unit::forward`"), "{error}");
        drop(strategy);
    }
    // What requires no gradient may be captured.
    let (net, mut strategy) =
        DataParallel::new(Net::new(&device), &single(), &sgd()).expect("a strategy");
    let loss = |net: &Net| {
        let factor = Tensor::<2>::ones([2, 4], &device).mul_scalar(2.0);
        let x = net.first.forward(Tensor::<2>::ones([2, 3], &device));
        let x = net.blocks.iter().fold(x, |x, unit| {
            let factor = factor.clone();
            unit.forward(x, move |block, x| block.forward(x) * factor.clone())
        });
        net.last.forward(x).sum()
    };
    assert!(step((net, &mut strategy), &[&loss]).is_ok());
}

#[derive(Module, Debug)]
struct Nested {
    outer: Vec<Unit<Outer>>,
}

#[derive(Module, Debug)]
struct Outer {
    inner: Unit<Block>,
    own: Linear,
}

#[test]
fn nested_units_give_the_same_bits_in_every_way() {
    let device = device();
    let new = || {
        let outer = || Outer { inner: Unit::new(Block::new(&device)), own: linear(4, 4, &device) };
        numbered(Nested { outer: vec![Unit::new(outer()), Unit::new(outer())] })
    };
    let loss = |net: &Nested| {
        let x = Tensor::<2>::ones([2, 4], &device);
        let x = net.outer.iter().fold(x, |x, unit| {
            unit.forward(x, |block, x| block.own.forward(block.inner.forward(x, Block::forward)))
        });
        x.powi_scalar(2).mean()
    };
    let run = |setup: &Setup, steps: usize| {
        let ends = all_of(2, |group| {
            let (mut model, mut strategy) = DataParallel::new(new(), group, setup)?;
            for _ in 0..steps {
                model = step((model, &mut strategy), &[&loss])?;
            }
            let model = strategy.whole(model)?;
            Ok(if group.rank() == 0 { bits(&model) } else { vec![] })
        });
        ends.into_iter().next().expect("rank 0")
    };
    let [(_, ddp), others @ ..] = ways();
    let expected = run(&ddp, 3);
    for (name, setup) in others {
        assert_eq!(run(&setup, 3), expected, "{name}");
    }
}

//! What a unit must not change: statistics of BatchNorm, and gradients; and what it refuses. Masks of
//! Dropout are tested where nobody else draws, in the workspace's integration tests.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::tensor::{Device, Tensor, TensorData};

use crate::testing::{Net, all_of, device, linear, numbered, sgd, single, step, ways};
use crate::{DataParallel, Error, Setup, Unit, UnitPolicy};

fn recomputing() -> Setup {
    Setup { activation_checkpointing: UnitPolicy::All, ..sgd() }
}

fn expected<const D: usize>(
    param: &Param<Tensor<D>>,
    grads: &burn::tensor::Gradients,
) -> TensorData {
    let grad = param.val().grad(grads).expect("a gradient");
    (param.val().inner() - grad.mul_scalar(0.5)).into_data()
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

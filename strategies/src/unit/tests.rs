mod behaviour;
mod nesting;
mod values;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;

use super::Unit;
use crate::layout::{ALIGNMENT, Layout};
use crate::testing::{Block, Net, bits, device, linear, numbered, sgd, single, step};
use crate::{DataParallel, Error};

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
fn a_unit_may_ignore_its_input_and_units_may_be_nested() {
    #[derive(Module, Debug)]
    struct Outer {
        first: Linear,
        outer: Unit<Inner>,
    }
    #[derive(Module, Debug)]
    struct Inner {
        inner: Unit<Linear>,
        own: Linear,
    }
    let device = device();
    let new = || {
        let inner = Inner { inner: Unit::new(linear(4, 4, &device)), own: linear(4, 4, &device) };
        numbered(Outer { first: linear(3, 4, &device), outer: Unit::new(inner) })
    };
    let loss = |net: &Outer| {
        let x = net.first.forward(Tensor::<2>::ones([2, 3], &device));
        let nested = net.outer.forward(x.clone(), |block, x| {
            block.own.forward(block.inner.forward(x, |layer, x| layer.forward(x).tanh()))
        });
        let ignoring = net.outer.forward(x, |block, x| block.own.forward(x.detach().ones_like()));
        nested.powi_scalar(2).sum() + ignoring.sum()
    };
    let plain_net = new();
    let plain = loss(&plain_net).backward();
    let expected = |param: &Param<Tensor<2>>| {
        let grad = param.val().grad(&plain).expect("a gradient");
        param.val().inner() - grad.mul_scalar(0.5)
    };
    let (net, mut strategy) = DataParallel::new(new(), &single(), &sgd()).expect("a strategy");
    assert_eq!(strategy.layout().units.len(), 3);
    let stepped = step((net, &mut strategy), &[&loss]).expect("a step");
    let pairs = [
        (&stepped.first.weight, &plain_net.first.weight),
        (&stepped.outer.module().own.weight, &plain_net.outer.module().own.weight),
        (
            &stepped.outer.module().inner.module().weight,
            &plain_net.outer.module().inner.module().weight,
        ),
    ];
    for (got, plain) in pairs {
        let difference = (got.val().inner() - expected(plain)).abs().max().into_scalar::<f32>();
        assert!(difference < 1e-5, "{difference}");
    }
}

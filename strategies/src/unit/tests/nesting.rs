//! Units in units, with and without a strategy, recomputed and not.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};

use crate::testing::{Block, all_of, bits, device, linear, numbered, sgd, step, ways};
use crate::{DataParallel, Setup, Unit, UnitPolicy};

#[derive(Module, Debug)]
struct Nested {
    outer: Vec<Unit<Outer>>,
}

#[derive(Module, Debug)]
struct Outer {
    inner: Unit<Block>,
    own: Linear,
}

impl Nested {
    fn new(device: &Device) -> Self {
        let outer = || Outer { inner: Unit::new(Block::new(device)), own: linear(4, 4, device) };
        numbered(Self { outer: vec![Unit::new(outer()), Unit::new(outer())] })
    }

    /// Runs the first block twice, so that its inner unit runs within two second forward passes.
    fn loss(&self, device: &Device) -> Tensor<1> {
        let x = Tensor::<2>::ones([2, 4], device);
        let blocks = [&self.outer[0], &self.outer[1], &self.outer[0]];
        let x = blocks.into_iter().fold(x, |x, unit| {
            unit.forward(x, |block, x| block.own.forward(block.inner.forward(x, Block::forward)))
        });
        x.powi_scalar(2).mean()
    }
}

fn trained(setup: &Setup, world: usize) -> Vec<(String, Vec<u32>)> {
    let device = device();
    let setup = Setup { optimizer: sgd().optimizer, ..setup.clone() };
    let ends = all_of(world, |group| {
        let (mut model, mut strategy) = DataParallel::new(Nested::new(&device), group, &setup)?;
        for _ in 0..3 {
            model = step((model, &mut strategy), &[&|net: &Nested| net.loss(&device)])?;
        }
        let model = strategy.whole(model)?;
        Ok(if group.rank() == 0 { bits(&model) } else { vec![] })
    });
    ends.into_iter().next().expect("rank 0")
}

fn assert_close(got: &[(String, Vec<u32>)], expected: &[(String, Vec<u32>)], what: &str) {
    for ((path, got), (_, expected)) in got.iter().zip(expected) {
        for (got, expected) in got.iter().zip(expected) {
            let (got, expected) = (f32::from_bits(*got), f32::from_bits(*expected));
            assert!((got - expected).abs() < 1e-5, "{what}: `{path}` is {got}, not {expected}");
        }
    }
}

#[test]
fn nested_units_train_alike_in_every_way_and_under_every_policy() {
    let expected = trained(&sgd(), 2);
    for (name, setup) in ways() {
        for wrap in [UnitPolicy::All, UnitPolicy::Types(vec!["Outer".into()]), UnitPolicy::None] {
            let setup = Setup { wrap, ..setup.clone() };
            assert_close(&trained(&setup, 2), &expected, name);
            let recomputed = Setup { activation_checkpointing: UnitPolicy::All, ..setup };
            assert_close(&trained(&recomputed, 2), &expected, name);
        }
    }
}

#[derive(Module, Debug)]
struct Twins {
    left: Linear,
    right: Linear,
}

#[test]
fn lazy_and_tied_parameters_of_a_unit_that_recomputes_alone_get_plain_gradients() {
    let device = device();
    // Lazy: the first forward pass draws the numbers.
    let layer = LinearConfig::new(4, 4).init(&device);
    let twins = Twins { left: layer.clone(), right: layer.clone() };
    let unit = Unit::new(twins).with_activation_checkpointing();
    let forward = |twins: &Twins, x: Tensor<2>| twins.right.forward(twins.left.forward(x).tanh());
    let x = Tensor::<2>::ones([2, 4], &device);
    let recomputed = unit.forward(x.clone(), forward).powi_scalar(2).sum().backward();
    let got = layer.weight.val().grad(&recomputed).expect("a gradient");
    let plain = forward(unit.module(), x).powi_scalar(2).sum().backward();
    let expected = layer.weight.val().grad(&plain).expect("a gradient");
    assert!((got - expected).abs().max().into_scalar::<f32>() < 1e-5);
}

#[derive(Module, Debug)]
struct Words {
    embed: Unit<Embedding>,
    head: Unit<Linear>,
}

#[test]
fn a_unit_trains_on_tokens_that_know_nothing_of_autodiff() {
    let device = device();
    let plain = Device::flex();
    let loss = |net: &Words| {
        let tokens = Tensor::<2, Int>::from_data([[1, 4, 2]], &plain);
        let x: Tensor<3> = net.embed.forward(tokens, |embed, tokens| embed.forward(tokens));
        net.head.forward(x, |head, x| head.forward(x)).powi_scalar(2).mean()
    };
    let new = || {
        let embed = EmbeddingConfig::new(5, 4).init(&device);
        numbered(Words { embed: Unit::new(embed), head: Unit::new(linear(4, 2, &device)) })
    };
    let run = |setup: &Setup| {
        let setup = Setup { optimizer: sgd().optimizer, ..setup.clone() };
        let ends = all_of(2, |group| {
            let (model, mut strategy) = DataParallel::new(new(), group, &setup)?;
            let model = step((model, &mut strategy), &[&loss])?;
            let model = strategy.whole(model)?;
            Ok(if group.rank() == 0 { bits(&model) } else { vec![] })
        });
        ends.into_iter().next().expect("rank 0")
    };
    let before = bits(&new());
    let [(_, ddp), others @ ..] = ways();
    let expected = run(&ddp);
    assert_ne!(expected, before);
    for (name, setup) in others {
        assert_eq!(run(&setup), expected, "{name}");
    }
}

#[test]
fn a_sharded_model_can_be_shown_and_cloned() {
    let device = device();
    let (_, setup) = ways()[3].clone();
    all_of(2, |group| {
        let (model, strategy) = DataParallel::new(Nested::new(&device), group, &setup)?;
        let shown = format!("{model}");
        assert!(shown.contains("sharded"), "{shown}");
        let valid = model.clone().valid();
        assert!(valid.devices().iter().all(|device| !device.is_autodiff()));
        assert_eq!(model.num_params(), 2 * (2 * 4 * 8 + 8 + 4 + 16 + 4));
        drop(strategy);
        Ok(())
    });
}

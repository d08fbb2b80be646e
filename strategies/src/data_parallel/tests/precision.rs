//! Units that compute in 16 bits: what a rank holds, what it refuses, and that master weights are kept.

use burn::module::Param;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::{DType, Device};
use pyroclast_kernels::numbers::{Float, Numbers, Slice};
use pyroclast_precision::{Precision, Types};

use super::*;
use crate::memory::Category;
use crate::testing::{Block, all_of, numbered, on_ranks, position, ways};
use crate::{Anomalies, Culprit, PieceOf, Setup, Stage, UnitPolicy, UnitTypes};

/// Blocks, all parameters of which are in units.
#[derive(Module, Debug)]
struct Deep {
    blocks: Vec<Unit<Block>>,
}

impl Deep {
    fn new(device: &Device) -> Self {
        numbered(Self { blocks: (0..3).map(|_| Unit::new(Block::new(device))).collect() })
    }

    fn loss(&self, rows: usize, device: &Device) -> Tensor<1> {
        let x = Tensor::<2>::ones([rows, 4], device).mul_scalar(0.5);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x, Block::forward));
        assert_eq!(x.dtype(), DType::F32, "outside of units there is f32 alone");
        x.powi_scalar(2).mean()
    }
}

fn with_types(setup: &Setup, types: Types) -> Setup {
    Setup { precision: types.into(), ..setup.clone() }
}

#[test]
fn a_rank_holds_what_the_formulas_of_mixed_precision_say() {
    let device = device();
    for reduce in [Float::F32, Float::BF16] {
        let types = Types { reduce, ..Precision::BF16Mixed.types() };
        for world in [1, 2, 4] {
            for (name, setup) in ways() {
                let setup = with_types(&setup, types);
                all_of(world, |group| {
                    let (mut model, mut strategy) =
                        DataParallel::new(Deep::new(&device), group, &setup)?;
                    for _ in 0..2 {
                        strategy.begin_step();
                        for index in 0..2 {
                            model = strategy.begin_micro_batch(
                                model,
                                position(index, 2),
                                Counts::Yes,
                            )?;
                            let grads = model.loss(3, &device).backward();
                            model = strategy.collect(model, grads)?;
                        }
                        strategy.reduce()?;
                        model = strategy.step(model, 0.5, 0.01)?;
                    }
                    let p: usize = strategy.layout().units.iter().map(|unit| unit.len).sum();
                    let g = reduce.size();
                    let stage = if world == 1 { Stage::Nothing } else { setup.stage };
                    let expected = match stage {
                        Stage::Nothing => (2 + g + 12) * p,
                        Stage::Optimizer => (2 + g) * p + 12 * p / world,
                        Stage::Gradients => 2 * p + (g + 12) * p / world,
                        Stage::Parameters => (14 + g) * p / world,
                    };
                    let live = strategy.memory().live();
                    let held = live.total() - live.of(Category::Communication);
                    assert_eq!(held, expected as u64, "{name}, world {world}, {reduce}");
                    Ok(())
                });
            }
        }
    }
}

/// The numbers of all parameters as they would be saved, on rank 0.
fn saved<M: Module>(strategy: &DataParallel, model: &M) -> Result<Vec<(String, Numbers)>, Error> {
    let mut named: Vec<_> = strategy
        .parameters(model)?
        .into_iter()
        .map(|named| (named.info.path, named.values))
        .collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(named)
}

#[test]
fn steps_that_16_bits_cannot_see_add_up_in_the_master_weights() {
    let device = device();
    for (name, setup) in ways() {
        let setup = Setup {
            optimizer: sgd().optimizer,
            ..with_types(&setup, Precision::BF16Mixed.types())
        };
        all_of(2, |group| {
            let (mut model, mut strategy) = DataParallel::new(Deep::new(&device), group, &setup)?;
            let before = saved(&strategy, &model)?;
            for _ in 0..4 {
                let loss = |model: &Deep| model.loss(2, &device).mul_scalar(1e-6);
                model = step((model, &mut strategy), &[&loss])?;
            }
            let after = saved(&strategy, &model)?;
            for ((path, before), (_, after)) in before.iter().zip(&after) {
                assert_eq!(after.float(), Float::F32);
                assert_ne!(before, after, "{name}: `{path}` has moved");
                let as_bf16 = |numbers: &Numbers| numbers.as_slice().cast(Float::BF16);
                assert_eq!(as_bf16(before), as_bf16(after), "{name}: no copy has seen it");
            }
            // The model that the run leaves has its master weights, on rank 0.
            let whole = strategy.whole(model)?;
            if group.rank() == 0 {
                let whole = parameters::read(&whole)?
                    .into_iter()
                    .map(|named| (named.info.path, named.values));
                let mut whole: Vec<_> = whole.collect();
                whole.sort_by(|a, b| a.0.cmp(&b.0));
                assert_eq!(whole, after);
            }
            Ok(())
        });
    }
}

#[test]
fn what_is_saved_and_restored_is_the_master_weights() {
    let device = device();
    let loss = |model: &Deep| model.loss(2, &device);
    for (name, setup) in ways() {
        let setup = with_types(&setup, Precision::BF16Mixed.types());
        let pieces = std::sync::Mutex::new(vec![]);
        all_of(2, |group| {
            let (mut model, mut strategy) = DataParallel::new(Deep::new(&device), group, &setup)?;
            for _ in 0..2 {
                model = step((model, &mut strategy), &[&loss])?;
            }
            let mut own = vec![];
            strategy.own_pieces(&model, |piece| {
                let key = (piece.of, piece.info.path.clone(), piece.range.start);
                own.push((key, piece.values.to_numbers()));
            })?;
            // The other ranks' are read from what all have written.
            pieces.lock().expect("no panic").extend(own);
            group.barrier()?;
            let steps = strategy.steps();
            let model = step((model, &mut strategy), &[&loss])?;
            let expected = saved(&strategy, &model)?;
            drop((model, strategy));
            let (again, mut strategy) = DataParallel::new(Deep::new(&device), group, &setup)?;
            let mut source =
                |of: PieceOf, info: &crate::ParamInfo, range: std::ops::Range<usize>| {
                    let pieces = pieces.lock().expect("no panic");
                    let mut found = Numbers::zeros(Float::F32, range.len());
                    for ((piece_of, path, start), values) in pieces.iter() {
                        if (*piece_of, path) != (of, &info.path) {
                            continue;
                        }
                        for (at, value) in values.as_slice().to_f32().into_iter().enumerate() {
                            if range.contains(&(start + at)) {
                                let at = start + at - range.start;
                                found.part_mut(at..at + 1).copy_from(Slice::F32(&[value]));
                            }
                        }
                    }
                    Ok(Some(found))
                };
            let again = strategy.restore(again, steps, &mut source)?;
            let again = step((again, &mut strategy), &[&loss])?;
            assert_eq!(saved(&strategy, &again)?, expected, "{name}");
            Ok(())
        });
    }
}

#[test]
fn a_unit_that_mixes_types_is_named() {
    let device = device();
    type Forward = fn(&Block, Tensor<2>) -> Tensor<2>;
    let cases: [(Forward, &str); 4] = [
        (|block, x| block.forward(x.clone() + Tensor::ones(x.dims(), &x.device())), "dtype"),
        (|block, x| x.clone() * block.forward(x).cast(burn::tensor::FloatDType::F64), "dtype"),
        (|_, x| x.cast(burn::tensor::FloatDType::F64), "it returned f64"),
        (|block, x| block.down.forward(Tensor::ones([2, 8], &x.device())), "dtype"),
    ];
    for (name, setup) in ways() {
        let setup = with_types(&setup, Precision::BF16Mixed.types());
        for (forward, expected) in cases {
            let outcomes = on_ranks(1, |group| {
                let (model, strategy) = DataParallel::new(Deep::new(&device), group, &setup)?;
                strategy.begin_step();
                let model = strategy.begin_micro_batch(model, MicroBatch::Last, Counts::Yes)?;
                let x = Tensor::<2>::ones([2, 4], &device);
                let run = std::panic::AssertUnwindSafe(|| model.blocks[1].forward(x, forward));
                match std::panic::catch_unwind(run) {
                    Ok(_) => Ok(()),
                    Err(payload) => Err(*payload.downcast::<Error>().expect("an error")),
                }
            });
            let error = outcomes[0].clone().expect_err("types are mixed").to_string();
            let is_named = error.starts_with("unit `blocks.1`, which computes in bf16: ");
            assert!(is_named && error.contains(expected), "{name}: {error}");
        }
    }
}

/// A convolution's norm, which has running statistics, and a scale outside of all units.
#[derive(Module, Debug)]
struct Normed {
    scale: Param<Tensor<1>>,
    norm: Unit<BatchNorm>,
    block: Unit<Block>,
}

impl Normed {
    fn new(device: &Device) -> Self {
        numbered(Self {
            scale: Param::from_tensor(Tensor::ones([1], device)),
            norm: Unit::new(BatchNormConfig::new(4).init(device)),
            block: Unit::new(Block::new(device)),
        })
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        let x = Tensor::<2>::from_floats([[1., 2., 3., 4.], [4., 0., 1., 1.]], device);
        let x = self.norm.forward(x * self.scale.val().unsqueeze::<2>(), |norm, x| norm.forward(x));
        self.block.forward(x, Block::forward).powi_scalar(2).mean()
    }
}

#[test]
fn norms_with_running_statistics_stay_in_f32_where_they_are_told_to() {
    let device = device();
    let mixed = Precision::BF16Mixed.types();
    let train = |precision: UnitTypes| {
        let setup = Setup { precision, ..sgd() };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let (model, mut strategy) = DataParallel::new(Normed::new(&device), &single(), &setup)?;
            let model = step((model, &mut strategy), &[&|model: &Normed| model.loss(&device)])?;
            saved(&strategy, &model)
        }));
        outcome.unwrap_or_else(|payload| Err(*payload.downcast::<Error>().expect("an error")))
    };
    let refused = train(mixed.into()).expect_err("statistics are f32").to_string();
    assert!(refused.starts_with("unit `norm`"), "{refused}");
    let f32 = Precision::F32True.types();
    let norms = |policy| UnitTypes { types: mixed, overrides: vec![(policy, f32)] };
    let by_type = train(norms(UnitPolicy::Types(vec!["BatchNorm".to_owned()])));
    let by_path = train(norms(UnitPolicy::Paths(vec!["norm".to_owned()])));
    assert!(by_type.is_ok() && by_type == by_path, "{by_type:?}");
    let unknown = train(norms(UnitPolicy::Types(vec!["LayerNorm".to_owned()])));
    let unknown = unknown.expect_err("there is none").to_string();
    assert!(unknown.contains("precision overrides") && unknown.contains("BatchNorm, Block"));
    let setup = Setup {
        wrap: UnitPolicy::None,
        precision: norms(UnitPolicy::Types(vec!["BatchNorm".to_owned()])),
        ..sgd()
    };
    let within = DataParallel::new(Normed::new(&device), &single(), &setup).err();
    assert_eq!(within, Some(Error::TypesWithoutUnit { unit: "norm".to_owned() }));
}

#[test]
fn everything_is_of_the_type_of_a_true_precision() {
    let device = device();
    for precision in [Precision::F64True, Precision::BF16True, Precision::F16True] {
        let types = precision.types();
        for (name, setup) in ways() {
            let setup = Setup { unused: crate::Unused::Allow, ..with_types(&setup, types) };
            all_of(2, |group| {
                let (mut model, mut strategy) =
                    DataParallel::new(Normed::new(&device), group, &setup)?;
                let before = saved(&strategy, &model)?;
                for _ in 0..2 {
                    let loss = |model: &Normed| {
                        let x =
                            Tensor::<2>::from_floats([[1., 2., 3., 4.], [4., 0., 1., 1.]], &device);
                        let x = x.cast(burn::tensor::FloatDType::from(types.output.dtype()));
                        let x = x * model.scale.val().unsqueeze::<2>();
                        let x = model.norm.forward(x, |norm, x| norm.forward(x));
                        let x = model.block.forward(x, Block::forward);
                        assert_eq!(x.dtype(), types.output.dtype());
                        x.powi_scalar(2).mean()
                    };
                    model = step((model, &mut strategy), &[&loss])?;
                }
                let after = saved(&strategy, &model)?;
                for ((path, before), (_, after)) in before.iter().zip(&after) {
                    assert_eq!(after.float(), types.params, "{name}: `{path}`");
                    assert_ne!(before, after, "{name}: `{path}` has moved");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn the_first_unit_whose_output_is_not_finite_is_found() {
    let device = device();
    for (name, setup) in ways() {
        let setup = Setup { anomalies: Anomalies::Detect, ..setup };
        let outcomes = on_ranks(1, |group| {
            let (model, strategy) = DataParallel::new(Deep::new(&device), group, &setup)?;
            strategy.begin_step();
            let model = strategy.begin_micro_batch(model, MicroBatch::Last, Counts::Yes)?;
            let divide = |block: &Block, x: Tensor<2>| block.forward(x.clone()) / x.zeros_like();
            let run = std::panic::AssertUnwindSafe(|| {
                let x = model.blocks[0].forward(Tensor::ones([2, 4], &device), Block::forward);
                let x = model.blocks[1].forward(x, divide);
                model.blocks[2].forward(x, Block::forward)
            });
            match std::panic::catch_unwind(run) {
                Ok(_) => Ok(()),
                Err(payload) => Err(*payload.downcast::<Error>().expect("an error")),
            }
        });
        let error = outcomes[0].clone().expect_err("it is infinite").to_string();
        let is_first = error.contains("unit `blocks.1` on rank 0") && error.contains("the first");
        assert!(is_first, "{name}: {error}");
    }
}

#[test]
fn gradients_that_are_not_finite_are_traced_to_rank_and_micro_batch() {
    let device = device();
    for (name, setup) in ways() {
        let culprits = all_of(3, |group| {
            let (mut model, strategy) = DataParallel::new(Deep::new(&device), group, &setup)?;
            strategy.begin_step();
            for index in 0..2 {
                model = strategy.begin_micro_batch(model, position(index, 2), Counts::Yes)?;
                let is_bad = group.rank() == 1 && index == 1;
                let factor = if is_bad { f64::INFINITY } else { 1.0 };
                let grads = model.loss(2, &device).mul_scalar(factor).backward();
                model = strategy.collect(model, grads)?;
            }
            assert!(!strategy.reduce()?.is_finite());
            strategy.culprit()
        });
        let culprit = culprits[0].clone().expect("a culprit");
        assert!(culprits.iter().all(|other| other.as_ref() == Some(&culprit)), "{name}");
        assert_eq!(culprit.source, Some((1, 2)), "{name}");
        assert!(culprit.path.starts_with("blocks.2."), "the backward pass begins there: {name}");
    }
}

#[test]
fn sums_that_overflow_although_no_rank_does_are_named_too() {
    let device = device();
    let types = Types { reduce: Float::F16, ..Precision::F32True.types() };
    let setup = Setup { stage: Stage::Gradients, ..with_types(&sgd(), types) };
    // What both ranks and one micro-batch make is a number; what two micro-batches make is none.
    for (micro_batches, is_finite) in [(1, true), (2, false)] {
        let ends = all_of(2, |group| {
            let layer = numbered(Unit::new(linear(1, 1, &device)));
            let (mut model, strategy) = DataParallel::new(layer, group, &setup)?;
            strategy.begin_step();
            for index in 0..micro_batches {
                let place = position(index, micro_batches);
                model = strategy.begin_micro_batch(model, place, Counts::Yes)?;
                let x = Tensor::<2>::ones([1, 1], &device);
                let loss = model.forward(x, |layer, x| layer.forward(x)).sum();
                model = strategy.collect(model, loss.mul_scalar(50_000.0).backward())?;
            }
            Ok((strategy.reduce()?.is_finite(), strategy.culprit()?))
        });
        let culprit = Culprit { path: "weight".to_owned(), source: None };
        let expected = (is_finite, (!is_finite).then_some(culprit));
        assert_eq!(ends, [expected.clone(), expected], "{micro_batches} micro-batches");
    }
}

#[test]
fn half_precision_sums_have_the_range_of_a_mean() {
    // Each rank's gradient is near the largest f16; their sum is not one, their mean is.
    let device = device();
    let types = Types { reduce: Float::F16, ..Precision::F32True.types() };
    let setup = with_types(&sgd(), types);
    let sums = all_of(4, |group| {
        let layer = numbered(Unit::new(linear(1, 1, &device)));
        let (model, mut strategy) = DataParallel::new(layer, group, &setup)?;
        strategy.begin_step();
        let model = strategy.begin_micro_batch(model, MicroBatch::Last, Counts::Yes)?;
        let x = Tensor::<2>::ones([1, 1], &device);
        let grads = model.forward(x, |layer, x| layer.forward(x)).sum().mul_scalar(50_000.0);
        let model = strategy.collect(model, grads.backward())?;
        let sum = strategy.reduce()?;
        let before = saved(&strategy, &model)?;
        let model = strategy.step(model, 1.0 / 4.0, 1.0)?;
        Ok((sum, before, saved(&strategy, &model)?))
    });
    let (sum, before, after) = &sums[0];
    // The gradients of weight and bias are 50,000 on each of four ranks.
    let expected = 2.0 * (4.0 * 50_000f64).powi(2);
    assert!((sum / expected - 1.0).abs() < 1e-3, "{sum} {expected}");
    for ((path, before), (_, after)) in before.iter().zip(after) {
        let change = before.as_slice().to_f64()[0] - after.as_slice().to_f64()[0];
        assert!((change - 50_000.0).abs() < 25.0, "{path}: {change}");
    }
}

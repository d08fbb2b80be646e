mod differences;
mod frozen;
mod memory;
mod overlap;
mod precision;
mod sizes;
mod stages;

use std::sync::Arc;
use std::thread;

use burn::module::Module;
use burn::tensor::Tensor;

use crate::testing::{Net, bits, device, linear, sgd, single, step, two_ranks};
use crate::{
    Counts, DataParallel, Error, GroupOptions, Layout, MicroBatch, ProcessGroup, Unit, parameters,
};

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
        let (x, y) = (a.values.as_slice().to_f32(), b.values.as_slice().to_f32());
        let close = x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(close, "{}", a.info.path);
    }
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
            let threads: Vec<_> = crate::transport::memory::endpoints(world)
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
            let (x, y) = (expected.values.as_slice().to_f32(), got.values.as_slice().to_f32());
            let close = x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(close, "world {world}: {}", expected.info.path);
        }
    }
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

    let partial = &partial;
    let outcomes = two_ranks(|net, strategy, _| step((net, strategy), &[partial]).map(drop));
    for outcome in outcomes {
        let message = outcome.expect_err("unused parameters").to_string();
        assert!(message.contains("last.weight") && message.contains("no_grad"), "{message}");
    }
}

#[test]
fn ranks_with_different_models_are_told() {
    let device = device();
    let errors: Vec<Error> = thread::scope(|scope| {
        let threads: Vec<_> = crate::transport::memory::endpoints(3)
            .into_iter()
            .map(|endpoint| {
                let device = device.clone();
                scope.spawn(move || {
                    let group = Arc::new(ProcessGroup::new(endpoint, GroupOptions::default()));
                    let width = if group.rank() == 1 { 5 } else { 4 };
                    let net = linear(3, width, &device);
                    DataParallel::new(net, &group, &sgd()).err()
                })
            })
            .collect();
        let ended = threads.into_iter().map(|t| t.join().expect("no rank should panic"));
        ended.map(|error| error.expect("every rank is told")).collect()
    });
    assert_eq!(errors[1], Error::LayoutMismatch { rank: 1 });
    assert!(errors[0].to_string().starts_with("rank 1 failed: rank 1 built a model"));
}

#[test]
fn a_gradient_that_does_not_come_through_its_unit_is_refused() {
    let device = device();
    let errors = two_ranks(|net, strategy, _| {
        let penalised = |net: &Net| {
            let weight = net.blocks[1].module().up.weight.val();
            net.loss(2, &device) + weight.powi_scalar(2).sum()
        };
        step((net, strategy), &[&penalised]).map(drop)
    });
    let late = Error::LateGradient { path: "blocks.1.up.weight".to_owned() };
    assert!(errors.contains(&Err(late)), "{errors:?}");
}

#[test]
fn a_batch_that_does_not_count_adds_nothing_even_if_it_is_no_number() {
    let device = device();
    let models = two_ranks(|net, strategy, group| {
        let counts = if group.rank() == 0 { Counts::Yes } else { Counts::No };
        let factor = if group.rank() == 0 { 1.0 } else { f64::NAN };
        strategy.begin_step();
        let net = strategy.begin_micro_batch(net, MicroBatch::Last, counts)?;
        let grads = net.loss(3, &device).mul_scalar(factor).backward();
        let net = strategy.collect(net, grads)?;
        assert!(strategy.reduce().expect("a sum").is_finite());
        Ok(bits(&strategy.step(net, 1.0, 0.5)?))
    });
    let (net, mut strategy) =
        DataParallel::new(Net::new(&device), &single(), &sgd()).expect("a strategy");
    let alone = step((net, &mut strategy), &[&|net: &Net| net.loss(3, &device)]).expect("a step");
    assert_eq!(models[0], Ok(bits(&alone)));
    assert_eq!(models[1], models[0]);
}

#[test]
fn a_unit_that_some_micro_batches_leave_out_is_summed_over_the_others() {
    let device = device();
    let whole = |net: &Net| net.loss(3, &device);
    let without_units = |net: &Net| {
        let x = net.first.forward(Tensor::<2>::ones([2, 3], &device));
        net.last.forward(x).sum()
    };
    let alone = {
        let (net, mut strategy) =
            DataParallel::new(Net::new(&device), &single(), &sgd()).expect("a strategy");
        bits(&step((net, &mut strategy), &[&whole, &without_units]).expect("a step"))
    };
    for order in [[&whole as &dyn Fn(&Net) -> Tensor<1>, &without_units], [&without_units, &whole]]
    {
        let (net, mut strategy) =
            DataParallel::new(Net::new(&device), &single(), &sgd()).expect("a strategy");
        let model = step((net, &mut strategy), &order).expect("a step");
        assert_eq!(bits(&model), alone);
    }
    let models = two_ranks(|net, strategy, _| {
        let losses: [&dyn Fn(&Net) -> Tensor<1>; 2] = [&whole, &without_units];
        step((net, strategy), &losses).map(|model| bits(&model))
    });
    assert!(models[0].is_ok());
    assert_eq!(models[0], models[1]);
}

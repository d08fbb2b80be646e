//! What each of DeepSpeed's numbers does, as events, messages and memory show it.

use super::*;
use crate::events::Event;
use crate::memory::Category;
use crate::testing::{all_of, position, ways};
use crate::{BackwardPrefetch, Gathering, Overlap, ParamOrder, Setup, Sizes, Stage};

/// What a rank did in the last of three steps, and with what outcome.
struct Run {
    events: Vec<Event>,
    messages: u64,
    bits: Vec<(String, Vec<u32>)>,
    /// Elements.
    peak_whole: usize,
    whole_between_steps: usize,
}

/// Rank 0 of two that train with `setup`.
fn run(setup: &Setup, micro_batches: usize) -> Run {
    let device = device();
    let setup = Setup { optimizer: sgd().optimizer, ..setup.clone() };
    let ranks = all_of(2, |group| {
        let (mut net, mut strategy) = DataParallel::new(Net::new(&device), group, &setup)?;
        let mut messages = 0;
        for _ in 0..3 {
            strategy.run.events.record();
            messages = group.traffic().messages;
            strategy.begin_step();
            for index in 0..micro_batches {
                let position = position(index, micro_batches);
                net = strategy.begin_micro_batch(net, position, Counts::Yes)?;
                let grads = net.loss(2 + group.rank(), &device).backward();
                net = strategy.collect(net, grads)?;
            }
            strategy.reduce()?;
            net = strategy.step(net, 0.5, 0.1)?;
        }
        let (live, peak) = (strategy.memory().live(), strategy.memory().peak());
        let elements = |bytes: u64| bytes as usize / 4;
        let run = Run {
            events: strategy.run.events.recorded(),
            messages: group.traffic().messages - messages,
            peak_whole: elements(peak.by_category.of(Category::ParametersFull)),
            whole_between_steps: elements(live.of(Category::ParametersFull)),
            bits: vec![],
        };
        let net = strategy.whole(net)?;
        Ok(Run { bits: if group.rank() == 0 { bits(&net) } else { vec![] }, ..run })
    });
    ranks.into_iter().next().expect("rank 0")
}

fn zero(stage: Stage) -> Setup {
    Setup { stage, ..Setup::default() }
}

fn with(setup: Setup, sizes: Sizes) -> Setup {
    Setup { sizes, ..setup }
}

/// Padded elements of the units of the net on two ranks: the root, and three that are alike.
fn lens() -> Vec<usize> {
    let layout = Layout::of(&Net::new(&device()), 2).expect("a layout");
    layout.units.iter().map(|unit| unit.len).collect()
}

/// Elements of a unit, without padding.
fn elements_of_unit() -> usize {
    Layout::of(&Net::new(&device()), 2).expect("a layout").units[1].num_elements()
}

#[test]
fn reduce_bucket_size_is_the_length_of_a_message() {
    let lens = lens();
    for stage in [Stage::Nothing, Stage::Optimizer, Stage::Gradients, Stage::Parameters] {
        let plain = run(&zero(stage), 1);
        let bucket = |elements: usize| {
            let sizes = Sizes { reduce_bucket: Some(elements), ..Sizes::default() };
            run(&with(zero(stage), sizes), 1)
        };
        // An all-reduce on two ranks takes two messages of each, a reduce-scatter one.
        let per_reduction = if stage == Stage::Nothing { 2 } else { 1 };
        let all: usize = lens.iter().sum();
        for (elements, reductions) in [
            (all, 1),
            (lens[1] * 2, 1 + usize::from(lens[0] + lens[1] > lens[1] * 2) + 1),
            (lens[1], 4),
            (lens[1] / 2, lens.iter().map(|len| len.div_ceil(lens[1] / 2)).sum()),
        ] {
            let got = bucket(elements);
            let fewer = plain.messages as i64 - got.messages as i64;
            let expected = per_reduction * (4 - reductions as i64);
            assert_eq!(fewer, expected, "{stage:?}, {elements}");
            assert_eq!(got.bits, plain.bits, "{stage:?}, {elements}");
        }
    }
}

#[test]
fn allgather_bucket_size_is_the_length_of_a_message() {
    let lens = lens();
    for stage in [Stage::Optimizer, Stage::Gradients] {
        let plain = run(&zero(stage), 1);
        let all: usize = lens.iter().sum();
        let quarter = lens[1] / 4;
        for (elements, gathers) in
            [(all, 1), (quarter, lens.iter().map(|len| len.div_ceil(quarter)).sum::<usize>())]
        {
            let sizes = Sizes { gather_bucket: Some(elements), ..Sizes::default() };
            let got = run(&with(zero(stage), sizes), 1);
            let fewer = plain.messages as i64 - got.messages as i64;
            assert_eq!(fewer, 4 - gathers as i64, "{stage:?}, {elements}");
            assert_eq!(got.bits, plain.bits, "{stage:?}, {elements}");
        }
    }
}

#[test]
fn without_overlap_every_reduction_is_waited_for() {
    for (name, setup) in ways() {
        let overlapped = run(&setup, 1);
        let setup = Setup { overlap: Overlap::No, ..setup };
        let got = run(&setup, 1);
        let reductions = |run: &Run| {
            let of_reductions = |event: &&Event| {
                matches!(event, Event::Reduce(_) | Event::ReduceWait(_) | Event::Backward(_))
            };
            run.events.iter().filter(of_reductions).copied().collect::<Vec<_>>()
        };
        for pair in reductions(&got).windows(2) {
            if let [Event::Reduce(unit), next] = pair {
                assert_eq!(*next, Event::ReduceWait(*unit), "{name}");
            }
        }
        assert_ne!(reductions(&got), reductions(&overlapped), "{name}");
        assert_eq!(got.bits, overlapped.bits, "{name}");
    }
}

#[test]
fn the_prefetch_bucket_limits_what_is_gathered_ahead() {
    let unit = elements_of_unit();
    let plain = run(&zero(Stage::Parameters), 1);
    // Gathers that were launched before the unit before them ran.
    let ahead = |run: &Run| {
        let first = run.events.iter().position(|event| matches!(event, Event::Forward(_)));
        let before = &run.events[..first.expect("a forward pass")];
        before.iter().filter(|event| matches!(event, Event::Gather(unit) if *unit > 1)).count()
    };
    for (elements, expected) in [(0, 0), (unit - 1, 0), (unit, 1), (2 * unit, 2)] {
        let sizes = Sizes { prefetch: Some(elements), ..Sizes::default() };
        let got = run(&with(zero(Stage::Parameters), sizes), 1);
        assert_eq!(ahead(&got), expected, "{elements}");
        assert_eq!(got.bits, plain.bits, "{elements}");
    }
}

#[test]
fn the_limit_of_live_parameters_stops_gathering_ahead() {
    let (unit, lens) = (elements_of_unit(), lens());
    let peak = |max_live: usize| {
        let sizes =
            Sizes { prefetch: Some(10 * unit), max_live: Some(max_live), ..Sizes::default() };
        run(&with(zero(Stage::Parameters), sizes), 1).peak_whole
    };
    // The root is whole beside them; it is not a unit's.
    let root = Layout::of(&Net::new(&device()), 2).expect("a layout").units[0].num_elements();
    assert_eq!(peak(usize::MAX), lens[0] + 3 * lens[1]);
    assert_eq!(peak(root + 2 * unit), lens[0] + 2 * lens[1]);
    assert_eq!(peak(unit), lens[0] + lens[1]);
}

#[test]
fn units_that_are_used_again_soon_stay_whole() {
    let unit = elements_of_unit();
    let gathers = |distance: usize| {
        let gathering = Gathering {
            forward_prefetch: false,
            backward_prefetch: BackwardPrefetch::None,
            ..Gathering::default()
        };
        let sizes = Sizes { max_reuse_distance: distance, ..Sizes::default() };
        let setup = Setup { gathering, ..with(zero(Stage::Parameters), sizes) };
        let events = run(&setup, 1).events;
        events.iter().filter(|event| matches!(event, Event::Gather(_))).count()
    };
    // The root, three units, and two of them once more: the last one's backward pass comes next.
    assert_eq!(gathers(0), 6);
    assert_eq!(gathers(2 * unit), 6);
    assert_eq!(gathers(2 * unit + 1), 5);
    assert_eq!(gathers(4 * unit + 1), 4);
}

#[test]
fn small_parameters_are_gathered_once_per_step() {
    let plain = run(&zero(Stage::Parameters), 3);
    // Biases of 8 and 4 elements, and 2 of the last layer.
    let sizes = Sizes { persistence: 8, ..Sizes::default() };
    let got = run(&with(zero(Stage::Parameters), sizes), 3);
    let gathers = |run: &Run, unit: usize| {
        run.events.iter().filter(|event| **event == Event::Gather(unit)).count()
    };
    assert_eq!(gathers(&got, 4), 1, "the persistent unit, in three micro-batches");
    assert_eq!(gathers(&got, 0), 3, "the root");
    assert_eq!((plain.whole_between_steps, got.whole_between_steps), (0, 0));
    for ((path, plain), (_, got)) in plain.bits.iter().zip(&got.bits) {
        let close = |a: &u32, b: &u32| (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 1e-5;
        assert!(plain.iter().zip(got).all(|(a, b)| close(a, b)), "{path}");
    }
    let device = device();
    let setup = with(zero(Stage::Parameters), sizes);
    all_of(2, |group| {
        let (_, strategy) = DataParallel::new(Net::new(&device), group, &setup)?;
        let units = &strategy.layout().units;
        let small: Vec<&str> = units[4].params.iter().map(|slot| slot.info.path.as_str()).collect();
        assert_eq!(small.len(), 9, "{small:?}");
        assert!(
            small.iter().all(|path| path.ends_with("bias") || *path == "last.weight"),
            "{small:?}"
        );
        assert!(units[1].params.iter().all(|slot| slot.info.num_elements() > 8));
        Ok(())
    });
}

#[test]
fn the_optimizer_steps_sub_groups() {
    for stage in [Stage::Nothing, Stage::Gradients, Stage::Parameters] {
        let plain = run(&zero(stage), 1);
        let sizes = Sizes { sub_group: Some(100), ..Sizes::default() };
        let got = run(&with(zero(stage), sizes), 1);
        let steps = |run: &Run| -> Vec<usize> {
            let steps = run.events.iter().filter_map(|event| match event {
                Event::Step(elements) => Some(*elements),
                _ => None,
            });
            steps.collect()
        };
        let expected: usize = steps(&plain).iter().map(|elements| elements.div_ceil(100)).sum();
        assert_eq!(steps(&got).len(), expected, "{stage:?}");
        assert!(steps(&got).iter().all(|elements| *elements <= 100));
        assert_eq!(steps(&got).iter().sum::<usize>(), steps(&plain).iter().sum::<usize>());
        assert_eq!(got.bits, plain.bits, "{stage:?}");
    }
}

#[test]
fn round_robin_deals_parameters_out_to_the_ranks() {
    let setup = Setup { order: ParamOrder::RoundRobin, ..zero(Stage::Gradients) };
    let (plain, got) = (run(&zero(Stage::Gradients), 2), run(&setup, 2));
    for ((path, plain), (_, got)) in plain.bits.iter().zip(&got.bits) {
        let close = |a: &u32, b: &u32| (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 1e-5;
        assert!(plain.iter().zip(got).all(|(a, b)| close(a, b)), "{path}");
    }
    let device = device();
    all_of(2, |group| {
        let (_, strategy) = DataParallel::new(Net::new(&device), group, &setup)?;
        let of_unit = &strategy.layout().units[1].params;
        let order: Vec<&str> = of_unit.iter().map(|slot| slot.info.path.as_str()).collect();
        let dealt = [
            "blocks.0.up.weight",
            "blocks.0.down.weight",
            "blocks.0.up.bias",
            "blocks.0.down.bias",
        ];
        assert_eq!(order, dealt);
        Ok(())
    });
}

//! What runs while a transfer is pending.

use std::collections::HashMap;

use super::*;
use crate::Setup;
use crate::events::Event;
use crate::layout::ROOT;
use crate::testing::{all_of, ways};
use crate::{BackwardPrefetch, Gathering};

/// The waits during which nothing was computed, if a transfer takes as long as a unit's forward pass, a
/// backward pass twice as long, and what happens outside of units before, between and after as long as
/// one unit.
fn exposed(events: &[Event]) -> Vec<Event> {
    let (mut now, mut line_is_free) = (0u32, 0u32);
    let mut done: HashMap<(bool, usize), u32> = HashMap::new();
    let mut exposed = vec![];
    let mut comes_back = false;
    for event in events {
        let mut transfer = |key: (bool, usize), now: u32| {
            line_is_free = line_is_free.max(now) + 1;
            done.insert(key, line_is_free);
        };
        match *event {
            Event::Gather(unit) => transfer((true, unit), now),
            Event::Reduce(unit) => {
                transfer((false, unit), now);
                // After the first unit, the part before it runs backward.
                now += u32::from(unit == 1);
            }
            Event::Step(_) => {}
            Event::Forward(_) => now += 1,
            Event::Backward(_) => now += 2,
            Event::GatherWait(unit) | Event::ReduceWait(unit) => {
                let is_gather = matches!(event, Event::GatherWait(_));
                let arrives = done[&(is_gather, unit)];
                if arrives > now {
                    exposed.push(*event);
                    now = arrives;
                }
                // The part before the first unit runs forward.
                now += u32::from(is_gather && unit == ROOT);
            }
        }
        if matches!(event, Event::Backward(_)) && !comes_back {
            comes_back = true;
            now += 1;
        }
    }
    exposed
}

/// The events of the second micro-batch, in which the order of the units is known.
fn events(setup: &Setup) -> Vec<Event> {
    let device = device();
    let ends = all_of(2, |group| {
        let (model, mut strategy) = DataParallel::new(Net::new(&device), group, setup)?;
        let loss = |net: &Net| net.loss(2, &device);
        let model = step((model, &mut strategy), &[&loss])?;
        strategy.run.events.record();
        step((model, &mut strategy), &[&loss])?;
        // What is left to the optimizer is each rank's own share; the order of all else is common.
        let mut events = strategy.run.events.recorded();
        events.retain(|event| !matches!(event, Event::Step(_)));
        Ok(events)
    });
    assert_eq!(ends[0], ends[1]);
    ends.into_iter().next().expect("rank 0")
}

#[test]
fn only_the_first_gather_and_the_last_reduction_are_exposed() {
    for (name, setup) in ways() {
        let exposed = exposed(&events(&setup));
        match name {
            "ddp" | "zero1" | "zero2" => assert_eq!(exposed, [Event::ReduceWait(ROOT)], "{name}"),
            _ => assert_eq!(exposed, [Event::GatherWait(ROOT), Event::ReduceWait(ROOT)], "{name}"),
        }
    }
}

#[test]
fn without_prefetching_every_gather_is_exposed() {
    let (_, setup) = ways()[3].clone();
    let gathering = Gathering {
        forward_prefetch: false,
        backward_prefetch: BackwardPrefetch::None,
        ..Gathering::default()
    };
    let exposed = exposed(&events(&Setup { gathering, ..setup.clone() }));
    let gathers = exposed.iter().filter(|event| matches!(event, Event::GatherWait(_))).count();
    // The root, three units forward, and two backward: the last one was kept.
    assert_eq!(gathers, 6, "{exposed:?}");

    let post = Gathering { backward_prefetch: BackwardPrefetch::Post, ..Gathering::default() };
    let events = events(&Setup { gathering: post, ..setup });
    let at = |event: Event| events.iter().rposition(|e| *e == event).expect("it happened");
    assert!(at(Event::Gather(2)) > at(Event::Reduce(3)), "after the pass, not before it");
}

#[test]
fn without_the_limit_all_units_are_gathered_at_the_start() {
    let (_, setup) = ways()[3].clone();
    let gathering = Gathering { limit_all_gathers: false, ..Gathering::default() };
    let events = events(&Setup { gathering, ..setup });
    let launches = [Event::Gather(ROOT), Event::Gather(1), Event::Gather(2), Event::Gather(3)];
    assert_eq!(events[..4], launches);
}

#[test]
fn passes_of_inference_gather_ahead_and_leave_the_order_of_training() {
    let device = device();
    let (_, setup) = ways()[3].clone();
    all_of(2, |group| {
        let (model, mut strategy) = DataParallel::new(Net::new(&device), group, &setup)?;
        let loss = |net: &Net| net.loss(2, &device);
        let model = step((model, &mut strategy), &[&loss])?;
        strategy.run.events.record();
        let model = strategy.begin_pass(model)?;
        let valid = model.valid();
        let plain = device.clone().without_autodiff();
        for _ in 0..3 {
            let _ = valid.loss(2, &plain);
        }
        drop(valid);
        let model = strategy.end_pass(model)?;
        let events = strategy.run.events.recorded();
        let place = |event| events.iter().position(|e| *e == event).expect("it happened");
        assert!(place(Event::Gather(2)) < place(Event::Forward(1)), "ahead: {events:?}");
        strategy.run.events.record();
        let model = step((model, &mut strategy), &[&loss])?;
        let events = strategy.run.events.recorded();
        assert_eq!(exposed(&events), [Event::GatherWait(ROOT), Event::ReduceWait(ROOT)]);
        drop(model);
        Ok(())
    });
}

//! The `scheduler` section.

use serde_json::{Map, Value};

use super::section::{Case, Section};

const SCHEDULES: [&str; 5] =
    ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"];
/// Schedules of PyTorch that DeepSpeed builds by name.
const LATER: [&str; 15] = [
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
];
const LEAST_ZERO: std::ops::RangeInclusive<f64> = 0.0..=f64::MAX;
const ANY: std::ops::RangeInclusive<f64> = f64::MIN..=f64::MAX;
/// A momentum of 1 would never forget.
const MOMENTUM: std::ops::RangeInclusive<f64> = 0.0..=0.999_999_999;

/// Reads the schedule into `schedule`, an object with DeepSpeed's names. The run's steps and learning
/// rate stand for `total_num_steps` and `warmup_max_lr` where these are left out.
pub(super) fn read(file: &mut Section<'_, '_>) {
    let Some(mut scheduler) = file.section("scheduler") else {
        return;
    };
    if let Some(name) = scheduler.kind(Case::Exact, &SCHEDULES, &LATER) {
        let mut params = scheduler.section_or_empty("params");
        let settings = match name {
            "WarmupLR" => warmup(&mut params),
            "WarmupDecayLR" => warmup_decay(&mut params),
            "WarmupCosineLR" => warmup_cosine(&mut params),
            "OneCycle" => one_cycle(&mut params),
            _ => range_test(&mut params),
        };
        if params.integer("last_batch_iteration", -1..=i64::MAX).is_some_and(|last| last != -1) {
            let problem =
                "a run begins its schedule at the start or at its checkpoint; leave it out";
            params.mistake("last_batch_iteration", problem);
        }
        params.finish();
        let schedule = Map::from_iter([(name.to_owned(), Value::Object(settings))]);
        scheduler.emit_from("schedule", schedule, "scheduler".to_owned());
    } else {
        // Without its type there is no telling which parameters a schedule has.
        scheduler.value("params");
    }
    scheduler.finish();
}

type Settings = Map<String, Value>;

fn warmup(params: &mut Section<'_, '_>) -> Settings {
    let mut settings = warmup_steps(params);
    put_number(params, &mut settings, "warmup_min_lr", 0.0);
    if let Some(max) = rate(params, "warmup_max_lr") {
        settings.insert("warmup_max_lr".to_owned(), max.into());
    } else {
        params.note(format!("`{}` is the run's `lr`", params.at("warmup_max_lr")));
    }
    settings
}

fn warmup_decay(params: &mut Section<'_, '_>) -> Settings {
    let mut settings = warmup_steps(params);
    put_number(params, &mut settings, "warmup_min_lr", 0.0);
    let max = rate(params, "warmup_max_lr");
    if params.is_auto("warmup_max_lr") {
        params.note(format!("`{}` is \"auto\": the run's `lr`", params.at("warmup_max_lr")));
    } else {
        settings.insert("warmup_max_lr".to_owned(), max.unwrap_or(0.001).into());
    }
    total_steps(params, &mut settings);
    settings
}

fn warmup_cosine(params: &mut Section<'_, '_>) -> Settings {
    let mut settings = warmup_steps(params);
    for (key, default) in [("warmup_min_ratio", 0.0), ("cos_min_ratio", 0.0001)] {
        settings.insert(key.to_owned(), params.number_or(key, 0.0..=1.0, default).into());
    }
    total_steps(params, &mut settings);
    settings
}

/// What all warmups have.
fn warmup_steps(params: &mut Section<'_, '_>) -> Settings {
    let steps = params.integer_or("warmup_num_steps", 1..=i64::MAX, 1000);
    if steps == 1 {
        params.note(format!("`{}` 1 counts as 2, as in DeepSpeed", params.at("warmup_num_steps")));
    }
    let kind = params.choice("warmup_type", &["log", "linear"]).unwrap_or("log");
    if params.is_auto("warmup_type") {
        params.note(format!("`{}` is \"auto\", which became log", params.at("warmup_type")));
    }
    Settings::from_iter([
        ("warmup_num_steps".to_owned(), steps.max(2).into()),
        ("warmup_type".to_owned(), kind.into()),
    ])
}

fn total_steps(params: &mut Section<'_, '_>, settings: &mut Settings) {
    const KEY: &str = "total_num_steps";
    let steps = params.integer(KEY, 1..=i64::MAX);
    if let Some(steps) = steps {
        settings.insert(KEY.to_owned(), steps.into());
        let warmup = settings.get("warmup_num_steps").and_then(Value::as_i64);
        if let Some(warmup) = warmup.filter(|warmup| *warmup > steps) {
            let path = params.at(KEY);
            params.note(format!("`{path}` {steps} is less than warmup_num_steps {warmup}"));
        }
    } else if params.is_auto(KEY) {
        params.note(format!("`{}` is \"auto\": the run's steps", params.at(KEY)));
    } else if !params.has(KEY) {
        params.mistake(KEY, "is missing; give the steps, or \"auto\" for the run's");
    }
}

fn one_cycle(params: &mut Section<'_, '_>) -> Settings {
    let mut settings = Settings::new();
    for key in ["cycle_min_lr", "cycle_max_lr"] {
        match rate(params, key) {
            Some(lr) => drop(settings.insert(key.to_owned(), lr.into())),
            None if params.has(key) && !params.is_auto(key) => {}
            None => params.mistake(key, "is missing; OneCycle has no default for it"),
        }
    }
    let first = params.integer_or("cycle_first_step_size", 1..=i64::MAX, 2000);
    let second = params.integer_or("cycle_second_step_size", 0..=i64::MAX, first);
    // DeepSpeed takes any count that is not positive for none.
    let stairs = params.integer_or("cycle_first_stair_count", i64::MIN..=i64::MAX, 0).max(0);
    let second_stairs = params.integer_or("cycle_second_stair_count", i64::MIN..=i64::MAX, stairs);
    let decay = params.integer_or("decay_step_size", 0..=i64::MAX, 0);
    for (key, value) in [
        ("cycle_first_step_size", first),
        ("cycle_second_step_size", second),
        ("cycle_first_stair_count", stairs),
        ("cycle_second_stair_count", second_stairs.max(0)),
        ("decay_step_size", decay),
    ] {
        settings.insert(key.to_owned(), value.into());
    }
    let mut cycles_momentum = params.bool_or("cycle_momentum", true);
    if cycles_momentum && params.emitted("optimizer").is_some_and(|optimizer| optimizer == "sgd") {
        let path = params.at("cycle_momentum");
        params.note(format!("`{path}` has no effect on SGD, which has no betas, as in DeepSpeed"));
        cycles_momentum = false;
    }
    settings.insert("cycle_momentum".to_owned(), cycles_momentum.into());
    for (key, range, default) in [
        ("decay_lr_rate", LEAST_ZERO, 0.0),
        ("cycle_min_mom", MOMENTUM, 0.8),
        ("cycle_max_mom", MOMENTUM, 0.9),
        ("decay_mom_rate", ANY, 0.0),
    ] {
        settings.insert(key.to_owned(), params.number_or(key, range, default).into());
    }
    settings
}

fn range_test(params: &mut Section<'_, '_>) -> Settings {
    let mut settings = Settings::new();
    put_number(params, &mut settings, "lr_range_test_min_lr", 0.001);
    let steps = params.integer_or("lr_range_test_step_size", 1..=i64::MAX, 2000);
    let increase = params.number_or("lr_range_test_step_rate", LEAST_ZERO, 1.0);
    let staircase = params.bool_or("lr_range_test_staircase", false);
    settings.insert("lr_range_test_step_size".to_owned(), steps.into());
    settings.insert("lr_range_test_step_rate".to_owned(), increase.into());
    settings.insert("lr_range_test_staircase".to_owned(), staircase.into());
    settings
}

fn put_number(
    params: &mut Section<'_, '_>,
    settings: &mut Settings,
    key: &'static str,
    default: f64,
) {
    let given = rate(params, key);
    if params.is_auto(key) {
        params.note(format!("`{}` is \"auto\", which became {default}", params.at(key)));
    }
    settings.insert(key.to_owned(), given.unwrap_or(default).into());
}

/// A learning rate. DeepSpeed also takes a list with one for each group of parameters; there is one
/// group.
fn rate(params: &mut Section<'_, '_>, key: &'static str) -> Option<f64> {
    let list = params.value(key).and_then(Value::as_array);
    let Some(list) = list else {
        return params.number(key, LEAST_ZERO);
    };
    let single = match list.as_slice() {
        [single] => single.as_f64().filter(|rate| LEAST_ZERO.contains(rate)),
        _ => None,
    };
    if single.is_none() {
        let problem = "a list of learning rates is one for each group of parameters, and there is \
                       one group; give one number of at least 0";
        params.mistake(key, problem);
    }
    single
}

//! The `optimizer` section.

use serde_json::Value;

use super::section::{Case, Section};

const NEVER_NEGATIVE: std::ops::RangeInclusive<f64> = 0.0..=f64::MAX;
/// Optimizers that DeepSpeed or PyTorch builds and this version does not.
const LATER: [&str; 20] = [
    "Adagrad",
    "Lamb",
    "OneBitAdam",
    "OneBitLamb",
    "ZeroOneAdam",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Lion",
    "Muon",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
];
/// Choices of PyTorch's implementation. All of them compute the same.
const IMPLEMENTATIONS: [&str; 6] =
    ["fused", "foreach", "capturable", "differentiable", "set_grad_none", "torch_adam"];

#[derive(Clone, Copy)]
enum Kind {
    Adam,
    AdamW,
    Sgd,
}

/// Reads the optimizer. Without the section, the run's own optimizer applies.
pub(super) fn read(file: &mut Section<'_, '_>) {
    let Some(mut optimizer) = file.section("optimizer") else {
        return;
    };
    if let Some(kind) = kind(&mut optimizer) {
        let mut params = optimizer.section_or_empty("params");
        match kind {
            Kind::Adam | Kind::AdamW => adam(&mut params, kind),
            Kind::Sgd => sgd(&mut params),
        }
        params.finish();
    } else {
        // Without its type there is no telling which parameters an optimizer has.
        optimizer.value("params");
    }
    optimizer.finish();
}

fn kind(optimizer: &mut Section<'_, '_>) -> Option<Kind> {
    let (kind, native) = match optimizer.kind(Case::Any, &["Adam", "AdamW", "SGD"], &LATER)? {
        "Adam" => (Kind::Adam, "adamw"),
        "AdamW" => (Kind::AdamW, "adamw"),
        _ => (Kind::Sgd, "sgd"),
    };
    optimizer.emit("optimizer", native, "type");
    optimizer.emit("decay_all", true, "type");
    optimizer.note(
        "weight decay falls on every parameter, as DeepSpeed's does on all that it is handed \
         (`decay_all`)",
    );
    Some(kind)
}

fn adam(params: &mut Section<'_, '_>, kind: Kind) {
    // The weight decay of PyTorch's AdamW, which this key chooses, is not that of DeepSpeed's.
    let is_torch = params.bool("torch_adam").unwrap_or(false);
    match (kind, params.bool("adam_w_mode")) {
        (Kind::Adam, Some(false)) => params.mistake(
            "adam_w_mode",
            "false is Adam with L2, which is not in this version; use AdamW, or leave it out",
        ),
        (Kind::AdamW, Some(false)) => {
            let path = params.at("adam_w_mode");
            params.note(format!("`{path}` false has no effect on AdamW, as in DeepSpeed"));
        }
        _ => {}
    }
    common(params, if is_torch { 0.01 } else { 0.0 });
    emit_or_run(params, "eps", "eps", 1e-8);
    betas(params);
    fixed(params, "bias_correction", true, "the moments' bias is always corrected");
    fixed(params, "amsgrad", false, "AMSGrad is not in this version");
    fixed(params, "fp32_optimizer_states", true, "optimizer state is always f32");
}

fn sgd(params: &mut Section<'_, '_>) {
    common(params, 0.0);
    let momentum = emit_or_run(params, "momentum", "momentum", 0.0);
    if params.number_or("dampening", 0.0..=f64::MAX, 0.0) != 0.0 {
        params.mistake("dampening", "dampening is not in this version; leave it out");
    }
    let nesterov = params.bool_or("nesterov", false);
    if nesterov && momentum == Some(0.0) {
        params.mistake("nesterov", "true needs momentum above 0; set `momentum`");
    }
    params.emit("nesterov", nesterov, "nesterov");
}

/// What every optimizer has.
fn common(params: &mut Section<'_, '_>, weight_decay: f64) {
    emit_or_run(params, "lr", "lr", 1e-3);
    emit_or_run(params, "weight_decay", "weight_decay", weight_decay);
    fixed(params, "maximize", false, "the loss is minimized; negate it in the model");
    if params.value("max_grad_norm").is_some() {
        params.mistake(
            "max_grad_norm",
            "DeepSpeed refuses it as an optimizer's parameter; set `gradient_clipping`",
        );
    }
    for key in IMPLEMENTATIONS {
        if params.bool(key).is_some() {
            let path = params.at(key);
            params.note(format!("`{path}` has no effect: there is one implementation"));
        }
    }
}

/// Emits a number. The default is that of DeepSpeed's class; `"auto"` leaves it to the run.
fn emit_or_run(
    params: &mut Section<'_, '_>,
    native: &str,
    key: &'static str,
    default: f64,
) -> Option<f64> {
    let number = params.number(key, NEVER_NEGATIVE);
    if params.is_auto(key) {
        auto(params, key, native);
        return None;
    }
    emit(params, native, key, number, default);
    Some(number.unwrap_or(default))
}

fn emit(params: &mut Section<'_, '_>, native: &str, key: &str, given: Option<f64>, default: f64) {
    let source = match given {
        Some(_) => params.at(key),
        None => format!("{} (default of DeepSpeed)", params.at(key)),
    };
    params.emit_from(native, given.unwrap_or(default), source);
}

fn auto(params: &mut Section<'_, '_>, key: &str, native: &str) {
    let path = params.at(key);
    params.note(format!("`{path}` is \"auto\": {native} of the run applies"));
}

fn betas(params: &mut Section<'_, '_>) {
    let given = params.value("betas");
    if params.is_auto("betas") {
        return auto(params, "betas", "`beta1` and `beta2`");
    }
    let pair = given.map(two_below_one);
    if let (Some(value), Some(None)) = (given, pair) {
        params.mistake("betas", format!("{value} is not two numbers from 0 to below 1"));
    }
    let pair = pair.flatten();
    emit(params, "beta1", "betas", pair.map(|[beta1, _]| beta1), 0.9);
    emit(params, "beta2", "betas", pair.map(|[_, beta2]| beta2), 0.999);
}

fn two_below_one(value: &Value) -> Option<[f64; 2]> {
    let [beta1, beta2] = value.as_array()?.as_slice() else {
        return None;
    };
    let below_one = |beta: &Value| beta.as_f64().filter(|beta| (0.0..1.0).contains(beta));
    Some([below_one(beta1)?, below_one(beta2)?])
}

/// Accepts the one value of `key` that is honoured.
fn fixed(params: &mut Section<'_, '_>, key: &'static str, only: bool, reason: &str) {
    if params.bool(key).is_some_and(|found| found != only) {
        params.mistake(key, format!("{} is not honoured: {reason}; leave it out", !only));
    }
}

//! The sections `fp16` and `bf16`.

use serde_json::{Value, json};

use super::section::Section;

const ANY: std::ops::RangeInclusive<i64> = i64::MIN..=i64::MAX;

/// What a section says about its precision.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Enabled {
    Yes,
    No,
    Auto,
}

/// Reads `precision`, and `loss_scale` for fp16.
pub(super) fn read(file: &mut Section<'_, '_>) {
    let fp16 = fp16(file);
    let key = bf16_key(file);
    let bf16 = bf16(file, key);
    match (fp16, bf16) {
        (Enabled::Yes, Enabled::Yes) => file.mistake_at(
            "fp16.enabled",
            format!("true contradicts `{key}.enabled`, which is true, too; set one to false"),
        ),
        (Enabled::Yes, _) => file.emit_from("precision", "16-mixed", "fp16.enabled".to_owned()),
        (_, Enabled::Yes) => file.emit_from("precision", "bf16-mixed", format!("{key}.enabled")),
        (Enabled::Auto, _) | (_, Enabled::Auto) => {
            file.note(
                "neither `fp16.enabled` nor `bf16.enabled` is true, and one of them is \"auto\": \
                 `precision` of the run applies",
            );
        }
        (Enabled::No, Enabled::No) => {
            let source = "fp16.enabled, bf16.enabled (default of DeepSpeed)";
            file.emit_from("precision", "32-true", source.to_owned());
        }
    }
}

/// Reads `enabled` of a section.
fn enabled(section: &mut Section<'_, '_>) -> Enabled {
    match section.bool("enabled") {
        Some(true) => Enabled::Yes,
        _ if section.is_auto("enabled") => Enabled::Auto,
        _ => Enabled::No,
    }
}

/// DeepSpeed looks at the old name only where the present one is not given.
fn bf16_key(file: &mut Section<'_, '_>) -> &'static str {
    let old = file.value("bfloat16");
    if old.is_none() {
        return "bf16";
    }
    if file.value("bf16").is_some() {
        file.mistake("bfloat16", "is the old name of `bf16`, which is given, too; keep `bf16`");
        return "bf16";
    }
    file.note("`bfloat16` is read as `bf16`, its present name");
    "bfloat16"
}

fn bf16(file: &mut Section<'_, '_>, key: &'static str) -> Enabled {
    let Some(mut bf16) = file.section(key) else {
        return Enabled::No;
    };
    let enabled = enabled(&mut bf16);
    bf16.finish();
    enabled
}

fn fp16(file: &mut Section<'_, '_>) -> Enabled {
    let Some(mut fp16) = file.section("fp16") else {
        return Enabled::No;
    };
    let enabled = enabled(&mut fp16);
    let scale = loss_scale(&mut fp16, enabled);
    let path = fp16.path().to_owned();
    fp16.finish();
    if enabled == Enabled::Yes {
        file.emit_from("loss_scale", scale, path);
    }
    enabled
}

/// The loss scaler's settings. As in DeepSpeed, limits that only a dynamic scale knows are not
/// imposed on a static one.
fn loss_scale(fp16: &mut Section<'_, '_>, enabled: Enabled) -> Value {
    let scale = fp16.number_or("loss_scale", 0.0..=f64::from(f32::MAX), 0.0);
    // 2 to the power of 127 is the greatest that an f32 holds.
    let power = fp16.integer_or("initial_scale_power", 0..=127, 16);
    let hysteresis = fp16.integer_or("hysteresis", 1..=i64::MAX, 2);
    let consecutive = fp16.bool_or("consecutive_hysteresis", false);
    let limit = if enabled == Enabled::Yes && scale == 0.0 { 1..=i64::MAX } else { ANY };
    let window = fp16.integer_or("loss_scale_window", limit.clone(), 1000);
    let least = fp16.integer_or("min_loss_scale", limit, 1);
    if scale != 0.0 {
        return json!(scale);
    }
    json!({ "deepspeed": {
        "initial_scale_power": power,
        "loss_scale_window": window,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
        "min_loss_scale": least,
    }})
}

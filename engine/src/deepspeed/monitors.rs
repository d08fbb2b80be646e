//! Where metrics go: `tensorboard`, `csv_monitor`, `wandb`, `comet`.

use serde_json::json;

use super::section::Section;

/// Reads all monitors.
pub(super) fn read(file: &mut Section<'_, '_>) {
    local(file, "tensorboard");
    local(file, "csv_monitor");
    wandb(file);
    comet(file);
}

/// A monitor that writes files.
fn local(file: &mut Section<'_, '_>, key: &'static str) {
    let Some(mut monitor) = file.section(key) else {
        return;
    };
    let is_enabled = monitor.bool_or("enabled", false);
    let output_path = monitor.text("output_path").unwrap_or("");
    let job_name = monitor.text("job_name").unwrap_or("DeepSpeedJobName");
    monitor.finish();
    if is_enabled {
        file.emit(key, json!({ "output_path": output_path, "job_name": job_name }), key);
    }
}

fn wandb(file: &mut Section<'_, '_>) {
    let Some(mut monitor) = file.section("wandb") else {
        return;
    };
    for key in ["group", "team", "project"] {
        monitor.text(key);
    }
    refuse_service(&mut monitor);
    monitor.finish();
}

fn comet(file: &mut Section<'_, '_>) {
    let Some(mut monitor) = file.section("comet") else {
        return;
    };
    for key in ["project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"] {
        monitor.text(key);
    }
    monitor.integer("samples_log_interval", 1..=i64::MAX);
    monitor.bool("online");
    refuse_service(&mut monitor);
    monitor.finish();
}

fn refuse_service(monitor: &mut Section<'_, '_>) {
    if monitor.bool_or("enabled", false) {
        monitor.mistake(
            "enabled",
            "true needs a service's client, which is not in this version; set it to false: metrics \
             are in metrics.jsonl, and csv_monitor and tensorboard write files",
        );
    }
}

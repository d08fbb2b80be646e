//! `offload_optimizer` and `offload_param`, which are checked but not in this version.

use super::section::Section;

const DEVICES: [&str; 3] = ["none", "cpu", "nvme"];

/// Reads both sections.
pub(super) fn read(zero: &mut Section<'_, '_>, stage: i64) {
    if let Some(mut offload) = zero.section("offload_optimizer") {
        common(&mut offload);
        for key in ["pipeline_read", "pipeline_write", "fast_init", "super_offload"] {
            offload.bool(key);
        }
        offload.number("cpuadam_cores_perc", 0.0..=1.0);
        let ratio = offload.number("ratio", 0.0..=1.0).unwrap_or(1.0);
        if ratio < 1.0 && stage != 3 {
            let problem = format!("{ratio} needs stage 3, and the stage is {stage}; leave it out");
            offload.mistake("ratio", problem);
        }
        offload.finish();
    }
    let Some(mut offload) = zero.section("offload_param") else {
        return;
    };
    let device = common(&mut offload);
    for key in ["buffer_size", "max_in_cpu"] {
        offload.integer(key, 0..=i64::MAX);
    }
    offload.finish();
    if device != "none" && stage != 3 {
        let problem = format!("needs stage 3, and the stage is {stage}; leave it out");
        zero.mistake("offload_param", problem);
    }
}

/// Reads what both sections have, and gives the device.
fn common(offload: &mut Section<'_, '_>) -> &'static str {
    let device = offload.choice("device", &DEVICES).unwrap_or("none");
    let path = offload.text("nvme_path");
    offload.integer("buffer_count", 0..=i64::MAX);
    offload.bool("pin_memory");
    if device != "none" {
        let problem = format!(
            "offload to {device} is not in this version; leave the section out or use device none"
        );
        offload.mistake("device", problem);
    }
    if device == "nvme" && path.is_none() {
        offload.mistake("nvme_path", "device nvme needs a folder on the drive; set nvme_path");
    }
    device
}

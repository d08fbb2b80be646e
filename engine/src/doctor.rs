//! What this machine can compute on and what it lacks: the examination behind `pyroclast doctor`.

mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod gpu;
mod missing;
mod text;

use burn::tensor::{DType, Device};
use serde::Serialize;

/// The findings about this machine and this binary.
#[derive(Debug, Clone, Serialize)]
pub struct Doctor {
    /// The host's processor and memory.
    pub cpu: Cpu,
    /// Every device that ranks can compute on, the host first.
    pub devices: Vec<DeviceInfo>,
    /// What is not there, and how to get it.
    pub missing: Vec<Missing>,
}

/// The host's processor and memory.
#[derive(Debug, Clone, Serialize)]
pub struct Cpu {
    /// The processor's name, or the architecture where the system does not tell.
    pub model: String,
    /// Physical cores of the machine, or `threads` where the system does not tell.
    pub cores: usize,
    /// Threads that this process may run at once.
    pub threads: usize,
    /// The instruction sets that matter to kernels.
    pub features: Vec<&'static str>,
    /// Memory of the machine; `None` where the system does not tell.
    pub total_memory_bytes: Option<u64>,
}

/// One device, as one accelerator sees it: a card can appear under several accelerators.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DeviceInfo {
    /// `cpu`, `wgpu`, `vulkan` or `cuda`.
    pub accelerator: &'static str,
    /// The position among the accelerator's devices.
    pub index: usize,
    /// The name that the driver gives.
    pub name: String,
    /// What kind of device it is.
    pub kind: Kind,
    /// The API that reaches it, such as `vulkan` or `gl`; empty on the host.
    pub api: String,
    /// The driver and its version; empty if there is none or it does not tell.
    pub driver: String,
    /// What compiles its kernels, such as `wgpu<wgsl>`.
    pub compiler: String,
    /// Element types that tensors can be computed in.
    pub dtypes: Vec<&'static str>,
    /// The fewest and the most units in a plane (subgroup, warp).
    pub plane_size: Option<(u32, u32)>,
    /// Whether the units of a plane can exchange values.
    pub plane_ops: bool,
    /// Shapes and types of matrix instructions, such as `16x16x16 f16 f16 -> f32`.
    pub cooperative_matrix: Vec<String>,
    /// All of its memory, where known.
    pub memory_bytes: Option<u64>,
    /// The largest single allocation.
    pub max_allocation_bytes: Option<u64>,
    /// Memory that the units of one cube (workgroup, block) share.
    pub shared_memory_bytes: Option<usize>,
    /// Why the device cannot be used.
    pub problem: Option<String>,
}

/// What kind of device it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A GPU API computed by the processor, such as llvmpipe.
    Software,
    /// A GPU that shares the processor's memory.
    Integrated,
    /// A GPU with memory of its own.
    Discrete,
    /// A GPU that a virtual machine is given.
    Virtual,
    /// The processor itself.
    Host,
    /// The driver does not tell.
    #[default]
    Unknown,
}

/// Something that would add a capability.
#[derive(Debug, Clone, Serialize)]
pub struct Missing {
    /// What is missing.
    pub what: String,
    /// What it would give, and what was seen.
    pub why: String,
    /// The command that installs it or builds it in; empty where there is no single one.
    pub command: String,
}

impl Doctor {
    /// Examines the machine. Opens every device, so it belongs before training rather than in it.
    ///
    /// Never panics: a device that cannot be opened is listed with its [`DeviceInfo::problem`].
    #[must_use]
    pub fn examine() -> Self {
        let cpu = Cpu::examine();
        let devices = vec![DeviceInfo::host(&cpu)];
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        let devices = [devices, gpu::examine()].concat();
        let missing = missing::find(&devices, &missing::Seen::look());
        Self { cpu, devices, missing }
    }

    /// The findings in aligned lines for a terminal.
    #[must_use]
    pub fn to_text(&self) -> String {
        text::render(self)
    }
}

impl DeviceInfo {
    /// What is known of a device before it is opened.
    fn new(accelerator: &'static str, index: usize) -> Self {
        Self { accelerator, index, name: "unknown".to_owned(), ..Self::default() }
    }

    fn host(cpu: &Cpu) -> Self {
        Self {
            name: cpu.model.clone(),
            kind: Kind::Host,
            compiler: "flex".to_owned(),
            dtypes: dtypes(&Device::flex()),
            memory_bytes: cpu.total_memory_bytes,
            ..Self::new("cpu", 0)
        }
    }
}

/// Opens the device.
fn dtypes(device: &Device) -> Vec<&'static str> {
    let all = [
        ("f64", DType::F64),
        ("f32", DType::F32),
        ("f16", DType::F16),
        ("bf16", DType::BF16),
        ("i64", DType::I64),
        ("i32", DType::I32),
    ];
    all.into_iter()
        .filter(|(_, dtype)| device.supports_dtype(*dtype))
        .map(|(name, _)| name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_comes_first_and_is_in_the_text() {
        let doctor = Doctor::examine();
        let host = &doctor.devices[0];
        assert_eq!((host.accelerator, host.kind, &host.problem), ("cpu", Kind::Host, &None));
        assert!(["f64", "f32", "f16", "bf16"].iter().all(|dtype| host.dtypes.contains(dtype)));
        let text = doctor.to_text();
        assert!(text.contains("cpu 0") && text.contains(&doctor.cpu.model), "{text}");
        assert!(["CPU\n", "\nDevices\n", "\nMissing\n"].iter().all(|head| text.contains(head)));
    }

    #[test]
    fn devices_can_be_examined_again_once_they_are_open() {
        let (first, second) = (Doctor::examine(), Doctor::examine());
        for (first, second) in first.devices.iter().zip(&second.devices) {
            assert_eq!((&first.name, &first.problem), (&second.name, &second.problem));
            assert_eq!(first.dtypes, second.dtypes);
        }
        assert_eq!(first.devices.len(), second.devices.len());
    }
}

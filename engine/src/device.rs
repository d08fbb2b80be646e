//! Accelerators by name, and the device that each rank computes on.

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;

use crate::error::Error;

/// Where ranks compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// Burn's pure-Rust CPU backend.
    Cpu,
    /// Any GPU API, kernels through WGSL.
    Wgpu,
    /// Vulkan, kernels through SPIR-V.
    Vulkan,
    /// CUDA.
    Cuda,
}

/// Why an accelerator cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceleratorError {
    /// No accelerator has this name.
    #[error("unknown accelerator `{0}`; there are cpu, gpu, wgpu, vulkan, cuda, auto")]
    Unknown(String),
    /// The binary was built without it.
    #[error("`{0}` is not compiled in; build with `--features {0}`, or use `cpu`")]
    NotCompiledIn(&'static str),
    /// The machine has no such device.
    #[error(
        "this machine has no {0} device; `pyroclast doctor` says what is missing, or use `cpu`"
    )]
    NoDevice(&'static str),
    /// The binary has no GPU support, or the machine no GPU.
    #[error(
        "no GPU was found among the accelerators compiled in ({0}); \
         `pyroclast doctor` says what is missing, or use `cpu`"
    )]
    NoGpu(String),
}

/// In the order in which `gpu` tries them.
const GPUS: [Accelerator; 3] = [Accelerator::Cuda, Accelerator::Vulkan, Accelerator::Wgpu];

impl Accelerator {
    /// The accelerator's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Cuda => "cuda",
        }
    }

    /// Whether the binary was built with it.
    #[must_use]
    pub fn is_compiled_in(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::Cuda => cfg!(feature = "cuda"),
        }
    }

    /// The first device, which all ranks that are threads of one process share.
    ///
    /// # Errors
    ///
    /// [`AcceleratorError`] if the accelerator is not compiled in or the machine has none.
    pub fn device(self) -> Result<Device, AcceleratorError> {
        self.device_of(0)
    }

    /// The device of a rank that is a process: the machine's devices are dealt to its ranks in turn.
    ///
    /// # Errors
    ///
    /// As [`Self::device`].
    pub fn device_of(self, local_rank: usize) -> Result<Device, AcceleratorError> {
        if !self.is_compiled_in() {
            return Err(AcceleratorError::NotCompiledIn(self.name()));
        }
        self.find(local_rank).ok_or(AcceleratorError::NoDevice(self.name()))
    }

    /// Looks without opening: using a device that does not exist would panic.
    #[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), expect(unused_variables))]
    fn find(self, local_rank: usize) -> Option<Device> {
        match self {
            Self::Cpu => Some(Device::flex()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => dealt(burn::tensor::DeviceType::Wgpu, local_rank),
            #[cfg(feature = "vulkan")]
            Self::Vulkan => dealt(burn::tensor::DeviceType::Vulkan, local_rank),
            #[cfg(feature = "cuda")]
            Self::Cuda => dealt(burn::tensor::DeviceType::Cuda, local_rank),
            #[allow(unreachable_patterns, reason = "with every feature on, no accelerator is left")]
            _ => None,
        }
    }
}

/// A rank's device of a type. Software ones count only where there is nothing else.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn dealt(device_type: burn::tensor::DeviceType, local_rank: usize) -> Option<Device> {
    let all = Device::enumerate(device_type).into_vec();
    let (software, hardware): (Vec<_>, Vec<_>) = all.into_iter().partition(is_software);
    let devices = if hardware.is_empty() { software } else { hardware };
    devices.get(local_rank % devices.len().max(1)).cloned()
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn is_software(device: &Device) -> bool {
    #[cfg(feature = "wgpu")]
    {
        use burn::backend::{CubeDevice, DispatchDevice, WgpuDeviceKind};
        matches!(
            device.as_dispatch(),
            DispatchDevice::Cube(CubeDevice::Wgpu(device)) if device.kind == WgpuDeviceKind::Cpu
        )
    }
    #[cfg(not(feature = "wgpu"))]
    {
        let _ = device;
        false
    }
}

/// Bytes in use on a device; `None` on the CPU, whose memory the process's own figures cover.
pub(crate) fn bytes_in_use(device: &Device) -> Option<u64> {
    device.clone().inner().memory_pool_usage().map(|usage| usage.bytes_in_use)
}

impl FromStr for Accelerator {
    type Err = AcceleratorError;

    fn from_str(name: &str) -> Result<Self, AcceleratorError> {
        let accelerator = match name {
            "cpu" => Self::Cpu,
            "wgpu" => Self::Wgpu,
            "vulkan" => Self::Vulkan,
            "cuda" => Self::Cuda,
            "gpu" => return first_gpu(),
            "auto" => return Ok(first_gpu().unwrap_or(Self::Cpu)),
            _ => return Err(AcceleratorError::Unknown(name.to_owned())),
        };
        accelerator.device().map(|_| accelerator)
    }
}

fn first_gpu() -> Result<Accelerator, AcceleratorError> {
    let present = GPUS.into_iter().find(|gpu| gpu.device().is_ok());
    present.ok_or_else(|| {
        let built: Vec<&str> =
            GPUS.iter().filter(|gpu| gpu.is_compiled_in()).map(|gpu| gpu.name()).collect();
        AcceleratorError::NoGpu(if built.is_empty() { "none".to_owned() } else { built.join(", ") })
    })
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<AcceleratorError> for Error {
    fn from(error: AcceleratorError) -> Self {
        Self::setting("accelerator", error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_resolved_or_refused() {
        assert_eq!("cpu".parse(), Ok(Accelerator::Cpu));
        assert_eq!("tpu".parse::<Accelerator>(), Err(AcceleratorError::Unknown("tpu".to_owned())));
        if !Accelerator::Cuda.is_compiled_in() {
            let refused = Err(AcceleratorError::NotCompiledIn("cuda"));
            assert_eq!("cuda".parse::<Accelerator>(), refused);
        }
        assert!("auto".parse::<Accelerator>().is_ok());
    }

    #[test]
    fn every_local_rank_has_a_device_where_there_is_one() {
        for accelerator in [Accelerator::Cpu, Accelerator::Wgpu] {
            let found = accelerator.device().map(drop);
            for local_rank in [1, 2, 7] {
                assert_eq!(accelerator.device_of(local_rank).map(drop), found, "{accelerator}");
            }
        }
    }
}

//! GPUs through Burn's runtimes. Listing opens nothing; properties need an open device.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use burn::backend::{CubeDevice, DispatchDevice};
use burn::tensor::{Device, DeviceType};

use super::{DeviceInfo, Kind, dtypes};

/// The devices of every accelerator that is compiled in.
pub(super) fn examine() -> Vec<DeviceInfo> {
    let accelerators = [
        #[cfg(feature = "cuda")]
        ("cuda", DeviceType::Cuda),
        #[cfg(feature = "vulkan")]
        ("vulkan", DeviceType::Vulkan),
        #[cfg(feature = "wgpu")]
        ("wgpu", DeviceType::Wgpu),
    ];
    accelerators.into_iter().flat_map(|(name, device_type)| list(name, device_type)).collect()
}

fn list(accelerator: &'static str, device_type: DeviceType) -> Vec<DeviceInfo> {
    let new = |index| DeviceInfo::new(accelerator, index);
    let found = match guard(|| Device::enumerate(device_type).into_vec()) {
        Ok(found) => found,
        Err(problem) => return vec![DeviceInfo { problem: Some(problem), ..new(0) }],
    };
    let examined = found.iter().enumerate().map(|(index, device)| {
        let mut info = new(index);
        info.problem = guard(|| describe(&mut info, device)).and_then(|described| described).err();
        info
    });
    examined.collect()
}

/// Fills in what is known at each step, so that a failing one leaves what came before it.
fn describe(info: &mut DeviceInfo, device: &Device) -> Result<(), String> {
    let DispatchDevice::Cube(cube) = device.as_dispatch() else { return Ok(()) };
    match cube {
        #[cfg(feature = "wgpu")]
        CubeDevice::Wgpu(device) => open(info, device)?,
        CubeDevice::Cuda(device) => {
            info.name = format!("CUDA device {}", device.index);
            // CubeCL does not tell, and on a Tegra the GPU is the processor's.
            let tegra = std::path::Path::new("/etc/nv_tegra_release").exists();
            info.kind = if tegra { Kind::Integrated } else { Kind::Discrete };
            info.api = "cuda".to_owned();
            let version = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
            info.driver = format!("NVIDIA {}", version.trim()).trim_end().to_owned();
        }
        _ => {}
    }

    // A runtime that is not open yet opens here; it panics if it cannot.
    let client = cube.client();
    let properties = client.properties();
    let (hardware, memory) = (&properties.hardware, &properties.memory);
    info.name.clone_from(&properties.identity.name);
    info.compiler = client.name().to_owned();
    info.memory_bytes = memory.max_memory();
    info.max_allocation_bytes = Some(memory.max_page_size);
    info.shared_memory_bytes = Some(hardware.max_shared_memory_size);
    info.plane_size = Some((hardware.plane_size_min, hardware.plane_size_max));
    // The set's own type is not among what Burn re-exports.
    info.plane_ops = properties.features.plane.iter().any(|plane| format!("{plane:?}") == "Ops");
    for config in &properties.features.matmul.cmma {
        let (m, n, k) = (config.m, config.n, config.k);
        let (a, b, c) = (config.a_type, config.b_type, config.cd_type);
        info.cooperative_matrix.push(format!("{m}x{n}x{k} {a} {b} -> {c}"));
    }
    info.cooperative_matrix.sort();
    info.dtypes = dtypes(device);
    Ok(())
}

/// Opens a wgpu device where failing is an error rather than a panic, and asks its adapter.
#[cfg(feature = "wgpu")]
fn open(info: &mut DeviceInfo, device: &burn::backend::WgpuDevice) -> Result<(), String> {
    use burn::backend::WgpuDeviceKind as Of;
    use burn::backend::wgpu::graphics::AutoGraphicsApi;
    use burn::backend::wgpu::{RuntimeOptions, WgpuInitError, try_init_setup};

    info.name = format!("{:?}", device.kind);
    info.kind = match device.kind {
        Of::DiscreteGpu(_) => Kind::Discrete,
        Of::IntegratedGpu(_) => Kind::Integrated,
        Of::VirtualGpu(_) => Kind::Virtual,
        Of::Cpu => Kind::Software,
        _ => Kind::Unknown,
    };
    let options = RuntimeOptions::try_default().map_err(|error| error.to_string())?;
    match try_init_setup::<AutoGraphicsApi>(device, options) {
        Ok(setup) => {
            let adapter = setup.adapter.get_info();
            info.name = adapter.name;
            info.api = adapter.backend.to_string();
            info.driver = format!("{} {}", adapter.driver, adapter.driver_info).trim().to_owned();
            Ok(())
        }
        // This process has opened it before: its properties can be read, its adapter cannot.
        Err(WgpuInitError::Registration { .. }) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs a step that may panic in a runtime or a driver, and returns the first panic's message.
///
/// A runtime opens its device on a thread of its own. If that panics, the caller's own panic tells
/// of a closed channel only, so the cause is taken from the panic hook. The hook that was there
/// still hears of every other thread's panics, and is put back.
fn guard<T>(step: impl FnOnce() -> T) -> Result<T, String> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);

    let cause = Arc::new(OnceLock::new());
    let before = Arc::new(panic::take_hook());
    panic::set_hook({
        let (caller, cause, before) = (thread::current().id(), cause.clone(), before.clone());
        Box::new(move |report| {
            let thread = thread::current();
            // CubeCL names the threads that serve a device `DSU-..` and `DSD-..`.
            if thread.id() == caller || thread.name().is_some_and(|name| name.starts_with("DS")) {
                let message = report.payload_as_str().unwrap_or("its runtime panicked");
                let _ = cause.set(message.to_owned());
            } else {
                before(report);
            }
        })
    });
    let outcome = panic::catch_unwind(AssertUnwindSafe(step));
    drop(panic::take_hook());
    if let Some(before) = Arc::into_inner(before) {
        panic::set_hook(before);
    }
    outcome.map_err(|_| cause.get().cloned().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(guard(|| 1), Ok(1));
        assert_eq!(guard(|| panic!("no such device")), Err::<(), _>("no such device".to_owned()));
    }

    /// The runtime panics on its own thread, and only there says why.
    #[cfg(feature = "wgpu")]
    #[test]
    fn the_cause_is_told_of_a_device_that_does_not_exist() {
        let absent = Device::wgpu(burn::tensor::DeviceKind::DiscreteGpu(4000));
        let outcome = guard(|| dtypes(&absent));
        assert!(outcome.is_err_and(|cause| cause.contains("Unable to acquire")));
        let mut info = DeviceInfo::new("wgpu", 4000);
        // Guarded for the lock: OpenGL cannot be opened on two threads at a time.
        let described = guard(|| describe(&mut info, &absent));
        assert!(described.is_ok_and(|d| d.is_err_and(|why| why.contains("No adapter available"))));
        assert_eq!(info.kind, Kind::Discrete);
    }
}

//! What would add a capability to this machine or this binary, with the command that installs it.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::{DeviceInfo, Kind, Missing};

const MESA: &str = "apt-get install mesa-vulkan-drivers";
const NVIDIA: &str = "apt-get install nvidia-driver    # on Ubuntu: ubuntu-drivers install";
const LINUX: bool = cfg!(target_os = "linux");

/// Hardware that is there whether or not an accelerator reaches it. Looked for on Linux only.
#[derive(Debug, Default)]
pub(super) struct Seen {
    nvidia: bool,
    nvidia_driver: bool,
    amd_or_intel: bool,
    /// There is a GPU that this user may not open.
    denied: bool,
}

impl Seen {
    pub(super) fn look() -> Self {
        let nvidia_driver = Path::new("/dev/nvidiactl").exists();
        let render = fs::File::open("/dev/dri/renderD128");
        let denied = render.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied);
        let mut seen = Self { nvidia: nvidia_driver, nvidia_driver, denied, ..Self::default() };
        for slot in fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten() {
            let read = |file| fs::read_to_string(slot.path().join(file)).unwrap_or_default();
            // Display controllers and processing accelerators.
            if ["0x03", "0x12"].iter().any(|class| read("class").starts_with(class)) {
                match read("vendor").trim() {
                    "0x10de" => seen.nvidia = true,
                    "0x1002" | "0x8086" => seen.amd_or_intel = true,
                    _ => {}
                }
            }
        }
        seen
    }
}

pub(super) fn find(devices: &[DeviceInfo], seen: &Seen) -> Vec<Missing> {
    let mut missing = features(seen);
    let of = |names: &'static [&str]| devices.iter().filter(|d| names.contains(&d.accelerator));
    if cfg!(feature = "wgpu") {
        let mut gpus = of(&["wgpu", "vulkan"]).peekable();
        let none = gpus.peek().is_none();
        if none {
            missing.push(adapter());
        }
        // Of an absent adapter, all has been said but for these.
        let more = !none || seen.nvidia || seen.denied;
        if more && gpus.all(|gpu| gpu.kind == Kind::Software) {
            missing.push(hardware(seen));
        }
    }
    if cfg!(feature = "cuda") && of(&["cuda"]).next().is_none() {
        let why = if seen.nvidia_driver {
            "The driver runs, but CUDA found no device: libcuda.so.1 or the GPU is not visible here."
        } else if seen.nvidia {
            "There is an NVIDIA GPU, but its driver, which has libcuda.so.1, is not loaded."
        } else {
            "CUDA found no device, and no NVIDIA GPU was seen."
        };
        missing.push(entry("An NVIDIA driver", why, if LINUX { NVIDIA } else { "" }));
    }
    missing
}

/// Accelerators that this binary was built without.
fn features(seen: &Seen) -> Vec<Missing> {
    let built = [
        ("wgpu", cfg!(feature = "wgpu")),
        ("vulkan", cfg!(feature = "vulkan")),
        ("cuda", cfg!(feature = "cuda")),
    ];
    let gives = |feature| match feature {
        "wgpu" => "Runs the kernels on any GPU: over Vulkan, Metal, DirectX 12 or OpenGL.",
        "vulkan" => "Compiles the kernels to SPIR-V, with cooperative matrices (tensor cores).",
        _ if seen.nvidia => "This machine has an NVIDIA GPU, and CUDA gets the most out of it.",
        _ => "Runs the kernels on NVIDIA GPUs through CUDA, with bf16 and tensor cores.",
    };
    let rebuild = |absent| {
        let on = built.iter().filter(|(name, built)| *built || *name == absent);
        let on: Vec<&str> = on.map(|(name, _)| *name).collect();
        let command = format!("cargo run --release --features {} -- doctor", on.join(","));
        entry(&format!("The feature `{absent}`"), gives(absent), &command)
    };
    let here = |name| name == "wgpu" || !cfg!(target_vendor = "apple");
    let absent = built.iter().filter(|(name, built)| !built && here(*name));
    absent.map(|(name, _)| rebuild(*name)).collect()
}

/// The least that the GPU kernels run on.
fn adapter() -> Missing {
    let mesa = "None was found. On Debian and Ubuntu, this package has Mesa's Vulkan drivers: for \
                AMD and Intel GPUs, and a software one that is enough to run the GPU kernels.";
    let other = "None was found. The GPU maker's driver has one.";
    let (why, command) = if LINUX { (mesa, MESA) } else { (other, "") };
    entry("A graphics adapter", why, command)
}

/// What would put hardware in the place of a software adapter, or of none.
fn hardware(seen: &Seen) -> Missing {
    let (why, command) = if !LINUX {
        ("Only software was found. The GPU maker's driver gives hardware.", "")
    } else if seen.nvidia_driver {
        (
            "The NVIDIA driver runs, but Vulkan does not reach it: its ICD or the Vulkan loader is \
             not visible here. A container also needs NVIDIA_DRIVER_CAPABILITIES=all.",
            "apt-get install libvulkan1 libegl1",
        )
    } else if seen.nvidia {
        ("There is an NVIDIA GPU, but its driver, which has the Vulkan ICD, is not loaded.", NVIDIA)
    } else if seen.denied {
        ("The GPU is /dev/dri/renderD128, which you may not open.", "usermod -aG render $USER")
    } else if seen.amd_or_intel {
        ("There is an AMD or Intel GPU, but no Vulkan driver (ICD) for it. Mesa has it.", MESA)
    } else {
        (
            "Only software was found, and no GPU was seen on the PCI bus. Where there is one, the \
             Vulkan ICD of its driver gives hardware: NVIDIA's own, or Mesa's for AMD and Intel.",
            "apt-get install mesa-vulkan-drivers    # for NVIDIA: nvidia-driver",
        )
    };
    entry("A hardware GPU", why, command)
}

fn entry(what: &str, why: &str, command: &str) -> Missing {
    Missing { what: what.to_owned(), why: why.to_owned(), command: command.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_what_was_built_and_seen() {
        let commands = |devices: &[DeviceInfo], seen: &Seen| -> String {
            find(devices, seen).iter().map(|m| format!("{}: {}\n", m.what, m.command)).collect()
        };
        let (nothing, nvidia) = (Seen::default(), Seen { nvidia: true, ..Seen::default() });
        let built = cfg!(feature = "wgpu");
        let none = commands(&[], &nothing);
        assert_eq!(none.contains("The feature `wgpu`"), !built);
        assert_eq!(none.contains("A graphics adapter"), built);
        assert!(!none.contains("A hardware GPU"), "{none}");
        assert_eq!(commands(&[], &nvidia).contains("A hardware GPU"), built);

        let software = DeviceInfo { kind: Kind::Software, ..DeviceInfo::new("wgpu", 0) };
        let card = DeviceInfo { kind: Kind::Discrete, ..DeviceInfo::new("wgpu", 1) };
        let both = [software, card];
        assert_eq!(commands(&both[..1], &nothing).contains("A hardware GPU"), built);
        assert!(!commands(&both, &nvidia).contains("A hardware GPU"));
    }
}

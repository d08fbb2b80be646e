//! Units with `Dropout`, in a process in which nobody else draws: Burn's generator belongs to the process.

use std::process::Command;
use std::sync::Arc;

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::{Device, Tensor};
use pyroclast::Unit;
use pyroclast::strategies::{
    Counts, DataParallel, MicroBatch, Optimizer, ProcessGroup, Setup, UnitPolicy,
};

use burn::module::Param;

/// Two masks, of which the inner unit draws one.
#[derive(Module, Debug)]
struct Net {
    outer: Unit<Outer>,
}

#[derive(Module, Debug)]
struct Outer {
    weight: Param<Tensor<1>>,
    inner: Unit<Inner>,
    dropout: Dropout,
}

#[derive(Module, Debug)]
struct Inner {
    weight: Param<Tensor<1>>,
    dropout: Dropout,
}

const LEN: usize = 512;

impl Net {
    fn new(device: &Device) -> Self {
        let weight = || Param::from_tensor(Tensor::<1>::ones([LEN], device));
        let dropout = || DropoutConfig::new(0.5).init();
        let inner = Unit::new(Inner { weight: weight(), dropout: dropout() });
        Self { outer: Unit::new(Outer { weight: weight(), inner, dropout: dropout() }) }
    }

    /// Zero exactly where one of the masks is.
    fn forward(&self, device: &Device) -> Tensor<1> {
        self.outer.forward(Tensor::<1>::ones([LEN], device), |outer, x| {
            let x = outer.inner.forward(x * outer.weight.val(), |inner, x| {
                inner.dropout.forward(x * inner.weight.val())
            });
            outer.dropout.forward(x)
        })
    }
}

fn zeros(tensor: Tensor<1>) -> Vec<bool> {
    let data = tensor.inner().into_data();
    data.as_slice::<f32>().expect("f32").iter().map(|value| *value == 0.0).collect()
}

/// The numbers that a step lets through forward, and those whose weights it changes.
fn masks(setup: &Setup, device: &Device) -> (Vec<bool>, [Vec<bool>; 2]) {
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let setup = Setup { optimizer, ..setup.clone() };
    let group = Arc::new(ProcessGroup::single());
    let (net, mut strategy) = DataParallel::new(Net::new(device), &group, &setup).expect("a run");
    device.seed(3);
    strategy.begin_step();
    let net = strategy.begin_micro_batch(net, MicroBatch::Last, Counts::Yes).expect("a batch");
    let output = net.forward(device);
    let let_through = zeros(output.clone());
    // Numbers that others draw in between must not matter.
    let _ = Tensor::<1>::random([7], burn::tensor::Distribution::Default, device);
    let grads = output.sum().backward();
    let net = strategy.collect(net, grads).expect("gradients");
    strategy.reduce().expect("a sum");
    let net = strategy.step(net, 1.0, 0.25).expect("a step");
    let outer = net.outer.module();
    let changed = [&outer.weight, &outer.inner.module().weight];
    (let_through, changed.map(|weight| zeros(weight.val() - 1.0)))
}

#[test]
#[ignore = "part of `masks_are_those_of_the_first_run`, in a process of its own"]
fn alone() {
    let device = Device::flex().autodiff();
    let plain = {
        let net = Net::new(&device);
        device.seed(3);
        zeros(net.forward(&device))
    };
    let (unit, changed) = masks(&Setup::default(), &device);
    assert_eq!(unit, plain, "a unit draws what its block draws");
    assert!(changed.iter().all(|changed| *changed == unit), "and its gradient is of that mask");
    for policy in ["all", "types=Outer", "types=Inner"] {
        let activation_checkpointing: UnitPolicy = policy.parse().expect("a policy");
        let setup = Setup { activation_checkpointing, ..Setup::default() };
        let (first_run, changed) = masks(&setup, &device);
        assert!(first_run.contains(&true) && first_run.contains(&false), "{policy}");
        for changed in changed {
            assert_eq!(changed, first_run, "{policy}: the second run has the masks of the first");
        }
    }
}

#[test]
fn masks_are_those_of_the_first_run() {
    let this = std::env::current_exe().expect("this program");
    let alone = Command::new(this)
        .args(["--exact", "dropout::alone", "--ignored", "--test-threads=1"])
        .output()
        .expect("a process");
    let said = String::from_utf8_lossy(&alone.stdout);
    assert!(alone.status.success() && said.contains("1 passed"), "{said}");
}

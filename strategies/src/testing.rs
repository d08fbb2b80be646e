//! What the tests of units and strategies share.

use std::sync::Arc;
use std::thread;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};

use crate::transport::memory;
use crate::{
    AfterForward, Counts, DataParallel, Error, Gathering, GroupOptions, MicroBatch, Optimizer,
    ProcessGroup, Setup, Stage, Unit, UnitPolicy, parameters,
};

/// A block in the way of a transformer's: a residual around two layers.
#[derive(Module, Debug)]
pub(crate) struct Block {
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl Block {
    pub(crate) fn new(device: &Device) -> Self {
        Self { up: linear(4, 8, device), down: linear(8, 4, device) }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(self.up.forward(x).tanh())
    }
}

#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) first: Linear,
    pub(crate) blocks: Vec<Unit<Block>>,
    pub(crate) last: Linear,
}

pub(crate) fn linear(input: usize, output: usize, device: &Device) -> Linear {
    LinearConfig::new(input, output).init(device)
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        numbered(Self {
            first: linear(3, 4, device),
            blocks: (0..3).map(|_| Unit::new(Block::new(device))).collect(),
            last: linear(4, 2, device),
        })
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.first.forward(x);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x, Block::forward));
        self.last.forward(x)
    }

    pub(crate) fn loss(&self, rows: usize, device: &Device) -> Tensor<1> {
        let numbers: Vec<f32> = (0..rows * 3).map(|i| (i % 11) as f32 * 0.2 - 1.0).collect();
        let x = Tensor::from_data(TensorData::new(numbers, [rows, 3]), device);
        self.forward(x).powi_scalar(2).mean()
    }
}

/// Initial numbers that do not come from the process-wide generator, which tests share.
pub(crate) fn numbered<M: Module>(model: M) -> M {
    let mut count = 0u32;
    let numbers = parameters::write(model, |info| {
        let len = info.shape.iter().product();
        let next = |_| {
            count += 1;
            f64::from(count * 37 % 101) as f32 / 101.0 - 0.5
        };
        Some((0..len).map(next).collect::<Vec<f32>>())
    });
    numbers.expect("as many numbers as the shape asks for")
}

pub(crate) fn device() -> Device {
    Device::flex().autodiff()
}

/// Plain SGD: the change of a weight is its gradient.
pub(crate) fn sgd() -> Setup {
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    Setup { optimizer, ..Setup::default() }
}

pub(crate) fn single() -> Arc<ProcessGroup> {
    Arc::new(ProcessGroup::single())
}

pub(crate) fn bits<M: Module>(model: &M) -> Vec<(String, Vec<u32>)> {
    let named = parameters::read(model).expect("f32 parameters");
    named
        .into_iter()
        .map(|n| (n.info.path, n.values.as_slice().to_f32().iter().map(|v| v.to_bits()).collect()))
        .collect()
}

/// The micro-batch at `index` of a step of `count`.
pub(crate) fn position(index: usize, count: usize) -> MicroBatch {
    if index + 1 == count { MicroBatch::Last } else { MicroBatch::Intermediate }
}

pub(crate) fn step<M: Module>(
    (mut model, strategy): (M, &mut DataParallel),
    losses: &[&dyn Fn(&M) -> Tensor<1>],
) -> Result<M, Error> {
    strategy.begin_step();
    for (i, loss) in losses.iter().enumerate() {
        let position = position(i, losses.len());
        model = strategy.begin_micro_batch(model, position, Counts::Yes)?;
        let grads = loss(&model).backward();
        model = strategy.collect(model, grads)?;
    }
    strategy.reduce()?;
    strategy.step(model, 1.0, 0.5)
}

/// Runs `body` on every rank of `world`, each a thread, and returns what they return.
pub(crate) fn on_ranks<R: Send>(
    world: usize,
    body: impl Fn(&Arc<ProcessGroup>) -> Result<R, Error> + Sync,
) -> Vec<Result<R, Error>> {
    thread::scope(|scope| {
        let threads: Vec<_> = memory::endpoints(world)
            .into_iter()
            .map(|endpoint| {
                let body = &body;
                scope.spawn(move || {
                    body(&Arc::new(ProcessGroup::new(endpoint, GroupOptions::default())))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    })
}

/// As [`on_ranks`], where no rank fails.
pub(crate) fn all_of<R: Send>(
    world: usize,
    body: impl Fn(&Arc<ProcessGroup>) -> Result<R, Error> + Sync,
) -> Vec<R> {
    on_ranks(world, body).into_iter().map(|outcome| outcome.expect("no rank should fail")).collect()
}

/// Runs `body` on two ranks, each with a net of its own, and returns what they return.
pub(crate) fn two_ranks<R: Send>(
    body: impl Fn(Net, &mut DataParallel, &ProcessGroup) -> Result<R, Error> + Sync,
) -> Vec<Result<R, Error>> {
    on_ranks(2, |group| {
        let (net, mut strategy) = DataParallel::new(Net::new(&device()), group, &sgd())?;
        body(net, &mut strategy, group)
    })
}

/// Every way to share the work, by name.
pub(crate) fn ways() -> [(&'static str, Setup); 6] {
    let setup = |stage| Setup { stage, ..Setup::default() };
    let keep = Gathering { after_forward: AfterForward::Keep, ..Gathering::default() };
    [
        ("ddp", setup(Stage::Nothing)),
        ("zero1", setup(Stage::Optimizer)),
        ("zero2", setup(Stage::Gradients)),
        ("full_shard", setup(Stage::Parameters)),
        (
            "full_shard with recompute",
            Setup { activation_checkpointing: UnitPolicy::All, ..setup(Stage::Parameters) },
        ),
        ("shard_grad_op", Setup { gathering: keep, ..setup(Stage::Parameters) }),
    ]
}

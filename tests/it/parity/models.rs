//! Small models, each with something that goes wrong easily.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pyroclast::Unit;
use pyroclast::gpt::{Gpt, GptConfig};
use pyroclast::strategies::parameters;

/// A model and its loss on one of many batches.
pub(crate) trait Case: Sync {
    type Model: Module + 'static;

    fn model(&self, device: &Device) -> Self::Model;

    fn loss(&self, model: &Self::Model, batch: usize, device: &Device) -> Tensor<1>;
}

/// Which model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Gpt,
    Mlp,
    ConvNet,
    Tied,
    Frozen,
    Odd,
    Branch,
}

impl Kind {
    pub(crate) const ALL: [Self; 7] =
        [Self::Gpt, Self::Mlp, Self::ConvNet, Self::Tied, Self::Frozen, Self::Odd, Self::Branch];

    /// Batch statistics are those of a rank's own batch; a running one is rank 0's.
    pub(crate) fn is_the_same_on_one_rank(self) -> bool {
        self != Self::ConvNet
    }
}

/// Runs `$body` with the case of a kind.
macro_rules! with_case {
    ($kind:expr, $case:ident => $body:expr) => {
        match $kind {
            models::Kind::Gpt => {
                let $case = models::GptCase;
                $body
            }
            models::Kind::Mlp => {
                let $case = models::MlpCase;
                $body
            }
            models::Kind::ConvNet => {
                let $case = models::ConvNetCase;
                $body
            }
            models::Kind::Tied => {
                let $case = models::TiedCase;
                $body
            }
            models::Kind::Frozen => {
                let $case = models::FrozenCase;
                $body
            }
            models::Kind::Odd => {
                let $case = models::OddCase;
                $body
            }
            models::Kind::Branch => {
                let $case = models::BranchCase;
                $body
            }
        }
    };
}
pub(crate) use with_case;

/// The same numbers on every device, and none from a generator that tests share.
pub(crate) fn numbered<M: Module>(model: M) -> M {
    let mut count = 0u64;
    let numbers = parameters::write(model, |info| {
        if info.path.contains("running") {
            return None;
        }
        let len = info.shape.iter().product();
        let next = |_| {
            count += 1;
            (count.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / 2f32.powi(24) - 0.5
        };
        Some((0..len).map(next).collect::<Vec<f32>>())
    });
    numbers.expect("as many numbers as the shape asks for")
}

/// Numbers of a batch.
fn numbers<const D: usize>(shape: [usize; D], batch: usize, device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let values: Vec<f32> =
        (0..len).map(|i| ((i * 7 + batch * 13) % 29) as f32 / 14.5 - 1.0).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn linear(input: usize, output: usize, device: &Device) -> Linear {
    LinearConfig::new(input, output).init(device)
}

/// The model of the `pyroclast` binary.
pub(crate) struct GptCase;

impl Case for GptCase {
    type Model = Gpt;

    fn model(&self, device: &Device) -> Gpt {
        Gpt::new(&GptConfig { layers: 2, heads: 2, width: 12, context: 6 }, device)
    }

    fn loss(&self, model: &Gpt, batch: usize, device: &Device) -> Tensor<1> {
        let tokens: Vec<i32> = (0..12).map(|i| ((i * 31 + batch * 17) % 256) as i32).collect();
        let tokens = |shift: usize| {
            let shifted: Vec<i32> = tokens.iter().cycle().skip(shift).take(12).copied().collect();
            Tensor::<2, Int>::from_data(TensorData::new(shifted, [2, 6]), device)
        };
        let logits = model.forward(tokens(0)).reshape([12, 256]);
        log_softmax(logits, 1).gather(1, tokens(1).reshape([12, 1])).mean().neg()
    }
}

/// Layers of sizes that no world divides.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    first: Linear,
    hidden: Vec<Unit<Linear>>,
    last: Option<Unit<Linear>>,
}

pub(crate) struct MlpCase;

impl Case for MlpCase {
    type Model = Mlp;

    fn model(&self, device: &Device) -> Mlp {
        Mlp {
            first: linear(5, 13, device),
            hidden: (0..3).map(|_| Unit::new(linear(13, 13, device))).collect(),
            last: Some(Unit::new(linear(13, 3, device))),
        }
    }

    fn loss(&self, model: &Mlp, batch: usize, device: &Device) -> Tensor<1> {
        let x = model.first.forward(numbers([3, 5], batch, device));
        let hidden =
            |x: Tensor<2>, unit: &Unit<Linear>| unit.forward(x, |layer, x| layer.forward(x).tanh());
        let x = model.hidden.iter().fold(x, hidden);
        let last = model.last.as_ref().expect("a last layer");
        last.forward(x, |layer, x| layer.forward(x)).powi_scalar(2).mean()
    }
}

/// Convolutions, and statistics that every forward pass changes.
#[derive(Module, Debug)]
pub(crate) struct ConvNet {
    blocks: Vec<Unit<ConvBlock>>,
    head: Linear,
}

#[derive(Module, Debug)]
pub(crate) struct ConvBlock {
    conv: Conv2d,
    /// A unit of its own, so that it may stay in `f32`, as its running statistics do.
    norm: Unit<BatchNorm>,
}

pub(crate) struct ConvNetCase;

impl Case for ConvNetCase {
    type Model = ConvNet;

    fn model(&self, device: &Device) -> ConvNet {
        let block = |input, output| {
            let conv = Conv2dConfig::new([input, output], [3, 3]).init(device);
            let norm = Unit::new(BatchNormConfig::new(output).init(device));
            Unit::new(ConvBlock { conv, norm })
        };
        ConvNet { blocks: vec![block(2, 3), block(3, 5)], head: linear(5, 2, device) }
    }

    fn loss(&self, model: &ConvNet, batch: usize, device: &Device) -> Tensor<1> {
        let x = numbers([3, 2, 7, 7], batch, device);
        let x = model.blocks.iter().fold(x, |x, unit| {
            unit.forward(x, |block, x| {
                let x = block.conv.forward(x);
                block.norm.forward(x, |norm, x| norm.forward(x)).tanh()
            })
        });
        let x: Tensor<2> = x.mean_dim(3).mean_dim(2).flatten(1, 3);
        model.head.forward(x).powi_scalar(2).mean()
    }
}

/// One parameter at two places in a unit, and one in a unit and outside of it.
#[derive(Module, Debug)]
pub(crate) struct Tied {
    embed: Embedding,
    twins: Unit<Twins>,
    first: Unit<Linear>,
    second: Unit<Linear>,
}

#[derive(Module, Debug)]
pub(crate) struct Twins {
    left: Linear,
    right: Linear,
}

pub(crate) struct TiedCase;

impl Case for TiedCase {
    type Model = Tied;

    fn model(&self, device: &Device) -> Tied {
        let (twin, shared) = (linear(4, 4, device), linear(4, 4, device));
        // Both places hold the same parameter, so that lazy initialisation happens once.
        Tied {
            embed: EmbeddingConfig::new(9, 4).init(device),
            twins: Unit::new(Twins { left: twin.clone(), right: twin }),
            first: Unit::new(shared.clone()),
            second: Unit::new(shared),
        }
    }

    fn loss(&self, model: &Tied, batch: usize, device: &Device) -> Tensor<1> {
        let tokens = TensorData::new(vec![(batch % 9) as i32, 3, 8, 0], [2, 2]);
        let tokens = Tensor::<2, Int>::from_data(tokens, device);
        let x: Tensor<3> = model.embed.forward(tokens);
        let x =
            model.twins.forward(x, |twins, x| twins.right.forward(twins.left.forward(x).tanh()));
        let x = model.first.forward(x, |layer, x| layer.forward(x).tanh());
        let x = model.second.forward(x, |layer, x| layer.forward(x));
        // The embedding once more, as a head.
        let head = model.embed.weight.val().transpose().unsqueeze::<3>();
        x.matmul(head.expand([2, 4, 9])).powi_scalar(2).mean()
    }
}

/// A frozen unit, and a frozen layer beside trained ones.
#[derive(Module, Debug)]
pub(crate) struct Frozen {
    first: Linear,
    frozen: Unit<Linear>,
    half: Unit<Half>,
}

#[derive(Module, Debug)]
pub(crate) struct Half {
    frozen: Linear,
    trained: Linear,
}

pub(crate) struct FrozenCase;

impl Case for FrozenCase {
    type Model = Frozen;

    fn model(&self, device: &Device) -> Frozen {
        let half = Half { frozen: linear(4, 4, device).no_grad(), trained: linear(4, 3, device) };
        Frozen {
            first: linear(3, 4, device),
            frozen: Unit::new(linear(4, 4, device).no_grad()),
            half: Unit::new(half),
        }
    }

    fn loss(&self, model: &Frozen, batch: usize, device: &Device) -> Tensor<1> {
        let x = model.first.forward(numbers([2, 3], batch, device));
        let x = model.frozen.forward(x, |layer, x| layer.forward(x).tanh());
        let half = |half: &Half, x: Tensor<2>| half.trained.forward(half.frozen.forward(x).tanh());
        model.half.forward(x, half).powi_scalar(2).mean()
    }
}

/// Parameters of no and of one element.
#[derive(Module, Debug)]
pub(crate) struct Odd {
    scale: Param<Tensor<1>>,
    unit: Unit<OddBlock>,
    empty: Unit<Empty>,
}

#[derive(Module, Debug)]
pub(crate) struct OddBlock {
    nothing: Param<Tensor<2>>,
    shift: Param<Tensor<1>>,
    layer: Linear,
}

/// A unit without any element.
#[derive(Module, Debug)]
pub(crate) struct Empty {
    nothing: Param<Tensor<1>>,
}

pub(crate) struct OddCase;

impl Case for OddCase {
    type Model = Odd;

    fn model(&self, device: &Device) -> Odd {
        let ones = || Param::from_tensor(Tensor::<1>::ones([1], device));
        Odd {
            scale: ones(),
            unit: Unit::new(OddBlock {
                nothing: Param::from_tensor(Tensor::zeros([0, 3], device)),
                shift: ones(),
                layer: linear(3, 1, device),
            }),
            empty: Unit::new(Empty { nothing: Param::from_tensor(Tensor::zeros([0], device)) }),
        }
    }

    fn loss(&self, model: &Odd, batch: usize, device: &Device) -> Tensor<1> {
        let x = numbers([2, 3], batch, device) * model.scale.val().unsqueeze::<2>();
        let x = model.unit.forward(x, |block, x| {
            let x = Tensor::cat(vec![x, block.nothing.val()], 0);
            block.layer.forward(x) + block.shift.val().unsqueeze::<2>()
        });
        let x = model.empty.forward(x, |_, x| x);
        x.powi_scalar(2).mean()
    }
}

/// A branch that no step takes, and one that only some ranks take.
#[derive(Module, Debug)]
pub(crate) struct Branch {
    first: Linear,
    never: Linear,
    never_unit: Unit<Linear>,
    sometimes: Linear,
    unit: Unit<Linear>,
}

pub(crate) struct BranchCase;

impl Case for BranchCase {
    type Model = Branch;

    fn model(&self, device: &Device) -> Branch {
        Branch {
            first: linear(3, 4, device),
            never: linear(4, 4, device),
            never_unit: Unit::new(linear(4, 4, device)),
            sometimes: linear(4, 4, device),
            unit: Unit::new(linear(4, 2, device)),
        }
    }

    fn loss(&self, model: &Branch, batch: usize, device: &Device) -> Tensor<1> {
        let x = model.first.forward(numbers([2, 3], batch, device));
        let x = if batch.is_multiple_of(2) { model.sometimes.forward(x).tanh() } else { x };
        model.unit.forward(x, |layer, x| layer.forward(x)).powi_scalar(2).mean()
    }
}

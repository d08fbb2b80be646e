//! The network: a pre-norm transformer with learned positions and an untied head.

use burn::module::Module;
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor};
use pyroclast_strategies::Unit;

use super::config::{GptConfig, VOCABULARY};
use crate::nn::{linear, matmul};

/// A GPT. Every parameter lies in a unit, so that where parameters are sharded none stays whole from one
/// end of a pass to the other.
#[derive(Module, Debug)]
pub struct Gpt {
    tok: Unit<Embedding>,
    pos: Unit<Embedding>,
    blocks: Vec<Unit<Block>>,
    ln: Unit<LayerNorm>,
    head: Unit<Linear>,
}

/// Attention, then a two-layer perceptron, each on a normalised copy of the residual stream.
#[derive(Module, Debug)]
pub struct Block {
    ln1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    ln2: LayerNorm,
    fc: Linear,
    out: Linear,
    heads: usize,
}

/// Standard deviation of initial weights, as in GPT-2.
const STD: f64 = 0.02;

fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}

fn layer(input: usize, output: usize, std: f64, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(input, output).with_initializer(normal(std)).init(device);
    let bias = Initializer::Zeros.init([output], device);
    linear.bias = Some(bias);
    linear
}

fn norm(width: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(width).with_epsilon(1e-5).init(device)
}

impl Gpt {
    /// A new model on `device`, initialised as GPT-2 is: weights from a normal distribution with
    /// standard deviation 0.02, projections into the residual stream scaled down by the square root
    /// of their number, biases 0.
    #[must_use]
    pub fn new(config: &GptConfig, device: &Device) -> Self {
        let GptConfig { layers, width, context, .. } = *config;
        let embedding = |rows| {
            let config = EmbeddingConfig::new(rows, width).with_initializer(normal(STD));
            Unit::new(config.init(device))
        };
        let head = LinearConfig::new(width, VOCABULARY).with_bias(false);
        Self {
            tok: embedding(VOCABULARY),
            pos: embedding(context),
            blocks: (0..layers).map(|_| Unit::new(Block::new(config, device))).collect(),
            ln: Unit::new(norm(width, device)),
            head: Unit::new(head.with_initializer(normal(STD)).init(device)),
        }
    }

    /// Logits of the next byte, `[batch, length, 256]`, for `tokens` of shape `[batch, length]`.
    /// The length is at most the context.
    #[must_use]
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, length] = tokens.dims();
        let device = tokens.device();
        let positions = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tok.forward(tokens, |tok, tokens| tok.forward(tokens))
            + self.pos.forward(positions, |pos, positions| pos.forward(positions));
        let mask = Tensor::<2, Bool>::tril_mask([length, length], 0, &device);
        let mask = mask.unsqueeze::<4>();
        let x = self.blocks.iter().fold(x, |x, block| {
            let mask = mask.clone();
            block.forward(x, move |block, x| block.forward(x, mask.clone()))
        });
        let x = self.ln.forward(x, |ln, x| ln.forward(x));
        self.head.forward(x, linear)
    }
}

impl Block {
    fn new(config: &GptConfig, device: &Device) -> Self {
        let width = config.width;
        let residual = STD / (2.0 * config.layers as f64).sqrt();
        Self {
            ln1: norm(width, device),
            qkv: layer(width, 3 * width, STD, device),
            proj: layer(width, width, residual, device),
            ln2: norm(width, device),
            fc: layer(width, 4 * width, STD, device),
            out: layer(4 * width, width, residual, device),
            heads: config.heads,
        }
    }

    /// `mask` is true where attention is forbidden, `[1, 1, length, length]`.
    fn forward(&self, x: Tensor<3>, mask: Tensor<4, Bool>) -> Tensor<3> {
        let x = x.clone() + linear(&self.proj, self.attend(self.ln1.forward(x), mask));
        x.clone() + linear(&self.out, gelu(linear(&self.fc, self.ln2.forward(x))))
    }

    fn attend(&self, x: Tensor<3>, mask: Tensor<4, Bool>) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let head_width = width / self.heads;
        let qkv = linear(&self.qkv, x).reshape([batch, length, 3, self.heads, head_width]);
        let part = |index: usize| -> Tensor<4> {
            qkv.clone().narrow(2, index, 1).squeeze_dim::<4>(2).swap_dims(1, 2)
        };
        let (q, k, v) = (part(0), part(1), part(2));
        let scores = matmul(q, k.swap_dims(2, 3)).div_scalar((head_width as f64).sqrt());
        let weights = softmax(scores.mask_fill(mask, f64::NEG_INFINITY), 3);
        matmul(weights, v).swap_dims(1, 2).reshape([batch, length, width])
    }
}

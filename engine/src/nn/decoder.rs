//! The decoder of a transformer.

use burn::module::Module;
use burn::nn::transformer::{self, TransformerDecoderConfig, TransformerDecoderInput};
use burn::tensor::{Bool, Device, Tensor};
use pyroclast_strategies::{TensorMap, Values};

use crate::Unit;

/// Burn's `TransformerDecoder` with each layer a unit.
#[derive(Module, Debug)]
pub struct TransformerDecoder {
    /// The layers, first to last.
    pub layers: Vec<Unit<transformer::TransformerDecoderLayer>>,
}

/// What a [`TransformerDecoder`] must not look at; true where it must not.
#[derive(Clone, Debug, Default)]
pub struct DecoderMasks {
    /// Padding of the target, `[batch, target length]`.
    pub target_pad: Option<Tensor<2, Bool>>,
    /// Attention of the target to itself, `[batch, target length, target length]`.
    pub target_attn: Option<Tensor<3, Bool>>,
    /// Padding of the memory, `[batch, memory length]`.
    pub memory_pad: Option<Tensor<2, Bool>>,
    /// Attention of the target to the memory, `[batch, target length, memory length]`.
    pub memory_attn: Option<Tensor<3, Bool>>,
}

impl Values for DecoderMasks {
    fn map(self, map: &mut impl TensorMap) -> Self {
        Self {
            target_pad: Values::map(self.target_pad, map),
            target_attn: Values::map(self.target_attn, map),
            memory_pad: Values::map(self.memory_pad, map),
            memory_attn: Values::map(self.memory_attn, map),
        }
    }
}

impl TransformerDecoder {
    /// A new decoder on `device`, initialised as Burn's is.
    #[must_use]
    pub fn new(config: &TransformerDecoderConfig, device: &Device) -> Self {
        let layers = config.init(device).layers;
        Self { layers: layers.into_iter().map(Unit::new).collect() }
    }

    /// Runs all layers on `target` of shape `[batch, target length, d_model]`, which the result has, too,
    /// with `memory` of shape `[batch, memory length, d_model]`.
    #[must_use]
    pub fn forward(&self, target: Tensor<3>, memory: Tensor<3>, masks: DecoderMasks) -> Tensor<3> {
        self.layers.iter().fold(target, |target, unit| {
            let inputs = (target, memory.clone(), masks.clone());
            unit.forward(inputs, |layer, (target, memory, masks)| {
                one(layer).forward(input(target, memory, masks))
            })
        })
    }
}

/// Burn's decoder of one layer: what a single layer returns cannot be taken apart.
fn one(layer: &transformer::TransformerDecoderLayer) -> transformer::TransformerDecoder {
    transformer::TransformerDecoder {
        layers: vec![layer.clone()],
        d_model: 0,
        d_ff: 0,
        n_heads: 0,
        n_layers: 1,
        dropout: 0.0,
        norm_first: layer.norm_first,
        quiet_softmax: false,
    }
}

fn input(target: Tensor<3>, memory: Tensor<3>, masks: DecoderMasks) -> TransformerDecoderInput {
    let DecoderMasks { target_pad, target_attn, memory_pad, memory_attn } = masks;
    let mut input = TransformerDecoderInput::new(target, memory);
    if let Some(mask) = target_pad {
        input = input.target_mask_pad(mask);
    }
    if let Some(mask) = target_attn {
        input = input.target_mask_attn(mask);
    }
    if let Some(mask) = memory_pad {
        input = input.memory_mask_pad(mask);
    }
    if let Some(mask) = memory_attn {
        input = input.memory_mask_attn(mask);
    }
    input
}

#[cfg(test)]
mod tests {
    use burn::tensor::Int;
    use pyroclast_strategies::parameters;

    use super::*;

    #[test]
    fn it_has_burns_paths_and_computes_what_burns_does() {
        let device = Device::flex();
        let config = TransformerDecoderConfig::new(8, 16, 2, 3).with_dropout(0.0);
        let burns = config.init(&device);
        let named = parameters::read(&burns).expect("f32 parameters");
        let find = |path: &str| named.iter().find(|n| n.info.path == path);
        let ours = parameters::write(TransformerDecoder::new(&config, &device), |info| {
            Some(find(&info.path).expect("a parameter of Burn's").values.clone())
        });
        let ours = ours.expect("numbers that fit");
        assert_eq!(parameters::read(&ours).expect("f32 parameters").len(), named.len());
        let numbers = Tensor::<1, Int>::arange(0..64, &device).float();
        let target = numbers.clone().sin().reshape([2, 4, 8]);
        let memory = numbers.cos().reshape([2, 4, 8]);
        let causal = Tensor::<2, Bool>::tril_mask([4, 4], 0, &device).unsqueeze::<3>();
        let masks = DecoderMasks {
            target_attn: Some(causal.expand([2, 4, 4])),
            memory_pad: Some(Tensor::from_data([[false, true, false, false]; 2], &device)),
            ..DecoderMasks::default()
        };
        let expected = burns.forward(input(target.clone(), memory.clone(), masks.clone()));
        let got = ours.forward(target, memory, masks);
        got.into_data().assert_eq(&expected.into_data(), true);
    }
}

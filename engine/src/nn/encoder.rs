//! The encoder of a transformer.

use burn::module::Module;
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderLayer};
use burn::tensor::{Bool, Device, Tensor};

use crate::Unit;

/// Burn's `TransformerEncoder` with each layer a unit.
#[derive(Module, Debug)]
pub struct TransformerEncoder {
    /// The layers, first to last.
    pub layers: Vec<Unit<TransformerEncoderLayer>>,
}

impl TransformerEncoder {
    /// A new encoder on `device`, initialised as Burn's is.
    #[must_use]
    pub fn new(config: &TransformerEncoderConfig, device: &Device) -> Self {
        let layer = |_| Unit::new(TransformerEncoderLayer::new(config, device));
        Self { layers: (0..config.n_layers).map(layer).collect() }
    }

    /// Runs all layers on `x` of shape `[batch, length, d_model]`, which the result has, too. `mask_pad`
    /// (`[batch, length]`) is true for positions that are padding, `mask_attn`
    /// (`[batch, length, length]`) where attention is forbidden.
    #[must_use]
    pub fn forward(
        &self,
        x: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        self.layers.iter().fold(x, |x, unit| {
            let inputs = (x, mask_pad.clone(), mask_attn.clone());
            unit.forward(inputs, |layer, (x, pad, attn)| layer.forward(x, pad, attn))
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::transformer::TransformerEncoderInput;
    use pyroclast_strategies::parameters;

    use super::*;

    #[test]
    fn it_has_burns_paths_and_computes_what_burns_does() {
        let device = Device::flex();
        let config = TransformerEncoderConfig::new(8, 16, 2, 3).with_dropout(0.0);
        let burns = config.init(&device);
        let named = parameters::read(&burns).expect("f32 parameters");
        let find = |path: &str| named.iter().find(|n| n.info.path == path);
        let ours = parameters::write(TransformerEncoder::new(&config, &device), |info| {
            Some(find(&info.path).expect("a parameter of Burn's").values.clone())
        });
        let ours = ours.expect("numbers that fit");
        assert_eq!(parameters::read(&ours).expect("f32 parameters").len(), named.len());
        let x = Tensor::<1, burn::tensor::Int>::arange(0..64, &device).float().sin();
        let x = x.reshape([2, 4, 8]);
        let pad = Tensor::<2, Bool>::from_data([[false, false, false, true]; 2], &device);
        let attn = Tensor::<2, Bool>::tril_mask([4, 4], 0, &device).unsqueeze::<3>();
        let attn = attn.expand([2, 4, 4]);
        let input = TransformerEncoderInput::new(x.clone());
        let expected = burns.forward(input.mask_pad(pad.clone()).mask_attn(attn.clone()));
        ours.forward(x, Some(pad), Some(attn)).into_data().assert_eq(&expected.into_data(), true);
    }
}

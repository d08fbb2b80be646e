//! Several inputs and outputs, of several kinds.

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear};
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::testing::{linear, numbered, single, step, ways};
use crate::{DataParallel, Setup, Unit};

#[derive(Module, Debug)]
struct Mixed {
    embed: Unit<Embedding>,
    mix: Unit<Mix>,
    head: Option<Unit<Linear>>,
    choice: Choice,
}

#[derive(Module, Debug)]
struct Mix {
    left: Linear,
    right: Linear,
}

/// Units may stand in the variants of an enum.
#[derive(Module, Debug)]
enum Choice {
    Linear(Unit<Linear>),
    Nothing(Unit<Linear>),
}

impl Mixed {
    fn new(device: &Device) -> Self {
        numbered(Self {
            embed: Unit::new(EmbeddingConfig::new(5, 4).init(device)),
            mix: Unit::new(Mix { left: linear(4, 3, device), right: linear(4, 3, device) }),
            head: Some(Unit::new(linear(3, 2, device))),
            choice: Choice::Linear(Unit::new(linear(3, 3, device))),
        })
    }

    /// The same with and without units at work.
    fn loss(&self, device: &Device) -> Tensor<1> {
        let tokens = Tensor::<1, Int>::from_data([0, 3, 3, 1], device).unsqueeze::<2>();
        let mask = Tensor::<2, Bool>::from_data([[true, false, true, false]], device);
        // Only an integer goes in.
        let x: Tensor<3> =
            self.embed.forward(tokens.clone(), |embed, tokens| embed.forward(tokens));
        // Floats, integers and booleans in; a tuple with a vector, an option and an integer out.
        let (parts, other, count) = self.mix.forward(
            (x.clone(), x.clone().mul_scalar(2.0), tokens, mask),
            |mix, (x, y, tokens, mask)| {
                let mask = mask.unsqueeze_dim::<3>(2).expand([1, 4, 3]);
                let left = mix.left.forward(x).mask_fill(mask, 0.0);
                let right = mix.right.forward(y).tanh();
                (vec![left, right.clone()], Some(right.powi_scalar(2)), tokens.add_scalar(1))
            },
        );
        let other = other.expect("what went in").mul(count.float().unsqueeze_dim::<3>(2));
        // The second part is not used further.
        let joined = parts[0].clone() + other;
        let joined = match &self.choice {
            Choice::Linear(unit) => unit.forward(joined, |layer, x| layer.forward(x)),
            Choice::Nothing(_) => joined,
        };
        let head = self.head.as_ref().expect("a head");
        head.forward([joined], |head, [x]| head.forward(x)).powi_scalar(2).mean()
    }
}

fn weights(model: &Mixed) -> [Param<Tensor<2>>; 5] {
    let Choice::Linear(choice) = &model.choice else { unreachable!("it is linear") };
    [
        model.embed.module().weight.clone(),
        model.mix.module().left.weight.clone(),
        model.mix.module().right.weight.clone(),
        model.head.as_ref().expect("a head").module().weight.clone(),
        choice.module().weight.clone(),
    ]
}

#[test]
fn values_of_every_kind_go_through_units_with_plain_gradients() {
    let device = crate::testing::device();
    let plain = Mixed::new(&device);
    let grads = plain.loss(&device).backward();
    let expected = weights(&plain).map(|weight| {
        let grad = weight.val().grad(&grads).expect("a gradient");
        (weight.val().inner() - grad.mul_scalar(0.5)).into_data()
    });
    for (name, setup) in ways() {
        let optimizer = crate::testing::sgd().optimizer;
        let setup = Setup { optimizer, ..setup };
        let ends = crate::testing::all_of(2, |group| {
            let model = Mixed::new(&device);
            let (model, mut strategy) = DataParallel::new(model, group, &setup)?;
            let half = |model: &Mixed| model.loss(&device).mul_scalar(0.5);
            let model = step((model, &mut strategy), &[&half])?;
            let model = strategy.whole(model)?;
            Ok((group.rank() == 0).then(|| weights(&model).map(|w| w.val().inner().into_data())))
        });
        let got = ends.into_iter().flatten().next().expect("rank 0's weights");
        for (got, expected) in got.iter().zip(&expected) {
            got.assert_approx_eq::<f32>(expected, burn::tensor::Tolerance::absolute(1e-6));
        }
        let _ = name;
    }
    // Alone, and recomputed, to the last bit.
    for setup in [Setup::default(), recomputing()] {
        let setup = Setup { optimizer: crate::testing::sgd().optimizer, ..setup };
        let (model, mut strategy) =
            DataParallel::new(Mixed::new(&device), &single(), &setup).expect("a strategy");
        let loss = |model: &Mixed| model.loss(&device);
        let model = step((model, &mut strategy), &[&loss]).expect("a step");
        for (got, expected) in weights(&model).iter().zip(&expected) {
            got.val().inner().into_data().assert_eq(expected, true);
        }
    }
}

fn recomputing() -> Setup {
    Setup { activation_checkpointing: crate::UnitPolicy::All, ..Setup::default() }
}

//! In which numbers a model computes, and what one step's gradients say.
//!
//! * [`Precision`]: the policies by the names that a Lightning user knows, and the [`Types`] of numbers
//!   that they stand for.
//! * [`Scaler`]: the loss scale, which changes by torch's rule or DeepSpeed's.
//! * [`seed`]: the start of a backward pass, with everything that multiplies a micro-batch's loss.
//! * [`Verdict`]: norm and finiteness of the gradients, and the one factor by which the optimizer
//!   multiplies them.
//!
//! This crate knows neither ranks nor collectives. A verdict is returned; making it the same on
//! every rank is the strategy's job.
//!
//! ```
//! use pyroclast_precision::{Clip, Precision, Verdict};
//!
//! assert_eq!("32-true".parse(), Ok(Precision::F32True));
//! // Two micro-batches of weight 1, summed gradients of norm 10, clipped to norm 1:
//! let verdict = Verdict::new(100.0, 2.0, 1.0);
//! assert_eq!(verdict.norm(), 5.0);
//! assert!((verdict.scale(Some(Clip::Norm(1.0))) - 0.1).abs() < 1e-6);
//! ```

mod policy;
mod scaler;
mod verdict;

pub use policy::{Precision, PrecisionError, Types, type_named};
pub use scaler::{AtMinimum, DeepSpeedScale, LossScale, Scaler, ScalerState, TorchScale};
pub use verdict::{Clip, Verdict, seed};

//! The checks of precision: which types of numbers there are, and whether the device has them.

use pyroclast_kernels::numbers::Float;
use pyroclast_precision::{LossScale, Precision, Types, type_named};
use pyroclast_strategies::{UnitPolicy, UnitTypes};

use super::check::Check;
use crate::config::TrainerConfig;
use crate::device::Accelerator;
use crate::loss_scale::LossScaleConfig;

/// In which numbers a run computes.
#[derive(Clone, Debug, PartialEq)]
pub struct PrecisionPlan {
    /// By name.
    pub name: Precision,
    /// The types that it stands for, by unit.
    pub types: UnitTypes,
    /// What the loss is multiplied by.
    pub loss_scale: LossScale,
}

impl Check {
    pub(super) fn precision(
        &mut self,
        config: &TrainerConfig,
        accelerator: Option<Accelerator>,
    ) -> Option<PrecisionPlan> {
        let name = self.parse("precision", config.precision.parse::<Precision>());
        let reduce = config.reduce_dtype.as_deref().map(type_named);
        let reduce = reduce.and_then(|reduce| self.parse("reduce_dtype", reduce));
        let overrides = self.overrides(config);
        let name = name?;
        let loss_scale = self.loss_scale(config, name);
        let default = self.reduced(name.types(), reduce);
        let types = UnitTypes {
            types: default,
            overrides: overrides
                .into_iter()
                .map(|(units, precision)| {
                    let own = self.reduced(precision.types(), reduce);
                    // What a unit returns is for others.
                    (units, Types { output: default.output, ..own })
                })
                .collect(),
        };
        if let Some(accelerator) = accelerator {
            self.device_types(name, &types, accelerator);
        }
        Some(PrecisionPlan { name, types, loss_scale })
    }

    /// Units with a precision of their own, those that are chosen by path last.
    fn overrides(&mut self, config: &TrainerConfig) -> Vec<(UnitPolicy, Precision)> {
        let mut overrides = vec![];
        for (units, precision) in &config.precision_overrides {
            let setting = format!("precision_overrides.{units}");
            let units = self.parse(&setting, units.parse::<UnitPolicy>());
            let precision = self.parse(&setting, precision.parse::<Precision>());
            overrides.extend(units.zip(precision));
        }
        overrides.sort_by_key(|(units, _)| matches!(units, UnitPolicy::Paths(_)));
        overrides
    }

    /// The types of a precision, with the one that gradients are summed in.
    fn reduced(&mut self, types: Types, reduce: Option<Float>) -> Types {
        let Some(reduce) = reduce else { return types };
        if (types.params == Float::F64) != (reduce == Float::F64) {
            let problem =
                format!("{reduce} does not go with parameters in {}; leave it out", types.params);
            self.mistake("reduce_dtype", problem);
        }
        Types { reduce, ..types }
    }

    fn loss_scale(&mut self, config: &TrainerConfig, name: Precision) -> LossScale {
        let rule = match config.loss_scale.rule() {
            Ok(rule) => rule,
            Err(mistakes) => {
                for (within, problem) in mistakes {
                    let dot = if within.is_empty() { "" } else { "." };
                    self.mistake(&format!("loss_scale{dot}{within}"), problem);
                }
                return LossScale::Off;
            }
        };
        match name.scales_loss() {
            true => rule,
            false => {
                if config.loss_scale != LossScaleConfig::default() {
                    let problem = format!(
                        "is for f16, and precision is {name}; leave it out, or use 16-mixed"
                    );
                    self.mistake("loss_scale", problem);
                }
                LossScale::Off
            }
        }
    }

    /// Refuses types that the device does not have.
    fn device_types(&mut self, name: Precision, types: &UnitTypes, accelerator: Accelerator) {
        let all = types.overrides.iter().map(|(_, types)| types).chain([&types.types]);
        let of_unit = |types: &Types| [types.params, types.compute, types.output, types.buffers];
        let mut needed: Vec<Float> = all.flat_map(of_unit).collect();
        needed.dedup();
        needed.retain(|float| *float != Float::F32);
        if needed.is_empty() {
            return;
        }
        let Ok(device) = accelerator.device() else { return };
        let is_shader = matches!(accelerator, Accelerator::Wgpu | Accelerator::Vulkan);
        let has = |float: &Float| match float {
            Float::F32 => true,
            // What shaders can be asked for, they compute without exponentials.
            Float::F64 if is_shader => false,
            float => device.supports_dtype(float.dtype()),
        };
        let Some(missing) = needed.iter().find(|float| !has(float)) else { return };
        let there: Vec<&str> =
            Float::ALL.iter().filter(|float| has(float)).map(|f| f.name()).collect();
        let reason = match (accelerator, missing) {
            (Accelerator::Wgpu, Float::BF16) => ": WGSL has no such type",
            (_, Float::F64) if is_shader => ": shaders have no exponentials in f64",
            (Accelerator::Wgpu, Float::F16) => ": its driver does not have shader-f16",
            _ => "",
        };
        let problem = format!(
            "`{name}` needs {missing}, which this {accelerator} device does not have{reason}; it has {}. Use \
             another precision, or --accelerator cpu, which has all types",
            there.join(", ")
        );
        self.mistake("precision", problem);
    }
}

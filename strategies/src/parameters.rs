//! A module's float parameters and buffers by path: reading and replacing their numbers.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, ParamMapper};
use burn::tensor::{FloatDType, Tensor};
use pyroclast_kernels::interop;
use pyroclast_kernels::numbers::{Float, Numbers};

use crate::error::Error;
use crate::layout::ParamInfo;

/// A parameter or buffer and its numbers, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedValues {
    /// Path and shape.
    pub info: ParamInfo,
    /// As many as the product of the shape.
    pub values: Numbers,
    pub(crate) id: ParamId,
}

/// Reads all float parameters and buffers of `model`, each once, in one round trip to the device.
/// Initialises lazy parameters, and brings running statistics up to date.
///
/// # Errors
///
/// [`Error::Read`] if the device fails.
pub fn read<M: Module>(model: &M) -> Result<Vec<NamedValues>, Error> {
    read_where(model, |_| true)
}

pub(crate) fn read_where<M: Module>(
    model: &M,
    wanted: impl Fn(ParamId) -> bool,
) -> Result<Vec<NamedValues>, Error> {
    // A running statistic takes up its last update only when the model is put into validation.
    read_valid(&model.valid(), wanted)
}

/// As [`read_where`], of a model that is in validation.
pub(crate) fn read_valid<M: Module>(
    model: &M,
    wanted: impl Fn(ParamId) -> bool,
) -> Result<Vec<NamedValues>, Error> {
    let mut collect = Collect { wanted, path: vec![], named: vec![], tensors: vec![] };
    model.visit(&mut collect);
    let Collect { mut named, tensors, .. } = collect;
    interop::read_all(tensors, |position, values| named[position].values = values.to_numbers())
        .map_err(|source| Error::Read { what: "parameters".to_owned(), source })?;
    Ok(named)
}

/// Parameters and buffers with zeros in place of their numbers. Lazy parameters stay lazy.
pub(crate) fn shapes_where<M: Module>(
    model: &M,
    wanted: impl Fn(ParamId) -> bool,
) -> Vec<NamedValues> {
    let mut shapes = Shapes { wanted, path: vec![], named: vec![] };
    model.visit(&mut shapes);
    shapes.named
}

struct Shapes<F> {
    wanted: F,
    path: Vec<String>,
    named: Vec<NamedValues>,
}

impl<F: Fn(ParamId) -> bool> ModuleVisitor for Shapes<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let known = self.named.iter().any(|named| named.id == param.id);
        if known || !(self.wanted)(param.id) {
            return;
        }
        let info = info(&self.path, param);
        let float = float_of(param);
        let values = Numbers::zeros(float, info.shape.iter().product());
        self.named.push(NamedValues { info, values, id: param.id });
    }
}

/// Replaces the numbers of every float parameter and buffer for which `find` has some. One that stands
/// at several paths is asked for once, under the first. The new numbers have their own type; identity,
/// device and whether a gradient is required stay.
///
/// # Errors
///
/// [`Error::WrongLength`] if there are too few or too many numbers.
pub fn write<M: Module, V: Into<Numbers>>(
    model: M,
    mut find: impl FnMut(&ParamInfo) -> Option<V>,
) -> Result<M, Error> {
    let find = |_: ParamId, info: &ParamInfo| find(info).map(Into::into);
    write_where(model, find)
}

pub(crate) fn write_where<M: Module>(
    model: M,
    find: impl FnMut(ParamId, &ParamInfo) -> Option<Numbers>,
) -> Result<M, Error> {
    let mut twice = Repeated::default();
    model.visit(&mut twice);
    let given = HashMap::new();
    let mut replace = Replace { find, repeated: twice.repeated, given, path: vec![], error: None };
    let model = model.map(&mut replace);
    replace.error.map_or(Ok(model), Err)
}

fn info<const D: usize>(path: &[String], param: &Param<Tensor<D>>) -> ParamInfo {
    ParamInfo { path: path.join("."), shape: param.lazy_shape().to_vec() }
}

/// The type of a parameter's numbers. A lazy one is taken for what its device makes by default.
pub(crate) fn float_of<const D: usize>(param: &Param<Tensor<D>>) -> Float {
    let dtype = match param.is_initialized() {
        true => param.base().dtype(),
        false => placeholder(param).base().dtype(),
    };
    Float::of(dtype).unwrap_or_default()
}

/// Whether a parameter is to be trained. A lazy one stays lazy.
pub(crate) fn is_trainable<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    match param.is_initialized() {
        true => param.is_require_grad(),
        false => placeholder(param).is_require_grad(),
    }
}

/// Converts the numbers of those float parameters and buffers for which `float` names a type.
pub(crate) fn convert<M: Module>(model: M, float: impl Fn(ParamId) -> Option<Float>) -> M {
    model.map(&mut Convert(float))
}

struct Convert<F>(F);

impl<F: Fn(ParamId) -> Option<Float>> ModuleMapper for Convert<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match (self.0)(param.id) {
            Some(float) if param.is_initialized() && param.base().dtype() != float.dtype() => {
                let tensor = param.base().cast(FloatDType::from(float.dtype()));
                replaced(param, tensor)
            }
            _ => param,
        }
    }
}

/// The parameters that are not to be trained. Running statistics, which are not either, are no
/// parameters: Burn does not let them require a gradient.
pub(crate) fn frozen<M: Module>(model: &M) -> HashSet<ParamId> {
    let mut candidates = Candidates::default();
    model.visit(&mut candidates);
    let Candidates { initialized, mut frozen } = candidates;
    if !initialized.is_empty() {
        let asked = model.clone().map(&mut Thaw(&initialized));
        asked.visit(&mut Thawed { initialized: &initialized, frozen: &mut frozen });
    }
    frozen
}

/// What requires no gradient.
#[derive(Default)]
struct Candidates {
    /// Parameters or running statistics.
    initialized: HashSet<ParamId>,
    /// Parameters: a running statistic is never lazy.
    frozen: HashSet<ParamId>,
}

impl ModuleVisitor for Candidates {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match param.is_initialized() {
            _ if is_trainable(param) => {}
            // What has no autodiff cannot be asked.
            true if !param.base().is_autodiff() => {}
            true => drop(self.initialized.insert(param.id)),
            false => drop(self.frozen.insert(param.id)),
        }
    }
}

/// Asks for gradients.
struct Thaw<'a>(&'a HashSet<ParamId>);

impl ModuleMapper for Thaw<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.contains(&param.id) {
            true => Param::initialized(param.id, param.base().require_grad()),
            false => param,
        }
    }
}

/// Sees which of those that were asked now have them.
struct Thawed<'a> {
    initialized: &'a HashSet<ParamId>,
    frozen: &'a mut HashSet<ParamId>,
}

impl ModuleVisitor for Thawed<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.initialized.contains(&param.id) && param.is_require_grad() {
            self.frozen.insert(param.id);
        }
    }
}

/// What Burn keeps beside a parameter's tensor. A lazy parameter stays lazy.
pub(crate) fn mapper_of<const D: usize>(param: &Param<Tensor<D>>) -> ParamMapper<Tensor<D>> {
    match param.is_initialized() {
        true => param.clone().consume().2,
        false => placeholder(param).consume().2,
    }
}

/// A lazy parameter with one number in place of its own: what Burn does when a record is loaded, and
/// the only way to everything but the numbers without drawing them.
fn placeholder<const D: usize>(param: &Param<Tensor<D>>) -> Param<Tensor<D>> {
    let one = Tensor::zeros([1; D], &param.lazy_device());
    param.clone().transform_for_load(one, param.id)
}

/// `param` with another tensor. A lazy parameter does not draw its numbers.
pub(crate) fn replaced<const D: usize>(
    param: Param<Tensor<D>>,
    tensor: Tensor<D>,
) -> Param<Tensor<D>> {
    let (id, mapper) = (param.id, mapper_of(&param));
    drop(param);
    Param::from_mapped_value(id, tensor, mapper)
}

struct Collect<F> {
    wanted: F,
    path: Vec<String>,
    named: Vec<NamedValues>,
    tensors: Vec<Tensor<1>>,
}

impl<F: Fn(ParamId) -> bool> ModuleVisitor for Collect<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let known = self.named.iter().any(|named| named.id == param.id);
        if known || !(self.wanted)(param.id) {
            return;
        }
        let info = info(&self.path, param);
        self.named.push(NamedValues { info, values: Numbers::default(), id: param.id });
        self.tensors.push(param.base().without_autodiff().reshape([-1]));
    }
}

/// Finds parameters that stand at several paths.
#[derive(Default)]
struct Repeated {
    seen: HashSet<ParamId>,
    repeated: HashSet<ParamId>,
}

impl ModuleVisitor for Repeated {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            self.repeated.insert(param.id);
        }
    }
}

struct Replace<F> {
    find: F,
    repeated: HashSet<ParamId>,
    /// Numbers of those that stand at several paths: they are asked for once, under the first.
    given: HashMap<ParamId, Option<Numbers>>,
    path: Vec<String>,
    error: Option<Error>,
}

impl<F: FnMut(ParamId, &ParamInfo) -> Option<Numbers>> ModuleMapper for Replace<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let info = info(&self.path, &param);
        let values = match self.given.get(&param.id) {
            Some(given) => given.clone(),
            None => {
                let values = (self.find)(param.id, &info);
                if self.repeated.contains(&param.id) {
                    self.given.insert(param.id, values.clone());
                }
                values
            }
        };
        let Some(values) = values else { return param };
        let expected = info.shape.iter().product();
        if values.len() != expected {
            let found = values.len();
            self.error.get_or_insert(Error::WrongLength { path: info.path, expected, found });
            return param;
        }
        let tensor = interop::tensor(values.as_slice(), param.lazy_shape(), &param.lazy_device())
            .set_require_grad(is_trainable(&param));
        replaced(param, tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{device, linear};

    #[test]
    fn a_parameter_at_two_paths_is_asked_for_once_and_written_at_both() {
        let layer = linear(2, 3, &device());
        let mut asked = vec![];
        let written = write(vec![layer.clone(), layer], |info| {
            asked.push(info.path.clone());
            Some(vec![0.5f32; info.shape.iter().product()])
        });
        let written = written.expect("numbers that fit");
        assert_eq!(asked, ["0.weight", "0.bias"]);
        for layer in written {
            assert_eq!(layer.weight.val().inner().sum().into_scalar::<f32>(), 3.0);
        }
    }
}

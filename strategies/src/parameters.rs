//! A module's float parameters and buffers by path: reading and replacing their numbers.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use pyroclast_kernels::interop;

use crate::error::Error;
use crate::layout::ParamInfo;

/// A parameter or buffer and its numbers, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedValues {
    /// Path and shape.
    pub info: ParamInfo,
    /// As many as the product of the shape.
    pub values: Vec<f32>,
    pub(crate) id: ParamId,
}

/// Reads all float parameters and buffers of `model`, each once, in one round trip to the device.
/// Initialises lazy parameters, and brings running statistics up to date.
///
/// # Errors
///
/// [`Error::Read`] if the device fails or a parameter is not `f32`.
pub fn read<M: Module>(model: &M) -> Result<Vec<NamedValues>, Error> {
    read_where(model, |_| true)
}

pub(crate) fn read_where<M: Module>(
    model: &M,
    wanted: impl Fn(ParamId) -> bool,
) -> Result<Vec<NamedValues>, Error> {
    let mut collect = Collect { wanted, path: vec![], named: vec![], tensors: vec![] };
    // A running statistic takes up its last update only when the model is put into validation.
    model.valid().visit(&mut collect);
    let Collect { mut named, tensors, .. } = collect;
    interop::read_all(tensors, |position, values| named[position].values = values.to_vec())
        .map_err(|source| Error::Read { what: "parameters".to_owned(), source })?;
    Ok(named)
}

/// Replaces the numbers of every float parameter and buffer for which `find` has some. Identity,
/// device and whether a gradient is required stay.
///
/// # Errors
///
/// [`Error::WrongLength`] if there are too few or too many numbers.
pub fn write<M: Module>(
    model: M,
    mut find: impl FnMut(&ParamInfo) -> Option<Vec<f32>>,
) -> Result<M, Error> {
    let find = |_: ParamId, info: &ParamInfo| find(info);
    write_where(model, find)
}

pub(crate) fn write_where<M: Module>(
    model: M,
    find: impl FnMut(ParamId, &ParamInfo) -> Option<Vec<f32>>,
) -> Result<M, Error> {
    let mut replace = Replace { find, path: vec![], error: None };
    let model = model.map(&mut replace);
    replace.error.map_or(Ok(model), Err)
}

fn info<const D: usize>(path: &[String], param: &Param<Tensor<D>>) -> ParamInfo {
    ParamInfo { path: path.join("."), shape: param.shape().to_vec() }
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
        self.named.push(NamedValues { info, values: vec![], id: param.id });
        self.tensors.push(param.base().without_autodiff().reshape([-1]));
    }
}

struct Replace<F> {
    find: F,
    path: Vec<String>,
    error: Option<Error>,
}

impl<F: FnMut(ParamId, &ParamInfo) -> Option<Vec<f32>>> ModuleMapper for Replace<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let info = info(&self.path, &param);
        let Some(values) = (self.find)(param.id, &info) else { return param };
        let expected = info.shape.iter().product();
        if values.len() != expected {
            let found = values.len();
            self.error.get_or_insert(Error::WrongLength { path: info.path, expected, found });
            return param;
        }
        param.map(|tensor| {
            interop::tensor(&values, tensor.shape(), &tensor.device())
                .set_require_grad(tensor.is_require_grad())
        })
    }
}

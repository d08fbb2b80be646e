//! Finding a model's parameters in a file that has names and layouts of its own.

use std::collections::BTreeSet;

use pyroclast_kernels::each;
use pyroclast_kernels::numbers::{Float, Numbers};
use pyroclast_strategies::ParamInfo;

use super::Tensors;
use crate::error::Error;

/// How a file stores a parameter.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) name: String,
    /// Whether a matrix is stored with rows and columns exchanged.
    pub(crate) transposed: bool,
}

impl Stored {
    /// Reads the numbers, in Burn's layout.
    pub(crate) fn read(&self, file: &Tensors) -> Result<Numbers, Error> {
        let numbers = file.read(&self.name)?;
        Ok(match (self.transposed, file.shape(&self.name)) {
            (true, Some(&[rows, columns])) => transpose(&numbers, rows, columns),
            _ => numbers,
        })
    }

    /// The same, those of 16 bits as `f32`, which has all of them: a model of mixed types would not run.
    pub(crate) fn read_wide(&self, file: &Tensors) -> Result<Numbers, Error> {
        let numbers = self.read(file)?;
        let is_half = numbers.float().is_half();
        Ok(if is_half { numbers.into_float(Float::F32) } else { numbers })
    }
}

/// Finds numbers for parameters and buffers, and notes what does not fit.
pub(crate) struct Lookup<'a, F> {
    file: &'a Tensors,
    stored: F,
    unused: BTreeSet<&'a str>,
    problem: Option<String>,
}

impl<'a, F: Fn(&ParamInfo) -> Stored> Lookup<'a, F> {
    pub(crate) fn new(file: &'a Tensors, stored: F) -> Self {
        Self { file, stored, unused: file.names().into_iter().collect(), problem: None }
    }

    /// Where the numbers of one parameter are.
    pub(crate) fn find(&mut self, info: &ParamInfo) -> Option<Stored> {
        let stored = (self.stored)(info);
        let name = &stored.name;
        self.unused.remove(name.as_str());
        let mut expected = info.shape.clone();
        if stored.transposed {
            expected.reverse();
        }
        let problem = match self.file.shape(name) {
            Some(shape) if *shape == expected => return Some(stored),
            Some(shape) => {
                format!("`{name}` has shape {shape:?}, but the model's has {expected:?}")
            }
            None => format!("`{name}` is missing"),
        };
        self.problem.get_or_insert(problem);
        None
    }

    /// What is wrong, if a parameter was missing or of another shape, or if something is left over.
    pub(crate) fn finish(self) -> Result<(), String> {
        let left_over = || self.unused.first().map(|name| format!("the model has no `{name}`"));
        self.problem.or_else(left_over).map_or(Ok(()), Err)
    }
}

/// A row-major matrix of `rows` rows, transposed.
pub(crate) fn transpose(values: &Numbers, rows: usize, columns: usize) -> Numbers {
    each!(Numbers, values, values => Numbers, {
        (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
    })
}

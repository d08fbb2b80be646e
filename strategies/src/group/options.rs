//! Settings of a group.

use std::time::Duration;

use crate::collectives::{Algorithm, CostModel};

/// Settings of a group. All ranks must have the same.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// How long a rank waits for a peer within one collective. 10 minutes by default.
    pub timeout: Duration,
    /// Largest segment in bytes. By default [`CostModel::segment_bytes`] for the collective at hand.
    pub segment_bytes: Option<usize>,
    /// How all-reduces are done. By default whichever is cheaper for their size.
    pub algorithm: Algorithm,
    /// If the ranks are a mesh whose rows are better connected than its columns, or too many for one
    /// ring: the ranks in a row, that is the length of its shard axis. Rank `r` stands in row
    /// `r / mesh_shard`. [`Algorithm::Auto`] then considers [`Algorithm::Hierarchical`]. Must divide
    /// the world. `None` by default.
    pub mesh_shard: Option<usize>,
    /// What messages cost, by which algorithms and segments are chosen.
    pub costs: CostModel,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            segment_bytes: None,
            algorithm: Algorithm::Auto,
            mesh_shard: None,
            costs: CostModel::default(),
        }
    }
}

impl GroupOptions {
    /// The settings of a part of the group, which is no mesh.
    pub(super) fn for_subgroup(&self) -> Self {
        let algorithm = match self.algorithm {
            Algorithm::Hierarchical { .. } => Algorithm::Auto,
            other => other,
        };
        Self { algorithm, mesh_shard: None, ..self.clone() }
    }

    /// Why no group of `world` ranks can have these settings, if none can.
    pub(super) fn objection(&self, world: usize) -> Option<String> {
        let forced = match self.algorithm {
            Algorithm::Hierarchical { shard } => Some(shard),
            _ => None,
        };
        [("mesh_shard", self.mesh_shard), ("Algorithm::Hierarchical", forced)]
            .into_iter()
            .filter_map(|(setting, row)| Some((setting, row?)))
            .find(|(_, row)| !world.is_multiple_of(*row))
            .map(|(setting, row)| format!("{setting}: rows of {row} do not divide {world} ranks"))
    }
}

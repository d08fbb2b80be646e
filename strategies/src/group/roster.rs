//! Who is in a group.

use super::GroupOptions;
use crate::collectives::ReduceOp;
use crate::description::{Description, GroupId};

/// The members of a group, which of them this rank is, and how they work together.
#[derive(Debug)]
pub(super) struct Roster {
    pub(super) id: GroupId,
    /// This rank, counted within the group.
    pub(super) rank: usize,
    /// By rank within the group: the rank within the whole job. Ascending.
    pub(super) members: Vec<usize>,
    pub(super) options: GroupOptions,
}

impl Roster {
    pub(super) fn world(&self) -> usize {
        self.members.len()
    }

    /// This rank, counted within the whole job.
    pub(super) fn global_rank(&self) -> usize {
        self.members[self.rank]
    }

    /// Why the group cannot run a collective, if it cannot.
    pub(super) fn objection(&self, collective: &Description) -> Option<String> {
        let world = self.world();
        let Description { operation, dtype, .. } = collective;
        if let Some(root) = operation.root().filter(|root| *root >= world) {
            return Some(format!("root {root} is not one of the group's {world} ranks"));
        }
        if operation.reduce_op() == Some(ReduceOp::Mean) && !dtype.is_float() {
            return Some(format!("a mean of {dtype} has no exact value; use sum"));
        }
        self.options.objection(world)
    }

    /// Why `peer` is nobody to send to or receive from, if it is not.
    pub(super) fn peer_objection(&self, peer: usize) -> Option<String> {
        let world = self.world();
        if peer >= world {
            return Some(format!("peer {peer} is not one of the group's {world} ranks"));
        }
        (peer == self.rank).then(|| format!("peer {peer} of {world} ranks is this rank itself"))
    }
}

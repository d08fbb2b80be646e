//! Groups within a group.

use std::sync::{Arc, Mutex, PoisonError};

use super::roster::Roster;
use super::{Counts, ProcessGroup, next};
use crate::description::GroupId;
use crate::error::Error;

/// A rank's two groups in a mesh of `replicate` rows of `shard` ranks.
#[derive(Debug)]
pub struct Mesh {
    /// The rank's column: the ranks that hold the same shard, one of each row.
    pub replicate: ProcessGroup,
    /// The rank's row: the ranks that hold one replica between them.
    pub shard: ProcessGroup,
}

impl ProcessGroup {
    /// The group of some of this group's ranks, given as ranks of this group in ascending order.
    /// `None` on ranks that are not among them.
    ///
    /// Every rank of this group calls it, in the same order as other calls of it. The subgroup runs
    /// on this group's communication thread and fails together with it, so ranks that share several
    /// groups must launch the collectives of all of them in one order. It is no mesh:
    /// [`Algorithm::Hierarchical`] becomes [`Algorithm::Auto`].
    ///
    /// [`Algorithm::Hierarchical`]: crate::Algorithm::Hierarchical
    /// [`Algorithm::Auto`]: crate::Algorithm::Auto
    ///
    /// # Errors
    ///
    /// [`Error::BadMembers`] if there are none, if they are not ascending, or not of this group.
    pub fn subgroup(&self, members: &[usize]) -> Result<Option<Self>, Error> {
        let world = self.world();
        let are_ascending = members.is_sorted_by(|a, b| a < b);
        if !are_ascending || members.last().is_none_or(|last| *last >= world) {
            let (rank, members) = (self.roster.global_rank(), members.to_vec());
            return Err(Error::BadMembers { rank, members, world });
        }
        Ok(self.join(members))
    }

    /// This rank's groups in a mesh: rank `r` stands in row `r / shard`, column `r % shard`.
    ///
    /// Every rank of this group calls it, in the same order as it calls [`Self::subgroup`].
    ///
    /// # Errors
    ///
    /// [`Error::BadMesh`] unless the mesh has as many places as the group has ranks.
    pub fn mesh(&self, replicate: usize, shard: usize) -> Result<Mesh, Error> {
        let (rank, world) = (self.rank(), self.world());
        let bad = || Error::BadMesh { rank: self.roster.global_rank(), replicate, shard, world };
        if replicate.checked_mul(shard) != Some(world) {
            return Err(bad());
        }
        let (row, column) = (rank / shard, rank % shard);
        // All rows are made at once, and all columns: what tells them apart is their members.
        let row: Vec<usize> = (row * shard..(row + 1) * shard).collect();
        let column: Vec<usize> = (column..world).step_by(shard).collect();
        let (shard, replicate) = (self.join(&row), self.join(&column));
        shard.zip(replicate).map(|(shard, replicate)| Mesh { replicate, shard }).ok_or_else(bad)
    }

    /// Counts a subgroup, and makes this rank's end of it if it has one.
    fn join(&self, members: &[usize]) -> Option<Self> {
        let made_before =
            next(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner).subgroups);
        let rank = members.iter().position(|member| *member == self.rank())?;
        let roster = Roster {
            id: subgroup_id(self.roster.id, made_before, members),
            rank,
            members: members.iter().map(|member| self.roster.members[*member]).collect(),
            options: self.roster.options.for_subgroup(),
        };
        let counts = Mutex::new(Counts::default());
        Some(Self { roster: Arc::new(roster), counts, thread: Arc::clone(&self.thread) })
    }
}

/// The same on every rank that made the same subgroups of the same group; never that of the world.
fn subgroup_id(parent: GroupId, made_before: u64, members: &[usize]) -> GroupId {
    let mut hash = blake3::Hasher::new();
    let members = members.iter().map(|member| *member as u64);
    for word in [parent.0, made_before].into_iter().chain(members) {
        hash.update(&word.to_le_bytes());
    }
    let mut word = [0; 8];
    hash.finalize_xof().fill(&mut word);
    GroupId(u64::from_le_bytes(word).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_differ_in_anything_have_different_ids() {
        let members: [&[usize]; 5] = [&[0], &[1], &[0, 1], &[0, 1, 2], &[0, 2]];
        let mut ids = vec![GroupId::WORLD];
        for parent in [GroupId::WORLD, GroupId(1), GroupId(u64::MAX)] {
            for made_before in 0..3 {
                ids.extend(members.map(|members| subgroup_id(parent, made_before, members)));
            }
        }
        let distinct: std::collections::HashSet<GroupId> = ids.iter().copied().collect();
        assert_eq!(distinct.len(), ids.len());
        assert_eq!(ids[1], subgroup_id(GroupId::WORLD, 0, &[0]), "the same on every rank");
    }
}

//! A store for ranks that are threads of one process.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{FAILURE, Store};
use crate::error::Error;

/// Values in memory. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl MemoryStore {
    fn values(&self) -> MutexGuard<'_, HashMap<String, Vec<u8>>> {
        self.0.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.values().contains_key(name)
    }
}

impl Store for MemoryStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<(), Error> {
        super::check(name, value)?;
        let mut values = self.values();
        if values.contains_key(name) {
            return Err(super::taken(name));
        }
        values.insert(name.to_owned(), value.to_vec());
        self.0.changed.notify_all();
        Ok(())
    }

    fn failure(&self) -> Result<Option<String>, Error> {
        Ok(self.values().get(FAILURE).map(|reason| super::text(reason)))
    }

    fn get(&self, name: &str, deadline: Instant) -> Result<Vec<u8>, Error> {
        let started = Instant::now();
        let mut values = self.values();
        loop {
            if let Some(value) = values.get(name) {
                return Ok(value.clone());
            }
            if let Some(reason) = values.get(FAILURE) {
                return Err(super::failed(reason));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(super::absent(name, started.elapsed()));
            }
            let waited = self.0.changed.wait_timeout(values, left);
            values = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

//! A pool as its handles know it: the books, and the process they belong to.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use kvalloc_core::{error::Error, ledger::ROOT, plan::SpecDigest, pool::Pool as Core, word::TenantId};
use pyo3::{prelude::*, types::PyString};

use crate::{
    args,
    errors::{ClosedError, InvalidArgument, UnknownTenant, WrongPool, raised},
    tenant::Tenant,
};

/// How often this process is a fork of another: pools of the parent are not the child's.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Called in the child after a fork.
#[pyfunction]
pub(crate) fn _forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A pool and the process it belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub(crate) core: Arc<Core>,
    /// `KVSpec.digest`.
    pub(crate) spec: SpecDigest,
    born: u32,
}

impl Owner {
    pub(crate) fn new(core: Core, spec: SpecDigest) -> Self {
        Self { core: Arc::new(core), spec, born: FORKS.load(Ordering::Relaxed) }
    }

    /// The books, unless this process is a fork of the one that made them.
    #[inline]
    pub(crate) fn live(&self) -> PyResult<&Arc<Core>> {
        if self.born == FORKS.load(Ordering::Relaxed) {
            Ok(&self.core)
        } else {
            Err(ClosedError::new_err(
                "this process is a fork of the one that made the pool; make a pool of its own here \
                 (or start workers with the 'spawn' method)",
            ))
        }
    }

    pub(crate) fn error(&self, py: Python<'_>, error: &Error) -> PyErr {
        raised(py, &self.core, error)
    }

    /// A tenant, or None: all of them.
    pub(crate) fn level(&self, value: &Bound<'_, PyAny>) -> PyResult<TenantId> {
        if value.is_none() { Ok(ROOT) } else { self.tenant(value, None) }
    }

    /// A tenant given by handle or by name.
    pub(crate) fn tenant(&self, value: &Bound<'_, PyAny>, default: Option<TenantId>) -> PyResult<TenantId> {
        if let Ok(tenant) = value.cast::<Tenant>() {
            let tenant = tenant.get();
            if !Arc::ptr_eq(&tenant.owner.core, &self.core) {
                return Err(WrongPool::new_err(format!("tenant {:?} belongs to another pool", tenant.name)));
            }
            tenant.live()?;
            return Ok(tenant.id);
        }
        let Ok(name) = value.cast::<PyString>() else {
            return Err(InvalidArgument::new_err(format!(
                "a tenant is a Tenant or its name, not {}",
                args::shown(value)
            )));
        };
        let id = name.to_str().ok().and_then(|name| self.core.ledger().find(name));
        id.or(default).ok_or_else(|| {
            let known: Vec<_> = self.core.ledger().ids().filter_map(|t| self.core.ledger().name(t)).take(8).collect();
            UnknownTenant::new_err(format!(
                "there is no tenant {}; known are {known:?}. Make it with pool.tenant(...), or give the pool a default_tenant",
                args::shown(value)
            ))
        })
    }
}

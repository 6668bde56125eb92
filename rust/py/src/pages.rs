//! `kvalloc.Pages`: the lower face.

use std::sync::Arc;

use kvalloc_core::{
    face::Pages as Core,
    hash::CallerKey,
    pool::Pool as CorePool,
    word::{GroupId, PageRef, TenantId},
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyString},
};

use crate::{args, arrays, errors::InvalidArgument, pool::Owner};

/// Pages in batches, for engines with tables of their own. References are uint64; `MISS` stands for none.
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Pages {
    owner: Owner,
    core: Core,
    default: Option<TenantId>,
}

/// What a lookup answers where there is nothing: no page has it.
const MISS: u64 = u64::MAX;

enum Key {
    Bytes(Vec<u8>),
    Int(i128),
}

impl Key {
    fn as_core(&self) -> CallerKey<'_> {
        match self {
            Self::Bytes(bytes) => CallerKey::Bytes(bytes),
            Self::Int(int) => CallerKey::Int(*int),
        }
    }
}

/// Keys are bytes or ints: a list of them, or an array of ints.
fn keys(value: &Bound<'_, PyAny>) -> PyResult<Vec<Key>> {
    if value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>() {
        return Err(InvalidArgument::new_err("keys are a list of bytes or ints, or an array of ints"));
    }
    let items = value.try_iter().map_err(|_| {
        InvalidArgument::new_err(format!("keys are a list of bytes or ints, not {}", args::shown(value)))
    })?;
    items
        .enumerate()
        .map(|(at, item)| {
            let item = item?;
            if let Ok(bytes) = item.cast::<PyBytes>() {
                return Ok(Key::Bytes(bytes.as_bytes().to_vec()));
            }
            args::integer(&item).map(Key::Int).ok_or_else(|| {
                InvalidArgument::new_err(format!(
                    "key {} at position {at} is neither bytes nor a 128-bit int",
                    args::shown(&item)
                ))
            })
        })
        .collect()
}

impl Pages {
    pub(crate) fn new(owner: &Owner, pool: &Arc<CorePool>, default: Option<TenantId>) -> Self {
        Self { owner: owner.clone(), core: Core::new(pool), default }
    }

    fn tenant(&self, value: &Bound<'_, PyAny>) -> PyResult<TenantId> {
        self.owner.live()?;
        self.owner.tenant(value, self.default)
    }
}

#[pymethods]
impl Pages {
    /// Take `n` pages for a tenant, all or none: references, uint64 [n].
    #[pyo3(signature = (tenant, n, *, group = 0))]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        tenant: &Bound<'py, PyAny>,
        n: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tenant = self.tenant(tenant)?;
        let n = args::number(n, "n", 0, u64::from(u32::MAX))? as usize;
        let pages = self.core.allocate(tenant, GroupId(group), n).map_err(|e| self.owner.error(py, &e))?;
        references(py, &pages)
    }

    /// Where pages lie: frames, int32.
    fn frames<'py>(&self, py: Python<'py>, pages: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.owner.live()?;
        let frames = self.core.frames(&args::references(pages)?).map_err(|e| self.owner.error(py, &e))?;
        arrays::int32(py, &frames.iter().map(|f| f.0 as i32).collect::<Vec<_>>())
    }

    /// Make held pages, written to the end, findable under the caller's keys: which of them are.
    #[pyo3(signature = (tenant, pages, keys, *, group = 0))]
    fn publish(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        keys: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Vec<bool>> {
        let tenant = self.tenant(tenant)?;
        let (pages, keys) = (args::references(pages)?, self::keys(keys)?);
        let keys: Vec<_> = keys.iter().map(Key::as_core).collect();
        self.core.publish(tenant, GroupId(group), &pages, &keys).map_err(|e| self.owner.error(py, &e))
    }

    /// Look keys up and reference what is there, up to the first that is not: references, uint64.
    #[pyo3(signature = (tenant, keys, *, group = 0))]
    fn lookup<'py>(
        &self,
        py: Python<'py>,
        tenant: &Bound<'py, PyAny>,
        keys: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tenant = self.tenant(tenant)?;
        let keys = self::keys(keys)?;
        let keys: Vec<_> = keys.iter().map(Key::as_core).collect();
        let found = self.core.lookup(tenant, GroupId(group), &keys).map_err(|e| self.owner.error(py, &e))?;
        references(py, &found)
    }

    /// Look keys up without a reference: one answer each, `MISS` where there is nothing.
    #[pyo3(signature = (tenant, keys, *, group = 0))]
    fn find<'py>(
        &self,
        py: Python<'py>,
        tenant: &Bound<'py, PyAny>,
        keys: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tenant = self.tenant(tenant)?;
        let keys = self::keys(keys)?;
        let keys: Vec<_> = keys.iter().map(Key::as_core).collect();
        let found =
            self.core.find_all(tenant, GroupId(group), &keys).map_err(|e| self.owner.error(py, &e))?;
        arrays::uint64(py, &found.iter().map(|p| p.map_or(MISS, PageRef::to_bits)).collect::<Vec<_>>())
    }

    /// Reference pages that were found: which of them now are. A stale reference is an answer, not an error.
    fn share(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        self.owner.live()?;
        let pages = args::references(pages)?;
        let asked: Vec<_> = pages.iter().copied().filter(|p| p.to_bits() != MISS).collect();
        let mut shared = self.core.share(&asked).map_err(|e| self.owner.error(py, &e))?.into_iter();
        Ok(pages.iter().map(|p| p.to_bits() != MISS && shared.next().unwrap_or(false)).collect())
    }

    /// Drop one reference on each page, in this order: later pages of a prefix first.
    fn release(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        self.owner.live()?;
        self.core.release(&args::references(pages)?).map_err(|e| self.owner.error(py, &e))
    }

    /// What `find` answers where there is nothing.
    #[classattr]
    const MISS: u64 = MISS;

    fn __repr__(&self) -> &'static str {
        "<kvalloc.Pages>"
    }
}

fn references<'py>(py: Python<'py>, pages: &[PageRef]) -> PyResult<Bound<'py, PyAny>> {
    arrays::uint64(py, &pages.iter().map(|p| p.to_bits()).collect::<Vec<_>>())
}

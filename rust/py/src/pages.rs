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

use crate::{args, arrays, errors::InvalidArgument, owner::Owner};

/// The lower face: pages in batches, for engines that keep their own tables. From ``pool.pages``.
///
/// The same books and the same rules as for sequences. A reference to a page is its id and its generation in 64 bits, uint64
/// in arrays; when the page is freed its generation changes, so that a reference kept too long is stale and never somebody
/// else's page. ``MISS`` (2**64 - 1) stands for none. Every array or sequence of ints is taken for references; keys are a list
/// of bytes (1 to 64 each) or of 128-bit ints, or an array of ints, one for each page, and are found only in the scope of the
/// tenant and layer group they were published under.
///
/// Notes
/// -----
/// May be used from any number of threads. Each ``pool.pages`` has its own place in the sharded counters: threads that keep
/// their own one disturb each other less.
///
/// Examples
/// --------
/// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
/// >>> acme = pool.tenant("acme")
/// >>> pages = pool.pages
/// >>> mine = pages.allocate(acme, 3)
/// >>> pages.publish(acme, mine[:2], [b"first", b"second"])  # once they are written
/// [True, True]
/// >>> pages.release(mine[::-1])  # later pages of a prefix first
/// >>> found = pages.find(acme, [b"first", b"second", b"third"])
/// >>> (found == pages.MISS).tolist(), pages.share(found)
/// ([False, False, True], [True, True, False])
/// >>> acme.held == 2 * pool.spec.page_bytes()
/// True
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
    args::collected(items, "keys", args::MOST_PAGES, |at, item| {
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
    /// Take pages for a tenant: all or none.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     Who pays.
    /// n : int
    ///     How many.
    /// group : int, optional
    ///     The layer group: it fixes the bytes of a page.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     uint64 [n]. References, one on each page, which are the caller's to `release`.
    ///
    /// Raises
    /// ------
    /// OutOfPages
    ///     There is no room; ``asked`` and ``room`` are bytes. Cached pages are evicted before.
    /// InvalidArgument, UnknownTenant, ClosedError
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

    /// Where pages lie.
    ///
    /// Parameters
    /// ----------
    /// pages : uint64 [n]
    ///     References.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     int32 [n]. Frames, as a block table has them.
    ///
    /// Raises
    /// ------
    /// StaleReference
    ///     Some are of an earlier life of their page: ``count`` of them, the ``first``.
    /// InvalidArgument
    ///     A number that is no page of the pool.
    fn frames<'py>(&self, py: Python<'py>, pages: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.owner.live()?;
        let frames = self.core.frames(&args::references(pages)?).map_err(|e| self.owner.error(py, &e))?;
        arrays::int32(py, &frames.iter().map(|f| f.0 as i32).collect::<Vec<_>>())
    }

    /// Make pages that the caller holds, and has written to the end, findable under its keys.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     The scope: whose pages they are, and under whom they are found.
    /// pages : uint64 [n]
    ///     References that the caller holds.
    /// keys : sequence of bytes or int
    ///     One for each page.
    /// group : int, optional
    ///     The layer group they were allocated for.
    ///
    /// Returns
    /// -------
    /// list of bool
    ///     Which of them can be found now: not one that is published already, or that the index has no room for.
    ///
    /// Raises
    /// ------
    /// StaleReference
    ///     The caller does not hold all of them: none was published.
    /// InvalidArgument
    ///     Not as many keys as pages; empty or long keys; pages of another tenant or group.
    /// UnknownTenant, ClosedError
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

    /// Look keys up and reference what is there, in one step, up to the first that is not.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     The scope.
    /// keys : sequence of bytes or int
    ///     In the order of the prefix.
    /// group : int, optional
    ///     The layer group.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     uint64 [hits]. References that the caller now holds; none of them can be evicted.
    ///
    /// Raises
    /// ------
    /// InvalidArgument, UnknownTenant, ClosedError
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

    /// Look keys up without a reference.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     The scope.
    /// keys : sequence of bytes or int
    ///     In any order.
    /// group : int, optional
    ///     The layer group.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     uint64 [len(keys)]. What is there, ``MISS`` where there is nothing. It may be gone at once; `share` tells.
    ///
    /// Raises
    /// ------
    /// InvalidArgument, UnknownTenant, ClosedError
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

    /// Reference pages that were found.
    ///
    /// Parameters
    /// ----------
    /// pages : uint64 [n]
    ///     What `find` gave, or references known otherwise.
    ///
    /// Returns
    /// -------
    /// list of bool
    ///     Which of them the caller now holds. A stale reference, and ``MISS``, is an answer and not an error; so is a cached page
    ///     that may not be held again, because that would reach into somebody's reserve.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     A number that is no page of the pool.
    fn share(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        self.owner.live()?;
        let pages = args::references(pages)?;
        let asked: Vec<_> = pages.iter().copied().filter(|p| p.to_bits() != MISS).collect();
        let mut shared = self.core.share(&asked).map_err(|e| self.owner.error(py, &e))?.into_iter();
        Ok(pages.iter().map(|p| p.to_bits() != MISS && shared.next().unwrap_or(false)).collect())
    }

    /// Drop one reference on each page, in this order: later pages of a prefix first.
    ///
    /// Parameters
    /// ----------
    /// pages : uint64 [n]
    ///     References that the caller holds. A page may be named as often as it is held.
    ///
    /// Raises
    /// ------
    /// StaleReference
    ///     Some are not held so often, or are of an earlier life: nothing was released.
    /// InvalidArgument
    ///     A number that is no page of the pool.
    ///
    /// Notes
    /// -----
    /// Pages without a reference are cached if they are published, pinned if a pin keeps them, and free otherwise. Children leave
    /// before parents: in another order the pages are released as well, and those in front are evicted a little later.
    fn release(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        self.owner.live()?;
        self.core.release(&args::references(pages)?).map_err(|e| self.owner.error(py, &e))
    }

    /// int : What `find` answers where there is nothing, 2**64 - 1.
    #[classattr]
    const MISS: u64 = MISS;

    fn __repr__(&self) -> &'static str {
        "<kvalloc.Pages>"
    }
}

fn references<'py>(py: Python<'py>, pages: &[PageRef]) -> PyResult<Bound<'py, PyAny>> {
    arrays::uint64(py, &pages.iter().map(|p| p.to_bits()).collect::<Vec<_>>())
}

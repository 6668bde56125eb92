//! `kvalloc.Stats`.

use std::collections::BTreeMap;

use kvalloc_core::{pool::Pool as Core, stats::Counter};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};

use crate::args;

/// Counters of what happened since the pool was made: attributes, and a mapping from name to count. From `Pool.stats`.
///
/// Counters only grow. Within one snapshot no effect is ahead of its cause: hits are never more than queries.
///
/// Examples
/// --------
/// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
/// >>> page = pool.pages.allocate(pool.tenant("acme"), 2)
/// >>> stats = pool.stats()
/// >>> stats.allocated_pages, stats["allocated_pages"], dict(stats)["refused_limit"]
/// (2, 2, 0)
/// >>> kvalloc.Stats.describe()["allocated_pages"]
/// ('pages', 'Pages given out, not counting hits.')
#[pyclass(frozen, mapping, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Stats {
    counts: BTreeMap<&'static str, u64>,
    hit_rate: Option<f64>,
}

impl Stats {
    fn of(&self, counter: Counter) -> u64 {
        self.counts.get(counter.name()).copied().unwrap_or(0)
    }

    pub(crate) fn new(core: &Core) -> Self {
        let snapshot = core.stats();
        let counts = snapshot.iter().map(|(counter, value)| (counter.name(), value)).collect();
        Self { counts, hit_rate: snapshot.hit_rate() }
    }
}

/// Every counter as an attribute too: Python's methods have to stand in one block.
macro_rules! stats {
    ($($name:ident, $counter:ident, $help:literal;)+) => {
        #[pymethods]
        impl Stats {
            $(
                #[doc = $help]
                #[getter]
                fn $name(&self) -> u64 {
                    self.of(Counter::$counter)
                }
            )+

            /// float or None : Tokens found of tokens looked up, 0 to 1; None before the first lookup.
            #[getter]
            fn hit_rate(&self) -> Option<f64> {
                self.hit_rate
            }

            /// int : Cached pages taken back, for anybody (pages).
            #[getter]
            fn evictions(&self) -> u64 {
                self.of(Counter::EvictedOwn) + self.of(Counter::EvictedForeign)
            }

            /// Say what each counter counts.
            ///
            /// Returns
            /// -------
            /// dict of str to (str, str)
            ///     Its unit (``"tokens"``, ``"pages"`` or ``"times"``) and a sentence.
            #[staticmethod]
            fn describe(py: Python<'_>) -> PyResult<Py<PyDict>> {
                let dict = PyDict::new(py);
                for counter in Counter::ALL {
                    dict.set_item(counter.name(), (counter.unit().name(), counter.help()))?;
                }
                Ok(dict.unbind())
            }

            /// Return the counters.
            ///
            /// Returns
            /// -------
            /// dict of str to int
            fn as_dict(&self) -> BTreeMap<&'static str, u64> {
                self.counts.clone()
            }

            /// Return the names.
            ///
            /// Returns
            /// -------
            /// list of str
            fn keys(&self) -> Vec<&'static str> {
                self.counts.keys().copied().collect()
            }

            fn __getitem__(&self, #[pyo3(from_py_with = args::text)] name: String) -> PyResult<u64> {
                self.counts.get(name.as_str()).copied().ok_or_else(|| {
                    pyo3::exceptions::PyKeyError::new_err(format!("{name:?}; known are {:?}", self.keys()))
                })
            }

            fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                Ok(PyList::new(py, self.counts.keys())?.try_iter()?.into_any())
            }

            fn __len__(&self) -> usize {
                self.counts.len()
            }

            fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
                args::text(name).is_ok_and(|name| self.counts.contains_key(name.as_str()))
            }

            fn __repr__(&self) -> String {
                let shown: Vec<_> =
                    self.counts.iter().filter(|c| *c.1 > 0).map(|(k, v)| format!("{k}={v}")).collect();
                format!("<kvalloc.Stats {}>", shown.join(" "))
            }
        }
    };
}

stats! {
    steps, Steps, "Batch steps that were committed (times).";
    written_tokens, TokensWritten, "Tokens whose KV was written, by commit (tokens).";
    allocated_pages, PagesAllocated, "Pages given out, not counting hits (pages).";
    released_pages, PagesReleased, "Pages that became free again (pages).";
    published_pages, PagesPublished, "Full pages that were put into the prefix index (pages).";
    query_tokens, QueryTokens, "Prompt tokens looked up in the prefix index, once for each sequence that ran (tokens).";
    hit_tokens, HitTokens, "Prompt tokens found in the prefix index, of those in query_tokens (tokens).";
    resumed_query_tokens, ResumedQueryTokens, "Tokens looked up again because their sequence was preempted (tokens).";
    resumed_hit_tokens, ResumedHitTokens, "Tokens found again after a preemption, of those in resumed_query_tokens (tokens).";
    copied_pages, CopiesOnWrite, "Shared partial pages copied before a write (pages).";
    evicted_own_pages, EvictedOwn, "Cached pages taken back for their own tenant (pages).";
    evicted_foreign_pages, EvictedForeign, "Cached pages taken back for another tenant (pages).";
    publish_refused_pages, PublishRefused, "Full pages that stayed out of the prefix index because it had no room (pages).";
    stopped_lookups, LookupsStopped, "Lookups that ended at a cached page because reviving it would have reached into a reserve or over a limit (times).";
    refused_limit, RefusedLimit, "Allocations refused at a tenant's limit (times).";
    refused_claim, RefusedClaim, "Allocations refused because they would have reached into somebody's reserve (times).";
    refused_frames, RefusedFrames, "Allocations refused because nothing was free or could be taken back (times).";
    refused_fragmented, RefusedFragmented, "Allocations refused although enough bytes were free: they lay in extents of other page classes (times).";
    double_frees, DoubleFrees, "Releases of what was not held: refused, nothing changed (times).";
    stale_references, StaleReferences, "Uses of a page by a reference to an earlier life of it: refused, nothing changed (times).";
    opened_plans, PlansOpened, "Plans that took leases and destination frames (times).";
    committed_plans, PlansCommitted, "Plans of which every move was committed (times).";
    aborted_plans, PlansAborted, "Plans that were given up (times).";
    expired_plans, PlansExpired, "Plans whose time was over before somebody ended them (times).";
    late_reports, LateReports, "Commits and aborts of a plan that had ended: ignored (times).";
    moved_pages, PagesMoved, "Pages that plans moved to another frame (pages).";
    cut_pages, PagesCut, "Pages that contexts lost for good (pages).";
    dropped_moves, MovesDropped, "Pages that a committed plan left where they were (pages).";
    written_events, EventsWritten, "KV events that got a sequence number (times).";
    dropped_events, EventsDropped, "KV events that no reader will get, because the ring was full or their writer stopped (times).";
}

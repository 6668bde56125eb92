//! `kvalloc.Plan`: what getting memory back will do, and how it ends.

use std::sync::{Arc, Weak};

use kvalloc_core::{
    error::{Bytes, Error},
    ledger::ROOT,
    plan::{Fault, Move, Plan as Core, Progress as CoreProgress, Rungs, SpecDigest, Victim as CoreVictim},
    sequence::Sequence as CoreSequence,
    word::{TenantId, plan::State},
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::{
    args, arrays,
    errors::{self, InvalidArgument, name_of},
    owner::Owner,
    pool::Pool,
    sequence::Sequence,
};

/// What getting memory back will do, before anything moves: plain data, and the leases that keep it possible.
///
/// Building a plan takes everything it needs: each page that moves is leased, each place it moves to is claimed and charged.
/// Then the bytes are copied (``store.execute(plan)``), here or on every rank of a group that got the plan as bytes, and the
/// plan is committed; or it is aborted, or its time is over, and everything is as before. It ends once: whoever comes later,
/// or twice, gets a `PlanError` and changes nothing.
///
/// A context manager: leaving the block commits what is left, an exception aborts it. A plan that ended inside the block is
/// left alone, unless its time was over: that raises. Dropping the object ends nothing: the clock does.
///
/// Examples
/// --------
/// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB", "64MiB")
/// >>> acme = pool.tenant("acme")
/// >>> batch = pool.batch(max_sequences=1, max_tokens=512)
/// >>> seq = pool.open(acme, range(64))
/// >>> row, out = batch.add(seq), batch.step()
/// >>> batch.commit([7])
/// >>> with pool.suspend(seq, mode="swap", batch=batch) as plan:
/// ...     plan.moves.shape, plan.bytes == acme.held  # store.execute(plan) copies the bytes
/// ((4, 6), True)
/// >>> plan.state, acme.held, seq.state
/// ('committed', 0, 'suspended')
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Plan {
    /// None: read from bytes, where no pool is.
    owner: Option<Owner>,
    core: Core,
    spec: SpecDigest,
    sequences: Vec<Weak<CoreSequence>>,
}

/// What becomes of a sequence.
///
/// Attributes
/// ----------
/// number : int
///     Its number: ``Sequence.number``.
/// sequence : Sequence or None
///     Its handle; None where the plan was read from bytes, or it has gone.
/// tenant : str
///     Whose it is.
/// fate : str
///     "swapped", "recomputed", "resumed", "frozen", or "trimmed": it goes on, without old pages.
/// bytes : int
///     Bytes that come back by it.
/// tokens : int
///     Tokens that have to be computed again, or are lost.
/// row, moved_row : int or None
///     The row it was taken out of, and the one that moved into its place then: as `Batch.remove`, one victim after the other.
#[pyclass(frozen, get_all, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Victim {
    number: u64,
    sequence: Option<Py<Sequence>>,
    tenant: String,
    fate: &'static str,
    bytes: u64,
    tokens: u32,
    row: Option<u32>,
    moved_row: Option<u32>,
}

#[pymethods]
impl Victim {
    fn __repr__(&self) -> String {
        let Self { number, tenant, fate, bytes, tokens, .. } = self;
        format!("<kvalloc.Victim {number} of {tenant:?}, {fate}, {}, {tokens} tokens>", Bytes(*bytes))
    }
}

/// How far a commit has come.
///
/// Attributes
/// ----------
/// moved : int
///     Moves that this call made. A page that is cut is one too, behind all others.
/// dropped : int
///     Moves that this call gave up: the page was gone, or somebody has begun to write into it.
/// left : int
///     Moves that nobody has taken yet; 0: the plan has ended.
#[pyclass(frozen, get_all, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Progress {
    moved: usize,
    dropped: usize,
    left: usize,
}

#[pymethods]
impl Progress {
    fn __repr__(&self) -> String {
        let Self { moved, dropped, left } = self;
        format!("Progress(moved={moved}, dropped={dropped}, left={left})")
    }
}

impl Plan {
    pub(crate) fn new(owner: &Owner, core: Core, sequences: &[Arc<CoreSequence>]) -> Self {
        let sequences = sequences.iter().map(Arc::downgrade).collect();
        Self { owner: Some(owner.clone()), core, spec: owner.spec, sequences }
    }

    /// The pool's books.
    fn owner(&self) -> PyResult<&Owner> {
        let Some(owner) = &self.owner else {
            return Err(errors::PlanError::new_err(
                "this plan was read from bytes: it can be carried out here, and is committed where its pool is",
            ));
        };
        owner.live()?;
        Ok(owner)
    }

    fn error(&self, py: Python<'_>, error: &Error) -> PyErr {
        match &self.owner {
            Some(owner) => owner.error(py, error),
            None => errors::PlanError::new_err(error.to_string()),
        }
    }

    fn name(&self, tenant: TenantId) -> String {
        match &self.owner {
            Some(owner) => name_of(&owner.core, tenant),
            None => tenant.to_string(),
        }
    }

    fn now(&self) -> Result<State, Error> {
        match &self.owner {
            Some(owner) => owner.core.plan_state(&self.core),
            None => Ok(State::Open),
        }
    }

    fn shown(&self) -> &'static str {
        match &self.owner {
            _ if self.core.is_dry() => "dry",
            // The books' locks are the parent's, and may be held for ever here.
            Some(owner) if owner.live().is_err() => "ended",
            _ => self.now().map_or("ended", State::name),
        }
    }
}

/// int64 [moves, 6], of what is copied: pages that are cut go nowhere.
fn rows<'py>(py: Python<'py>, moves: &[Move]) -> PyResult<Bound<'py, PyAny>> {
    let moves = moves.iter().filter(|m| !m.to.is_gone());
    let ends = |m: &Move| [m.from, m.to];
    let place = |at: kvalloc_core::word::page::Location| {
        let tier = at.tier().map_or(0, |tier| tier as i64);
        [tier, at.class().0.into(), at.frame().0.into()]
    };
    let numbers: Vec<i64> = moves.flat_map(ends).flat_map(place).collect();
    arrays::int64_rows(py, &numbers, 6)
}

#[pymethods]
impl Plan {
    /// int : Its number in the pool, never used twice; 0 for a dry run.
    #[getter]
    fn id(&self) -> u64 {
        self.core.id.0
    }

    /// bytes : `KVSpec.digest` of its pool. A store of another spec refuses it.
    #[getter]
    fn spec_digest(&self, py: Python<'_>) -> Py<PyBytes> {
        PyBytes::new(py, &self.spec).unbind()
    }

    /// str : What it is for: "reclaim", "rebalance", "top_up", "suspend", "resume", "offload", "prefetch", "compress",
    /// "give_back" or "cut".
    #[getter]
    fn kind(&self) -> &'static str {
        self.core.kind.name()
    }

    /// str or None : Whose bytes; None: nobody's in particular.
    #[getter]
    fn tenant(&self) -> Option<String> {
        (self.core.tenant != ROOT).then(|| self.name(self.core.tenant))
    }

    /// str : "open", "committed", "aborted" or "expired"; "dry" for a dry run; "ended" when that was too long ago to know how.
    #[getter]
    fn state(&self) -> PyResult<&'static str> {
        if let Some(owner) = &self.owner {
            owner.live()?;
        }
        Ok(self.shown())
    }

    /// float : When its leases end, in seconds of the pool's clock, if nobody gives it more time (`renew`).
    #[getter]
    fn deadline(&self) -> f64 {
        self.core.deadline_ms as f64 / 1000.0
    }

    /// int : Bytes that were asked for.
    #[getter]
    fn asked(&self) -> u64 {
        self.core.asked
    }

    /// int : Bytes that come back.
    #[getter]
    fn bytes(&self) -> u64 {
        self.core.rungs.sum()
    }

    /// dict of str to int : Bytes that come back, by the step of the ladder: "free", "offload", "compress", "evict".
    #[getter]
    fn rungs(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let Rungs { free, offload, compress, evict } = self.core.rungs;
        let dict = PyDict::new(py);
        for (name, bytes) in [("free", free), ("offload", offload), ("compress", compress), ("evict", evict)]
        {
            dict.set_item(name, bytes)?;
        }
        Ok(dict.unbind())
    }

    /// int : Bytes that stay because others hold them too: they are not touched.
    #[getter]
    fn shared(&self) -> u64 {
        self.core.shared
    }

    /// int : Bytes that stay because pins keep them.
    #[getter]
    fn pinned(&self) -> u64 {
        self.core.pinned
    }

    /// int : Bytes that were asked for and don't come back.
    #[getter]
    fn shortfall(&self) -> u64 {
        self.core.shortfall
    }

    /// list of (str or None) : Where the host tier had no place for what would have gone there, so that something else was done, or
    /// is missing: tenants whose ``host_limit`` was in the way; None among them: the tier itself, full or not there.
    #[getter]
    fn host_full(&self) -> Vec<Option<String>> {
        self.core.host_full.iter().map(|&level| (level != ROOT).then(|| self.name(level))).collect()
    }

    /// int : Bytes of extents that it empties, for pages of another size.
    #[getter]
    fn emptied(&self) -> u64 {
        self.core.emptied
    }

    /// tuple of (int, int) : Bytes that are copied within the device, and between the tiers.
    #[getter]
    fn copied(&self) -> (u64, u64) {
        (self.core.copied[0], self.core.copied[1])
    }

    /// float or None : Seconds that copying takes at the speeds the pool was told (`Pool.set_speeds`); None: it was told none.
    #[getter]
    fn copy_seconds(&self) -> Option<f64> {
        self.core.copy_ns.map(|ns| ns as f64 / 1e9)
    }

    /// numpy.ndarray : int64 [moves, 6]. What is copied, in order: from tier, class, frame; to tier, class, frame. Tier 0 is the
    /// device, 1 the host. Pages that are cut are not copied: they come behind all others, and ``victims`` tells of them.
    #[getter]
    fn moves<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        rows(py, &self.core.moves)
    }

    /// The moves that are still to be carried out, for a store that is about to copy them: all but those that were committed.
    /// A plan that was read from bytes can't say what was, and gives all of them.
    ///
    /// Parameters
    /// ----------
    /// pool : Pool
    ///     The store's.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     int64 [n, 6], as `moves`.
    ///
    /// Raises
    /// ------
    /// PlanError
    ///     It has ended, or was a dry run: its places may be others' by now.
    /// InvalidArgument
    ///     It was read from bytes, and its pool has another spec than this one.
    /// WrongPool
    fn to_copy<'py>(&self, py: Python<'py>, pool: &Bound<'py, Pool>) -> PyResult<Bound<'py, PyAny>> {
        let moves = &self.core.moves;
        let Some(owner) = &self.owner else {
            let pool = pool.get();
            if self.spec != pool.owner.spec {
                return Err(InvalidArgument::new_err(format!(
                    "the plan is of another spec than the store's {}: make the pools of all ranks with the same one",
                    pool.spec.bind(py).repr()?
                )));
            }
            if self.core.is_dry() && !moves.is_empty() {
                return Err(errors::plan_error(py, &Fault::Dry.to_string(), &Fault::Dry));
            }
            return rows(py, moves);
        };
        let core = owner.live()?;
        if !Arc::ptr_eq(core, &pool.get().owner.core) {
            return Err(self.error(py, &Error::WrongPool("the plan")));
        }
        // Nobody's places are at stake in a plan without moves, whatever became of it.
        let left =
            if moves.is_empty() { 0 } else { core.moves_left(&self.core).map_err(|e| self.error(py, &e))? };
        rows(py, &moves[moves.len() - left..])
    }

    /// list of Victim : What becomes of sequences, in the order in which they were taken.
    #[getter]
    fn victims(&self, py: Python<'_>) -> PyResult<Vec<Victim>> {
        let handle = |at: usize| {
            let core = self.sequences.get(at).and_then(Weak::upgrade);
            let owner = self.owner.clone();
            core.zip(owner).map(|(core, owner)| Py::new(py, Sequence { owner, core })).transpose()
        };
        let victim = |(at, v): (usize, &CoreVictim)| {
            Ok(Victim {
                number: v.sequence,
                sequence: handle(at)?,
                tenant: self.name(v.tenant),
                fate: v.fate.name(),
                bytes: v.bytes,
                tokens: v.tokens,
                row: v.row.map(|taken| taken.row),
                moved_row: v.row.and_then(|taken| taken.moved),
            })
        };
        self.core.victims.iter().enumerate().map(victim).collect()
    }

    /// The bytes were copied: every page lies in its new place, and every sequence is where the plan takes it.
    ///
    /// Parameters
    /// ----------
    /// moves : int, optional
    ///     Commit the next so many only, for copying at a bounded rate; with the last one the plan ends. Default: all that are left.
    ///
    /// Returns
    /// -------
    /// Progress
    ///
    /// Raises
    /// ------
    /// PlanError
    ///     It has ended, or was a dry run: nothing was changed, and a late report is counted.
    #[pyo3(signature = (moves = None))]
    fn commit(&self, py: Python<'_>, moves: Option<&Bound<'_, PyAny>>) -> PyResult<Progress> {
        let n = moves.map_or(Ok(u64::MAX), |n| args::number(n, "moves", 0, u64::MAX))?;
        let owner = self.owner()?;
        let n = usize::try_from(n).unwrap_or(usize::MAX);
        let CoreProgress { moved, dropped, left } =
            py.detach(|| owner.core.commit_some(&self.core, n)).map_err(|e| self.error(py, &e))?;
        Ok(Progress { moved, dropped, left })
    }

    /// Give it up: what was not committed is as before.
    ///
    /// Raises
    /// ------
    /// PlanError
    ///     It has ended, or was a dry run: nothing was changed, and a late report is counted.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let owner = self.owner()?;
        py.detach(|| owner.core.abort_plan(&self.core)).map_err(|e| self.error(py, &e))
    }

    /// Give it more time from now on: whoever copies for long says so.
    ///
    /// Parameters
    /// ----------
    /// ttl : float
    ///     Seconds of the pool's clock.
    ///
    /// Returns
    /// -------
    /// float
    ///     Its new deadline.
    ///
    /// Raises
    /// ------
    /// PlanError
    ///     It has ended.
    fn renew(&self, py: Python<'_>, ttl: &Bound<'_, PyAny>) -> PyResult<f64> {
        let ttl = args::milliseconds(ttl, "ttl")?;
        let deadline = self.owner()?.core.renew_plan(&self.core, ttl).map_err(|e| self.error(py, &e))?;
        Ok(deadline as f64 / 1000.0)
    }

    /// As bytes, for those who carry it out elsewhere: every rank of a group copies its own shard.
    ///
    /// Returns
    /// -------
    /// bytes
    ///     With the spec's digest, and a checksum. Who may send one is not decided here.
    fn to_bytes(&self, py: Python<'_>) -> Py<PyBytes> {
        PyBytes::new(py, &self.core.to_bytes(self.spec)).unbind()
    }

    /// What `to_bytes` wrote: a plan to carry out. It is committed where its pool is.
    ///
    /// Parameters
    /// ----------
    /// data : bytes
    ///
    /// Returns
    /// -------
    /// Plan
    ///
    /// Raises
    /// ------
    /// PlanError
    ///     These bytes are no plan, of another version, or were altered on the way.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB", "64MiB")
    /// >>> plan = pool.suspend(pool.open(pool.tenant("acme"), range(64)))
    /// >>> there = kvalloc.Plan.from_bytes(plan.to_bytes())
    /// >>> there.kind, there.id == plan.id, bool((there.moves == plan.moves).all())
    /// ('suspend', True, True)
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &Bound<'_, PyBytes>) -> PyResult<Self> {
        let (core, spec) = Core::from_bytes(data.as_bytes())
            .map_err(|fault| errors::plan_error(py, &fault.to_string(), &fault))?;
        Ok(Self { owner: None, core, spec, sequences: Vec::new() })
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind = None, *_exception))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _exception: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.core.is_dry() || self.owner.as_ref().is_none_or(|owner| owner.live().is_err()) {
            return Ok(());
        }
        let failed = kind.is_some_and(|kind| !kind.is_none());
        match (failed, self.now()) {
            (false, Ok(State::Open | State::Expired)) => self.commit(py, None).map(drop),
            // What the exception says comes first: if the plan has ended meanwhile, it is as before all the same.
            (true, Ok(State::Open)) => {
                let _ = self.abort(py);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn __repr__(&self) -> String {
        let Core { kind, moves, victims, shortfall, .. } = &self.core;
        format!(
            "<kvalloc.Plan {} to {}, {}, {} come back, {} moves, {} sequences, {} short>",
            self.core.id.0,
            kind.name(),
            self.shown(),
            Bytes(self.core.rungs.sum()),
            moves.len(),
            victims.len(),
            Bytes(*shortfall),
        )
    }
}

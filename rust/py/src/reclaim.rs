//! The part of `kvalloc.Pool` and `kvalloc.Tenant` that takes bytes back and hands them on.

use std::sync::Arc;

use kvalloc_core::{
    batch::Batch as CoreBatch,
    error::Error,
    ledger::ROOT,
    preempt::{For, From},
    reclaim::Live,
    word::{ClassId, TenantId},
};
use pyo3::prelude::*;

use crate::{
    args,
    errors::InvalidArgument,
    plan::Plan,
    pool::Pool,
    preempt::{batches, dry_or, mode_or, sessions, ttl_or},
    tenant::Tenant,
};

/// The most moves of a plan if nobody says otherwise.
const MOST_MOVES: usize = 4096;

fn moves_or(max_moves: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
    max_moves.map_or(Ok(MOST_MOVES), |n| Ok(args::number(n, "max_moves", 0, 1 << 30)? as usize))
}

/// A low and a high mark in bytes; None: none.
fn marks(low: Option<&Bound<'_, PyAny>>, high: Option<&Bound<'_, PyAny>>) -> PyResult<Option<(u64, u64)>> {
    let bytes = |value: Option<&Bound<'_, PyAny>>| {
        value.filter(|value| !value.is_none()).map(|value| args::bytes(value)).transpose()
    };
    match (bytes(low)?, bytes(high)?) {
        (None, None) => Ok(None),
        (low, Some(high)) => Ok(Some((low.unwrap_or(high), high))),
        (Some(_), None) => Err(InvalidArgument::new_err("a low mark needs a high one above it")),
    }
}

impl Pool {
    fn open_core(&self, py: Python<'_>) -> PyResult<&Arc<kvalloc_core::pool::Pool>> {
        let core = self.owner.live()?;
        core.check_open().map_err(|e| self.owner.error(py, &e))?;
        Ok(core)
    }

    /// Call `f` with what a call says of live sequences.
    fn with_live<R>(
        &self,
        py: Python<'_>,
        live: Option<&Bound<'_, PyAny>>,
        batch: Option<&Bound<'_, PyAny>>,
        idle: Option<&Bound<'_, PyAny>>,
        mode: Option<&Bound<'_, PyAny>>,
        f: impl FnOnce(Live<'_>) -> Result<R, Error> + Send,
    ) -> PyResult<R>
    where
        R: Send,
    {
        let (rows, idle, wish) = (batches(batch)?, sessions(idle)?, mode_or(mode)?);
        let live = live.filter(|live| !live.is_none()).map(|live| args::text(live)).transpose()?;
        let preempts = live.as_deref() == Some("preempt");
        if !preempts && (!rows.is_empty() || !idle.is_empty() || mode.is_some()) {
            return Err(InvalidArgument::new_err(
                "batch, sessions and mode say which sequences may be stopped, and how: with live=\"preempt\" only",
            ));
        }
        let answer = py.detach(|| {
            let rows: Vec<&CoreBatch> = rows.iter().map(|b| &b.core).collect();
            let live = match live.as_deref() {
                None => Live::Stay,
                Some("freeze") => Live::Freeze,
                Some("preempt") => {
                    Live::Preempt(From { batches: &rows, sessions: &idle, who: For::Anybody }, wish)
                }
                Some(other) => {
                    return Err(Error::Argument(format!(
                        "live is {other:?}; it is None, \"freeze\" or \"preempt\""
                    )));
                }
            };
            f(live)
        });
        answer.map_err(|e| self.owner.error(py, &e))
    }
}

#[pymethods]
impl Pool {
    /// Take bytes of a tenant back: a plan, which says what comes back and what stays before anything happens.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant, str or None
    ///     Whose, those of the tenants below it included. None: of the whole pool.
    /// bytes : int or str
    ///     How many.
    /// live : {None, "freeze", "preempt"}, optional
    ///     How its live sequences go on. None: they are not touched. "freeze": from now on no new request of the tenant is
    ///     taken, and those that run may grow to the length they were admitted for, until `Tenant.thaw`, or until the plan is
    ///     aborted or expires (of the whole pool: until it ends, committed or not). "preempt": where cached pages are not enough
    ///     some of them stop (`Pool.preempt`), and can be resumed; where the host tier is full they are compressed or cut first,
    ///     if that is allowed (`Pool.compress`, `Pool.cut`).
    /// batch : Batch or list of Batch, optional
    ///     With "preempt": whose rows may be taken.
    /// sessions : list of Sequence, optional
    ///     With "preempt": sequences that stand in no batch and may go.
    /// mode : {"auto", "swap", "recompute"}, optional
    ///     With "preempt": how they stop.
    /// ttl : float, optional
    ///     Seconds until the plan gives up by itself. Default 30.
    /// dry_run : bool, optional
    ///     Only say what would be.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     ``rungs["free"]`` of cached pages, which go at the commit: of tenants with no open sequence first, then of those most
    ///     over their share, the coldest and the ends of prompts first. ``shared``, ``pinned`` and ``shortfall`` stay.
    ///
    /// Raises
    /// ------
    /// UnknownTenant, InvalidArgument, WrongPool, SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// More than there is is no error: the plan says what is missing. Cached pages that are hit before the commit are held by
    /// then and stay.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme = pool.tenant("acme")
    /// >>> batch = pool.batch(max_sequences=1, max_tokens=512)
    /// >>> with pool.open(acme, range(160)) as seq:
    /// ...     row, out = batch.add(seq), batch.step()
    /// ...     batch.commit()
    /// >>> half = acme.cached // 2
    /// >>> with pool.reclaim(acme, half) as plan:  # leaving the block commits
    /// ...     plan.rungs["free"] == half, plan.shortfall
    /// (True, 0)
    /// >>> acme.cached == half
    /// True
    #[pyo3(signature = (
        tenant, bytes, *, live = None, batch = None, sessions = None, mode = None, ttl = None, dry_run = None
    ))]
    #[pyo3(
        text_signature = "($self, tenant, bytes, *, live=None, batch=None, sessions=None, mode='auto', ttl=30.0, dry_run=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn reclaim(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        bytes: &Bound<'_, PyAny>,
        live: Option<&Bound<'_, PyAny>>,
        batch: Option<&Bound<'_, PyAny>>,
        sessions: Option<&Bound<'_, PyAny>>,
        mode: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let core = self.owner.live()?;
        let tenant = self.owner.level(tenant)?;
        let bytes = args::bytes(bytes)?;
        let (ttl, dry) = (ttl_or(ttl)?, dry_or(dry_run)?);
        let (plan, stopped) = self
            .with_live(py, live, batch, sessions, mode, |live| core.reclaim(tenant, bytes, live, ttl, dry))?;
        Ok(Plan::new(&self.owner, plan, &stopped))
    }

    /// Give a tenant a reserve that is larger by so many bytes, and make sure that they can be handed out at once.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     Who gets them.
    /// bytes : int or str
    ///     By how much its reserve grows. It shrinks by ``tenant.set(reserve=...)``; nothing gets lost on the way.
    /// live : {None, "preempt"}, optional
    ///     "preempt": where others hold what is missing, their sequences give it as in `reclaim`. Default: they are not touched.
    /// batch, sessions, mode : optional
    ///     As in `reclaim`.
    /// max_moves : int, optional
    ///     The most pages that are moved, where free bytes lie in extents of another page size. Default 4,096.
    /// ttl : float, optional
    ///     Seconds until a plan that waits for copies gives up by itself. Default 30.
    /// dry_run : bool, optional
    ///     Only say what would be.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     What needs no copies is done when the call returns: the plan is committed. Else it waits for them; the reserve is there
    ///     with its commit at the latest, and its abort takes it back.
    ///
    /// Raises
    /// ------
    /// PlanError
    ///     It can't be had; ``shortfall`` says how many bytes are missing. Nothing is reserved, nobody was stopped.
    /// TenantError
    ///     The reserve would lie above the tenant's limit.
    /// UnknownTenant, InvalidArgument, WrongPool, SequenceBusy, ClosedError
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> beta = pool.tenant("beta")
    /// >>> pool.top_up(beta, "16MiB").state, beta.reserve
    /// ('committed', 16777216)
    /// >>> try:
    /// ...     pool.top_up("beta", "1GiB")
    /// ... except kvalloc.PlanError as error:
    /// ...     error.shortfall == (1 << 30) - pool.capacity, beta.reserve
    /// (True, 16777216)
    #[pyo3(signature = (
        tenant, bytes, *, live = None, batch = None, sessions = None, mode = None, max_moves = None, ttl = None,
        dry_run = None
    ))]
    #[pyo3(
        text_signature = "($self, tenant, bytes, *, live=None, batch=None, sessions=None, mode='auto', max_moves=4096, ttl=30.0, dry_run=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn top_up(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        bytes: &Bound<'_, PyAny>,
        live: Option<&Bound<'_, PyAny>>,
        batch: Option<&Bound<'_, PyAny>>,
        sessions: Option<&Bound<'_, PyAny>>,
        mode: Option<&Bound<'_, PyAny>>,
        max_moves: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let core = self.owner.live()?;
        let tenant = self.owner.tenant(tenant, None)?;
        let bytes = args::bytes(bytes)?;
        let (moves, ttl, dry) = (moves_or(max_moves)?, ttl_or(ttl)?, dry_or(dry_run)?);
        let (plan, stopped) = self.with_live(py, live, batch, sessions, mode, |live| match live {
            Live::Freeze => {
                Err(Error::Argument("live is \"freeze\"; a top-up takes None or \"preempt\"".into()))
            }
            live => core.top_up(tenant, bytes, live, moves, ttl, dry),
        })?;
        Ok(Plan::new(&self.owner, plan, &stopped))
    }

    /// Get bytes back that a tenant has lent of its reserve, from those who are beyond theirs.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant or str
    ///     Who has lent them (``lend=True``).
    /// bytes : int or str
    ///     How many it wants to be charged for beside what it uses; at most what its reserve has left.
    /// batch : Batch or list of Batch, optional
    ///     Whose rows may be taken.
    /// sessions : list of Sequence, optional
    ///     Sequences that stand in no batch and may go.
    /// mode : {"auto", "swap", "recompute"}, optional
    ///     How they stop.
    /// ttl : float, optional
    ///     Seconds until the plan gives up by itself. Default 30.
    /// dry_run : bool, optional
    ///     Only say what would be.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     ``victims`` stop; if there are none it is committed when the call returns. From the commit on the bytes can be charged
    ///     to the tenant, and to nobody else until `Tenant.lend_unused`. An abort lends them again.
    ///
    /// Raises
    /// ------
    /// PlanError
    ///     It can't be had: more than the reserve has left, or others hold it in what pins keep, in pages that are shared, or in
    ///     sequences that were not given. ``shortfall`` says how many bytes are missing. Nothing was changed, nobody was stopped.
    /// UnknownTenant, InvalidArgument, WrongPool, SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// Nobody inside his own reserve is touched. Victims as `preempt` chooses them; a tenant's oldest sequence and its last
    /// victim come last here, but they are not spared.
    ///
    /// Reserves, lent or not, never add up to more than there is: what is missing in one is what others have beyond theirs. So one
    /// plan is enough, but for two cases: a thread that allocates for another tenant while the plan is being committed may come in
    /// between; and where a level above the tenant is full as well, it takes a plan for each.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme, beta = pool.tenant("acme", reserve="32MiB", lend=True), pool.tenant("beta")
    /// >>> batch = pool.batch(max_sequences=2, max_tokens=32768)
    /// >>> seq = pool.open(beta, range(24576))
    /// >>> row, out = batch.add(seq), batch.step()
    /// >>> batch.commit()
    /// >>> beta.held >> 20, acme.lent >> 20  # it runs in acme's reserve
    /// (48, 32)
    /// >>> with pool.give_back(acme, "32MiB", batch=batch, mode="recompute") as plan:
    /// ...     len(plan.victims)
    /// 1
    /// >>> acme.lent, beta.held
    /// (0, 0)
    #[pyo3(signature = (
        tenant, bytes, *, batch = None, sessions = None, mode = None, ttl = None, dry_run = None
    ))]
    #[pyo3(
        text_signature = "($self, tenant, bytes, *, batch=None, sessions=None, mode='auto', ttl=30.0, dry_run=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn give_back(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        bytes: &Bound<'_, PyAny>,
        batch: Option<&Bound<'_, PyAny>>,
        sessions: Option<&Bound<'_, PyAny>>,
        mode: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let core = self.owner.live()?;
        let tenant = self.owner.tenant(tenant, None)?;
        let bytes = args::bytes(bytes)?;
        let (wish, ttl, dry) = (mode_or(mode)?, ttl_or(ttl)?, dry_or(dry_run)?);
        let (rows, idle) = (batches(batch)?, self::sessions(sessions)?);
        let built = py.detach(|| {
            let rows: Vec<&CoreBatch> = rows.iter().map(|b| &b.core).collect();
            let from = From { batches: &rows, sessions: &idle, who: For::Anybody };
            core.give_back(tenant, bytes, from, wish, ttl, dry)
        });
        let (plan, stopped) = built.map_err(|e| self.owner.error(py, &e))?;
        Ok(Plan::new(&self.owner, plan, &stopped))
    }

    /// Give extents that serve one page size to pages of another: a plan of moves. Whoever holds the pages goes on.
    ///
    /// Parameters
    /// ----------
    /// bytes : int or str
    ///     How many shall be free to be given out at once.
    /// page_class : int, optional
    ///     To which page class (``pool.spec.classes``). Default: to any.
    /// max_moves : int, optional
    ///     The most pages that are moved: what bounds the copying of one plan. Default 4,096.
    /// ttl : float, optional
    ///     Seconds until the plan gives up by itself. Default 30.
    /// dry_run : bool, optional
    ///     Only say what would be.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     ``moves``, ``emptied`` bytes, ``shortfall``. Its commit tells batches where the pages lie; extents go on to their new
    ///     size once no batch shows the old places any more: a few steps later, or when somebody needs them.
    ///
    /// Raises
    /// ------
    /// InvalidArgument, ClosedError
    ///
    /// Notes
    /// -----
    /// An allocation can be refused as "fragmented" though enough bytes are free, also inside a reserve: they lie in extents that
    /// serve another page size, and moving what is in use there takes copies, which an allocation does not do. This is what
    /// to do then; `top_up` does it by itself.
    ///
    /// A page that a batch writes to is not in the plan: its batch takes it along with its steps (``step.copies``). Pages whose
    /// frames `Pages.frames` has told stay where they are. No allocation is refused for a plan: before that extents
    /// are given out again as they were.
    #[pyo3(signature = (bytes, *, page_class = None, max_moves = None, ttl = None, dry_run = None))]
    #[pyo3(text_signature = "($self, bytes, *, page_class=None, max_moves=4096, ttl=30.0, dry_run=False)")]
    fn rebalance(
        &self,
        py: Python<'_>,
        bytes: &Bound<'_, PyAny>,
        page_class: Option<&Bound<'_, PyAny>>,
        max_moves: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let core = self.owner.live()?;
        let class = page_class.filter(|class| !class.is_none());
        let class = class.map(|class| args::number(class, "page_class", 0, u8::MAX.into())).transpose()?;
        let class = class.map(|class| ClassId(class as u8));
        let bytes = args::bytes(bytes)?;
        let (moves, ttl, dry) = (moves_or(max_moves)?, ttl_or(ttl)?, dry_or(dry_run)?);
        let plan = py.detach(|| core.rebalance(class, bytes, moves, ttl, dry));
        Ok(Plan::new(&self.owner, plan.map_err(|e| self.owner.error(py, &e))?, &[]))
    }

    /// Do a small step in the background, for an idle loop or a thread of its own.
    ///
    /// It ends pins and plans whose time is over, takes back frames that pages have left, and evicts cached pages where more
    /// than a high mark is charged (`set_watermarks`).
    ///
    /// Parameters
    /// ----------
    /// max_pages : int, optional
    ///     Evict at most about so many pages. Default 64.
    ///
    /// Returns
    /// -------
    /// int
    ///     Bytes that were freed; 0: there is nothing to do now.
    #[pyo3(signature = (max_pages = None))]
    #[pyo3(text_signature = "($self, max_pages=64)")]
    fn reclaim_some(&self, py: Python<'_>, max_pages: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let core = self.open_core(py)?;
        let pages = max_pages.map_or(Ok(64), |n| args::number(n, "max_pages", 1, 1 << 30))?;
        Ok(py.detach(|| core.reclaim_some(pages as usize)))
    }

    /// Keep what is charged in the whole pool below a high mark, by `reclaim_some`.
    ///
    /// Above the high mark cached pages go, until no more than the low one is charged.
    ///
    /// Parameters
    /// ----------
    /// low, high : int, str or None
    ///     Bytes. Without ``low`` it is the same as ``high``; both None: no marks.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     A low mark above the high one, or a high one of nothing.
    #[pyo3(signature = (low = None, high = None))]
    fn set_watermarks(
        &self,
        py: Python<'_>,
        low: Option<&Bound<'_, PyAny>>,
        high: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let core = self.owner.live()?;
        core.set_watermarks(ROOT, marks(low, high)?).map_err(|e| self.owner.error(py, &e))
    }

    /// tuple of (int, int) or None : The pool's low and high mark, in bytes.
    #[getter]
    fn watermarks(&self) -> PyResult<Option<(u64, u64)>> {
        Ok(self.owner.live()?.watermarks(ROOT))
    }

    /// The plans that are open, oldest first.
    ///
    /// Returns
    /// -------
    /// list of Plan
    fn plans(&self, py: Python<'_>) -> PyResult<Vec<Plan>> {
        let core = self.open_core(py)?;
        Ok(core.open_plans().into_iter().map(|plan| Plan::new(&self.owner, plan, &[])).collect())
    }
}

impl Tenant {
    fn with<R>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&Arc<kvalloc_core::pool::Pool>, TenantId) -> Result<R, Error>,
    ) -> PyResult<R> {
        f(self.live()?, self.id).map_err(|e| self.owner.error(py, &e))
    }
}

#[pymethods]
impl Tenant {
    /// Take no new requests of it and of the tenants below it; those that run may grow to the length they were admitted for.
    ///
    /// Notes
    /// -----
    /// `Pool.open` raises `OutOfPages` with ``why="frozen"`` then, `Pool.admit` answers "wait". Until `thaw`, whatever becomes of
    /// plans that freeze it too (`Pool.reclaim`).
    fn freeze(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |core, id| core.set_frozen(id, true))
    }

    /// Let it go on, whatever has frozen it: a plan that is open too.
    fn thaw(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |core, id| core.set_frozen(id, false))
    }

    /// bool : Whether it, or a tenant above it, is frozen.
    #[getter]
    fn frozen(&self) -> PyResult<bool> {
        Ok(self.live()?.is_frozen(self.id))
    }

    /// Keep what is charged to its subtree below a high mark, by `Pool.reclaim_some`.
    ///
    /// Above the high mark cached pages go, until no more than the low one is charged.
    ///
    /// Parameters
    /// ----------
    /// low, high : int, str or None
    ///     Bytes. Without ``low`` it is the same as ``high``; both None: no marks.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     A low mark above the high one, or a high one of nothing.
    #[pyo3(signature = (low = None, high = None))]
    fn set_watermarks(
        &self,
        py: Python<'_>,
        low: Option<&Bound<'_, PyAny>>,
        high: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let marks = marks(low, high)?;
        self.with(py, |core, id| core.set_watermarks(id, marks))
    }

    /// tuple of (int, int) or None : Its low and high mark, in bytes.
    #[getter]
    fn watermarks(&self) -> PyResult<Option<(u64, u64)>> {
        Ok(self.live()?.watermarks(self.id))
    }
}

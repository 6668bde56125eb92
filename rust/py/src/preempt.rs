//! The part of `kvalloc.Pool` and `kvalloc.Sequence` that takes live sequences off the device and brings them back.

use std::sync::Arc;

use kvalloc_core::{
    batch::Batch as CoreBatch,
    error::Error,
    pool::Pool as CorePool,
    preempt::{Built, For, From, Wish},
    sequence::{Mode, Sequence as CoreSequence, State},
    word::TenantId,
};
use pyo3::prelude::*;

use crate::{
    args,
    batch::{Batch, Inner},
    errors::InvalidArgument,
    plan::Plan,
    pool::Pool,
    sequence::Sequence,
};

/// How long a plan's leases last if nobody says otherwise.
const TTL_MS: u64 = 30_000;

fn wish(mode: &Bound<'_, PyAny>) -> PyResult<Wish> {
    match args::text_ref(mode)? {
        "auto" => Ok(Wish::Auto),
        "swap" => Ok(Wish::Swap),
        "recompute" => Ok(Wish::Recompute),
        other => Err(InvalidArgument::new_err(format!(
            "mode is {other:?}; it is \"auto\", \"swap\" or \"recompute\""
        ))),
    }
}

pub(crate) fn mode_or(mode: Option<&Bound<'_, PyAny>>) -> PyResult<Wish> {
    mode.map_or(Ok(Wish::Auto), wish)
}

pub(crate) fn ttl_or(ttl: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
    ttl.map_or(Ok(TTL_MS), |ttl| args::milliseconds(ttl, "ttl"))
}

pub(crate) fn dry_or(dry_run: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
    dry_run.map_or(Ok(false), |dry| args::flag(dry, "dry_run"))
}

/// One batch, several, or none.
pub(crate) fn batches(value: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Arc<Inner>>> {
    let Some(value) = value.filter(|value| !value.is_none()) else { return Ok(Vec::new()) };
    let one = |value: &Bound<'_, PyAny>| {
        value.cast::<Batch>().map(|batch| Arc::clone(batch.get().inner())).map_err(|_| {
            InvalidArgument::new_err(format!(
                "batch is a Batch or a list of them, not {}",
                args::shown(value)
            ))
        })
    };
    match value.try_iter() {
        Ok(items) => args::collected(items, "batch", args::MOST_SCOPES, |_, item| one(&item)),
        Err(_) => Ok(vec![one(value)?]),
    }
}

pub(crate) fn sessions(value: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Arc<CoreSequence>>> {
    let Some(value) = value.filter(|value| !value.is_none()) else { return Ok(Vec::new()) };
    let wrong = |value: &Bound<'_, PyAny>| {
        InvalidArgument::new_err(format!("sessions is a list of Sequence, not {}", args::shown(value)))
    };
    let items = value.try_iter().map_err(|_| wrong(value))?;
    args::collected(items, "sessions", args::MOST_PAGES, |_, item| {
        let sequence = item.cast::<Sequence>().map_err(|_| wrong(&item))?;
        Ok(Arc::clone(&sequence.get().core))
    })
}

type Build = fn(&Arc<CorePool>, &Arc<CoreSequence>, u64, bool) -> Result<Built, Error>;

impl Pool {
    fn plan(
        &self,
        py: Python<'_>,
        build: impl FnOnce(&Arc<CorePool>) -> Result<Built, Error> + Send,
    ) -> PyResult<Plan> {
        let core = self.owner.live()?;
        let (plan, sequences) = py.detach(|| build(core)).map_err(|e| self.owner.error(py, &e))?;
        Ok(Plan::new(&self.owner, plan, &sequences))
    }

    /// A plan by which bytes come back from below a tenant.
    fn gather(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        bytes: &Bound<'_, PyAny>,
        batch: Option<&Bound<'_, PyAny>>,
        sessions: Option<&Bound<'_, PyAny>>,
        build: impl FnOnce(&Arc<CorePool>, TenantId, u64, From<'_>) -> Result<Built, Error> + Send,
    ) -> PyResult<Plan> {
        self.owner.live()?;
        let (tenant, bytes) = (self.owner.level(tenant)?, args::bytes(bytes)?);
        let (batches, sessions) = (batches(batch)?, self::sessions(sessions)?);
        self.plan(py, |core| {
            let batches: Vec<&CoreBatch> = batches.iter().map(|b| &b.core).collect();
            build(core, tenant, bytes, From { batches: &batches, sessions: &sessions, who: For::Anybody })
        })
    }

    fn plan_for(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
        build: Build,
    ) -> PyResult<Plan> {
        let (ttl, dry) = (ttl_or(ttl)?, dry_or(dry_run)?);
        self.plan(py, |core| build(core, &sequence.core, ttl, dry))
    }
}

#[pymethods]
impl Pool {
    /// Stop a sequence and get its memory back, so that it can go on later with the same tokens.
    ///
    /// Parameters
    /// ----------
    /// sequence : Sequence
    ///     One that runs.
    /// mode : {"auto", "swap", "recompute"}, optional
    ///     "swap": its private pages go to the host tier. "recompute": its pages are let go, and its tokens, sampled ones included,
    ///     are a prompt again when it comes back. "auto": what restores sooner. Where the host tier is full, or there is none, or
    ///     the tenant has reached its ``host_limit``, recompute is the answer in any case (``plan.host_full``); tokens that the
    ///     pool was never told can only be swapped.
    /// batch : Batch, optional
    ///     The batch whose row it may be taken out of, as `Batch.remove` does (``plan.victims[0].row``, ``moved_row``). Steps that
    ///     are not committed are forgotten for it. Without it a sequence that stands in a batch is refused.
    /// ttl : float, optional
    ///     Seconds of the pool's clock until the plan's leases end. Default 30.
    /// dry_run : bool, optional
    ///     Only say what would be done.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     With the moves to carry out. Until its commit the sequence is "leaving", and everything it holds is where it was; an
    ///     abort, or the end of the plan's time, makes it run again (out of its row).
    ///
    /// Raises
    /// ------
    /// OutOfPages
    ///     It can only be swapped, and the host tier has no room. It runs on in its row (out of it where another thread took the
    ///     room at that moment).
    /// InvalidArgument
    ///     It does not run, or stands in another batch.
    /// SequenceBusy, ClosedError, WrongPool
    ///
    /// Notes
    /// -----
    /// "auto" compares twice the private bytes at the host link's speed with the written tokens, but for those that others keep on
    /// the device at its beginning, at the speed of computing a prompt: see `set_speeds`. Pages that others hold too, and pinned
    /// ones, stay with the sequence's reference: ``plan.shared``, ``plan.pinned``. Pages off the device are never hit.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB", "64MiB")
    /// >>> acme = pool.tenant("acme")
    /// >>> batch = pool.batch(max_sequences=1, max_tokens=512)
    /// >>> seq = pool.open(acme, range(64))
    /// >>> row, out = batch.add(seq), batch.step()
    /// >>> batch.commit([7])
    /// >>> plan = pool.suspend(seq, batch=batch)
    /// >>> seq.state, plan.victims[0].fate, plan.moves[0, :5].tolist()
    /// ('leaving', 'swapped', [0, 0, 1, 1, 0])
    /// >>> plan.commit()  # after store.execute(plan)
    /// Progress(moved=4, dropped=0, left=0)
    /// >>> seq.state, acme.held, acme.host_held == plan.bytes
    /// ('suspended', 0, True)
    /// >>> with pool.resume(seq) as plan:
    /// ...     pass
    /// >>> seq.state, batch.add(seq), batch.step().num_tokens
    /// ('running', 0, 1)
    #[pyo3(signature = (sequence, *, mode = None, batch = None, ttl = None, dry_run = None))]
    #[pyo3(text_signature = "($self, sequence, *, mode='auto', batch=None, ttl=30.0, dry_run=False)")]
    fn suspend(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        mode: Option<&Bound<'_, PyAny>>,
        batch: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let (wish, ttl, dry) = (mode_or(mode)?, ttl_or(ttl)?, dry_or(dry_run)?);
        let batches = batches(batch)?;
        if batches.len() > 1 {
            return Err(InvalidArgument::new_err("a sequence stands in one batch; give that one"));
        }
        self.plan(py, |core| core.suspend(&sequence.core, wish, batches.first().map(|b| &b.core), ttl, dry))
    }

    /// Bring a suspended sequence back: it goes on where it was, with the same tokens.
    ///
    /// Parameters
    /// ----------
    /// sequence : Sequence
    ///     A suspended one.
    /// ttl, dry_run : optional
    ///     As in `suspend`.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     Until its commit the sequence is "returning". After it, it can be given a row; after recompute its known tokens are
    ///     prefilled as a prompt by the batch's steps, but for those that were hit (``plan.victims[0].tokens`` are left).
    ///
    /// Raises
    /// ------
    /// OutOfPages
    ///     There is no room for all it needs: its pages, its known tokens, and what it was admitted for. Nothing was changed.
    /// InvalidArgument
    ///     It is not suspended.
    /// SequenceBusy, ClosedError, WrongPool
    #[pyo3(signature = (sequence, *, ttl = None, dry_run = None))]
    #[pyo3(text_signature = "($self, sequence, *, ttl=30.0, dry_run=False)")]
    fn resume(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        self.plan_for(py, sequence, ttl, dry_run, CorePool::resume)
    }

    /// Take a session between two turns off the device, to the host tier.
    ///
    /// Parameters
    /// ----------
    /// sequence : Sequence
    ///     One that runs and stands in no batch.
    /// ttl, dry_run : optional
    ///     As in `suspend`.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     As that of `suspend` by swap.
    ///
    /// Raises
    /// ------
    /// OutOfPages
    ///     The host tier has no room, or a ``host_limit`` is reached: ``level`` says whose. Everything stays on the device as it was.
    /// InvalidArgument
    ///     It does not run, or stands in a batch.
    /// SequenceBusy, ClosedError, WrongPool
    #[pyo3(signature = (sequence, *, ttl = None, dry_run = None))]
    #[pyo3(text_signature = "($self, sequence, *, ttl=30.0, dry_run=False)")]
    fn offload(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        self.plan_for(py, sequence, ttl, dry_run, CorePool::offload)
    }

    /// Bring a session back before its next turn: as `resume`.
    ///
    /// Parameters
    /// ----------
    /// sequence : Sequence
    ///     A suspended one.
    /// ttl, dry_run : optional
    ///     As in `suspend`.
    ///
    /// Returns
    /// -------
    /// Plan
    ///
    /// Raises
    /// ------
    /// OutOfPages, InvalidArgument, SequenceBusy, ClosedError, WrongPool
    ///     As `resume`.
    #[pyo3(signature = (sequence, *, ttl = None, dry_run = None))]
    #[pyo3(text_signature = "($self, sequence, *, ttl=30.0, dry_run=False)")]
    fn prefetch(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        self.plan_for(py, sequence, ttl, dry_run, CorePool::prefetch)
    }

    /// Stop as many sequences of a tenant's subtree as it takes to get bytes back.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant, str or None
    ///     Whose sequences, those of the tenants below it included; None: anybody's.
    /// bytes : int or str
    ///     How many bytes should come back.
    /// batch : Batch or list of Batch, optional
    ///     Batches whose rows may be taken.
    /// sessions : list of Sequence, optional
    ///     Sequences that stand in no batch: they go before any that has a row.
    /// mode, ttl, dry_run : optional
    ///     As in `suspend`.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     ``victims`` names who stops, with its row, in the order in which they were taken; ``shortfall`` says what is missing.
    ///
    /// Raises
    /// ------
    /// UnknownTenant, WrongPool, SequenceBusy, InvalidArgument
    ///
    /// Notes
    /// -----
    /// Sessions first; then by lower priority of the tenant, by its use over its reserve and weight, by the cost of restoring for
    /// each byte, the youngest. Two are spared: the oldest running sequence of each tenant, and the sequence that was its tenant's
    /// last victim. One that another thread is using is passed by.
    #[pyo3(signature = (
        tenant, bytes, *, batch = None, sessions = None, mode = None, ttl = None, dry_run = None
    ))]
    #[pyo3(
        text_signature = "($self, tenant, bytes, *, batch=None, sessions=None, mode='auto', ttl=30.0, dry_run=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn preempt(
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
        let (wish, ttl, dry) = (mode_or(mode)?, ttl_or(ttl)?, dry_or(dry_run)?);
        self.gather(py, tenant, bytes, batch, sessions, |core, tenant, bytes, from| {
            core.preempt(tenant, bytes, from, wish, ttl, dry)
        })
    }

    /// Let pages of live sequences go on in the smaller class of their layer group (``KVSpec(small_dtype=...)``): lossy, for good.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant, str or None
    ///     Whose sequences, those of the tenants below it included. None: anybody's. Pages go whose payer allows it (``tenant(compress=True)``).
    /// bytes : int or str
    ///     How many bytes should come back.
    /// batch : Batch or list of Batch, optional
    ///     Batches whose sequences give pages; they go on.
    /// sessions : list of Sequence, optional
    ///     Sequences that stand in no batch: they give first.
    /// ttl, dry_run : optional
    ///     As in `suspend`.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     ``rungs["compress"]`` comes back with the commit; ``store.execute(plan)`` quantises. ``shortfall`` says what is missing:
    ///     what others hold too, pins and other plans keep is let be, and so is what has no room beside what it is now.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     No tenant there allows it; the spec has no smaller class for a group whose pages stay.
    /// UnknownTenant, WrongPool, SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// Pages go that are full and published and that one sequence holds alone: the longest sequence first, its oldest pages
    /// first. Block tables show them as ``~frame``, below 0, from the batch's next step on. From the plan's building on nobody
    /// finds them: a prompt that begins like the sequence computes them again. They can't be written to, so the sequence can't
    /// be truncated to the middle of one; and while the plan is open it can't be forked.
    ///
    /// Examples
    /// --------
    /// >>> spec = kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, small_dtype="int8")
    /// >>> pool = kvalloc.Pool(spec, "64MiB")
    /// >>> acme = pool.tenant("acme", compress=True)
    /// >>> batch = pool.batch(max_sequences=1, max_tokens=512)
    /// >>> seq = pool.open(acme, range(64))
    /// >>> row, out = batch.add(seq), batch.step()
    /// >>> batch.commit([7])
    /// >>> before = acme.held
    /// >>> with pool.compress(acme, "1MiB", batch=batch) as plan:  # store.execute(plan) copies the bytes
    /// ...     len(plan.moves)
    /// 4
    /// >>> before - acme.held == plan.rungs["compress"], (seq.block_table() < 0).tolist()
    /// (True, [True, True, True, True])
    #[pyo3(signature = (tenant, bytes, *, batch = None, sessions = None, ttl = None, dry_run = None))]
    #[pyo3(text_signature = "($self, tenant, bytes, *, batch=None, sessions=None, ttl=30.0, dry_run=False)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn compress(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        bytes: &Bound<'_, PyAny>,
        batch: Option<&Bound<'_, PyAny>>,
        sessions: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let (ttl, dry) = (ttl_or(ttl)?, dry_or(dry_run)?);
        self.gather(py, tenant, bytes, batch, sessions, |core, tenant, bytes, from| {
            core.compress(tenant, bytes, from, ttl, dry)
        })
    }

    /// Let contexts that are too long lose old pages: the model forgets what stood there, for good.
    ///
    /// Parameters
    /// ----------
    /// tenant : Tenant, str or None
    ///     Whose sequences, those of the tenants below it included. None: anybody's. Those are cut whose tenant allows it
    ///     (``tenant(cut=tokens)``).
    /// bytes : int or str
    ///     How many bytes should come back.
    /// batch : Batch or list of Batch, optional
    ///     Batches whose sequences give pages; they go on.
    /// sessions : list of Sequence, optional
    ///     Sequences that stand in no batch: they give first.
    /// ttl, dry_run : optional
    ///     As in `suspend`.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     ``rungs["evict"]`` comes back with the commit; there is nothing to copy. ``victims`` names the sequences ("trimmed") and
    ///     how many tokens each forgets, ``shortfall`` what is missing: what others hold too, pins and other plans keep is let be.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     No tenant there allows it; the spec has no layer group whose pages stay.
    /// UnknownTenant, WrongPool, SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// Of a sequence with more tokens than ``tenant.cut`` the oldest pages go that lie between the first page and those of its
    /// last ``tenant.cut`` tokens, in groups that keep their pages, as in `compress`: full ones that it holds alone. Block tables
    /// show 0 there, from the batch's next step on at the latest; positions stay as they are. Nobody finds these pages from the
    /// plan's building on, nor what the sequence computes after it: that is not exact. It can't be truncated to the middle of
    /// such a page. Recomputed, the sequence is whole again.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme = pool.tenant("acme", cut=32)
    /// >>> batch = pool.batch(max_sequences=1, max_tokens=512)
    /// >>> seq = pool.open(acme, range(96))
    /// >>> row, out = batch.add(seq), batch.step()
    /// >>> batch.commit([7])
    /// >>> before = acme.held
    /// >>> with pool.cut(acme, "1MiB", batch=batch) as plan:
    /// ...     [(victim.fate, victim.tokens) for victim in plan.victims], len(plan.moves)
    /// ([('trimmed', 48)], 0)
    /// >>> before - acme.held == plan.rungs["evict"], (seq.block_table() > 0).tolist()
    /// (True, [True, False, False, False, True, True])
    #[pyo3(signature = (tenant, bytes, *, batch = None, sessions = None, ttl = None, dry_run = None))]
    #[pyo3(text_signature = "($self, tenant, bytes, *, batch=None, sessions=None, ttl=30.0, dry_run=False)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn cut(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        bytes: &Bound<'_, PyAny>,
        batch: Option<&Bound<'_, PyAny>>,
        sessions: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
        dry_run: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let (ttl, dry) = (ttl_or(ttl)?, dry_or(dry_run)?);
        self.gather(py, tenant, bytes, batch, sessions, |core, tenant, bytes, from| {
            core.cut(tenant, bytes, from, ttl, dry)
        })
    }

    /// Tell the pool how fast things are: for the estimates of plans, and for what restores sooner.
    ///
    /// Parameters
    /// ----------
    /// device, host : int or str, optional
    ///     Bytes a second that are copied within the device, and between the tiers.
    /// tokens : int, optional
    ///     Tokens a second that a prompt is computed with.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     For a speed of 0, or what can't be read.
    ///
    /// Notes
    /// -----
    /// What is not given stays. Where a speed was never told, a plan's ``copy_seconds`` is None, and ``mode="auto"`` reckons with
    /// 25 GB a second between the tiers and 10,000 tokens a second.
    #[pyo3(signature = (*, device = None, host = None, tokens = None))]
    fn set_speeds(
        &self,
        device: Option<&Bound<'_, PyAny>>,
        host: Option<&Bound<'_, PyAny>>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let core = self.owner.live()?;
        let bytes = |value: Option<&Bound<'_, PyAny>>, now: u64| match value {
            None => Ok(now),
            Some(value) => match args::bytes(value)? {
                0 => Err(InvalidArgument::new_err("a speed is at least 1 byte a second")),
                speed => Ok(speed),
            },
        };
        let [within, between] = core.bandwidths();
        let (device, host) = (bytes(device, within)?, bytes(host, between)?);
        let tokens = tokens.map(|n| args::number(n, "tokens", 1, u64::MAX)).transpose()?;
        core.set_bandwidths(device, host);
        if let Some(tokens) = tokens {
            core.set_recompute_speed(tokens);
        }
        Ok(())
    }
}

#[pymethods]
impl Sequence {
    /// str : "running"; "leaving", while a plan suspends it; "suspended"; "returning", while a plan brings it back.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.owner.live()?;
        Ok(match self.core.state().map_err(|e| self.owner.error(py, &e))? {
            State::Running => "running",
            State::Leaving(_) => "leaving",
            State::Suspended(_) => "suspended",
            State::Returning(_) => "returning",
        })
    }

    /// str or None : How it is suspended, or on its way: "swap" or "recompute"; None: it runs.
    #[getter]
    fn mode(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.owner.live()?;
        Ok(match self.core.state().map_err(|e| self.owner.error(py, &e))? {
            State::Running => None,
            State::Leaving(mode) | State::Suspended(mode) | State::Returning(mode) => Some(match mode {
                Mode::Swap => "swap",
                Mode::Recompute => "recompute",
            }),
        })
    }

    /// int : Its number, unique in the pool: older sequences have smaller ones.
    #[getter]
    fn number(&self) -> u64 {
        self.core.number()
    }
}

//! Who has to go, when a tenant's bytes must come back and live sequences hold them.
//!
//! Candidates are the running sequences of the batches that are given, and sessions that stand in no batch. In this order:
//!
//! 1. sessions before sequences in a row: nobody waits for them at the moment;
//! 2. lower priority of their tenant;
//! 3. the tenant that is most over its reserve, by weight, counting what this plan takes from it already;
//! 4. what restores sooner, for each byte that comes back;
//! 5. the youngest.
//!
//! Two are spared, whatever is missing then: the oldest running sequence of a tenant, which so makes progress, and the
//! sequence that was its tenant's last victim, which so is not the next one again. Where a reserve that was lent is asked back
//! they come last instead ([`For::Lender`]): nobody makes progress at the expense of a reserve. A sequence that somebody else
//! is using at that moment is passed by.
//!
//! When it is for a tenant, only what lies beyond reserves counts: a tenant inside its own, or below one that is inside its
//! own, is not touched, for what it gave up would stay reserved for it.
//!
//! Callers: preempt.rs, reclaim.rs.

use std::{
    cmp::{Ordering, Reverse},
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::{Build, Built, Survey, Wish};
use crate::{
    batch::Batch,
    error::Error,
    plan::{Kind, Plan},
    pool::Pool,
    sequence::{Sequence, State},
    sync::{Mutex, lock},
    word::{TenantId, Tier},
};

/// The last victim of each tenant. Only building and ending plans looks here.
#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<HashMap<TenantId, u64>>);

impl Turns {
    pub(super) fn remember(&self, tenant: TenantId, sequence: u64) {
        lock(&self.0).insert(tenant, sequence);
    }

    fn was(&self, tenant: TenantId) -> Option<u64> {
        lock(&self.0).get(&tenant).copied()
    }
}

/// Where victims may come from.
#[derive(Clone, Copy, Debug)]
pub struct From<'a> {
    /// Rows of these batches may be taken.
    pub batches: &'a [&'a Batch],
    /// Sequences that stand in no batch.
    pub sessions: &'a [Arc<Sequence>],
    /// For whom.
    pub who: For,
}

/// For whom sequences stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum For {
    /// For nobody named.
    Anybody,
    /// For this tenant, which wants more than it has: its own sequences, and those of tenants below it, are not touched.
    Tenant(TenantId),
    /// The same, for its own reserve, which is lent.
    Lender(TenantId),
}

impl For {
    fn tenant(self) -> Option<TenantId> {
        match self {
            Self::Anybody => None,
            Self::Tenant(tenant) | Self::Lender(tenant) => Some(tenant),
        }
    }
}

/// Sequences, and the batch in which each has a row.
type Listed<'a> = Vec<(Arc<Sequence>, Option<&'a Batch>)>;

struct Candidate<'a> {
    sequence: Arc<Sequence>,
    batch: Option<&'a Batch>,
    tenant: TenantId,
    born: u64,
    /// The oldest of its tenant, or the last victim.
    favoured: bool,
    priority: u8,
    survey: Survey,
    /// Nanoseconds to restore it.
    cost: u64,
}

/// How much a tenant holds above its reserve, by its weight.
#[derive(Clone, Copy)]
struct OverUse {
    units: i64,
    weight: i64,
}

impl OverUse {
    fn cmp(self, other: Self) -> Ordering {
        (i128::from(self.units) * i128::from(other.weight))
            .cmp(&(i128::from(other.units) * i128::from(self.weight)))
    }
}

/// Bytes that each node below a level has in demand beyond its reserve, less what goes already.
#[derive(Clone)]
pub(crate) struct Surplus<'a> {
    pool: &'a Pool,
    level: TenantId,
    bytes: HashMap<TenantId, u64>,
}

impl<'a> Surplus<'a> {
    fn new(pool: &'a Pool, level: TenantId) -> Self {
        Self { pool, level, bytes: HashMap::new() }
    }

    fn path(&self, tenant: TenantId) -> impl Iterator<Item = TenantId> + use<'a> {
        let (pool, level) = (self.pool, self.level);
        std::iter::successors(Some(tenant), |&at| pool.ledger.parent(at)).take_while(move |&at| at != level)
    }

    /// How much of what a tenant gives up reaches the level.
    pub(super) fn of(&mut self, tenant: TenantId) -> u64 {
        let path = self.path(tenant);
        path.map(|at| *self.bytes.entry(at).or_insert_with(|| self.pool.beyond_reserve(at)))
            .min()
            .unwrap_or(u64::MAX)
    }

    pub(super) fn take(&mut self, tenant: TenantId, bytes: u64) {
        for at in self.path(tenant) {
            let left = self.bytes.entry(at).or_insert_with(|| self.pool.beyond_reserve(at));
            *left = left.saturating_sub(bytes);
        }
    }
}

impl Pool {
    fn beyond_reserve(&self, tenant: TenantId) -> u64 {
        let usage = self.ledger.usage(Tier::Device, tenant);
        self.bytes(usage.demand.0.saturating_sub(usage.reserve.0))
    }

    /// Stop sequences of the subtree of `tenant` (the root's: anybody's) until `bytes` come back. The plan says what is
    /// missing.
    ///
    /// # Errors
    /// No such tenant; a batch or a sequence of another pool.
    pub fn preempt(
        self: &Arc<Self>,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        wish: Wish,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        self.check_open()?;
        self.check_level(tenant)?;
        self.regain(Plan::new(Kind::Suspend, tenant, bytes), ttl_ms, dry, |build| {
            let mut surplus = build.surplus(tenant, from);
            build.stop_victims(tenant, bytes, from, wish, &mut surplus)
        })
    }
}

impl<'a> Build<'a> {
    /// When it is for a tenant: what reaches the level of `tenant`.
    pub(super) fn surplus(&self, tenant: TenantId, from: From<'_>) -> Option<Surplus<'a>> {
        from.who.tenant().map(|_| Surplus::new(self.pool, tenant))
    }

    /// Stop sequences of the subtree of `tenant` until `bytes` come back: how many do.
    pub(crate) fn stop_victims(
        &mut self,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        wish: Wish,
        surplus: &mut Option<Surplus<'_>>,
    ) -> Result<u64, Error> {
        let mut candidates = self.candidates(tenant, from)?;
        let mut over: HashMap<TenantId, OverUse> =
            candidates.iter().map(|c| (c.tenant, self.over_use(c.tenant))).collect();
        let mut back = 0;
        while back < bytes
            && let Some(first) =
                candidates.iter().enumerate().min_by(|a, b| order(a.1, b.1, &over)).map(|c| c.0)
        {
            let chosen = candidates.swap_remove(first);
            let most = surplus.as_mut().map_or(u64::MAX, |surplus| surplus.of(chosen.tenant));
            if most == 0 {
                continue;
            }
            let before = self.plan.rungs.sum();
            // What is in use at this moment, or went another way, is passed by.
            let victim = Some((chosen.tenant, bytes - back));
            if self.stop(&chosen.sequence, wish, chosen.batch, tenant, victim).is_err() {
                continue;
            }
            let got = self.plan.rungs.sum() - before;
            back += got.min(most);
            if let Some(surplus) = surplus {
                surplus.take(chosen.tenant, got);
            }
            if let Some(over) = over.get_mut(&chosen.tenant) {
                over.units -= (got / self.pool.spec.unit()) as i64;
            }
        }
        Ok(back)
    }

    fn candidates<'b>(&self, tenant: TenantId, from: From<'b>) -> Result<Vec<Candidate<'b>>, Error> {
        let pool = self.pool;
        let mut found: Vec<Candidate<'b>> = Vec::new();
        let mut oldest: HashMap<TenantId, u64> = HashMap::new();
        let who = from.who;
        for (sequence, batch) in self.listed(tenant, from)? {
            let owner = sequence.tenant();
            let seen = sequence.visit(|_, body, _| {
                (body.state(pool) == State::Running)
                    .then(|| (body.born, pool.survey(body, tenant, &self.spoken)))
            });
            let Ok(Some((born, survey))) = seen else { continue };
            if batch.is_some() {
                oldest.entry(owner).and_modify(|first| *first = born.min(*first)).or_insert(born);
            }
            let priority = pool.ledger.policy(owner).map_or(0, |policy| policy.priority);
            let cost = pool.costs(&survey).least();
            let favoured = pool.victims.was(owner) == Some(born);
            found.push(Candidate { sequence, batch, tenant: owner, born, favoured, priority, survey, cost });
        }
        for c in &mut found {
            c.favoured |= c.batch.is_some() && oldest.get(&c.tenant) == Some(&c.born);
        }
        let all = matches!(who, For::Lender(_));
        found.retain(|c| (all || !c.favoured) && c.survey.back() > 0);
        Ok(found)
    }

    /// The sequences of the subtree of `tenant` that are given, each once.
    pub(super) fn listed<'b>(&self, tenant: TenantId, from: From<'b>) -> Result<Listed<'b>, Error> {
        let pool = self.pool;
        let mut found: Listed<'b> = Vec::new();
        let mut seen = HashSet::new();
        let mut rows = Vec::new();
        for &batch in from.batches {
            if !Arc::ptr_eq(batch.pool(), pool) {
                return Err(Error::WrongPool("the batch"));
            }
            for sequence in batch.sequences()? {
                rows.push((sequence, Some(batch)));
            }
        }
        let sessions = from.sessions.iter().map(|sequence| (Arc::clone(sequence), None));
        for (sequence, batch) in rows.into_iter().chain(sessions) {
            if !Arc::ptr_eq(&sequence.pool, pool) {
                return Err(Error::WrongPool("the sequence"));
            }
            let owner = sequence.tenant();
            if !pool.ledger.is_under(owner, tenant)
                || from.who.tenant().is_some_and(|spared| pool.ledger.is_under(owner, spared))
                || !seen.insert(Arc::as_ptr(&sequence))
            {
                continue;
            }
            found.push((sequence, batch));
        }
        Ok(found)
    }

    fn over_use(&self, tenant: TenantId) -> OverUse {
        let usage = self.pool.ledger.usage(Tier::Device, tenant);
        let weight = self.pool.ledger.policy(tenant).map_or(1, |policy| policy.weight.max(1));
        OverUse { units: i64::from(usage.demand.0) - i64::from(usage.reserve.0), weight: weight.into() }
    }
}

/// Who goes first.
fn order(a: &Candidate<'_>, b: &Candidate<'_>, over: &HashMap<TenantId, OverUse>) -> Ordering {
    let per_byte = |x: &Candidate<'_>, y: &Candidate<'_>| u128::from(x.cost) * u128::from(y.survey.back());
    (a.favoured.cmp(&b.favoured))
        .then(a.batch.is_some().cmp(&b.batch.is_some()))
        .then(a.priority.cmp(&b.priority))
        .then_with(|| match (over.get(&a.tenant), over.get(&b.tenant)) {
            (Some(a), Some(b)) => b.cmp(*a),
            _ => Ordering::Equal,
        })
        .then_with(|| per_byte(a, b).cmp(&per_byte(b, a)))
        .then(Reverse(a.born).cmp(&Reverse(b.born)))
}

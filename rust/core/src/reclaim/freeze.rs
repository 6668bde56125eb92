//! Frozen tenants: no sequence of theirs is opened, and those that run may grow to the length they were admitted for.
//!
//! | who freezes | until |
//! | --- | --- |
//! | [`Pool::set_frozen`] | it is thawed |
//! | a plan with [`Live::Freeze`](super::Live::Freeze) | it comes to nothing; if it is committed, until it is thawed |
//! | such a plan of the root's | it ends, one way or the other: nobody could thaw the root |
//!
//! A tenant is frozen as long as one of them freezes it, and no end of a plan undoes what another one did, before or after
//! it. A thaw ends all of them, those of plans that are open too. So does the removal of the tenant, and who has its id then
//! is not touched by their ends.
//!
//! The word of a tenant: `word/freeze.rs`.
//!
//! Callers: reclaim.rs, admit.rs, sequence.rs, batch/rows.rs, keep.rs, the binding.

#[cfg(all(test, any(kvalloc_loom, kvalloc_shuttle)))]
mod models;

use crate::{
    error::{Error, Refusal, Why},
    ledger::ROOT,
    plan::Ending,
    pool::Pool,
    preempt::Build,
    sync::{Atom, AtomicU64, Words},
    word::{TenantId, Tier, freeze::FreezeWord, plan::State},
};

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Freezes {
    words: Words,
    /// Tenants that are frozen: counted before one is and until after it is not, so never too few.
    any: AtomicU64,
}

impl Freezes {
    pub(crate) fn new(tenants: usize) -> Self {
        Self { words: Words::zeroed(tenants), any: AtomicU64::new(0) }
    }

    /// Whether there may be one at all.
    #[inline]
    fn any(&self) -> bool {
        self.any.peek() != 0
    }

    fn is_frozen(&self, tenant: TenantId) -> bool {
        FreezeWord(self.words[tenant.as_usize()].get()).is_frozen()
    }

    /// One step of a tenant's word; as it was before.
    fn step(&self, tenant: TenantId, f: impl Fn(FreezeWord) -> Option<FreezeWord>) -> FreezeWord {
        self.any.plus(1);
        let mut after = false;
        let done = self.words[tenant.as_usize()].transit(|word| {
            let next = f(FreezeWord(word))?;
            after = next.is_frozen();
            Some(next.0)
        });
        let over = match done.map(|before| (FreezeWord(before).is_frozen(), after)) {
            Ok((false, true)) => 0,
            Ok((true, false)) => 2,
            _ => 1,
        };
        self.any.minus(over);
        let (Ok(before) | Err(before)) = done;
        FreezeWord(before)
    }

    fn freeze(&self, tenant: TenantId) {
        self.step(tenant, |word| Some(word.freeze()));
    }

    fn thaw(&self, tenant: TenantId) {
        self.step(tenant, |word| Some(word.thaw()));
    }

    /// For a plan that opens.
    fn begin(&self, tenant: TenantId) -> Freezing {
        let thaws = self.step(tenant, |word| Some(word.begin())).thaws();
        Freezing { tenant, thaws }
    }

    fn end(&self, Freezing { tenant, thaws }: &Freezing, committed: bool) {
        self.step(*tenant, |word| word.end(*thaws, committed));
    }
}

/// A tenant that a plan has frozen, and how often it had been thawed then.
#[derive(Debug)]
pub(super) struct Freezing {
    tenant: TenantId,
    thaws: u32,
}

impl Ending for Freezing {
    fn settle(&mut self, pool: &Pool, state: State) {
        pool.freezes.end(self, state == State::Committed && self.tenant != ROOT);
    }
}

impl Pool {
    /// Freeze a tenant and those below it, or thaw it.
    ///
    /// # Errors
    /// No such tenant.
    pub fn set_frozen(&self, tenant: TenantId, frozen: bool) -> Result<(), Error> {
        self.check_tenant(tenant)?;
        self.note(tenant, || if frozen { self.freezes.freeze(tenant) } else { self.thaw(tenant) })
    }

    /// Nothing freezes it any more.
    pub(crate) fn thaw(&self, tenant: TenantId) {
        self.freezes.thaw(tenant);
    }

    /// Freeze a tenant until the plan that is being built ends, and beyond that if it is committed.
    ///
    /// # Errors
    /// No such tenant.
    pub(super) fn freeze_for_plan(&self, build: &mut Build<'_>, tenant: TenantId) -> Result<(), Error> {
        self.note(tenant, || build.endings.push(Box::new(self.freezes.begin(tenant))))
    }

    /// Whether a tenant or one above it is frozen.
    #[inline]
    pub fn is_frozen(&self, tenant: TenantId) -> bool {
        self.freezes.any() && self.is_frozen_above(tenant)
    }

    #[cold]
    fn is_frozen_above(&self, tenant: TenantId) -> bool {
        let mut at = Some(tenant);
        while let Some(level) = at {
            if self.freezes.is_frozen(level) {
                return true;
            }
            at = self.ledger.parent(level);
        }
        false
    }

    /// What a frozen tenant's new request, or growth beyond what was admitted, gets.
    pub(crate) fn frozen(&self, tenant: TenantId, asked: u64) -> Refusal {
        Refusal { why: Why::Frozen, tier: Tier::Device, tenant, level: tenant, asked, room: 0 }
    }
}

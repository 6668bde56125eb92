//! Reserves that are lent, and how they come back.
//!
//! What a lending tenant does not use of its device reserve is not kept from others: its claim is what it uses, and what was
//! asked back (ledger.rs). So it is charged to whoever wants it, and `claim(root) <= capacity` holds at every moment with no
//! word about lending in it.
//!
//! # What the lender has
//!
//! Reserves, lent ones too, never add up to more than the capacity, at any level: policies are refused else. So while a
//! lender wants `n` more inside its reserve and is refused, others have `n` beyond *their* reserves. [`Pool::give_back`] takes
//! these: cached pages that are in the way go, and others' sequences give pages where that is allowed, or stop. Nobody inside
//! his own reserve is touched.
//!
//! What fits at once is kept for the lender from the plan's building on, the rest from its commit on, and until
//! [`Pool::lend_unused`]. So what was asked for is there after one plan, if the call was given the batches and sessions in
//! which others run. (Where a level between the lender and the root is full too, it may take one plan for each.)
//!
//! | it is not there, for | then |
//! | --- | --- |
//! | what pins keep, what others hold too, sequences that weren't given or that somebody is using, uncommitted plans | the error says how many bytes are missing; nobody was stopped, and nothing is kept |
//! | a thread of another tenant that allocates while the plan is being committed | the lender is refused once more, and asks once more |
//! | a thread that calls [`Pool::lend_unused`] at the very moment of the lender's charge | the same: what is let go counts twice for that moment |
//!
//! Where the pool has several page sizes a charge can be refused as fragmented after that as anywhere: rebalance.rs.

use std::sync::Arc;

use crate::{
    error::{Error, sizes},
    ledger::LedgerError,
    plan::{Ending, Fault, Kind, Plan},
    pool::Pool,
    preempt::{Build, Built, For, From, Wish},
    word::{TenantId, TenantRef, Tier, Units, plan::State},
};

/// What was lent is being kept for its owner again.
#[derive(Debug)]
struct Recall {
    tenant: TenantRef,
    kept: Units,
    before: Units,
}

impl Ending for Recall {
    fn settle(&mut self, pool: &Pool, state: State) {
        match state {
            // What another thread took in between is missing: as much as there is is kept.
            State::Committed => drop(pool.ledger.recall(Tier::Device, self.tenant, self.kept)),
            _ => pool.ledger.lend(Tier::Device, self.tenant, self.before),
        }
    }

    fn waits(&self) -> bool {
        true
    }
}

impl Pool {
    /// Get `bytes` back that `tenant` has left of its reserve and lends: cached pages of others go, and their sequences stop,
    /// of the batches and sessions in `from`. From the commit on they can be charged to the tenant, and to nobody else until
    /// [`Self::lend_unused`]. A plan for which nobody has to stop has been carried out.
    ///
    /// # Errors
    /// Closed; no such tenant; more than the reserve has left; it can't be had: the error says what is missing, and nothing was
    /// changed.
    pub fn give_back(
        self: &Arc<Self>,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        wish: Wish,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        self.check_open()?;
        self.check_tenant(tenant)?;
        self.expire_plans();
        let lane = self.next_lane();
        let _op = self.enter(lane);
        let lender = self.ledger.now(tenant);
        // What lies in stock is not in use.
        self.ledger.drain(Tier::Device);
        let usage = self.ledger.usage(Tier::Device, tenant);
        let left = usage.reserve.0.saturating_sub(usage.demand.0);
        let units = bytes.div_ceil(self.spec.unit());
        if units > left.into() {
            let text = "its reserve has no more left";
            return Err(self.not_given(tenant, bytes, bytes - self.bytes(left), text));
        }
        let units = units as u32;
        let (kept, before) = (Units(usage.demand.0 + units), self.ledger.kept(Tier::Device, tenant));
        let mut build = Build::new(self, lane, Plan::new(Kind::GiveBack, tenant, bytes), dry);
        let had = match self.ledger.recall(Tier::Device, lender, kept) {
            Ok(()) => Ok(()),
            Err(LedgerError::Reserve { level, short, .. }) => {
                let from = From { who: For::Lender(tenant), ..from };
                self.call_back(&mut build, level, self.bytes(short.0), from, wish)
            }
            Err(error) => Err(Error::Tenant(error.to_string())),
        };
        if dry || had.is_err() {
            self.ledger.lend(Tier::Device, lender, before);
        }
        if let Err(error) = had {
            build.give_up();
            return Err(error);
        }
        if !dry {
            build.endings.push(Box::new(Recall { tenant: lender, kept, before }));
        }
        self.clear_reserves(&mut build, tenant, units);
        let waits = !build.plan.victims.is_empty() || !build.plan.moves.is_empty();
        let built = build.open(ttl_ms);
        if !dry && !waits {
            self.commit_plan(&built.0)?;
        }
        Ok(built)
    }

    /// Lend what a tenant does not use of its reserve, what was given back included.
    ///
    /// # Errors
    /// Closed; no such tenant.
    pub fn lend_unused(&self, tenant: TenantId) -> Result<(), Error> {
        self.check_open()?;
        self.check_tenant(tenant)?;
        self.ledger.lend(Tier::Device, self.ledger.now(tenant), Units(0));
        Ok(())
    }

    /// Bytes of a tenant's reserve that others may have at this moment.
    pub fn lent(&self, tenant: TenantId) -> u64 {
        let usage = self.ledger.usage(Tier::Device, tenant);
        self.bytes(usage.reserve.0.saturating_sub(usage.claim.0))
    }

    /// Stop who has what is missing at a level.
    fn call_back(
        self: &Arc<Self>,
        build: &mut Build<'_>,
        level: TenantId,
        short: u64,
        from: From<'_>,
        wish: Wish,
    ) -> Result<(), Error> {
        let (tenant, asked) = (build.plan.tenant, build.plan.asked);
        let back = build.shrink_or_stop(level, short, from, wish, true)?;
        if back < short {
            let text = "others hold them in what can't be stopped, or was not given to this call";
            return Err(self.not_given(tenant, asked, short - back, text));
        }
        Ok(())
    }

    fn not_given(&self, tenant: TenantId, asked: u64, short: u64, why: &str) -> Error {
        let name = self.ledger.name(tenant).unwrap_or_default();
        let [back, missing] = sizes([asked, short]);
        let text = format!(
            "{name:?} asked for {back} of its reserve back, and {missing} are missing: {why}; nothing was changed"
        );
        Error::Plan(Fault::Short { asked, short, text })
    }
}

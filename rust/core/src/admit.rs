//! May this start now? The whole need of a request against what there is: now, wait (for whom, how much), or never.
//!
//! An answer is about a moment; [`Pool::open`] with `admit` is what reserves. Never is final: it does not depend on what
//! others hold, only on limits, reserves and the pool's size. Callers: sequence.rs, the binding.

use crate::{
    error::{Error, Refusal, Why},
    ledger::ROOT,
    pool::Pool,
    prefix::Prompt,
    sequence::Open,
    stats::TenantCounter,
    word::{GroupId, TenantId, Tier, Units},
};

/// The answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It fits.
    Now,
    /// It will fit once something is given back.
    Wait,
    /// It can never fit.
    Never,
}

/// The answer to "may this start now?".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Admission {
    /// The answer.
    pub verdict: Verdict,
    /// Bytes it needs beyond the pages of its prompt that are held by others already.
    pub need: u64,
    /// Bytes there are now (for [`Verdict::Never`]: can ever be).
    pub room: u64,
    /// The level that is in the way: a tenant whose limit it is, or the root.
    pub behind: TenantId,
    /// In which way; `None` for [`Verdict::Now`].
    pub why: Option<Why>,
}

impl Pool {
    /// The most units a sequence on its way to `total` tokens holds.
    pub(crate) fn need(&self, total: u32) -> u64 {
        let page_tokens = self.spec.page_tokens();
        let groups = self.groups.iter().enumerate();
        groups
            .map(|(g, info)| {
                u64::from(self.spec.peak_pages(GroupId(g as u8), total, page_tokens)) * u64::from(info.units)
            })
            .sum()
    }

    /// Refuse what can never fit. `need`: units that each payer would have to hold for a sequence of `tenant`; the payers
    /// stand on one path of the tree, so what one holds counts at those above it too.
    pub(crate) fn check_ever(&self, tenant: TenantId, need: &[(TenantId, u64)]) -> Result<(), Error> {
        let room = |units, payer| {
            self.ledger.room(Tier::Device, payer, Units(u32::try_from(units).unwrap_or(u32::MAX)))
        };
        let fits = |units: u64, most: Units, level, counts: &dyn Fn(TenantId) -> bool| {
            if units <= u64::from(most.0) || !counts(level) {
                return Ok(());
            }
            Err(Error::Never(Refusal {
                why: Why::Limit,
                tier: Tier::Device,
                tenant,
                level,
                asked: units * self.spec.unit(),
                room: self.bytes(most.0),
            }))
        };
        for &(payer, own) in need {
            let below = need.iter().filter(|n| self.ledger.is_under(n.0, payer)).map(|n| n.1).sum();
            let room = room(below, payer);
            fits(below, room.ever, room.ever_level, &|_| true)?;
            // (The root pays nothing itself: it stands for whoever is below it.)
            fits(own, room.own, room.own_level, &|_| payer != ROOT)?;
        }
        // All of it stands beside the reserves of the tenant's neighbours; what the scopes pay, its own limits don't bound.
        let pays = |level| need.iter().all(|n| self.ledger.is_under(n.0, level));
        let all = need.iter().map(|n| n.1).sum();
        let room = room(all, tenant);
        fits(all, room.ever, room.ever_level, &pays)
    }

    /// May this start now? `length`: of the prompt, whose tokens may be left out of `open`; then no prefix is looked for.
    ///
    /// # Errors
    /// An empty or absurdly long prompt, no such tenant, a scope that is not above it.
    pub fn admit(&self, tenant: TenantId, open: &Open<'_>, length: u32) -> Result<Admission, Error> {
        self.check_open()?;
        self.check_tenant(tenant)?;
        // What lies in stock may have to go back first.
        let _op = self.enter(self.next_lane());
        let max_new = open.max_new_tokens;
        let total = length
            .checked_add(max_new)
            .filter(|&n| length > 0 && n <= crate::sequence::MAX_TOKENS)
            .ok_or_else(|| {
            Error::Argument(format!(
                "a prompt of {length} tokens and {max_new} new ones; it needs at least 1 and has at most {}",
                crate::sequence::MAX_TOKENS
            ))
        })?;
        let all = self.need(total);
        let shared: u64 = if open.tokens.is_empty() {
            0
        } else {
            let ranges = self.ranges(tenant, open)?;
            let prompt = Prompt { tenant, tokens: &open.tokens, root: self.root(open) };
            let pages = self.peek_prefix(&prompt, &ranges);
            let held = pages.iter().filter(|p| self.pages.read(p.id).is_held());
            held.map(|p| u64::from(self.units_of(p.id))).sum()
        };
        let units = all.saturating_sub(shared);
        let capped = Units(u32::try_from(units).unwrap_or(u32::MAX));
        let room = self.ledger.room(Tier::Device, tenant, capped);
        let answer = |verdict, room: Units, behind, why| Admission {
            verdict,
            need: units * self.spec.unit(),
            room: self.bytes(room.0),
            behind,
            why,
        };
        // What the scopes pay, the reserves of the tenant's children don't bound.
        let (most, level) = match open.share.is_empty() {
            true => (room.own, room.own_level),
            false => (room.ever, room.ever_level),
        };
        if units > u64::from(most.0) {
            return Ok(answer(Verdict::Never, most, level, Some(Why::Limit)));
        }
        let why = if room.level == TenantId(0) { Why::Claim } else { Why::Limit };
        if self.is_frozen(tenant) {
            self.stats.count_for(tenant, TenantCounter::Waited, 1);
            return Ok(answer(Verdict::Wait, Units(0), tenant, Some(Why::Frozen)));
        }
        if units > u64::from(room.now.0) {
            self.stats.count_for(tenant, TenantCounter::Waited, 1);
            return Ok(answer(Verdict::Wait, room.now, room.level, Some(why)));
        }
        Ok(answer(Verdict::Now, room.now, tenant, None))
    }
}

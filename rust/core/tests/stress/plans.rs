//! What a worker does with plans: sequences leave the device and come back, extents change the size they serve, tenants
//! give back and get more; each plan is committed, whole or in pieces, given up, or forgotten until its time is over.

use std::sync::{Arc, atomic::Ordering};

use kvalloc_core::{
    error::Error,
    ledger::Policy,
    plan::{Fate, Plan, Progress},
    pool::Pool,
    preempt::{Built, For, From, Wish},
    reclaim::Live,
    sequence::{Sequence, State},
    word::{ClassId, TenantId},
};

use super::{Kind, ROWS, Worker};

/// Plans that a worker keeps open.
const OPEN: usize = 4;
/// Sequences that a worker has away.
const AWAY: usize = 6;

impl Worker {
    /// Something with plans.
    pub(super) fn plan(&mut self) {
        match self.dice.roll(24) {
            0..3 => self.suspend(),
            3..6 => self.resume(),
            6 => self.preempt(),
            7..9 => self.rebalance(),
            9 => self.reclaim(),
            10 => self.top_up(),
            11 => self.take_back(),
            12..17 => self.commit_plan(),
            17 => self.abort_plan(),
            18 => self.close_away(),
            19 => self.look_after(),
            20..22 => self.shrink(true),
            _ => self.shrink(false),
        }
    }

    fn ttl(&mut self) -> u64 {
        1 + self.dice.roll(60)
    }

    fn wish(&mut self) -> Wish {
        [Wish::Auto, Wish::Swap, Wish::Recompute, Wish::SwapOnly][self.dice.roll(4) as usize]
    }

    /// A plan that is open, or was carried out at once. Sequences that lose pages go on.
    fn keep(&mut self, (plan, sequences): Built) {
        let stops = plan.victims.iter().map(|victim| victim.fate != Fate::Trimmed);
        let stopped: Vec<_> = sequences.iter().zip(stops).filter(|(_, stops)| *stops).map(|s| s.0).collect();
        self.running.retain(|mine| !stopped.iter().any(|gone| Arc::ptr_eq(mine, gone)));
        for sequence in stopped.into_iter().map(Arc::clone) {
            if !self.away.iter().any(|away| Arc::ptr_eq(away, &sequence)) {
                self.away.push(sequence);
            }
        }
        if plan.is_dry() {
            assert!(self.pool.commit_plan(&plan).is_err(), "nothing stands behind it");
        } else {
            self.plans.push(plan);
        }
    }

    fn suspend(&mut self) {
        if self.plans.len() >= OPEN || self.away.len() >= AWAY {
            return;
        }
        let Some(at) = self.pick() else { return };
        self.did(Kind::Suspend);
        let (wish, ttl, dry) = (self.wish(), self.ttl(), self.dice.roll(8) == 0);
        let sequence = Arc::clone(&self.running[at]);
        match self.pool.suspend(&sequence, wish, Some(&self.batch), ttl, dry) {
            Ok((plan, _)) if dry => self.keep((plan, Vec::new())),
            Ok(built) => self.keep(built),
            // No room in the other tier, or it can't be computed again: it goes on, out of its row if others came in between.
            Err(Error::Refused(_) | Error::Argument(_)) => self.rows_left(),
            Err(e) => panic!("{e}"),
        }
    }

    fn resume(&mut self) {
        if self.plans.len() >= OPEN || self.away.is_empty() {
            return;
        }
        self.did(Kind::Resume);
        let at = self.dice.roll(self.away.len() as u64) as usize;
        let (ttl, sequence) = (self.ttl(), Arc::clone(&self.away[at]));
        match self.pool.resume(&sequence, ttl, false) {
            Ok(built) => self.keep(built),
            // No room; a plan has it in hand, or whoever ends one just now; it runs.
            Err(Error::Refused(_) | Error::Never(_) | Error::Argument(_) | Error::Busy(_)) => {}
            Err(e) => panic!("{e}"),
        }
    }

    fn preempt(&mut self) {
        if self.plans.len() >= OPEN || self.away.len() >= AWAY {
            return;
        }
        self.did(Kind::Preempt);
        let (wish, ttl, bytes) = (self.wish(), self.ttl(), self.dice.roll(8) * self.page_bytes());
        let from = From { batches: &[&self.batch], sessions: &[], who: For::Anybody };
        let built = self.pool.preempt(self.tenant, bytes, from, wish, ttl, false).expect("a tenant");
        self.keep(built);
    }

    fn page_bytes(&self) -> u64 {
        self.pool.spec().sizes()[0]
    }

    /// Pages of sequences that go on are cut or go on in a smaller class, and so do those of suspended ones that are back.
    fn shrink(&mut self, cut: bool) {
        if self.plans.len() >= OPEN {
            return;
        }
        self.did(if cut { Kind::Cut } else { Kind::Compress });
        let (ttl, dry) = (self.ttl(), self.dice.roll(8) == 0);
        let bytes = self.dice.roll(8) * self.page_bytes();
        let from = From { batches: &[&self.batch], sessions: &self.away, who: For::Anybody };
        let built = match cut {
            true => self.pool.cut(self.tenant, bytes, from, ttl, dry),
            false => self.pool.compress(self.tenant, bytes, from, ttl, dry),
        };
        match built {
            Ok((plan, sequences)) => self.keep((plan, if dry { Vec::new() } else { sequences })),
            // There is no smaller class, or the tenant does not allow it.
            Err(Error::Argument(_)) => {}
            Err(e) => panic!("{e}"),
        }
    }

    fn rebalance(&mut self) {
        if self.plans.len() >= OPEN {
            return;
        }
        self.did(Kind::Rebalance);
        let classes = self.pool.spec().groups().len() as u64;
        let goal = (self.dice.roll(3) > 0).then(|| ClassId(self.dice.roll(classes) as u8));
        let (ttl, bytes) = (self.ttl(), self.dice.roll(20) * self.page_bytes());
        let (most, dry) = (self.dice.roll(12) as usize, self.dice.roll(8) == 0);
        let plan = self.pool.rebalance(goal, bytes, most, ttl, dry).expect("a class");
        assert!(plan.moves.len() <= most);
        self.keep((plan, Vec::new()));
    }

    fn reclaim(&mut self) {
        if self.plans.len() >= OPEN {
            return;
        }
        self.did(Kind::Reclaim);
        let (ttl, bytes, dry) = (self.ttl(), self.dice.roll(10) * self.page_bytes(), self.dice.roll(6) == 0);
        let live = if self.dice.roll(3) == 0 { Live::Freeze } else { Live::Stay };
        let built = self.pool.reclaim(self.tenant, bytes, live, ttl, dry).expect("a tenant");
        self.pool.set_frozen(self.tenant, false).expect("it lives");
        self.keep(built);
    }

    /// The tenant beside the workers gets more.
    fn top_up(&mut self) {
        if self.plans.len() >= OPEN {
            return;
        }
        self.did(Kind::TopUp);
        let (ttl, bytes, wish) = (self.ttl(), (1 + self.dice.roll(6)) * self.page_bytes(), self.wish());
        let batches = [&self.batch];
        let from = From { batches: &batches, sessions: &[], who: For::Anybody };
        let preempt = self.away.len() < AWAY && self.dice.roll(3) == 0;
        let live = if preempt { Live::Preempt(from, wish) } else { Live::Stay };
        let (most, dry) = (self.dice.roll(12) as usize, self.dice.roll(6) == 0);
        match self.pool.top_up(self.topped, bytes, live, most, ttl, dry) {
            Ok((plan, _)) if dry => self.keep((plan, Vec::new())),
            Ok(built) => self.keep(built),
            // It can't be had. Whoever was stopped for it goes on, out of its row.
            Err(Error::Plan(_) | Error::Tenant(_)) => self.rows_left(),
            Err(e) => panic!("{e}"),
        }
    }

    /// Sequences whose rows are gone are away.
    fn rows_left(&mut self) {
        let rows = self.batch.sequences().expect("mine");
        let has_row = |mine: &Arc<Sequence>| rows.iter().any(|row| Arc::ptr_eq(row, mine));
        let (rows, out): (Vec<_>, Vec<_>) = std::mem::take(&mut self.running).into_iter().partition(has_row);
        self.running = rows;
        self.away.extend(out);
    }

    /// And gives it back.
    fn take_back(&mut self) {
        self.did(Kind::Policy);
        reset(&self.pool, self.topped);
    }

    fn commit_plan(&mut self) {
        if self.plans.is_empty() {
            return;
        }
        self.did(Kind::CommitPlan);
        let at = self.dice.roll(self.plans.len() as u64) as usize;
        let some = if self.dice.roll(2) == 0 { usize::MAX } else { 1 + self.dice.roll(3) as usize };
        // As it comes back from another process.
        let plan = match self.dice.roll(4) {
            0 => Plan::from_bytes(&self.plans[at].to_bytes([0; 16])).expect("as it was written").0,
            _ => self.plans[at].clone(),
        };
        match self.pool.commit_some(&plan, some) {
            Ok(Progress { moved, dropped, left }) => {
                self.count_moves(moved, dropped);
                if left == 0 {
                    self.plans.swap_remove(at);
                    assert!(self.pool.commit_plan(&plan).is_err(), "a second report");
                }
            }
            // Its time was over, or it was carried out at once.
            Err(Error::Plan(_)) => self.ended(at),
            Err(e) => panic!("{e}"),
        }
    }

    fn count_moves(&self, moved: usize, dropped: usize) {
        self.tally.moved.fetch_add(moved as u64, Ordering::Relaxed);
        self.tally.dropped.fetch_add(dropped as u64, Ordering::Relaxed);
    }

    fn ended(&mut self, at: usize) {
        self.tally.late.fetch_add(1, Ordering::Relaxed);
        self.plans.swap_remove(at);
    }

    fn abort_plan(&mut self) {
        if self.plans.is_empty() {
            return;
        }
        self.did(Kind::AbortPlan);
        let at = self.dice.roll(self.plans.len() as u64) as usize;
        match self.pool.abort_plan(&self.plans[at]) {
            Ok(()) => drop(self.plans.swap_remove(at)),
            Err(Error::Plan(_)) => self.ended(at),
            Err(e) => panic!("{e}"),
        }
    }

    /// A session ends while it is away, or in the middle of a plan.
    fn close_away(&mut self) {
        if self.away.is_empty() {
            return;
        }
        self.did(Kind::Close);
        let at = self.dice.roll(self.away.len() as u64) as usize;
        close(&self.away.swap_remove(at));
    }

    /// Who is back gets a row.
    fn look_after(&mut self) {
        self.did(Kind::Add);
        let mut at = 0;
        while at < self.away.len() {
            if self.away[at].state() != Ok(State::Running) || self.running.len() == ROWS {
                at += 1;
                continue;
            }
            match self.batch.add(&self.away[at]) {
                Ok(_) => self.running.push(self.away.swap_remove(at)),
                // Whoever ends its plan has it in hand, or begins another.
                Err(Error::Busy(_)) => at += 1,
                // Longer than a row.
                Err(Error::Argument(_)) => close(&self.away.swap_remove(at)),
                Err(e) => panic!("{e}"),
            }
        }
    }

    /// Nothing is open and nobody away.
    pub(super) fn end_plans(&mut self) {
        for plan in std::mem::take(&mut self.plans) {
            // Or it is late.
            let _ = self.pool.abort_plan(&plan);
        }
        self.away.drain(..).for_each(|sequence| close(&sequence));
    }
}

fn close(sequence: &Arc<Sequence>) {
    match sequence.close() {
        // Somebody ends its plan in this very moment: it closes with its last handle.
        Ok(()) | Err(Error::Busy(_)) => {}
        Err(e) => panic!("{e}"),
    }
}

/// Nothing is reserved for a tenant any more.
pub(super) fn reset(pool: &Pool, tenant: TenantId) {
    pool.ledger().set_policy(tenant, &Policy::default()).expect("less is always possible");
}

//! Sequences that leave the device and come back in the world of world.rs, by plans that are committed, given up, or
//! forgotten until their time is over. The bytes are copied when a plan is built: whoever writes to its places before it
//! has ended is found out.

use std::{collections::HashMap, sync::Arc};

use super::{device, world::World};
use crate::{
    batch::Batch,
    error::Error,
    plan::{Fate, Fault, Plan},
    preempt::{Built, For, From, Wish},
    reclaim::Live,
    sequence::{Mode, State},
    word::{ClassId, FrameId, PageId, PageRef, TenantId, Tier, page::Location, plan::State as Ended},
};

/// An open plan.
pub(super) struct Carried {
    plan: Plan,
    /// What it does to which sequence, and which of its pages move.
    parts: Vec<(u64, State, Vec<PageRef>)>,
    /// References that the plan itself has, for sequences that are to be computed again.
    pub(super) refs: HashMap<PageRef, u32>,
    /// What it was promised for those who come back.
    pub(super) promised: HashMap<TenantId, u32>,
}

impl Carried {
    pub(super) fn carries(&self, id: u64) -> bool {
        self.parts.iter().any(|part| part.0 == id)
    }
}

const TTL: u64 = 2500;

impl World {
    fn place(&self, at: Location) -> (Tier, FrameId) {
        (at.tier().expect("a place"), FrameId(self.pool.entry_at(at) as u32))
    }

    /// A plan was built: its bytes are copied at once.
    fn carry(
        &mut self,
        (plan, sequences): Built,
        refs: HashMap<PageRef, u32>,
        promised: HashMap<TenantId, u32>,
    ) {
        for m in plan.moves.iter().filter(|m| !m.to.is_gone()) {
            let group = self.pool.classes[m.from.class().as_usize()].group;
            let (from, to) = (self.place(m.from), self.place(m.to));
            self.device.carry(group, from, to);
        }
        let mut parts = Vec::new();
        let stopped = plan.victims.iter().zip(sequences).filter(|(victim, _)| victim.fate != Fate::Trimmed);
        for (victim, handle) in stopped {
            let (&id, model) =
                self.sequences.iter_mut().find(|(_, m)| Arc::ptr_eq(&m.handle, &handle)).expect("it lives");
            assert_eq!((victim.sequence, victim.tenant), (handle.number(), model.tenant));
            model.state = match (victim.fate, model.state) {
                (Fate::Swapped, State::Running) => State::Leaving(Mode::Swap),
                (Fate::Recomputed, State::Running) => State::Leaving(Mode::Recompute),
                (Fate::Resumed, State::Suspended(mode)) => State::Returning(mode),
                other => panic!("{other:?}"),
            };
            let held: Vec<_> =
                self.groups().flat_map(|g| handle.pages(g).expect("nobody uses it").1).collect();
            let model = &self.sequences[&id];
            let moved = plan.moves.iter().map(|m| m.page).filter(|page| held.iter().any(|h| h.0 == *page));
            parts.push((id, model.state, moved.collect()));
        }
        self.plans.push(Carried { plan, parts, refs, promised });
    }

    pub(super) fn suspend(&mut self, id: u64, wish: usize, with_batch: bool) {
        let wish = [Wish::Auto, Wish::Swap, Wish::Swap, Wish::Recompute, Wish::SwapOnly][wish % 5];
        let model = &self.sequences[&id];
        let batch = model.batch.filter(|_| with_batch).map(|at| &self.batches[at].batch);
        let may = model.state == State::Running && (model.batch.is_none() || batch.is_some());
        let built = self.pool.suspend(&model.handle, wish, batch, TTL, false);
        if !may {
            assert!(matches!(built, Err(Error::Argument(_))), "{built:?}");
            return;
        }
        let had_row = model.batch.is_some();
        match built {
            Ok(built) => {
                let row = self.pulled(id);
                assert_eq!(row.is_some(), had_row);
                assert_eq!(built.0.victims[0].row.map(|taken| taken.row as usize), row);
                self.carry(built, HashMap::new(), HashMap::new());
            }
            // It may only be swapped, and there is no room for it: it stays in its row.
            Err(Error::Refused(refusal)) => assert_eq!(refusal.tier, Tier::Host),
            Err(e) => panic!("{e}"),
        }
    }

    /// References and promises as they are now.
    fn count(&self) -> (HashMap<PageRef, u32>, HashMap<TenantId, u32>) {
        let pages = (0..self.pool.max_pages()).map(PageId);
        let refs = pages.map(|id| {
            let word = self.pool.pages.read(id);
            (PageRef { id, generation: word.generation() }, word.refs())
        });
        let usage = |t: &TenantId| (*t, self.pool.ledger().usage(Tier::Device, *t).promised.0);
        (refs.filter(|r| r.1 > 0).collect(), self.tenants.iter().map(usage).collect())
    }

    pub(super) fn resume(&mut self, n: usize) {
        let away: Vec<_> =
            self.sequences.iter().filter(|(_, m)| m.state != State::Running).map(|(&id, _)| id).collect();
        let Some(&id) = away.get(n % away.len().max(1)) else { return };
        let model = &self.sequences[&id];
        let before = self.count();
        let built = if n.is_multiple_of(2) {
            self.pool.resume(&model.handle, TTL, false)
        } else {
            self.pool.prefetch(&model.handle, TTL, false)
        };
        let after = self.count();
        match built {
            Ok(built) => {
                let more = |(key, n): (&PageRef, &u32)| {
                    let before = before.0.get(key).copied().unwrap_or(0);
                    (*n > before).then(|| (*key, n - before))
                };
                let promised = |(t, n): (&TenantId, &u32)| (*t, n - before.1[t]);
                let refs = after.0.iter().filter_map(more).collect();
                self.carry(built, refs, after.1.iter().map(promised).collect());
            }
            Err(Error::Argument(_)) => {
                assert!(matches!(model.state, State::Leaving(_) | State::Returning(_)));
                assert_eq!(before, after);
            }
            Err(Error::Refused(_) | Error::Never(_)) => {
                assert!(matches!(model.state, State::Suspended(_)));
                assert_eq!(before, after, "nothing is changed");
            }
            Err(e) => panic!("{e}"),
        }
    }

    pub(super) fn preempt(&mut self, tenant: usize, bytes: u64, which: usize) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let wish = [Wish::Auto, Wish::Swap, Wish::Recompute][which % 3];
        let batches: Vec<&Batch> = self.batches.iter().map(|b| &b.batch).collect();
        let batches = if which.is_multiple_of(2) { &batches[..] } else { &[] };
        let idle = self.sequences.values().filter(|m| m.batch.is_none()).map(|m| Arc::clone(&m.handle));
        let sessions: Vec<_> = if which.is_multiple_of(5) { Vec::new() } else { idle.collect() };
        let from = From { batches, sessions: &sessions, who: For::Anybody };
        // By stopping alone, or down the whole ladder.
        let ask = |dry| match which.is_multiple_of(7) {
            true => self.pool.reclaim(tenant, bytes, Live::Preempt(from, wish), TTL, dry).expect("sound"),
            false => self.pool.preempt(tenant, bytes, from, wish, TTL, dry).expect("sound"),
        };
        let (dry, built) = (ask(true), ask(false));
        assert!(dry.0.is_dry() && dry.0.moves.is_empty());
        assert_eq!(built.0.shortfall, bytes.saturating_sub(built.0.rungs.sum()));
        let pool = Arc::clone(&self.pool);
        for (victim, handle) in built.0.victims.iter().zip(&built.1) {
            assert!(pool.ledger().is_under(victim.tenant, tenant));
            if victim.fate == Fate::Trimmed {
                continue;
            }
            let (&id, model) =
                self.sequences.iter().find(|(_, m)| Arc::ptr_eq(&m.handle, handle)).expect("it lives");
            assert_eq!(model.batch.is_some(), victim.row.is_some());
            let row = self.pulled(id);
            assert_eq!(victim.row.map(|taken| taken.row as usize), row);
        }
        self.carry(built, HashMap::new(), HashMap::new());
    }

    /// Pages of sequences go on in a smaller class.
    pub(super) fn compress(&mut self, tenant: usize, bytes: u64, which: usize) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let batches: Vec<&Batch> = self.batches.iter().map(|b| &b.batch).collect();
        let batches = if which.is_multiple_of(3) { &[] } else { &batches[..] };
        let idle = self.sequences.values().filter(|m| m.batch.is_none()).map(|m| Arc::clone(&m.handle));
        let sessions: Vec<_> = if which.is_multiple_of(4) { Vec::new() } else { idle.collect() };
        let from = From { batches, sessions: &sessions, who: For::Anybody };
        let dry = which.is_multiple_of(5);
        let spec = &self.spec;
        let can = self
            .groups()
            .any(|g| spec.small_class_of(g).is_some() && spec.groups()[g.as_usize()].kind.grows());
        match self.pool.compress(tenant, bytes, from, TTL, dry) {
            Ok((plan, _)) => {
                assert!(can && plan.victims.is_empty());
                assert_eq!(plan.shortfall, bytes.saturating_sub(plan.rungs.compress));
                for m in &plan.moves {
                    let word = self.pool.pages.read(m.page.id);
                    assert!(word.is_away() && word.refs() == 1 && self.pool.ledger().may_compress(m.payer));
                    assert!(!self.pool.is_small(m.from) && self.pool.is_small(m.to));
                }
                self.hand_over(plan);
            }
            Err(e) => assert!(matches!(e, Error::Argument(_)), "{e}"),
        }
    }

    /// Contexts lose old pages.
    pub(super) fn cut(&mut self, tenant: usize, bytes: u64, which: usize) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let batches: Vec<&Batch> = self.batches.iter().map(|b| &b.batch).collect();
        let batches = if which.is_multiple_of(3) { &[] } else { &batches[..] };
        let idle = self.sequences.values().filter(|m| m.batch.is_none()).map(|m| Arc::clone(&m.handle));
        let sessions: Vec<_> = if which.is_multiple_of(4) { Vec::new() } else { idle.collect() };
        let from = From { batches, sessions: &sessions, who: For::Anybody };
        let dry = self.pool.cut(tenant, bytes, from, TTL, true);
        match self.pool.cut(tenant, bytes, from, TTL, false) {
            Ok((plan, sequences)) => {
                let dry = dry.expect("as the real one").0;
                assert_eq!(
                    (dry.rungs, dry.shortfall, dry.victims),
                    (plan.rungs, plan.shortfall, plan.victims.clone())
                );
                assert_eq!(plan.shortfall, bytes.saturating_sub(plan.rungs.evict));
                for m in &plan.moves {
                    let word = self.pool.pages.read(m.page.id);
                    assert!(word.is_away() && word.refs() == 1 && m.to.is_gone() && !m.from.is_gone());
                }
                for (victim, sequence) in plan.victims.iter().zip(&sequences) {
                    assert_eq!((victim.fate, victim.sequence), (Fate::Trimmed, sequence.number()));
                    assert!(self.pool.ledger().cut(victim.tenant).is_some());
                }
                self.hand_over(plan);
            }
            Err(e) => assert!(matches!(e, Error::Argument(_)) && dry.is_err(), "{e}"),
        }
    }

    /// Extents for one class, or for any.
    pub(super) fn rebalance(&mut self, goal: usize, bytes: u64, max_moves: usize, dry: bool) {
        let goal = (!goal.is_multiple_of(3)).then(|| ClassId((goal % self.spec.classes().len()) as u8));
        let plan = self.pool.rebalance(goal, bytes, max_moves, TTL, dry).expect("a class");
        assert!(plan.moves.len() <= max_moves && plan.victims.is_empty());
        self.hand_over(plan);
    }

    /// A tenant, or (`freeze`) one whose sequences may go on only as far as they were admitted; thawed at once.
    pub(super) fn reclaim(&mut self, tenant: usize, bytes: u64, freeze: bool, dry: bool) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let live = if freeze { Live::Freeze } else { Live::Stay };
        let (plan, _) = self.pool.reclaim(tenant, bytes, live, TTL, dry).expect("a tenant");
        assert_eq!(plan.asked, plan.rungs.free.min(bytes) + plan.shortfall);
        assert_eq!(self.pool.is_frozen(tenant), freeze && !dry);
        self.pool.set_frozen(tenant, false).expect("it lives");
        self.hand_over(plan);
    }

    /// The reserve grows by what was asked for, or nothing has changed.
    pub(super) fn top_up(&mut self, tenant: usize, bytes: u64, max_moves: usize, dry: bool) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let reserve = || self.pool.ledger().usage(Tier::Device, tenant).reserve.0;
        let before = reserve();
        match self.pool.top_up(tenant, bytes, Live::Stay, max_moves, TTL, dry) {
            Ok((plan, _)) => {
                let by = bytes.div_ceil(self.spec.unit()) as u32;
                assert_eq!(reserve(), before + if dry { 0 } else { by });
                self.policy_changed = true;
                self.hand_over(plan);
            }
            Err(Error::Plan(Fault::Short { short, .. })) => {
                assert!(short > 0 && short <= bytes.next_multiple_of(self.spec.unit()));
                assert_eq!(reserve(), before);
            }
            Err(Error::Tenant(_)) => assert_eq!(reserve(), before),
            Err(e) => panic!("{e}"),
        }
    }

    /// A plan without sequences: it stays open, unless it is over already.
    fn hand_over(&mut self, plan: Plan) {
        if plan.is_dry() {
            assert!(self.pool.commit_plan(&plan).is_err());
        } else if self.pool.plan_state(&plan) == Ok(Ended::Open) {
            self.carry((plan, Vec::new()), HashMap::new(), HashMap::new());
        }
    }

    pub(super) fn commit_plan(&mut self, n: usize, some: usize) {
        if self.plans.is_empty() {
            return;
        }
        let at = n % self.plans.len();
        let done = self.pool.commit_some(&self.plans[at].plan, some).expect("open");
        if done.left == 0 {
            let carried = self.plans.remove(at);
            assert!(self.pool.commit_plan(&carried.plan).is_err(), "a second report");
            carried.parts.iter().for_each(|(id, during, _)| self.committed(*id, *during));
        }
    }

    pub(super) fn abort(&mut self, n: usize) {
        if self.plans.is_empty() {
            return;
        }
        let carried = self.plans.remove(n % self.plans.len());
        self.pool.abort_plan(&carried.plan).expect("open");
        self.given_up(&carried);
    }

    /// It is `now`: plans whose time is over have ended.
    pub(super) fn expire(&mut self, now: u64) {
        let (due, open) =
            std::mem::take(&mut self.plans).into_iter().partition(|c| c.plan.deadline_ms <= now);
        self.plans = open;
        let due: Vec<Carried> = due;
        for carried in due {
            assert_eq!(self.pool.plan_state(&carried.plan), Ok(Ended::Expired));
            assert!(self.pool.commit_plan(&carried.plan).is_err(), "too late");
            self.given_up(&carried);
        }
    }

    fn committed(&mut self, id: u64, during: State) {
        let Some(mut model) = self.sequences.remove(&id) else { return };
        match during {
            State::Leaving(mode) => {
                model.state = State::Suspended(mode);
                if mode == Mode::Recompute {
                    model.cut(0);
                    (model.written, model.cached) = (0, 0);
                }
            }
            State::Returning(mode) => {
                model.state = State::Running;
                if mode == Mode::Recompute {
                    model.cached = model.handle.counts().expect("nobody uses it").cached;
                    model.written = model.cached;
                    assert!(model.cached < model.known(), "the last token is computed");
                    for position in 0..model.cached as usize {
                        let content = device::next(model.content_before(position), model.ids[position]);
                        model.contents.push(content);
                    }
                    self.check_hit(&model);
                }
            }
            State::Running | State::Suspended(_) => unreachable!("a plan has it in hand"),
        }
        self.sequences.insert(id, model);
    }

    fn given_up(&mut self, carried: &Carried) {
        for (id, during, pages) in &carried.parts {
            let off = |page: &PageRef| {
                let word = self.pool.pages.read(page.id);
                word.generation() == page.generation && self.pool.tier_of(page.id) == Tier::Host
            };
            let partly = pages.iter().any(off);
            let Some(model) = self.sequences.get_mut(id) else { continue };
            model.state = match *during {
                State::Leaving(_) if !partly => State::Running,
                State::Leaving(mode) | State::Returning(mode) => State::Suspended(mode),
                other => other,
            };
        }
    }
}

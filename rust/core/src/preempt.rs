//! Live sequences under pressure: how they leave the device, come back, and who has to go.
//!
//! | call | does | is refused when |
//! | --- | --- | --- |
//! | [`Pool::suspend`] | a sequence stops, by swap or by recompute | it does not run, or stands in another batch |
//! | [`Pool::offload`] | the same for a session between two turns: by swap alone | the host tier has no room: everything stays |
//! | [`Pool::resume`], [`Pool::prefetch`] | it goes on where it was | there is no room for all it needs: nothing is changed |
//! | [`Pool::compress`] | pages of sequences go on in a smaller class | the tenant has not allowed it |
//! | [`Pool::cut`] | contexts that are too long lose pages | the tenant has not allowed it |
//! | [`Pool::preempt`] | as many sequences of a tenant stop as bytes are wanted | never: the plan says what is missing |
//!
//! Each builds a plan (plan.rs). What a sequence holds with others, and what pins keep, is not touched: it stays on the
//! device with the sequence's reference, and the plan says how many bytes that is.
//!
//! # By swap or by recompute
//!
//! Swap copies the private bytes out and back; recompute computes every written token again, but for those that others keep
//! on the device before the first private page. [`Wish::Auto`] takes what is restored sooner:
//!
//! ```text
//! swap       2 * private bytes / bytes a second between the tiers
//! recompute  tokens to compute / tokens a second
//! ```
//!
//! What recompute lets go and nobody wants yet stays cached, and is hit when the sequence goes on. So where less is wanted
//! than a victim has, its tokens count in that proportion.
//!
//! Both speeds are the pool's ([`Pool::set_bandwidths`], [`Pool::set_recompute_speed`]); the defaults stand below. When the
//! host tier is full, or whoever pays is at its limit of it, the ladder goes on: recompute instead of swap, and the device copy
//! stays until the commit; the plan says at which level there was no room. A sequence with tokens that nobody told the pool can't
//! be computed again, so it can only be swapped.
//!
//! # Whole need
//!
//! What comes back has room for all it needs before its plan is there: the places of its pages, and promises for the rest of
//! its known tokens and of what it was admitted for. So nothing is brought back to be stopped half-way.
//!
//! Which sequences have to go is in `preempt/victims.rs`, room in the other tier in `preempt/places.rs`,
//! what is compressed in `preempt/compress.rs`, what is cut in `preempt/cut.rs`, what hangs on the end of a plan in
//! `preempt/ending.rs`.
//!
//! Callers: reclaim.rs, the binding.

mod compress;
mod cut;
mod ending;
mod places;
mod victims;

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

use std::{collections::HashSet, sync::Arc};

pub(crate) use victims::Turns;
pub use victims::{For, From};

use crate::{
    batch::Batch,
    error::{Error, Refusal},
    ledger::ROOT,
    plan::{Draft, Ending, Fate, Kind, Move, Plan, TakenRow, Victim},
    pool::{ClassInfo, Pool, Scratch},
    prefix::Prompt,
    sequence::{Body, Mode, Place, Sequence, State, try_lock},
    sync::Atom,
    word::{Lane, PageId, PageRef, TenantId, Tier},
};
use ending::{Leaving, Returning};
use places::Away;

/// Bytes a second between the tiers where the pool was told none: a PCIe 4 link as copies of whole pages use it.
pub const HOST_BYTES_PER_SECOND: u64 = 25_000_000_000;
/// Tokens a second that a prompt is computed with where the pool was told none.
pub const TOKENS_PER_SECOND: u64 = 10_000;

/// How a sequence should be suspended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// As it is restored sooner.
    Auto,
    /// By swap; by recompute if the host tier has no room.
    Swap,
    /// By recompute.
    Recompute,
    /// By swap or not at all.
    SwapOnly,
}

/// What a sequence would give back, and what it costs to restore it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Survey {
    /// Bytes of its private pages that a tenant pays for.
    pub(crate) bytes: u64,
    /// Bytes of all its private pages, whoever pays: what swap copies.
    pub(crate) copied: u64,
    /// Bytes that stay because others hold them too.
    pub(crate) shared: u64,
    /// Bytes that stay because pins keep them.
    pub(crate) pinned: u64,
    /// Bytes it was promised and does not hold yet.
    pub(crate) promised: u64,
    /// Tokens that recompute computes again; `None`: some of them are not known.
    pub(crate) tokens: Option<u32>,
    /// How many of the bytes that come back are wanted; `None`: all.
    pub(crate) wanted: Option<u64>,
}

/// What it costs to restore a sequence, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Costs {
    pub(crate) swap: u64,
    pub(crate) recompute: u64,
}

impl Survey {
    /// Bytes that come back.
    pub(crate) fn back(&self) -> u64 {
        self.bytes + self.promised
    }

    /// Tokens that recompute is likely to compute again: what nobody wants now stays cached, and is hit.
    fn lost_tokens(&self) -> Option<u64> {
        let (tokens, back) = (u64::from(self.tokens?), self.back());
        let lost = |wanted| u128::from(tokens) * u128::from(wanted) / u128::from(back);
        Some(self.wanted.filter(|&wanted| wanted < back).map_or(tokens, |wanted| lost(wanted) as u64))
    }
}

impl Costs {
    pub(crate) fn least(self) -> u64 {
        self.swap.min(self.recompute)
    }
}

/// A plan, and the sequences it is about, in the order of its victims.
pub type Built = (Plan, Vec<Arc<Sequence>>);

/// A plan being built.
pub(crate) struct Build<'a> {
    pool: &'a Arc<Pool>,
    lane: Lane,
    pub(crate) plan: Plan,
    /// Only ask: take no row, no lease and no place.
    dry: bool,
    /// What is lost in the host tier counts as room: it is not looked at closely, nor does it go.
    lost: bool,
    pub(crate) endings: Vec<Box<dyn Ending>>,
    sequences: Vec<Arc<Sequence>>,
    /// Of a dry one: the pages that it would take.
    spoken: HashSet<PageId>,
    /// Of a dry one: what would go to the host tier.
    away: Away,
}

impl Pool {
    /// Tokens a second that a prompt is computed with, for what restores sooner.
    pub fn set_recompute_speed(&self, tokens_per_second: u64) {
        self.recompute_speed.put(tokens_per_second);
    }

    /// As it was set; 0: not known.
    pub fn recompute_speed(&self) -> u64 {
        self.recompute_speed.get()
    }

    /// What a sequence would give back to `within`, beside the pages that a plan takes already.
    pub(crate) fn survey(&self, body: &Body, within: TenantId, spoken: &HashSet<PageId>) -> Survey {
        let mut survey = Survey::default();
        let pays = |payer| self.ledger.is_under(payer, within);
        for page in body.held_pages(self) {
            let (word, bytes) = (self.pages.read(page.id), self.bytes(self.units_of(page.id)));
            if self.tier_of(page.id) != Tier::Device {
                // It has gone already.
            } else if word.pins() > 0 {
                survey.pinned += bytes;
            } else if !self.is_private(page, spoken) {
                survey.shared += bytes;
            } else {
                survey.copied += bytes;
                survey.bytes += if pays(self.pages.payer(page.id)) { bytes } else { 0 };
            }
        }
        let promised = body.promises.iter().filter(|p| pays(p.0));
        survey.promised = promised.map(|p| self.bytes(p.1)).sum();
        survey.tokens = body.is_known().then(|| body.written - self.kept_tokens(body));
        survey
    }

    /// Whether a page that a sequence holds, and no pin keeps, is its alone, and no plan takes it.
    fn is_private(&self, page: PageRef, spoken: &HashSet<PageId>) -> bool {
        let word = self.pages.read(page.id);
        word.refs() <= 1 && !word.is_leased() && !spoken.contains(&page.id)
    }

    /// Tokens at the beginning whose pages others keep on the device.
    fn kept_tokens(&self, body: &Body) -> u32 {
        let Some(anchor) = self.spec.anchor() else { return 0 };
        let kept = |page: &&PageRef| {
            let word = self.pages.read(page.id);
            (word.refs() > 1 || word.pins() > 0) && !word.is_away()
        };
        let pages = body.tables[anchor.as_usize()].live().iter().take(body.published as usize);
        (pages.take_while(kept).count() as u32 * self.spec.page_tokens()).min(body.written)
    }

    pub(crate) fn costs(&self, survey: &Survey) -> Costs {
        let speed = |told: u64, default| if told == 0 { default } else { told };
        let ns = |n: u64, per_second: u64| {
            u64::try_from(u128::from(n) * 1_000_000_000 / u128::from(per_second)).unwrap_or(u64::MAX)
        };
        let host = speed(self.plans.bandwidths()[1], HOST_BYTES_PER_SECOND);
        let tokens = speed(self.recompute_speed.get(), TOKENS_PER_SECOND);
        Costs {
            swap: ns(survey.copied.saturating_mul(2), host),
            recompute: survey.lost_tokens().map_or(u64::MAX, |n| ns(n, tokens)),
        }
    }

    /// Whether swap is to be tried first.
    fn swaps(&self, wish: Wish, survey: &Survey) -> bool {
        match wish {
            Wish::Auto => {
                let costs = self.costs(survey);
                costs.swap <= costs.recompute
            }
            Wish::Swap | Wish::SwapOnly => true,
            Wish::Recompute => survey.tokens.is_none(),
        }
    }

    /// Stop a sequence: its private pages come back by swap or by recompute. One that stands in `batch` is taken out of its
    /// row; in another batch it can't be stopped.
    ///
    /// # Errors
    /// Busy, closed, suspended; in another batch; it can neither be swapped nor computed again: it goes on then. (Out of its
    /// row, where another thread took its place in the host tier at that moment.)
    pub fn suspend(
        self: &Arc<Self>,
        sequence: &Arc<Sequence>,
        wish: Wish,
        batch: Option<&Batch>,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        let stop = |build: &mut Build<'_>| build.stop(sequence, wish, batch, ROOT, None);
        self.one(sequence, Kind::Suspend, ttl_ms, dry, stop)
    }

    /// Take a session that stands in no batch off the device, to the host tier.
    ///
    /// # Errors
    /// Busy, closed, suspended; it stands in a batch; the host tier has no room: then everything stays as it was.
    pub fn offload(
        self: &Arc<Self>,
        sequence: &Arc<Sequence>,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        let stop = |build: &mut Build<'_>| build.stop(sequence, Wish::SwapOnly, None, ROOT, None);
        self.one(sequence, Kind::Offload, ttl_ms, dry, stop)
    }

    /// Bring a suspended sequence back. After the commit it can be given a row.
    ///
    /// # Errors
    /// Busy, closed, not suspended; no room for all it needs: then nothing was changed.
    pub fn resume(
        self: &Arc<Self>,
        sequence: &Arc<Sequence>,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        self.one(sequence, Kind::Resume, ttl_ms, dry, |build| build.bring_back(sequence))
    }

    /// Bring a session back before it is needed: as [`Self::resume`].
    ///
    /// # Errors
    /// As [`Self::resume`].
    pub fn prefetch(
        self: &Arc<Self>,
        sequence: &Arc<Sequence>,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        self.one(sequence, Kind::Prefetch, ttl_ms, dry, |build| build.bring_back(sequence))
    }

    fn one(
        self: &Arc<Self>,
        sequence: &Arc<Sequence>,
        kind: Kind,
        ttl_ms: u64,
        dry: bool,
        f: impl FnOnce(&mut Build<'_>) -> Result<(), Error>,
    ) -> Result<Built, Error> {
        self.check_open()?;
        if !Arc::ptr_eq(self, &sequence.pool) {
            return Err(Error::WrongPool("the sequence"));
        }
        self.build(Plan::new(kind, sequence.tenant(), 0), ttl_ms, dry, f)
    }

    /// A plan that `f` fills, after its call was checked. If that fails there is none, and what was taken for it goes back.
    pub(crate) fn build(
        self: &Arc<Self>,
        plan: Plan,
        ttl_ms: u64,
        dry: bool,
        f: impl FnOnce(&mut Build<'_>) -> Result<(), Error>,
    ) -> Result<Built, Error> {
        self.expire_plans();
        let lane = self.next_lane();
        let _op = self.enter(lane);
        let mut build = Build::new(self, lane, plan, dry);
        match f(&mut build) {
            Ok(()) => Ok(build.open(ttl_ms)),
            Err(error) => {
                build.give_up();
                Err(error)
            }
        }
    }

    /// As [`Self::build`]: a plan by which as many bytes come back as `give` finds; it says how many are missing.
    fn regain(
        self: &Arc<Self>,
        plan: Plan,
        ttl_ms: u64,
        dry: bool,
        give: impl FnOnce(&mut Build<'_>) -> Result<u64, Error>,
    ) -> Result<Built, Error> {
        self.build(plan, ttl_ms, dry, |build| {
            let back = give(build)?;
            build.plan.shortfall = build.plan.asked.saturating_sub(back);
            Ok(())
        })
    }
}

impl<'a> Build<'a> {
    pub(crate) fn new(pool: &'a Arc<Pool>, lane: Lane, plan: Plan, dry: bool) -> Self {
        let (endings, sequences) = (Vec::new(), Vec::new());
        let (spoken, away) = (HashSet::new(), Away::default());
        Self { pool, lane, plan, dry, lost: dry, endings, sequences, spoken, away }
    }

    /// Only to ask, but as exactly as who does it: what is lost in the host tier and in the way goes, or is no room.
    pub(crate) fn exact(pool: &'a Arc<Pool>, lane: Lane, plan: Plan) -> Self {
        Self { lost: false, ..Self::new(pool, lane, plan, true) }
    }

    pub(crate) fn is_dry(&self) -> bool {
        self.dry
    }

    pub(crate) fn lane(&self) -> Lane {
        self.lane
    }

    /// The plan is there; a dry one says what would be.
    pub(crate) fn open(self, ttl_ms: u64) -> Built {
        let draft = Draft { plan: self.plan, endings: self.endings };
        (self.pool.open_draft(self.lane, draft, ttl_ms, self.dry), self.sequences)
    }

    /// There will be no plan: what was taken for it goes back.
    pub(crate) fn give_up(self) {
        let draft = Draft { plan: self.plan, endings: self.endings };
        self.pool.open_draft(self.lane, draft, 0, true);
    }

    /// Let another room add to it.
    pub(crate) fn with_draft<R>(&mut self, f: impl FnOnce(Lane, &mut Draft) -> R) -> R {
        let Plan { kind, tenant, asked, .. } = self.plan;
        let plan = std::mem::replace(&mut self.plan, Plan::new(kind, tenant, asked));
        let mut draft = Draft { plan, endings: std::mem::take(&mut self.endings) };
        let answer = f(self.lane, &mut draft);
        (self.plan, self.endings) = (draft.plan, draft.endings);
        answer
    }

    /// Take a sequence off the device. What is paid for below `within` counts as coming back; `victim`: the tenant whose
    /// last victim it is then, and how many bytes are wanted of it.
    fn stop(
        &mut self,
        sequence: &Arc<Sequence>,
        wish: Wish,
        batch: Option<&Batch>,
        within: TenantId,
        victim: Option<(TenantId, u64)>,
    ) -> Result<(), Error> {
        let (pool, wanted) = (self.pool, victim.map(|v| v.1));
        // All this before a row is taken, for nobody can put it back.
        if !self.dry {
            let mut place = try_lock(&sequence.place, "the sequence")?;
            if !batch.is_some_and(|batch| batch.has(&place)) {
                idle(&mut place)?;
            }
        }
        sequence.visit(|_, body, _| {
            body.check_running(pool)?;
            let survey = Survey { wanted, ..pool.survey(body, within, &self.spoken) };
            let (mode, away) = self.way(body, wish, &survey)?;
            if self.dry {
                self.tell(body, &survey, mode, None);
                self.plan.copied[1] += if mode == Mode::Swap { survey.copied } else { 0 };
                self.away = away;
                self.sequences.push(Arc::clone(sequence));
            }
            Ok::<_, Error>(())
        })??;
        if self.dry {
            return Ok(());
        }
        let row = match batch {
            Some(batch) => batch.take_out(sequence)?,
            None => None,
        };
        let mut place = try_lock(&sequence.place, "the sequence")?;
        let body = idle(&mut place)?;
        body.check_running(pool)?;
        let survey = Survey { wanted, ..pool.survey(body, within, &self.spoken) };
        let moves = match pool.swaps(wish, &survey).then(|| self.swap_out(body)).transpose() {
            Ok(moves) => moves,
            Err(refusal) => {
                self.plan.tell_host_full(refusal.level);
                if !may_compute(wish, &survey) {
                    return Err(refusal.into());
                }
                // The device copy stays, and the ladder goes on.
                None
            }
        };
        let mode = if moves.is_some() { Mode::Swap } else { Mode::Recompute };
        let moves = moves.unwrap_or_default();
        self.tell(body, &survey, mode, row);
        let passage = body.set_out(State::Leaving(mode));
        let pages = moves.iter().map(|m| m.page).collect();
        self.add_moves(moves);
        self.endings.push(Box::new(Leaving {
            sequence: Arc::clone(sequence),
            passage,
            mode,
            pages,
            victim: victim.map(|v| v.0),
        }));
        self.sequences.push(Arc::clone(sequence));
        Ok(())
    }

    /// Who pays for the pages that a sequence would take to the host tier, and what they are there.
    fn takes_along(&self, body: &Body) -> impl Iterator<Item = (TenantId, ClassInfo)> {
        let (pool, spoken) = (self.pool, &self.spoken);
        body.held_pages(pool).into_iter().filter_map(move |page| {
            let at = pool.pages.location(page.id);
            let here = at.tier() == Some(Tier::Device) && !at.is_gone();
            let goes = here && pool.pages.read(page.id).pins() == 0 && pool.is_private(page, spoken);
            goes.then(|| (pool.pages.payer(page.id), pool.class_at(at)))
        })
    }

    /// Where the host tier has no place for one page of each kind that a sequence would take there.
    fn finds_host_full(&self, body: &Body) -> Option<TenantId> {
        let (mut away, mut kinds) = (self.away.clone(), Vec::new());
        for kind in self.takes_along(body) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
                away.add(kind.0, kind.1);
            }
        }
        self.check_away(&away).err().map(|refusal| refusal.level)
    }

    /// How a sequence would stop at this moment, and what this plan would have in the host tier then; the plan says where that has
    /// no place.
    fn way(&mut self, body: &Body, wish: Wish, survey: &Survey) -> Result<(Mode, Away), Refusal> {
        let mut away = self.away.clone();
        if !self.pool.swaps(wish, survey) {
            return Ok((Mode::Recompute, away));
        }
        self.takes_along(body).for_each(|(payer, class)| away.add(payer, class));
        let Err(refusal) = self.check_away(&away) else { return Ok((Mode::Swap, away)) };
        self.plan.tell_host_full(refusal.level);
        if may_compute(wish, survey) { Ok((Mode::Recompute, self.away.clone())) } else { Err(refusal) }
    }

    /// Whether the host tier has room for all this.
    fn check_away(&self, away: &Away) -> Result<(), Refusal> {
        loop {
            let Err(refusal) = self.pool.check_host(away, self.lost) else { return Ok(()) };
            if self.lost || self.pool.drop_lost_pages(self.lane) == 0 {
                return Err(refusal);
            }
        }
    }

    /// A sequence that stops, into the plan's numbers.
    fn tell(&mut self, body: &Body, survey: &Survey, mode: Mode, row: Option<TakenRow>) {
        let rungs = &mut self.plan.rungs;
        rungs.free += survey.promised;
        let (rung, fate, tokens) = match mode {
            Mode::Swap => (&mut rungs.offload, Fate::Swapped, 0),
            Mode::Recompute => (&mut rungs.free, Fate::Recomputed, survey.tokens.unwrap_or(0)),
        };
        *rung += survey.bytes;
        self.plan.shared += survey.shared;
        self.plan.pinned += survey.pinned;
        let (sequence, tenant, bytes) = (body.born, body.tenant, survey.back());
        self.plan.victims.push(Victim { sequence, tenant, fate, bytes, tokens, row });
    }

    fn swap_out(&self, body: &Body) -> Result<Vec<Move>, Refusal> {
        let pool = self.pool;
        let lease = |page: PageRef| pool.lease_out(page).map(|at| (page, at));
        let leased: Vec<_> = body.held_pages(pool).into_iter().filter_map(lease).collect();
        pool.destinations(self.lane, Tier::Host, &leased, |class| class)
    }

    fn add_moves(&mut self, moves: Vec<Move>) {
        let bytes = |m: &Move| self.pool.bytes(self.pool.classes[m.from.class().as_usize()].units);
        self.plan.copied[1] += moves.iter().map(bytes).sum::<u64>();
        self.plan.moves.extend(moves);
    }

    /// Bring a suspended sequence back.
    fn bring_back(&mut self, sequence: &Arc<Sequence>) -> Result<(), Error> {
        let (pool, lane) = (self.pool, self.lane);
        let mut place = try_lock(&sequence.place, "the sequence")?;
        let body = idle(&mut place)?;
        let mode = match body.state(pool) {
            State::Suspended(mode) => mode,
            State::Running => return Err(Error::Argument("the sequence is not suspended; it runs".into())),
            State::Leaving(_) | State::Returning(_) => {
                let text = "the sequence is on its way; commit or abort the plan first";
                return Err(Error::Argument(text.into()));
            }
        };
        if self.dry {
            self.tell_return(body, mode);
            self.sequences.push(Arc::clone(sequence));
            return Ok(());
        }
        let returning = match mode {
            Mode::Recompute => {
                let next = body.reborn(pool, &mut Scratch::default())?;
                Returning::computed(sequence, body.set_out(State::Returning(mode)), next)
            }
            Mode::Swap => {
                let off = |page: &PageRef| pool.tier_of(page.id) == Tier::Host;
                let lease = |page: PageRef| pool.lease_out(page).map(|at| (page, at));
                let leased: Vec<_> =
                    body.held_pages(pool).into_iter().filter(off).filter_map(lease).collect();
                let moves = pool.destinations(lane, Tier::Device, &leased, |class| class)?;
                if let Err(error) = body.reserve_again(pool) {
                    pool.undo(lane, &moves);
                    return Err(error);
                }
                let passage = body.set_out(State::Returning(mode));
                let returning = Returning::swapped(sequence, passage, body.take_promises());
                self.add_moves(moves);
                returning
            }
        };
        self.resumed(body, returning.tokens());
        self.endings.push(Box::new(returning));
        self.sequences.push(Arc::clone(sequence));
        Ok(())
    }
}

impl Build<'_> {
    /// A sequence that would come back, into the plan's numbers.
    fn tell_return(&mut self, body: &Body, mode: Mode) {
        let pool = self.pool;
        let away = body.held_pages(pool).into_iter().filter(|page| pool.tier_of(page.id) == Tier::Host);
        self.plan.copied[1] += away.map(|page| pool.bytes(pool.units_of(page.id))).sum::<u64>();
        let prompt = Prompt { tenant: body.tenant, tokens: &body.tokens, root: body.root() };
        let tokens = match mode {
            Mode::Swap => 0,
            Mode::Recompute => {
                let cached = pool.peek_prefix(&prompt, body.ranges()).len() as u32;
                body.known() - cached * pool.spec.page_tokens()
            }
        };
        self.resumed(body, tokens);
    }

    fn resumed(&mut self, body: &Body, tokens: u32) {
        let (sequence, tenant) = (body.born, body.tenant);
        self.plan.victims.push(Victim { sequence, tenant, fate: Fate::Resumed, bytes: 0, tokens, row: None });
    }
}

/// Whether recompute is an answer.
fn may_compute(wish: Wish, survey: &Survey) -> bool {
    wish != Wish::SwapOnly && survey.tokens.is_some()
}

/// The body of a sequence that stands in no batch.
fn idle(place: &mut Place) -> Result<&mut Body, Error> {
    match place {
        Place::Idle(body) => Ok(body),
        Place::Closed => Err(Error::Closed("the sequence")),
        Place::Batched(_) => Err(Error::Argument(
            "the sequence has a row in a batch; give that batch, or remove the sequence from it first".into(),
        )),
    }
}

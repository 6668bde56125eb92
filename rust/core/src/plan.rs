//! Plans: what getting memory back will do, as plain data, and the leases that keep it possible until it is done.
//!
//! # A plan's life
//!
//! ```text
//!   built -----> open --- commit_some ---> open ... --- commit ---> committed
//!                  |                         |
//!                  +--------- abort, or its time is over ----------> aborted, expired
//! ```
//!
//! Building takes everything a plan needs: each page that moves is leased (it can be hit, held and let go, and not leave
//! its frame), each destination frame is claimed (and charged, where it lies in another tier). Somebody else then copies
//! the bytes, here or on other ranks, who got the plan as bytes ([`Plan::to_bytes`]). Committing a move stores its new location
//! and retires the frame it left; undoing it gives the destination back. Both end the lease; a page that everybody let go
//! meanwhile is freed by whoever ends it.
//!
//! A plan ends once, as a whole: what was committed piece by piece stays, and an end undoes all that no piece had taken.
//! Whoever comes later, or twice, gets an error that says how it ended, and is counted; nothing is changed. An end that
//! never comes is made by the clock.
//!
//! | file | keeps |
//! | --- | --- |
//! | here | the plan as data; what the end of each move does to the books |
//! | `plan/table.rs` | the open plans, and who ends them |
//! | `plan/wire.rs` | a plan as bytes |
//! | `word/plan.rs` | the word in which a plan's end is decided |
//!
//! # Who moves a page
//!
//! The one whose lease it is. The new location is stored by compare-exchange on the one that was leased, so a page that
//! somebody began to write into ([`Location::is_open`]) or whose frame an engine of its own asked for
//! ([`Location::is_outside`]) since then stays where it is, and the move is given up.
//!
//! Callers: reclaim.rs, rebalance.rs, preempt.rs, compress.rs and cut.rs build; the binding commits and aborts; pool.rs expires.

mod table;
#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;
mod wire;

use std::fmt;

pub(crate) use table::{Entry, Plans};
pub use wire::SpecDigest;

pub use crate::batch::TakenRow;
use crate::{
    error::Error,
    pool::Pool,
    stats::Counter,
    word::{
        Lane, PageRef, TenantId, Tier, Units,
        page::{Location, PageWord},
        plan::{MAX_MOVES, State},
    },
};

/// The number of a plan; never used twice in a pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PlanId(pub u64);

impl fmt::Display for PlanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plan {}", self.0)
    }
}

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$help:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$help])* $variant,)+
        }

        impl $name {
            /// Every one, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];
            /// As a person reads it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    };
}

named! {
    /// What a plan is for.
    Kind {
        /// Bytes of a tenant come back.
        Reclaim = "reclaim",
        /// Extents change the page size they serve.
        Rebalance = "rebalance",
        /// A tenant gets more, from those over their share.
        TopUp = "top_up",
        /// Sequences stop and give their pages back.
        Suspend = "suspend",
        /// Suspended sequences go on.
        Resume = "resume",
        /// Pages go to the host tier.
        Offload = "offload",
        /// Pages come back from it.
        Prefetch = "prefetch",
        /// Pages go on in a smaller class.
        Compress = "compress",
        /// A tenant gets back what it had lent of its reserve.
        GiveBack = "give_back",
        /// Contexts lose pages for good.
        Cut = "cut",
    }
}

named! {
    /// What becomes of a sequence.
    Fate {
        /// It may grow to the length it was admitted for.
        Frozen = "frozen",
        /// It stops, and its pages go to the host tier.
        Swapped = "swapped",
        /// It stops, and its pages are computed again when it goes on.
        Recomputed = "recomputed",
        /// It loses the oldest part of its context.
        Trimmed = "trimmed",
        /// It goes on.
        Resumed = "resumed",
    }
}

/// One page from one place to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// The page.
    pub page: PageRef,
    /// Where it lies.
    pub from: Location,
    /// Where it will lie; [`Location::is_gone`]: nowhere, and there is nothing to copy.
    pub to: Location,
    /// Who is charged for it.
    pub payer: TenantId,
}

impl Move {
    /// Whether it is charged elsewhere afterwards: in another tier, in another class, or nowhere.
    pub(crate) fn crosses(&self) -> bool {
        self.to.is_gone() || (self.from.tier(), self.from.class()) != (self.to.tier(), self.to.class())
    }
}

/// A sequence that a plan touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Victim {
    /// Its number, unique in the pool.
    pub sequence: u64,
    /// Whose it is.
    pub tenant: TenantId,
    /// What becomes of it.
    pub fate: Fate,
    /// Bytes that come back by it.
    pub bytes: u64,
    /// Tokens that have to be computed again, or are lost.
    pub tokens: u32,
    /// The row that was taken from it; `None`: it stood in no batch.
    pub row: Option<TakenRow>,
}

/// Bytes that come back, by the step of the ladder that they come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rungs {
    /// Of cached pages.
    pub free: u64,
    /// By going to the host tier.
    pub offload: u64,
    /// By going on in a smaller class.
    pub compress: u64,
    /// Of contexts that are cut.
    pub evict: u64,
}

impl Rungs {
    /// All of them.
    pub fn sum(&self) -> u64 {
        self.free + self.offload + self.compress + self.evict
    }
}

/// What will be done, as plain data.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Its number; 0: it was only asked for (`dry_run`), and nothing stands behind it.
    pub id: PlanId,
    /// The pool it belongs to.
    pub pool: u64,
    /// What it is for.
    pub kind: Kind,
    /// Whose bytes; the root: nobody's in particular.
    pub tenant: TenantId,
    /// When its leases end, on the pool's clock.
    pub deadline_ms: u64,
    /// Bytes that were asked for.
    pub asked: u64,
    /// Bytes that come back.
    pub rungs: Rungs,
    /// Bytes that stay because others than the tenant hold them too.
    pub shared: u64,
    /// Bytes that stay because pins keep them.
    pub pinned: u64,
    /// Bytes that were asked for and don't come back.
    pub shortfall: u64,
    /// Where the host tier had no place for what would have gone there, so that the ladder went on: tenants whose limit of it
    /// was in the way, the root: the tier itself.
    pub host_full: Vec<TenantId>,
    /// Bytes of extents that the plan empties, for pages of another size.
    pub emptied: u64,
    /// Bytes of the moves within the device, and between the tiers.
    pub copied: [u64; 2],
    /// How long copying them takes at the bandwidths the pool was told; `None`: it was told none.
    pub copy_ns: Option<u64>,
    /// What is copied, and behind that what is cut.
    pub moves: Vec<Move>,
    /// What becomes of sequences.
    pub victims: Vec<Victim>,
}

impl Plan {
    /// A plan that does nothing yet.
    pub(crate) fn new(kind: Kind, tenant: TenantId, asked: u64) -> Self {
        Self {
            id: PlanId(0),
            pool: 0,
            kind,
            tenant,
            deadline_ms: 0,
            asked,
            rungs: Rungs::default(),
            shared: 0,
            pinned: 0,
            shortfall: 0,
            host_full: Vec::new(),
            emptied: 0,
            copied: [0; 2],
            copy_ns: None,
            moves: Vec::new(),
            victims: Vec::new(),
        }
    }

    /// At this level the host tier had no place.
    pub(crate) fn tell_host_full(&mut self, level: TenantId) {
        if !self.host_full.contains(&level) {
            self.host_full.push(level);
        }
    }

    /// Whether it only says what would be done.
    pub fn is_dry(&self) -> bool {
        self.id.0 == 0
    }
}

/// How far a commit has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Moves that this call made.
    pub moved: usize,
    /// Moves that this call gave up, because the page was gone, or somebody has begun to write into it.
    pub dropped: usize,
    /// Moves that nobody has taken yet.
    pub left: usize,
}

/// Why a plan can't be built, read or ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It ended before.
    Ended(PlanId, State),
    /// It ended before, too long ago to know how.
    Forgotten(PlanId),
    /// There never was such a plan here.
    Unknown(PlanId),
    /// It only says what would be done.
    Dry,
    /// These bytes are no plan, or not as they were written.
    Altered(&'static str),
    /// It needs more moves than a plan can have.
    TooLong(u64),
    /// Not all that was asked for can come back.
    Short {
        /// Bytes asked for.
        asked: u64,
        /// Bytes there are not.
        short: u64,
        /// Whose cannot be taken.
        text: String,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(id, state) => write!(f, "{id} was {} before; nothing was changed", state.name()),
            Self::Forgotten(id) => write!(f, "{id} has ended before; nothing was changed"),
            Self::Unknown(id) => write!(f, "there never was a {id} in this pool; nothing was changed"),
            Self::Dry => {
                f.write_str("a plan of a dry run has no leases; build it without dry_run to carry it out")
            }
            Self::Altered(what) => write!(f, "these bytes are no plan: {what}"),
            Self::TooLong(n) => write!(f, "{n} moves; a plan has at most {MAX_MOVES}"),
            Self::Short { text, .. } => f.write_str(text),
        }
    }
}

/// What else hangs on a plan and has to know how it ended: called once, after its last move.
pub(crate) trait Ending: fmt::Debug + Send + Sync {
    /// `state` is never [`State::Open`].
    fn settle(&mut self, pool: &Pool, state: State);

    /// Whether it takes a lock also where the plan came to nothing: then nobody who allocates ends that plan.
    fn waits(&self) -> bool {
        false
    }
}

/// A plan that is being built: the leases and the frames of its moves are taken, and what hangs on it is done.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) plan: Plan,
    pub(crate) endings: Vec<Box<dyn Ending>>,
}

impl Draft {
    pub(crate) fn new(kind: Kind, tenant: TenantId, asked: u64) -> Self {
        Self { plan: Plan::new(kind, tenant, asked), endings: Vec::new() }
    }
}

impl Pool {
    /// Open a plan whose leases and destination frames were taken by the caller. `dry_run`: give all of it back at once, so
    /// that nothing is changed.
    pub(crate) fn open_draft(&self, lane: Lane, draft: Draft, ttl_ms: u64, dry_run: bool) -> Plan {
        let Draft { mut plan, mut endings } = draft;
        plan.copy_ns = self.plans.copy_ns(plan.copied);
        // Who commits in pieces counts what it has copied.
        plan.moves.sort_by_key(|m| m.to.is_gone());
        if dry_run {
            plan.moves.iter().for_each(|m| _ = self.end_move(lane, m, false));
            endings.iter_mut().for_each(|ending| ending.settle(self, State::Aborted));
            return plan;
        }
        plan.deadline_ms = self.clock.now_ms().saturating_add(ttl_ms);
        let entry = self.plans.add(plan, endings);
        self.stats.count(lane, Counter::PlansOpened, 1);
        entry.plan().clone()
    }

    /// Commit what is left of a plan: its bytes have been copied.
    ///
    /// # Errors
    /// It has ended, or is of another pool: nothing is changed.
    pub fn commit_plan(&self, plan: &Plan) -> Result<Progress, Error> {
        self.commit_some(plan, usize::MAX)
    }

    /// Commit the next `n` moves of a plan, whose bytes have been copied; with the last ones it ends.
    ///
    /// # Errors
    /// It has ended, or is of another pool: nothing is changed.
    pub fn commit_some(&self, plan: &Plan, n: usize) -> Result<Progress, Error> {
        let lane = self.next_lane();
        let _op = self.enter(lane);
        // What is late stays late, whoever finds it out first.
        self.expire_plans();
        let entry = self.open_entry(plan)?;
        let Some(taken) = entry.take(n) else { return Err(self.late(plan.id)) };
        let moves = &entry.plan().moves[taken.clone()];
        let (mut moved, mut cut) = (0, 0);
        for m in moves.iter().filter(|m| self.end_move(lane, m, true)) {
            moved += 1;
            cut += u64::from(m.to.is_gone());
        }
        self.stats.count(lane, Counter::PagesMoved, moved as u64 - cut);
        self.stats.count(lane, Counter::PagesCut, cut);
        self.stats.count(lane, Counter::MovesDropped, (moves.len() - moved) as u64);
        self.end_moves(&entry, taken.len());
        // What no step shows is free at once.
        self.quiescence.drain(&self.arenas);
        Ok(Progress { moved, dropped: taken.len() - moved, left: entry.plan().moves.len() - taken.end })
    }

    /// Give a plan up: what has not been committed is as before.
    ///
    /// # Errors
    /// It has ended, or is of another pool: nothing is changed.
    pub fn abort_plan(&self, plan: &Plan) -> Result<(), Error> {
        let lane = self.next_lane();
        let _op = self.enter(lane);
        let entry = self.open_entry(plan)?;
        if self.give_up(lane, &entry, State::Aborted) { Ok(()) } else { Err(self.late(plan.id)) }
    }

    /// The moves that nobody has committed yet: the last so many. For whoever is about to copy their bytes.
    ///
    /// # Errors
    /// It has ended, or is of another pool: its places may be others' by now.
    pub fn moves_left(&self, plan: &Plan) -> Result<usize, Error> {
        self.expire_plans();
        let entry = self.open_entry(plan)?;
        entry.left().ok_or_else(|| self.late(plan.id))
    }

    /// Give an open plan more time from now on: whoever copies for long says so.
    ///
    /// # Errors
    /// It has ended, or is of another pool.
    pub fn renew_plan(&self, plan: &Plan, ttl_ms: u64) -> Result<u64, Error> {
        self.expire_plans();
        let entry = self.open_entry(plan)?;
        let deadline = self.clock.now_ms().saturating_add(ttl_ms);
        if self.plans.renew(plan.id, deadline) {
            return Ok(deadline);
        }
        // Another thread has found that its time is over, and is about to end it.
        self.give_up(self.next_lane(), &entry, State::Expired);
        Err(self.late(plan.id))
    }

    /// End the plans whose time is over; how many.
    pub fn expire_plans(&self) -> usize {
        self.end_due_plans(true)
    }

    /// As [`Self::expire_plans`], by somebody who must not wait: plans whose end takes a lock are left to others.
    pub(crate) fn expire_plans_in_passing(&self) -> usize {
        self.end_due_plans(false)
    }

    fn end_due_plans(&self, may_wait: bool) -> usize {
        let now = self.clock.now_ms();
        if !self.plans.are_due(now) {
            return 0;
        }
        let lane = self.next_lane();
        let _op = self.enter(lane);
        let (due, drains) = self.plans.due(now, may_wait);
        for (tier, extent) in drains {
            // Most are empty by now.
            let _ = self.arena(tier).undrain(extent);
        }
        due.iter().filter(|entry| self.give_up(lane, entry, State::Expired)).count()
    }

    /// What became of a plan.
    ///
    /// # Errors
    /// It is of another pool, was never there, or ended too long ago to know.
    pub fn plan_state(&self, plan: &Plan) -> Result<State, Error> {
        self.expire_plans();
        self.check_plan(plan)?;
        self.plans.state(plan.id).map_err(Error::Plan)
    }

    /// The plans that are open, oldest first.
    pub fn open_plans(&self) -> Vec<Plan> {
        self.expire_plans();
        self.plans.open().iter().map(|entry| entry.plan().clone()).collect()
    }

    /// Bytes a second within the device, and between the tiers, as they were set; 0: not known.
    pub fn bandwidths(&self) -> [u64; 2] {
        self.plans.bandwidths()
    }

    /// Bytes a second within the device, and between the tiers, for the estimates of later plans; 0: not known.
    pub fn set_bandwidths(&self, device: u64, host: u64) {
        self.plans.set_bandwidths([device, host]);
    }

    fn check_plan(&self, plan: &Plan) -> Result<(), Error> {
        if plan.is_dry() {
            return Err(Error::Plan(Fault::Dry));
        }
        if plan.pool == self.plans.stamp() { Ok(()) } else { Err(Error::WrongPool("the plan")) }
    }

    fn open_entry(&self, plan: &Plan) -> Result<Entry, Error> {
        self.check_plan(plan)?;
        self.plans.get(plan.id).ok_or_else(|| self.late(plan.id))
    }

    /// A report on a plan that is not open.
    fn late(&self, id: PlanId) -> Error {
        self.stats.count(Lane(0), Counter::LateReports, 1);
        Error::Plan(match self.plans.state(id) {
            Ok(state) => Fault::Ended(id, state),
            Err(fault) => fault,
        })
    }

    /// Undo all that nobody took; `false`: the plan has ended.
    fn give_up(&self, lane: Lane, entry: &Entry, state: State) -> bool {
        let Some(left) = entry.give_up(state) else { return false };
        let left = &entry.plan().moves[left];
        // The last first: pages that everybody let go meanwhile end before those that they continue.
        for m in left.iter().rev() {
            self.end_move(lane, m, false);
        }
        self.end_moves(entry, left.len());
        true
    }

    /// `n` moves are over; after the last one the plan is.
    fn end_moves(&self, entry: &Entry, n: usize) {
        let Some(state) = entry.end(n) else { return };
        entry.settle(self, state);
        self.plans.remove(entry.plan().id, state);
        let counter = match state {
            State::Committed => Counter::PlansCommitted,
            State::Expired => Counter::PlansExpired,
            State::Aborted | State::Open => Counter::PlansAborted,
        };
        self.stats.count(Lane(0), counter, 1);
    }

    /// End a lease: with `commit` the page lies at its destination from now on, else the destination goes back. Whether it
    /// was moved. A move to another tier or class was charged there when it was built, and is no longer charged where it was.
    pub(crate) fn end_move(&self, lane: Lane, m: &Move, commit: bool) -> bool {
        let crosses = m.crosses();
        let moved = match (crosses, commit) {
            (true, true) => self.land(lane, m.page, m.from, m.to),
            (true, false) => {
                self.stay(lane, m.page);
                false
            }
            (false, _) => commit && self.pages.swap_location(m.page.id, m.from, m.to).is_ok(),
        };
        let left = if moved { m.from } else { m.to };
        let class = self.classes[left.class().as_usize()];
        let tier = left.tier().unwrap_or(Tier::Device);
        if left.is_gone() {
            // Nothing was taken for it.
            return false;
        }
        if moved && tier == Tier::Device {
            // Steps that are not committed may still show it.
            self.quiescence.retire(tier, class.size, left.frame());
        } else {
            // It was claimed for this page, or for its move.
            let _ = self.arena(tier).release(class.size, left.frame());
        }
        if crosses {
            self.ledger.discharge(tier, m.payer, lane, Units(class.units));
        } else {
            self.unlease(lane, m.page);
        }
        moved
    }

    /// End a lease. A page that everybody let go meanwhile is freed.
    pub(crate) fn unlease(&self, lane: Lane, page: PageRef) {
        self.end_lease(lane, page, PageWord::is_away);
    }
}

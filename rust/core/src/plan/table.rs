//! The open plans of a pool, and who ends them.
//!
//! A plan stands in the table from its building until its last move is over. Its end is decided in its word, which needs no
//! lock; the table is under a mutex, which only those wait for who build plans or look at them. Expiry looks at one word
//! first and passes by if somebody has the mutex, and so does whoever strikes a plan off that has ended: the next one who has
//! the mutex does that first. So nobody who allocates ever waits here.
//!
//! # Invariant
//!
//! - `next_deadline` is never later than the earliest deadline in the table.
//! - A plan that came up as due gets no more time: whoever asks for it ends the plan. It comes up again until somebody has
//!   begun to end it, so a thread that stops between the two leaves it to the next one.
//! - A thread that stops while it commits a piece, or gives up what is left, keeps the moves that it has taken, and the end of
//!   that plan, and nothing else: others take the rest, or the clock does.

#[cfg(all(test, any(kvalloc_loom, kvalloc_shuttle)))]
mod models;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
    sync::Arc,
};

use super::{Ending, Fault, Move, Plan, PlanId};
use crate::{
    pool::Pool,
    sync::{Atom, AtomicU64, Mutex, MutexGuard, lock, try_lock},
    word::{
        ExtentId, TIERS, Tier,
        plan::{MAX_MOVES, PlanWord, State},
    },
};

/// `next_deadline` when nothing expires.
const NEVER: u64 = u64::MAX;
/// How a plan ended is remembered for so many.
const REMEMBERED: usize = 1024;

/// An open plan.
#[derive(Clone, Debug)]
pub(crate) struct Entry(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    plan: Plan,
    word: AtomicU64,
    endings: Mutex<Vec<Box<dyn Ending>>>,
    /// One of these waits for a lock.
    waits: bool,
}

impl Entry {
    pub(crate) fn plan(&self) -> &Plan {
        &self.0.plan
    }

    fn len(&self) -> u32 {
        self.0.plan.moves.len() as u32
    }

    fn word(&self) -> PlanWord {
        PlanWord(self.0.word.get())
    }

    /// How it ended, if its last move is over.
    fn over(&self) -> Option<State> {
        let word = self.word();
        (word.state() != State::Open && word.ended() == self.len()).then_some(word.state())
    }

    /// How many moves nobody has taken. `None`: the plan has ended.
    pub(super) fn left(&self) -> Option<usize> {
        let word = self.word();
        (word.state() == State::Open).then(|| (self.len() - word.taken()) as usize)
    }

    /// The next `n` moves, for the caller to commit. `None`: the plan has ended.
    pub(super) fn take(&self, n: usize) -> Option<Range<usize>> {
        let n = n.min(MAX_MOVES as usize) as u32;
        let before = self.0.word.transit(|w| PlanWord(w).take(n, self.len()).map(|w| w.0)).ok()?;
        let taken = PlanWord(before).taken();
        Some(taken as usize..taken.saturating_add(n).min(self.len()) as usize)
    }

    /// The moves that nobody took, for the caller to undo. `None`: the plan has ended.
    pub(super) fn give_up(&self, state: State) -> Option<Range<usize>> {
        let before = self.0.word.transit(|w| PlanWord(w).give_up(state).map(|w| w.0)).ok()?;
        Some(PlanWord(before).taken() as usize..self.len() as usize)
    }

    /// `n` moves are over; how the plan ended, if these were the last.
    pub(super) fn end(&self, n: usize) -> Option<State> {
        let step = PlanWord::end_step(n as u32);
        let word = PlanWord(self.0.word.plus(step).wrapping_add(step));
        // A plan without moves is over when it is decided, by whoever decided it.
        let last = word.ended() == self.len() && (n > 0 || self.len() == 0);
        (last && word.state() != State::Open).then_some(word.state())
    }

    pub(super) fn settle(&self, pool: &Pool, state: State) {
        // Called once, so nobody waits for it.
        let endings = std::mem::take(&mut *lock(&self.0.endings));
        for mut ending in endings {
            ending.settle(pool, state);
        }
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Plans {
    table: Mutex<Table>,
    next_deadline: AtomicU64,
    /// 1: plans that have ended may stand in the table.
    left_over: AtomicU64,
    /// Bytes a second: within the device, between the tiers.
    bandwidths: [AtomicU64; 2],
    stamp: u64,
}

/// A plan in the table.
#[derive(Debug)]
struct Row {
    deadline: u64,
    /// It came up as due.
    due: bool,
    entry: Entry,
}

#[derive(Debug, Default)]
struct Table {
    open: BTreeMap<PlanId, Row>,
    by_deadline: BTreeSet<(u64, PlanId)>,
    ended: VecDeque<(PlanId, State)>,
    /// Extents that drain on behind their plan's end, and until when.
    lingering: Vec<(u64, Tier, ExtentId)>,
    made: u64,
}

impl Plans {
    /// No plans yet.
    ///
    /// # Errors
    /// No entropy for the number by which plans of this pool are told from those of others.
    pub(crate) fn new() -> Result<Self, getrandom::Error> {
        let mut stamp = [0; 8];
        getrandom::fill(&mut stamp)?;
        Ok(Self {
            table: Mutex::new(Table::default()),
            next_deadline: AtomicU64::new(NEVER),
            left_over: AtomicU64::new(0),
            bandwidths: [AtomicU64::new(0), AtomicU64::new(0)],
            stamp: u64::from_le_bytes(stamp),
        })
    }

    pub(super) fn stamp(&self) -> u64 {
        self.stamp
    }

    pub(super) fn set_bandwidths(&self, [device, host]: [u64; 2]) {
        self.bandwidths[0].put(device);
        self.bandwidths[1].put(host);
    }

    /// How long copying takes; `None`: a bandwidth that is needed is not known.
    pub(crate) fn copy_ns(&self, copied: [u64; 2]) -> Option<u64> {
        let mut ns = 0u64;
        for (bytes, bandwidth) in copied.into_iter().zip(&self.bandwidths) {
            let bandwidth = bandwidth.get();
            if bytes > 0 {
                let took =
                    u128::from(bytes) * 1_000_000_000 / u128::from(Some(bandwidth).filter(|&b| b > 0)?);
                ns = ns.saturating_add(u64::try_from(took).unwrap_or(u64::MAX));
            }
        }
        Some(ns)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        let mut table = lock(&self.table);
        self.clean(&mut table);
        table
    }

    /// Strike off what others could not.
    fn clean(&self, table: &mut Table) {
        if self.left_over.get() == 0 || self.left_over.exchange(0) == 0 {
            return;
        }
        let over = |(&id, row): (&PlanId, &Row)| Some((id, row.entry.over()?));
        let over: Vec<_> = table.open.iter().filter_map(over).collect();
        over.into_iter().for_each(|(id, state)| table.end(id, state));
        self.show_deadline(table);
    }

    pub(super) fn add(&self, mut plan: Plan, endings: Vec<Box<dyn Ending>>) -> Entry {
        debug_assert!(plan.moves.len() <= MAX_MOVES as usize);
        let mut table = self.lock();
        table.made += 1;
        plan.id = PlanId(table.made);
        plan.pool = self.stamp;
        let (id, deadline) = (plan.id, plan.deadline_ms);
        let waits = endings.iter().any(|ending| ending.waits());
        let (word, endings) = (AtomicU64::new(0), Mutex::new(endings));
        let entry = Entry(Arc::new(Inner { plan, word, endings, waits }));
        table.open.insert(id, Row { deadline, due: false, entry: entry.clone() });
        table.by_deadline.insert((deadline, id));
        self.show_deadline(&table);
        entry
    }

    /// A plan that has not ended.
    pub(super) fn get(&self, id: PlanId) -> Option<Entry> {
        self.lock().open.get(&id).map(|row| row.entry.clone())
    }

    /// The plans that have not ended, oldest first.
    pub(super) fn open(&self) -> Vec<Entry> {
        self.lock().open.values().map(|row| row.entry.clone()).collect()
    }

    /// More time for a plan; `false`: it has ended, or somebody is at it because its time is over.
    pub(super) fn renew(&self, id: PlanId, deadline: u64) -> bool {
        let mut table = self.lock();
        let Table { open, by_deadline, .. } = &mut *table;
        let Some(row) = open.get_mut(&id).filter(|row| !row.due) else { return false };
        by_deadline.remove(&(row.deadline, id));
        row.deadline = deadline;
        by_deadline.insert((deadline, id));
        self.show_deadline(&table);
        true
    }

    pub(super) fn state(&self, id: PlanId) -> Result<State, Fault> {
        let table = self.lock();
        let ended = || table.ended.iter().rev().find(|(ended, _)| *ended == id).map(|&(_, state)| state);
        match table.open.get(&id) {
            Some(row) => Ok(row.entry.word().state()),
            None if id.0 == 0 || id.0 > table.made => Err(Fault::Unknown(id)),
            None => ended().ok_or(Fault::Forgotten(id)),
        }
    }

    /// Whether there may be plans whose time has come.
    pub(super) fn are_due(&self, now_ms: u64) -> bool {
        self.next_deadline.get() <= now_ms
    }

    /// Let extents drain until a deadline, behind the end of their plan.
    pub(crate) fn linger(&self, deadline: u64, tier: Tier, extents: &[ExtentId]) {
        let mut table = self.lock();
        table.lingering.extend(extents.iter().map(|&extent| (deadline, tier, extent)));
        self.show_deadline(&table);
    }

    /// The extents that drain behind their plan's end.
    pub(crate) fn lingering(&self, tier: Tier) -> Vec<ExtentId> {
        self.lock().lingering.iter().filter(|l| l.1 == tier).map(|l| l.2).collect()
    }

    /// Another plan empties these extents now.
    pub(crate) fn forget_lingering(&self, tier: Tier, extents: &[ExtentId]) {
        self.lock().lingering.retain(|(_, at, extent)| *at != tier || !extents.contains(extent));
    }

    /// The plans whose time has come and that nobody has begun to end, earliest first, and the extents that have drained for
    /// long enough, which don't come up again. Plans whose end waits for a lock come up only for who `may_wait`. Never waits
    /// itself.
    pub(super) fn due(&self, now_ms: u64, may_wait: bool) -> (Vec<Entry>, Vec<(Tier, ExtentId)>) {
        let Some(mut table) = try_lock(&self.table) else { return Default::default() };
        self.clean(&mut table);
        let mut due = Vec::new();
        let Table { open, by_deadline, .. } = &mut *table;
        by_deadline.retain(|&(at, id)| {
            if at > now_ms {
                return true;
            }
            // Whoever has decided how it ends brings it to its end.
            let Some(row) = open.get_mut(&id).filter(|row| row.entry.left().is_some()) else { return false };
            if may_wait || !row.entry.0.waits {
                row.due = true;
                due.push(row.entry.clone());
            }
            true
        });
        let mut drains = Vec::new();
        table.lingering.retain(|&(at, tier, extent)| {
            if at <= now_ms {
                drains.push((tier, extent));
            }
            at > now_ms
        });
        self.show_deadline(&table);
        (due, drains)
    }

    /// Its last move is over. Never waits.
    pub(super) fn remove(&self, id: PlanId, state: State) {
        match try_lock(&self.table) {
            Some(mut table) => {
                table.end(id, state);
                self.show_deadline(&table);
            }
            None => self.left_over.put(1),
        }
    }

    /// Moves of open plans that nobody has taken: their destinations are allocated, and no page lies there.
    pub(crate) fn each_claimed(&self, mut f: impl FnMut(&Move)) {
        for Row { entry, .. } in self.lock().open.values() {
            // (Of what was taken and has not ended, an audit under load may count too much.)
            entry.plan().moves[entry.word().taken() as usize..].iter().for_each(&mut f);
        }
    }

    /// Bytes a second within the device, and between the tiers; 0: not known.
    pub(crate) fn bandwidths(&self) -> [u64; 2] {
        self.bandwidths.each_ref().map(Atom::get)
    }

    /// Under the mutex, so that it follows the table.
    fn show_deadline(&self, table: &Table) {
        let plans = table.by_deadline.first().map_or(NEVER, |&(at, _)| at);
        let drains = table.lingering.iter().map(|&(at, ..)| at).min().unwrap_or(NEVER);
        self.next_deadline.put(plans.min(drains));
    }
}

impl Table {
    /// A plan has ended, if it had not.
    fn end(&mut self, id: PlanId, state: State) {
        let Some(Row { deadline, .. }) = self.open.remove(&id) else { return };
        self.by_deadline.remove(&(deadline, id));
        self.ended.push_back((id, state));
        if self.ended.len() > REMEMBERED {
            self.ended.pop_front();
        }
    }
}

const _: () = assert!(TIERS == 2, "bandwidths: within the first tier, and between the two");

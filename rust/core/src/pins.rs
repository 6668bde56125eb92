//! The pins of a pool: who keeps which pages, out of what budget, until when.
//!
//! A pin is a lock on cached content, so each has an owner who pays for it, a number that is never used again, and an
//! end: by its number, by its expiry, or with its owner. This is the list of them and nothing more; the pins in the page
//! words and the pinned bytes in the ledger are changed by the caller, who pins the pages BEFORE `add` (and
//! unpins them if it is refused), and unpins them AFTER it got the pin back from one of the `take`s.
//!
//! # Invariant
//!
//! - A pin is given back exactly once, whoever comes: an unpin, a time-out, the end of its owner. Nobody else ever
//!   unpins its pages, so the count in a page word can't fall below what the pins in here account for.
//! - The pins of an owner are within the budget that was given when the last of them was added.
//! - `next_expiry` is never later than the earliest expiry in the table.
//!
//! Pinning is rare, so the table is under a mutex. The one call that a step makes, `take_expired`, looks at one
//! word first and never waits for the mutex: a thread stopped inside holds up other pins, no step.
//!
//! Callers: pool.rs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    sync::{Atom, AtomicU64, Mutex, MutexGuard, lock, try_lock},
    word::{PageRef, TenantId, Units},
};

#[cfg(all(test, kvalloc_loom))]
mod models;
#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

/// The number of a pin; never used twice in a pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PinId(pub u64);

impl std::fmt::Display for PinId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pin {}", self.0)
    }
}

/// Pages kept by an owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pin {
    /// Its number.
    pub id: PinId,
    /// Who pays for it.
    pub owner: TenantId,
    /// What it keeps.
    pub pages: Vec<PageRef>,
    /// What that costs the owner's budget.
    pub units: Units,
    /// When it ends by itself, on the pool's clock.
    pub expires_at_ms: Option<u64>,
    /// What the owner calls it.
    pub label: String,
}

/// A pin does not fit into its owner's budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinError {
    /// Whose budget.
    pub owner: TenantId,
    /// All of it.
    pub budget: Units,
    /// What the owner's other pins use.
    pub used: Units,
    /// What this one would add.
    pub asked: Units,
}

impl std::fmt::Display for PinError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "a pin of {} units does not fit: tenant {} uses {} of its pin budget of {}; unpin something, wait for a pin \
             to expire, or raise pin_budget",
            self.asked.0, self.owner, self.used.0, self.budget.0
        )
    }
}

impl std::error::Error for PinError {}

/// There is nothing to unpin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotPinned {
    /// There was such a pin: it was unpinned before, expired, or went with its owner.
    Ended(PinId),
    /// There never was such a pin.
    Unknown(PinId),
}

impl std::fmt::Display for NotPinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ended(id) => {
                write!(f, "{id} has ended: it was unpinned before or it expired; nothing was changed")
            }
            Self::Unknown(id) => write!(f, "there never was a {id} in this pool; nothing was changed"),
        }
    }
}

impl std::error::Error for NotPinned {}

/// `next_expiry` when nothing expires.
const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct Pins {
    table: Mutex<Table>,
    /// A hint outside the mutex: nothing expires before.
    next_expiry: AtomicU64,
}

#[derive(Debug, Default)]
struct Table {
    pins: BTreeMap<PinId, Pin>,
    by_expiry: BTreeSet<(u64, PinId)>,
    used: HashMap<TenantId, Units>,
    /// How many there ever were.
    made: u64,
}

impl Pins {
    pub(crate) fn new() -> Self {
        Self { table: Mutex::new(Table::default()), next_expiry: AtomicU64::new(NEVER) }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Nothing in here panics half-way through a change, so a poisoned table is whole.
        lock(&self.table)
    }

    /// List a pin whose pages are pinned already, if its owner's budget allows it. All or nothing.
    pub(crate) fn add(
        &self,
        owner: TenantId,
        budget: Units,
        pages: &[PageRef],
        units: Units,
        expires_at_ms: Option<u64>,
        label: &str,
    ) -> Result<PinId, PinError> {
        let mut table = self.lock();
        let used = table.used.get(&owner).copied().unwrap_or_default();
        let Some(sum) = used.0.checked_add(units.0).filter(|&sum| sum <= budget.0) else {
            return Err(PinError { owner, budget, used, asked: units });
        };
        table.made += 1;
        let id = PinId(table.made);
        let pin = Pin { id, owner, pages: pages.to_vec(), units, expires_at_ms, label: label.to_owned() };
        table.used.insert(owner, Units(sum));
        table.pins.insert(id, pin);
        if let Some(at) = expires_at_ms {
            table.by_expiry.insert((at, id));
            self.show_expiry(&table);
        }
        Ok(id)
    }

    /// The pins of one owner, or all of them, oldest first.
    pub(crate) fn list(&self, owner: Option<TenantId>) -> Vec<Pin> {
        let table = self.lock();
        table.pins.values().filter(|pin| owner.is_none_or(|owner| owner == pin.owner)).cloned().collect()
    }

    /// What the pins of an owner use of its budget.
    pub(crate) fn used(&self, owner: TenantId) -> Units {
        self.lock().used.get(&owner).copied().unwrap_or_default()
    }

    /// How many there are.
    #[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
    pub(crate) fn len(&self) -> usize {
        self.lock().pins.len()
    }

    /// End a pin: whoever gets it unpins its pages, nobody else does.
    pub(crate) fn take(&self, id: PinId) -> Result<Pin, NotPinned> {
        let mut table = self.lock();
        let taken = table.take(id);
        self.show_expiry(&table);
        taken.ok_or(if (1..=table.made).contains(&id.0) {
            NotPinned::Ended(id)
        } else {
            NotPinned::Unknown(id)
        })
    }

    /// Whether there may be pins whose time has come.
    pub(crate) fn are_due(&self, now_ms: u64) -> bool {
        self.next_expiry.get() <= now_ms
    }

    /// End all pins whose time has come, earliest first. Never waits: what it can't reach now comes the next time.
    pub(crate) fn take_expired(&self, now_ms: u64) -> Vec<Pin> {
        if !self.are_due(now_ms) {
            return Vec::new();
        }
        let Some(mut table) = try_lock(&self.table) else { return Vec::new() };
        let mut expired = Vec::new();
        while let Some(&(at, id)) = table.by_expiry.first()
            && at <= now_ms
        {
            match table.take(id) {
                Some(pin) => expired.push(pin),
                // Every entry has its pin; should one not, it must not hold up the others.
                None => _ = table.by_expiry.pop_first(),
            }
        }
        self.show_expiry(&table);
        expired
    }

    /// End all pins of an owner, or all there are, oldest first: the owner goes, or the pool closes.
    pub(crate) fn take_all(&self, owner: Option<TenantId>) -> Vec<Pin> {
        let mut table = self.lock();
        let ids: Vec<_> = table
            .pins
            .values()
            .filter(|pin| owner.is_none_or(|owner| owner == pin.owner))
            .map(|pin| pin.id)
            .collect();
        let taken = ids.into_iter().filter_map(|id| table.take(id)).collect();
        self.show_expiry(&table);
        taken
    }

    /// Under the mutex, so that it follows the table.
    fn show_expiry(&self, table: &Table) {
        self.next_expiry.put(table.by_expiry.first().map_or(NEVER, |&(at, _)| at));
    }
}

impl Table {
    fn take(&mut self, id: PinId) -> Option<Pin> {
        let pin = self.pins.remove(&id)?;
        if let Some(at) = pin.expires_at_ms {
            self.by_expiry.remove(&(at, id));
        }
        if let Some(used) = self.used.get_mut(&pin.owner) {
            debug_assert!(used.0 >= pin.units.0);
            used.0 = used.0.saturating_sub(pin.units.0);
            if used.0 == 0 {
                self.used.remove(&pin.owner);
            }
        }
        Some(pin)
    }
}

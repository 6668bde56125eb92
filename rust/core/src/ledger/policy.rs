//! Tenants and their policies. Changing one takes the policy lock; reading one (and finding a tenant by name) takes none.
//!
//! | words | of each tenant |
//! | --- | --- |
//! | the node lines of both tiers | reserve, limit, weight, priority, pin budget (tree.rs) |
//! | `hashes` | hash of the name, 0: no tenant; dense, so that a search by name reads eight tenants a cache line |
//! | `heads` | length of the name (0-7), LEND (8), COMPRESS (9), number of changes (10-63) |
//! | `cuts` | tokens that a context keeps when it is cut, 0: it never is |
//! | `names` | 16 words: the name's bytes |
//! | `rights` | 8 [`UsageWord`]s: their limit is how many units may be charged to the ancestor at that depth; 0: no right to publish there |
//!
//! A name is read with `heads` before and after: whoever writes one sets the length to 0 first. It is written when a tenant
//! comes and when it goes, so the number of changes also tells who has an id from who had it ([`TenantRef`]).

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    num::NonZeroU32,
};

use crate::{
    ledger::{
        Ledger,
        error::{LedgerError, NameRule},
        tree::{MAX_DEPTH, Obstacle, ROOT},
    },
    sync::{Atom, AtomicU64, Mutex, MutexGuard, Words, lock},
    word::{
        Generation, TIERS, TenantId, TenantRef, Tier, Units,
        ledger::{MetaWord, UsageWord},
    },
};

/// The longest name, in bytes.
pub const MAX_NAME: usize = 128;
const NAME_WORDS: usize = MAX_NAME / 8;
const RIGHTS: usize = MAX_DEPTH as usize;
const LEND: u64 = 1 << 8;
const COMPRESS: u64 = 1 << 9;
const CHANGE: u64 = 1 << 10;
const NONE: Units = Units(u32::MAX);

/// What a tenant may have and how it is weighed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Always available to the tenant's subtree at once, per tier.
    pub reserve: [Units; TIERS],
    /// The most that is charged to the subtree, per tier; `None`: the capacity. Limits may add up to more than there is.
    pub limit: [Option<Units>; TIERS],
    /// At least 1. Twice the weight: twice as much above the reserve before it gives back first.
    pub weight: u32,
    /// 0-100. Among equals the lower gives back first.
    pub priority: u8,
    /// What is not in use of the device's reserve is lent: others may be charged for it until it is asked back
    /// ([`Ledger::recall`]).
    pub lend: bool,
    /// Pages it pays for may go on in a smaller class: lossy and final.
    pub compress: bool,
    /// A context may lose pages but for its first one and those of its last so many tokens: the model forgets. `None`: never.
    pub cut: Option<NonZeroU32>,
    /// Ancestors the tenant may publish into, and how many units; `None`: as many as it likes.
    pub publish: Vec<(TenantId, Option<Units>)>,
    /// How many units it may pin, over both tiers.
    pub pin_budget: Units,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            reserve: [Units(0); TIERS],
            limit: [None; TIERS],
            weight: 1,
            priority: 50,
            lend: false,
            compress: false,
            cut: None,
            publish: Vec::new(),
            pin_budget: Units(0),
        }
    }
}

/// Ids that can be given out. Ids of removed tenants are used again only when all others are taken.
#[derive(Debug, Default)]
struct Spare {
    next: u32,
    removed: Vec<TenantId>,
}

#[derive(Debug)]
pub(super) struct Tenants {
    hashes: Words,
    heads: Words,
    names: Words,
    rights: Words,
    cuts: Words,
    live: AtomicU64,
    max: u32,
    spare: Mutex<Spare>,
}

impl Tenants {
    pub(super) fn new(max: u32) -> Self {
        let nodes = max as usize + 1;
        Self {
            hashes: Words::zeroed(nodes),
            heads: Words::zeroed(nodes),
            names: Words::zeroed(nodes * NAME_WORDS),
            rights: Words::zeroed(nodes * RIGHTS),
            cuts: Words::zeroed(nodes),
            live: AtomicU64::new(0),
            max,
            spare: Mutex::new(Spare { next: 1, removed: Vec::new() }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Spare> {
        // A panic under the lock leaves words that are each valid.
        lock(&self.spare)
    }

    fn name_words(&self, tenant: TenantId) -> &[AtomicU64] {
        &self.names[tenant.as_usize() * NAME_WORDS..][..NAME_WORDS]
    }

    fn name(&self, tenant: TenantId) -> Option<String> {
        let head = self.heads.get(tenant.as_usize())?;
        loop {
            let before = head.get();
            let len = (before & 0xff) as usize;
            if len == 0 {
                return None;
            }
            let bytes: Vec<u8> =
                self.name_words(tenant).iter().flat_map(|w| w.get().to_le_bytes()).take(len).collect();
            if head.get() == before {
                return String::from_utf8(bytes).ok();
            }
        }
    }

    fn set_name(&self, tenant: TenantId, name: &str) {
        let head = &self.heads[tenant.as_usize()];
        self.hashes[tenant.as_usize()].put(0);
        let change = (head.get() & !0xff).wrapping_add(CHANGE);
        head.put(change);
        if name.is_empty() {
            return;
        }
        for (word, bytes) in self.name_words(tenant).iter().zip(name.as_bytes().chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.put(u64::from_le_bytes(padded));
        }
        head.put(change | name.len() as u64);
        self.hashes[tenant.as_usize()].put(hash(name));
    }

    /// The name changes when a tenant comes and when it goes.
    fn generation(&self, tenant: TenantId) -> Generation {
        Generation(self.heads.get(tenant.as_usize()).map_or(0, |head| (head.get() / CHANGE) as u32))
    }

    /// The word of the right to publish into the ancestor at `depth`.
    fn right(&self, tenant: TenantId, depth: usize) -> &AtomicU64 {
        &self.rights[tenant.as_usize() * RIGHTS + depth]
    }
}

fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish() | 1
}

/// Characters that make two different names look alike, or turn the text after them around: those that Unicode lets a
/// font leave out, line separators, and the blank of Braille.
fn is_invisible(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
            | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

/// What a policy keeps from others whatever is in use: the reserves; of one that is lent what was asked back.
fn kept(policy: &Policy, asked_back: Units) -> [Units; TIERS] {
    let [device, host] = policy.reserve;
    [if policy.lend { device.min(asked_back) } else { device }, host]
}

/// Whether `name` can name a tenant.
pub fn check_name(name: &str) -> Result<(), NameRule> {
    let broken = if name.is_empty() {
        NameRule::Empty
    } else if name.len() > MAX_NAME {
        NameRule::Long
    } else if name.chars().any(char::is_control) {
        NameRule::Control
    } else if name.chars().any(is_invisible) {
        NameRule::Invisible
    } else if name.contains('/') {
        NameRule::Slash
    } else if name == "." || name == ".." {
        NameRule::Dots
    } else if name.trim() != name {
        NameRule::Blank
    } else {
        return Ok(());
    };
    Err(broken)
}

impl Ledger {
    /// A new tenant below `parent`.
    ///
    /// # Errors
    /// The name is none or is taken, the tree is full or too deep, or the policy does not hold ([`Self::set_policy`]).
    pub fn create(&self, parent: TenantId, name: &str, policy: &Policy) -> Result<TenantId, LedgerError> {
        check_name(name).map_err(|rule| LedgerError::Name { name: name.into(), rule })?;
        let mut spare = self.tenants.lock();
        if let Some(tenant) = self.find(name) {
            return Err(LedgerError::Exists { name: name.into(), tenant });
        }
        if !self.is_live(parent) {
            return Err(LedgerError::Unknown { tenant: parent });
        }
        if self.books[0].tree.path(parent).len() > MAX_DEPTH as usize {
            return Err(LedgerError::TooDeep { max: MAX_DEPTH });
        }
        let fresh = spare.next <= self.tenants.max;
        let tenant = if fresh { Some(TenantId(spare.next)) } else { spare.removed.last().copied() };
        let tenant = tenant.ok_or(LedgerError::Full { max: self.tenants.max })?;
        for book in &self.books {
            // Of a removed tenant nothing is left but limits of 0.
            book.tree.set_meta(tenant, MetaWord::new(parent, policy.weight, policy.priority));
            book.set_top(book.top().max(tenant.0));
        }
        if let Err(error) = self.apply(tenant, policy, kept(policy, Units(0))) {
            self.books.iter().for_each(|book| book.tree.set_meta(tenant, MetaWord::new(parent, 1, 0).dead()));
            return Err(error);
        }
        if fresh {
            spare.next += 1;
        } else {
            spare.removed.pop();
        }
        self.tenants.set_name(tenant, name);
        self.tenants.live.plus(1);
        Ok(tenant)
    }

    /// Change a tenant's policy: all of it or nothing.
    ///
    /// # Errors
    /// The limit lies below the reserve or the children's reserves, a reserve does not fit beside what others hold or have
    /// reserved (with the shortfall), a weight is 0, a priority above 100, a scope not above the tenant. A limit below what
    /// is charged is no error: new charges are refused until use is below.
    pub fn set_policy(&self, tenant: TenantId, policy: &Policy) -> Result<(), LedgerError> {
        let _lock = self.tenants.lock();
        self.known(tenant)?;
        self.apply(tenant, policy, kept(policy, self.asked_back(tenant)))
    }

    /// Move a tenant's reserve by `by`, whatever else of its policy changes beside it; it ends at 0. What comes to a reserve that
    /// is lent is not lent yet, and what goes is what was asked back, as far as there is some.
    ///
    /// # Errors
    /// As [`Self::set_policy`]; the tenant was removed.
    pub fn shift_reserve(&self, tier: Tier, tenant: TenantRef, by: i64) -> Result<(), LedgerError> {
        let _lock = self.tenants.lock();
        let tenant = self.still(tenant)?;
        let mut policy = self.policy(tenant).ok_or(LedgerError::Unknown { tenant })?;
        let reserve = &mut policy.reserve[tier.as_usize()];
        let moved = i64::from(reserve.0).saturating_add(by).max(0);
        *reserve = Units(u32::try_from(moved).unwrap_or(u32::MAX));
        let back = i64::from(self.asked_back(tenant).0);
        let back = if tier == Tier::Device { back.saturating_add(by).max(0) } else { back };
        let back = Units(u32::try_from(back).unwrap_or(u32::MAX));
        self.apply(tenant, &policy, kept(&policy, back))
    }

    /// Keep `kept` of a reserve that is lent from others, or as much of it as they leave.
    ///
    /// # Errors
    /// They have too much: the level, and how much they have to give back there. The tenant was removed.
    pub fn recall(&self, tier: Tier, tenant: TenantRef, kept: Units) -> Result<(), LedgerError> {
        let _lock = self.tenants.lock();
        let tenant = self.still(tenant)?;
        let book = self.book(tier);
        let asked = kept.min(book.tree.floor(tenant).reserve());
        let (mut most, mut refused) = (asked, Ok(()));
        while most > book.tree.claim(tenant).kept()
            && let Err(Obstacle { level, short, .. }) = book.set_kept(tenant, most)
        {
            let short = short.clamp(1, most.0);
            most = Units(most.0 - short);
            refused = refused.and(Err(LedgerError::Reserve { tier, asked, level, short: Units(short) }));
        }
        refused
    }

    /// Lend what a tenant keeps of its reserve above `kept` and does not use, if its policy lends. Nothing of one that was
    /// removed.
    pub fn lend(&self, tier: Tier, tenant: TenantRef, kept: Units) {
        let _lock = self.tenants.lock();
        let Ok(tenant) = self.still(tenant) else { return };
        if tier == Tier::Device && self.lends(tenant) && kept < self.kept(tier, tenant) {
            // Shrinking is never refused.
            let _ = self.book(tier).set_kept(tenant, kept);
        }
    }

    /// The reserve, or what is kept of one that is lent.
    pub fn kept(&self, tier: Tier, tenant: TenantId) -> Units {
        self.book(tier).tree.claim(tenant).kept()
    }

    fn lends(&self, tenant: TenantId) -> bool {
        self.tenants.heads[tenant.as_usize()].get() & LEND != 0
    }

    /// What is kept of a reserve that is lent.
    fn asked_back(&self, tenant: TenantId) -> Units {
        if self.lends(tenant) { self.kept(Tier::Device, tenant) } else { Units(0) }
    }

    /// Change a tier's capacity. Below what is charged is no error: new charges are refused until use is below.
    ///
    /// # Errors
    /// The capacity lies below what tenants have reserved, or above what the words can count.
    pub fn set_capacity(&self, tier: Tier, capacity: Units) -> Result<(), LedgerError> {
        let _lock = self.tenants.lock();
        Self::check_capacity(capacity)?;
        let tree = &self.books[tier.as_usize()].tree;
        let reserves = tree.floor(ROOT).children();
        if reserves > capacity {
            return Err(LedgerError::LimitBelowReserves { tier, limit: capacity, reserves });
        }
        self.books[tier.as_usize()].set_limit(ROOT, capacity);
        Ok(())
    }

    /// Take a tenant out of the tree. `forget`: what else knows it by its id, before anybody gets that.
    ///
    /// # Errors
    /// It has children or charges; it was removed.
    pub fn remove(&self, tenant: TenantRef, forget: impl FnOnce()) -> Result<(), LedgerError> {
        let mut spare = self.tenants.lock();
        let tenant = self.still(tenant)?;
        let children = self.ids().filter(|&t| self.parent(t) == Some(tenant)).count() as u32;
        if children > 0 {
            return Err(LedgerError::HasChildren { children });
        }
        // With limits of 0 nothing more can be charged; what is charged then shows in the words.
        let limits = self.books.each_ref().map(|book| book.set_limit(tenant, Units(0)));
        for tier in Tier::ALL {
            let tree = &self.books[tier.as_usize()].tree;
            // Demand without charges is a claim that a thread has not passed upward yet.
            let charged = tree.usage(tenant).charged().max(tree.claim(tenant).demand());
            if charged.0 > 0 {
                for (book, limit) in self.books.iter().zip(limits) {
                    book.set_limit(tenant, limit);
                }
                return Err(LedgerError::NotEmpty { tier, charged });
            }
        }
        self.tenants.set_name(tenant, "");
        for book in &self.books {
            let meta = book.tree.meta(tenant);
            book.tree.set_meta(tenant, meta.dead());
            // Shrinking is never refused.
            let _ = book.tree.set_kept(tenant, Units(0));
            book.tree.set_floor(tenant, Units(0), false);
            book.tree.set_pin_budget(tenant, Units(0));
        }
        (0..RIGHTS).for_each(|depth| self.tenants.right(tenant, depth).put(0));
        forget();
        spare.removed.push(tenant);
        self.tenants.live.minus(1);
        Ok(())
    }

    fn known(&self, tenant: TenantId) -> Result<(), LedgerError> {
        match tenant {
            ROOT => Err(LedgerError::Root),
            _ if self.is_live(tenant) => Ok(()),
            _ => Err(LedgerError::Unknown { tenant }),
        }
    }

    /// Whoever has this id now, to be told from who gets it after a removal.
    pub fn now(&self, tenant: TenantId) -> TenantRef {
        TenantRef { id: tenant, generation: self.tenants.generation(tenant) }
    }

    /// Whether a tenant was not removed since.
    pub fn is_same(&self, tenant: TenantRef) -> bool {
        self.is_live(tenant.id) && self.now(tenant.id) == tenant
    }

    /// No policy changes, and no tenant comes or goes, until this is dropped.
    pub(crate) fn hold_policies(&self) -> impl Drop + '_ {
        self.tenants.lock()
    }

    /// Write down something about a tenant that is forgotten with it ([`Self::remove`]), or about the root: whether it is there,
    /// and so whether `f` was done.
    pub(crate) fn note(&self, tenant: TenantId, f: impl FnOnce()) -> bool {
        let _lock = self.tenants.lock();
        let there = tenant == ROOT || self.is_live(tenant);
        if there {
            f();
        }
        there
    }

    /// Under the lock, so that it stays.
    fn still(&self, tenant: TenantRef) -> Result<TenantId, LedgerError> {
        self.known(tenant.id)?;
        if self.is_same(tenant) { Ok(tenant.id) } else { Err(LedgerError::Unknown { tenant: tenant.id }) }
    }

    /// Check a policy by itself and against the other policies, then let what is kept grow (which use may refuse), and only
    /// then do what can't be refused.
    fn apply(&self, tenant: TenantId, policy: &Policy, kept: [Units; TIERS]) -> Result<(), LedgerError> {
        if policy.weight == 0 {
            return Err(LedgerError::Weight);
        }
        if policy.priority > 100 {
            return Err(LedgerError::Priority { given: policy.priority });
        }
        let path = self.books[0].tree.path(tenant);
        for &(scope, _) in &policy.publish {
            if !path.contains(&scope) {
                return Err(LedgerError::Scope { scope });
            }
        }
        for tier in Tier::ALL {
            self.check_limits(tier, tenant, policy)?;
        }
        let before = self.books.each_ref().map(|book| book.tree.claim(tenant).kept());
        let limits = self.books.each_ref().map(|book| book.tree.usage(tenant).limit());
        // A limit that is to rise must do so before a reserve grows up to it.
        for ((book, limit), new) in self.books.iter().zip(limits).zip(policy.limit) {
            book.set_limit(tenant, limit.max(new.unwrap_or(NONE)));
        }
        for tier in Tier::ALL {
            let i = tier.as_usize();
            if kept[i] > before[i]
                && let Err(obstacle) = self.books[i].set_kept(tenant, kept[i])
            {
                for (j, book) in self.books.iter().enumerate() {
                    if j < i && kept[j] > before[j] {
                        let _ = book.tree.set_kept(tenant, before[j]);
                    }
                    book.set_limit(tenant, limits[j]);
                }
                let (level, short) = (obstacle.level, Units(obstacle.short));
                return Err(LedgerError::Reserve { tier, asked: policy.reserve[i], level, short });
            }
        }
        for (i, book) in self.books.iter().enumerate() {
            let _ = book.tree.set_kept(tenant, kept[i]);
            book.tree.set_floor(tenant, policy.reserve[i], policy.lend && i == Tier::Device.as_usize());
            book.set_limit(tenant, policy.limit[i].unwrap_or(NONE));
            book.tree.set_pin_budget(tenant, policy.pin_budget);
            let parent = book.tree.meta(tenant).parent();
            book.tree.set_meta(tenant, MetaWord::new(parent, policy.weight, policy.priority));
        }
        let head = &self.tenants.heads[tenant.as_usize()];
        for (bit, on) in [(LEND, policy.lend), (COMPRESS, policy.compress)] {
            let _ = if on { head.set(bit) } else { head.clear(bit) };
        }
        self.tenants.cuts[tenant.as_usize()].put(policy.cut.map_or(0, |n| n.get().into()));
        for (depth, scope) in path.iter().rev().take(path.len() - 1).enumerate() {
            let right = policy.publish.iter().find(|(s, _)| s == scope);
            let limit = right.map_or(Units(0), |(_, units)| units.unwrap_or(NONE));
            let _ = self.tenants.right(tenant, depth).transit(|w| Some(UsageWord(w).with_limit(limit).0));
        }
        Ok(())
    }

    /// The policy's numbers against each other, and the reserves of all against the limits above them.
    fn check_limits(&self, tier: Tier, tenant: TenantId, policy: &Policy) -> Result<(), LedgerError> {
        let tree = &self.books[tier.as_usize()].tree;
        let reserve = policy.reserve[tier.as_usize()];
        let limit = policy.limit[tier.as_usize()].unwrap_or(NONE);
        if limit < reserve {
            return Err(LedgerError::LimitBelowReserve { tier, limit, reserve });
        }
        let reserves = tree.floor(tenant).children();
        if limit < reserves {
            return Err(LedgerError::LimitBelowReserves { tier, limit, reserves });
        }
        let (mut level, mut old, mut new) = (tenant, tree.floor(tenant).floor(), reserve.max(reserves));
        while let Some(parent) = tree.above(level) {
            let sum = u64::from(tree.floor(parent).children().0 - old.0) + u64::from(new.0);
            let most = u64::from(tree.usage(parent).limit().0);
            if sum > most && new > old {
                let short = Units((sum - most).min(u64::from(u32::MAX)) as u32);
                return Err(LedgerError::Reserve { tier, asked: reserve, level: parent, short });
            }
            old = tree.floor(parent).floor();
            new = Units(sum as u32).max(tree.floor(parent).reserve());
            level = parent;
        }
        Ok(())
    }

    /// Whether this id is a tenant, or the root.
    pub fn is_live(&self, tenant: TenantId) -> bool {
        self.books[0].tree.is_live(tenant)
    }

    /// The tenant of this name.
    pub fn find(&self, name: &str) -> Option<TenantId> {
        let wanted = hash(name);
        (1..=self.books[0].top()).map(TenantId).find(|&t| {
            self.tenants.hashes[t.as_usize()].get() == wanted && self.tenants.name(t).as_deref() == Some(name)
        })
    }

    /// A tenant's name; the root has none.
    pub fn name(&self, tenant: TenantId) -> Option<String> {
        self.tenants.name(tenant)
    }

    /// The node above; `None` for the root and for what is no tenant.
    pub fn parent(&self, tenant: TenantId) -> Option<TenantId> {
        if self.is_live(tenant) { self.books[0].tree.above(tenant) } else { None }
    }

    /// Whether `tenant` is `level` or stands below it.
    pub fn is_under(&self, tenant: TenantId, level: TenantId) -> bool {
        self.books[0].tree.is_under(tenant, level)
    }

    /// How many tenants there are, the root not counted.
    pub fn len(&self) -> u32 {
        self.tenants.live.get() as u32
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every tenant, by id.
    pub fn ids(&self) -> impl Iterator<Item = TenantId> + '_ {
        (1..=self.books[0].top()).map(TenantId).filter(|&t| self.is_live(t))
    }

    /// A tenant's weight and priority.
    pub fn rank(&self, tenant: TenantId) -> (u32, u8) {
        let meta = self.books[0].tree.meta(tenant);
        (meta.weight(), meta.priority())
    }

    /// A tenant's policy, `None` for the root and for what is no tenant.
    pub fn policy(&self, tenant: TenantId) -> Option<Policy> {
        self.known(tenant).ok()?;
        let path = self.books[0].tree.path(tenant);
        let publish = path.iter().rev().take(path.len() - 1).enumerate().filter_map(|(depth, &scope)| {
            let limit = UsageWord(self.tenants.right(tenant, depth).get()).limit();
            (limit.0 > 0).then_some((scope, Some(limit).filter(|&limit| limit != NONE)))
        });
        let (weight, priority) = self.rank(tenant);
        Some(Policy {
            reserve: self.books.each_ref().map(|book| book.tree.floor(tenant).reserve()),
            limit: self
                .books
                .each_ref()
                .map(|book| Some(book.tree.usage(tenant).limit()).filter(|&limit| limit != NONE)),
            weight,
            priority,
            lend: self.lends(tenant),
            compress: self.may_compress(tenant),
            cut: self.cut(tenant),
            publish: publish.collect(),
            pin_budget: self.books[0].tree.pin_budget(tenant),
        })
    }

    /// Whether pages that `tenant` pays for may go on in a smaller class.
    pub fn may_compress(&self, tenant: TenantId) -> bool {
        self.tenants.heads.get(tenant.as_usize()).is_some_and(|head| head.get() & COMPRESS != 0)
    }

    /// The tokens that a context of `tenant` keeps at its end when it is cut; `None`: it is never cut.
    pub fn cut(&self, tenant: TenantId) -> Option<NonZeroU32> {
        self.tenants.cuts.get(tenant.as_usize()).and_then(|cut| NonZeroU32::new(cut.get() as u32))
    }

    /// Whether `tenant` may publish into `scope`, an ancestor, and up to how many units charged there; `None` inside: no
    /// bound of its own.
    pub fn may_publish(&self, tenant: TenantId, scope: TenantId) -> Option<Option<Units>> {
        let limit = UsageWord(self.right_word(tenant, scope)?.get()).limit();
        (limit.0 > 0).then_some(Some(limit).filter(|&limit| limit != NONE))
    }

    /// The highest id that was ever in use.
    pub fn top(&self) -> u32 {
        self.books[0].top()
    }

    fn right_word(&self, tenant: TenantId, scope: TenantId) -> Option<&AtomicU64> {
        let path = self.books[0].tree.path(tenant);
        let depth = path.iter().rev().position(|&level| level == scope)?;
        (depth < RIGHTS).then(|| self.tenants.right(tenant, depth))
    }
}

//! A scheduler, a device and a book-keeper by hand: does operations on a pool and says what must be true afterwards.
//!
//! The model is kept simple on purpose. It knows each sequence's tokens and counts, and what the device holds; the
//! references, sums and claims it counts anew from these after every operation ([`World::check`]).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use super::{
    build,
    build::PAGE,
    device::{self, Content, Device},
};
use crate::{
    admit::Verdict,
    batch::{Batch, Copy},
    error::{Error, Refusal, Why},
    face::Pages,
    hash::CallerKey,
    index::page_before,
    ledger::{Policy, ROOT},
    pins::PinId,
    pool::Pool,
    sequence::{Open, Sequence},
    spec::{GroupKind, Spec},
    word::{FrameId, GroupId, PageId, PageRef, TIERS, TenantId, Tier, Units, page::PageWord},
};

/// The rows and the longest sequence of a batch.
pub(super) const ROWS: usize = 4;
pub(super) const MOST: u32 = 39;
pub(super) const BATCHES: usize = 2;

/// A sequence as it should be.
pub(super) struct Model {
    pub(super) handle: Arc<Sequence>,
    tenant: TenantId,
    /// Who pays for, or shares, the page at each place of the prompt.
    shares: Vec<(TenantId, u32)>,
    root: Content,
    /// What the pool knows: unknown tokens are 0.
    ids: Vec<u32>,
    /// What the device has written for each slot, and the identity of everything up to it.
    contents: Vec<Content>,
    written: u32,
    cached: u32,
    batch: Option<usize>,
    /// Admitted for so many tokens, and nothing has happened since that takes more pages than that.
    admitted: u32,
}

impl Model {
    fn known(&self) -> u32 {
        self.ids.len() as u32
    }
    fn slots(&self) -> u32 {
        self.contents.len() as u32
    }
    fn content_before(&self, position: usize) -> Content {
        position.checked_sub(1).map_or(self.root, |p| self.contents[p])
    }
    fn cut(&mut self, n: u32) {
        self.contents.truncate(n as usize);
    }
}

/// What a step that is not committed did for one row.
#[derive(Clone, Copy, Debug)]
struct Entry {
    sequence: u64,
    count: u32,
    sampled: i32,
    /// All of it was truncated away: what was sampled follows tokens that are gone.
    cut: bool,
    write: u64,
}

#[derive(Default)]
struct Record {
    entries: Vec<Entry>,
    sources: Vec<PageRef>,
}

struct Rows {
    batch: Batch,
    rows: Vec<u64>,
    outstanding: Vec<Record>,
}

/// A page that a caller of the lower face holds.
#[derive(Clone, Copy)]
pub(super) struct Owned {
    page: PageRef,
    tenant: TenantId,
    group: GroupId,
}

pub(super) struct World {
    pub(super) pool: Arc<Pool>,
    spec: Spec,
    pub(super) tenants: Vec<TenantId>,
    device: Device,
    pub(super) sequences: BTreeMap<u64, Model>,
    batches: Vec<Rows>,
    face: Pages,
    pub(super) owned: Vec<Owned>,
    /// References that were given up: stale, or of a page that lives on.
    old: Vec<PageRef>,
    /// Pages found without a reference, and what they hold.
    found: Vec<(PageRef, GroupId, Content)>,
    pub(super) pins: Vec<(PinId, Option<u64>)>,
    born: u64,
    unknown: u32,
    resets: u64,
    single_size: bool,
    /// Charged units of each subtree, and claims, before the operation.
    before: Vec<(u32, u32)>,
    policy_changed: bool,
}

impl World {
    pub(super) fn new(spec: Spec, pages: u64, force_collisions: bool) -> Self {
        let mut options = build::options(&spec, pages);
        options.force_collisions = force_collisions;
        let pool = Arc::new(Pool::new(spec.clone(), &options).expect("a pool"));
        let org = build::plain_tenant(&pool, "org");
        let publish = Policy { publish: vec![(org, None)], pin_budget: Units(1000), ..Policy::default() };
        let a = build::tenant(&pool, org, "a", &publish);
        let b = build::tenant(&pool, org, "b", &Policy::default());
        let c = build::plain_tenant(&pool, "c");
        let batches = (0..BATCHES).map(|_| Rows {
            batch: build::batch(&pool, ROWS, MOST),
            rows: Vec::new(),
            outstanding: Vec::new(),
        });
        Self {
            device: Device::new(&spec),
            tenants: vec![a, b, c, org],
            sequences: BTreeMap::new(),
            batches: batches.collect(),
            face: Pages::new(&pool),
            owned: Vec::new(),
            old: Vec::new(),
            found: Vec::new(),
            pins: Vec::new(),
            born: 0,
            unknown: 1 << 20,
            resets: 0,
            single_size: spec.sizes().len() == 1,
            before: vec![(0, 0); 5],
            policy_changed: false,
            spec,
            pool,
        }
    }

    fn groups(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.spec.groups().len()).map(|g| GroupId(g as u8))
    }

    fn is_state(&self, group: GroupId) -> bool {
        self.spec.groups()[group.as_usize()].kind == GroupKind::State
    }

    /// What the ledger grants there is a frame for.
    fn every_frame_counts(&self) -> bool {
        self.single_size && self.pool.quiescence.is_empty()
    }

    fn all_grow(&self) -> bool {
        self.spec.groups().iter().all(|g| g.kind.grows())
    }

    fn has_state(&self) -> bool {
        self.groups().any(|g| self.is_state(g))
    }

    pub(super) fn rows(&self, batch: usize) -> usize {
        self.batches[batch % BATCHES].rows.len()
    }

    /// The sequence that this number picks.
    pub(super) fn pick(&self, n: usize) -> Option<u64> {
        self.sequences.keys().copied().nth(n % self.sequences.len().max(1))
    }

    // What is done.

    #[expect(clippy::too_many_arguments, reason = "one for each thing that is random")]
    pub(super) fn open(
        &mut self,
        tenant: usize,
        tokens: Vec<u32>,
        share: Option<u32>,
        adapter: Option<u8>,
        max_new: u32,
        admit: bool,
        protection: u8,
    ) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let org = self.tenants[3];
        let share = share.filter(|_| self.pool.ledger().is_under(tenant, org)).map(|n| (org, n));
        let shares: Vec<_> = share.into_iter().collect();
        let adapter = adapter.map(|a| [a]);
        let open = Open {
            tokens: tokens.clone(),
            max_new_tokens: max_new,
            admit,
            share: &shares,
            adapter: adapter.as_ref().map(|a| &a[..]),
            protection,
            protection_ms: 2000,
            ..Open::default()
        };
        let room = self
            .pool
            .admit(tenant, &Open { max_new_tokens: max_new, ..Open::default() }, tokens.len() as u32)
            .expect("a sound prompt");
        match self.pool.open(tenant, open) {
            Ok(handle) => {
                let counts = handle.counts().expect("idle");
                let root = device::root(&(adapter, self.resets));
                let cached = counts.cached as usize;
                assert!(cached < tokens.len(), "the last token is computed");
                assert_eq!(
                    (counts.known, counts.slots, counts.written, counts.prompt),
                    (tokens.len() as u32, counts.cached, counts.cached, tokens.len() as u32)
                );
                let mut content = root;
                let contents = tokens[..cached].iter().map(|&t| {
                    content = device::next(content, t);
                    content
                });
                let model = Model {
                    tenant,
                    shares,
                    root,
                    contents: contents.collect(),
                    ids: tokens,
                    written: counts.cached,
                    cached: counts.cached,
                    batch: None,
                    admitted: if admit { counts.prompt + max_new } else { 0 },
                    handle,
                };
                self.check_hit(&model);
                self.born += 1;
                self.sequences.insert(self.born, model);
            }
            Err(Error::Refused(_)) => assert!(admit),
            Err(Error::Never(_)) => {
                // What is shared is reserved with each payer.
                assert!(admit && (room.verdict == Verdict::Never || !shares.is_empty()), "{room:?}");
            }
            Err(e) => panic!("{e}"),
        }
    }

    /// What was hit is what the prompt says, was written, and belongs to whom it may.
    fn check_hit(&self, model: &Model) {
        for group in self.groups() {
            let (start, pages) = model.handle.pages(group).expect("idle");
            for (place, (page, frame)) in (start..).zip(pages) {
                let payer = self.pool.pages.payer(page.id);
                let last = (place + 1) * PAGE;
                let shared = model.shares.iter().any(|&(scope, n)| scope == payer && last <= n);
                if self.is_state(group) {
                    let content = model.content_before(model.cached as usize);
                    assert_eq!(self.device.read(group, frame, 0), Some((content, true)), "a wrong state");
                    continue;
                }
                assert!(payer == model.tenant || shared, "page {place} of {group} belongs to {payer}");
                for position in place * PAGE..last.min(model.cached) {
                    let content = model.contents[position as usize];
                    let slot = self.device.read(group, frame, position % PAGE);
                    assert_eq!(slot, Some((content, true)), "a wrong hit at {position} in {group}");
                }
            }
        }
    }

    pub(super) fn add(&mut self, id: u64, batch: usize) {
        let at = batch % BATCHES;
        let model = &mut self.sequences.get_mut(&id).expect("picked");
        let rows = &mut self.batches[at];
        let fits =
            rows.rows.len() < ROWS && model.known().max(model.slots()) <= MOST && model.batch.is_none();
        match rows.batch.add(&model.handle) {
            Ok(row) => {
                assert!(fits && row == rows.rows.len());
                rows.rows.push(id);
                model.batch = Some(at);
            }
            Err(e) => assert!(!fits, "{e}"),
        }
    }

    /// What becomes of a sequence that leaves its batch with steps that are not committed.
    fn pulled(&mut self, id: u64) -> Option<usize> {
        let has_state = self.has_state();
        let model = self.sequences.get_mut(&id).expect("it lives");
        let at = model.batch.take()?;
        if has_state && model.slots() > model.written {
            // A state can't go back: the sequence begins anew.
            (model.written, model.cached) = (0, 0);
        }
        model.cut(model.written);
        let rows = &mut self.batches[at];
        let row = rows.rows.iter().position(|&s| s == id).expect("it has a row");
        rows.rows.swap_remove(row);
        for entry in rows.outstanding.iter_mut().flat_map(|r| &mut r.entries).filter(|e| e.sequence == id) {
            entry.sequence = 0;
        }
        Some(row)
    }

    pub(super) fn remove(&mut self, id: u64) {
        let model = &self.sequences[&id];
        let Some(at) = model.batch else {
            let answer = self.batches[0].batch.remove(&model.handle);
            assert!(answer.is_err(), "it has no row");
            return;
        };
        let moved = self.batches[at].batch.remove(&model.handle).expect("it has a row");
        let row = self.pulled(id).expect("it had a row");
        let rows = self.batches[at].rows.len();
        assert_eq!(moved, (row < rows).then_some(rows));
    }

    pub(super) fn close(&mut self, id: u64, by_drop: bool) {
        if by_drop && self.sequences[&id].batch.is_none() {
            self.sequences.remove(&id);
            return;
        }
        self.sequences[&id].handle.close().expect("nobody uses it");
        self.pulled(id);
        let model = self.sequences.remove(&id).expect("picked");
        assert!(model.handle.is_closed() && model.handle.close().is_ok());
        assert!(matches!(model.handle.counts(), Err(Error::Closed(_))));
    }

    pub(super) fn drop_batch(&mut self, batch: usize) {
        let at = batch % BATCHES;
        for id in self.batches[at].rows.clone() {
            self.pulled(id);
        }
        self.batches[at] =
            Rows { batch: build::batch(&self.pool, ROWS, MOST), rows: Vec::new(), outstanding: Vec::new() };
    }

    /// What the device takes as the token at position `slots`: what was sampled there, if that is known on the device.
    fn planned(&self, at: usize, id: u64) -> Option<u32> {
        let mut entries = self.batches[at].outstanding.iter().rev().flat_map(|r| &r.entries);
        let last = entries.find(|e| e.sequence == id && e.count > 0)?;
        u32::try_from(last.sampled).ok().filter(|_| !last.cut)
    }

    /// Tokens each row should get.
    fn plan(&self, at: usize, budget: Option<u32>) -> Vec<u32> {
        let models: Vec<_> = self.batches[at].rows.iter().map(|id| &self.sequences[id]).collect();
        let behind: Vec<_> = models.iter().map(|m| m.known().saturating_sub(m.slots())).collect();
        let mut left = budget.unwrap_or(u32::MAX).min(MOST + ROWS as u32);
        let mut plan: Vec<_> = behind.iter().map(|n| (*n).max(1)).collect();
        for decoding in [true, false] {
            for (count, &n) in plan.iter_mut().zip(&behind) {
                if (n <= 1) == decoding {
                    *count = (*count).min(left);
                    left -= *count;
                }
            }
        }
        plan
    }

    pub(super) fn step(&mut self, batch: usize, budget: Option<u32>, counts: Option<Vec<i32>>, sample: u8) {
        let at = batch % BATCHES;
        let plan = match &counts {
            Some(counts) => counts.iter().map(|&c| c as u32).collect(),
            None => self.plan(at, budget),
        };
        let frames = self.frames_of(at);
        let seen = self.batches[at].batch.step(counts.as_deref(), budget, |step| {
            let refused = step.refused.iter().map(|r| (r.row, r.refusal)).collect::<Vec<_>>();
            (step.counts.clone(), refused, step.copies.clone(), step.num_tokens, step.num_rows)
        });
        let (counts, refused, copies, num_tokens, num_rows) = match seen {
            Ok(seen) => seen,
            Err(e) => {
                let full = self.batches[at].outstanding.len() == crate::batch::MAX_OUTSTANDING;
                assert!(full && matches!(e, Error::Argument(_)), "{e}");
                return;
            }
        };
        assert_eq!(num_rows as usize, plan.len());
        assert_eq!(num_tokens, counts.iter().sum::<u32>());
        self.check_grants(at, &plan, &counts, &refused);
        let sources = self.copy(&copies, &frames);
        self.look_at_arrays(at, &counts);
        let mut record = Record { entries: Vec::new(), sources };
        for (row, &count) in counts.iter().enumerate() {
            let entry = self.run_row(at, row, count, sample);
            record.entries.push(entry);
        }
        self.batches[at].outstanding.push(record);
    }

    /// Where each page of a batch's sequences lies.
    fn frames_of(&self, at: usize) -> HashMap<(GroupId, FrameId), PageRef> {
        let mut frames = HashMap::new();
        for id in &self.batches[at].rows {
            for group in self.groups() {
                let (_, pages) = self.sequences[id].handle.pages(group).expect("nobody uses it");
                frames.extend(pages.into_iter().map(|(page, frame)| ((group, frame), page)));
            }
        }
        frames
    }

    fn check_grants(&self, at: usize, plan: &[u32], counts: &[u32], refused: &[(u32, Refusal)]) {
        for (row, (&planned, &count)) in plan.iter().zip(counts).enumerate() {
            let refusal = refused.iter().find(|r| r.0 as usize == row).map(|r| r.1);
            let model = &self.sequences[&self.batches[at].rows[row]];
            assert!(count <= planned, "row {row} got {count} of {planned}");
            assert_eq!(refusal.is_some(), count == 0 && planned > 0, "row {row}: {refusal:?}");
            if let Some(Refusal { why: Why::Row, .. }) = refusal {
                assert_eq!(model.slots(), MOST);
            } else if model.admitted > 0 && self.every_frame_counts() && count < planned && self.all_grow() {
                // (What a window leaves behind may be held by others who hit it: that room is not sure to come back.)
                let end = (model.slots() + planned).min(MOST);
                assert!(
                    end > model.admitted,
                    "row {row} was admitted, got {count} of {planned}: {refusal:?}"
                );
            }
        }
    }

    fn copy(&mut self, copies: &[Copy], frames: &HashMap<(GroupId, FrameId), PageRef>) -> Vec<PageRef> {
        copies
            .iter()
            .map(|&Copy { group, from, to }| {
                self.device.copy(group, from, to);
                *frames.get(&(group, from)).expect("a copy of a page that one of the rows had")
            })
            .collect()
    }

    /// The arrays tell the device the truth: the pages of each row, and where its new tokens go.
    fn look_at_arrays(&self, at: usize, counts: &[u32]) {
        let Rows { batch, rows, .. } = &self.batches[at];
        let total = counts.iter().sum::<u32>() as usize;
        let (groups, [seq_lens, query_start_loc, positions]) = batch.shown();
        let (mut lens, mut starts, mut places) = (vec![0; ROWS], vec![0], Vec::new());
        for (row, (id, &count)) in rows.iter().zip(counts).enumerate() {
            let slots = self.sequences[id].slots();
            lens[row] = (slots + count) as i32;
            places.extend((slots..slots + count).map(|p| p as i32));
            starts.push(places.len() as i32);
        }
        assert_eq!(seq_lens, lens);
        assert_eq!(query_start_loc[..=rows.len()], starts);
        assert_eq!(positions[..total], places);
        for (group, (block_table, slot_mapping)) in self.groups().zip(&groups) {
            let width = MOST.div_ceil(PAGE) as usize;
            let mut slots = Vec::new();
            for (row, table) in block_table.chunks(width).enumerate() {
                let mut expected = vec![0; width];
                if let Some(id) = rows.get(row) {
                    let model = &self.sequences[id];
                    let (start, pages) = model.handle.pages(group).expect("nobody uses it");
                    for (entry, (_, frame)) in expected[start as usize..].iter_mut().zip(pages) {
                        *entry = frame.0 as i32;
                    }
                    slots.extend((model.slots()..model.slots() + counts[row]).map(|p| {
                        i64::from(table[(p / PAGE) as usize]) * i64::from(PAGE) + i64::from(p % PAGE)
                    }));
                }
                assert_eq!(table, expected, "the block table of row {row}, {group}");
            }
            if !self.is_state(group) {
                let distinct: HashSet<_> = slots.iter().collect();
                assert_eq!(distinct.len(), slots.len(), "two tokens in one slot");
                assert_eq!(slot_mapping[..total], slots, "slots of {group}");
                assert!(slot_mapping[total..].iter().all(|&s| s == -1));
            }
        }
    }

    /// The device computes `count` tokens of a row.
    fn run_row(&mut self, at: usize, row: usize, count: u32, sample: u8) -> Entry {
        let id = self.batches[at].rows[row];
        let planned = self.planned(at, id);
        let model = self.sequences.get_mut(&id).expect("it has a row");
        let (from, write) = (model.slots(), self.device.new_write());
        for position in from..from + count {
            let known = model.ids.get(position as usize).copied();
            let token = known.or(planned.filter(|_| position == from)).unwrap_or_else(|| {
                self.unknown += 1;
                self.unknown
            });
            model.contents.push(device::next(model.content_before(position as usize), token));
        }
        let end = model.contents.last().copied().unwrap_or_default();
        // The same content is followed by the same tokens as a rule, so that generated tokens are hit as well.
        let sampled = match sample {
            0 => -1,
            1..3 => (end % 3) as i32,
            _ => i32::from(sample % 5),
        };
        let model = &self.sequences[&id];
        for group in (0..self.spec.groups().len()).map(|g| GroupId(g as u8)) {
            let (start, pages) = model.handle.pages(group).expect("nobody uses it");
            let frame = |place: u32| pages[place.checked_sub(start).expect("not left yet") as usize].1;
            let attended = match self.spec.groups()[group.as_usize()].kind {
                GroupKind::State if count == 0 => continue,
                GroupKind::State => {
                    if from > 0 {
                        let state = self.device.read(group, frame(0), 0).map(|s| s.0);
                        assert_eq!(state, Some(model.contents[from as usize - 1]), "state of row {row}");
                    }
                    self.device.write(group, frame(0), 0, end, write);
                    continue;
                }
                GroupKind::Window { tokens } => (from + 1).saturating_sub(tokens),
                GroupKind::Chunked { tokens } => from / tokens * tokens,
                _ => 0,
            };
            if count > 0 {
                for position in attended..from {
                    let slot = self.device.read(group, frame(position / PAGE), position % PAGE);
                    let content = Some(model.contents[position as usize]);
                    assert_eq!(slot.map(|s| s.0), content, "row {row} attends to {position} in {group}");
                }
            }
            for position in from..from + count {
                let content = model.contents[position as usize];
                self.device.write(group, frame(position / PAGE), position % PAGE, content, write);
            }
        }
        Entry { sequence: id, count, sampled, cut: false, write }
    }

    pub(super) fn commit(&mut self, batch: usize) {
        let at = batch % BATCHES;
        if self.batches[at].outstanding.is_empty() {
            assert!(self.batches[at].batch.commit(None).is_err());
            return;
        }
        let record = self.batches[at].outstanding.remove(0);
        let sampled: Vec<_> = record.entries.iter().map(|e| e.sampled).collect();
        self.batches[at].batch.commit(Some(&sampled)).expect("a step waits");
        for entry in record.entries {
            self.device.finish(entry.write);
            let Some(model) = self.sequences.get_mut(&entry.sequence).filter(|_| entry.count > 0) else {
                continue;
            };
            model.written += entry.count;
            if model.written >= model.known() {
                model.ids.resize(model.written as usize, 0);
                if let Some(token) = u32::try_from(entry.sampled).ok().filter(|_| !entry.cut) {
                    model.ids.push(token);
                }
            }
        }
    }

    pub(super) fn extend(&mut self, id: u64, tokens: &[u32]) {
        let model = self.sequences.get_mut(&id).expect("picked");
        let answer = model.handle.extend(tokens);
        // Nobody knows the tokens of slots beyond the known ones: these can't come behind them.
        assert_eq!(answer.is_ok(), model.slots() <= model.known() || tokens.is_empty(), "{answer:?}");
        if answer.is_ok() {
            model.ids.extend_from_slice(tokens);
        }
    }

    pub(super) fn truncate(&mut self, id: u64, n: u32) {
        let full = self.all_grow();
        let model = self.sequences.get_mut(&id).expect("picked");
        let answer = model.handle.truncate(n);
        let sound = n > 0 && n <= model.known().max(model.slots());
        assert!(sound || answer.is_err());
        if full {
            assert_eq!(answer.is_ok(), sound, "{answer:?}");
        }
        if answer.is_err() {
            return;
        }
        if n < model.slots() {
            // Others may have hit what it gives back: then the way there takes more pages than were promised.
            model.admitted = 0;
        }
        model.ids.truncate(n as usize);
        model.cut(n);
        model.written = model.written.min(n);
        model.cached = model.cached.min(n / PAGE * PAGE);
        let Some(at) = model.batch else { return };
        let mut left = model.slots() - model.written;
        let entries = self.batches[at].outstanding.iter_mut().flat_map(|r| &mut r.entries);
        for entry in entries.filter(|e| e.sequence == id) {
            if entry.count > left {
                (entry.count, entry.cut) = (left, left == 0);
            }
            left -= entry.count;
        }
    }

    pub(super) fn fork(&mut self, id: u64) {
        let state = self.has_state();
        let model = self.sequences.get_mut(&id).expect("picked");
        let unsettled = model.slots() > model.written;
        // Both go on in copies, for which nothing was promised.
        model.admitted = 0;
        match model.handle.fork() {
            Ok(handle) => {
                assert!(!(state && unsettled), "a state can't be forked in the middle of a step");
                let model = Model {
                    handle,
                    ids: model.ids.clone(),
                    contents: model.contents[..model.written as usize].to_vec(),
                    shares: model.shares.clone(),
                    batch: None,
                    ..*model
                };
                self.born += 1;
                self.sequences.insert(self.born, model);
            }
            Err(e) => assert!(state && unsettled, "{e}"),
        }
    }

    pub(super) fn keep_state(&mut self, id: u64) {
        let model = &self.sequences[&id];
        let kept = model.handle.keep_state().expect("nobody uses it");
        assert!(
            !kept || self.has_state() && model.slots() == model.written && model.written.is_multiple_of(PAGE)
        );
    }

    /// Move a page of a sequence to another frame.
    pub(super) fn relocate(&mut self, id: u64, group: usize, n: usize) {
        let group = GroupId((group % self.spec.groups().len()) as u8);
        let (_, pages) = self.sequences[&id].handle.pages(group).expect("nobody uses it");
        let Some(&(page, at)) = pages.get(n % pages.len().max(1)) else { return };
        let device = &mut self.device;
        let moved = self.pool.relocate(page, |from, to| {
            assert_eq!(from, at);
            device.copy(group, from, to);
        });
        assert_eq!(self.pool.pages.location(page.id).frame(), moved.unwrap_or(at));
    }

    // Pins, policies, time.

    pub(super) fn pin(&mut self, id: u64, tokens: u32, owner: usize, ttl: Option<u64>) {
        let owner = self.tenants[owner % self.tenants.len()];
        let model = &self.sequences[&id];
        if let Ok(pin) = self.pool.pin(&model.handle, tokens, owner, ttl, "test") {
            self.pins.push((pin, ttl.map(|ttl| self.pool.now_ms() + ttl)));
        }
    }

    pub(super) fn unpin(&mut self, n: usize) {
        if let Some(at) = n.checked_rem(self.pins.len()) {
            let (pin, _) = self.pins.remove(at);
            self.pool.unpin(pin).expect("it is listed");
            assert!(self.pool.unpin(pin).is_err());
        }
    }

    pub(super) fn advance(&mut self, ms: u64) {
        let now = self.pool.advance(ms).expect("a manual clock");
        self.pins.retain(|&(_, until)| until.is_none_or(|until| until > now));
    }

    pub(super) fn set_policy(
        &mut self,
        tenant: usize,
        reserve: u32,
        limit: Option<u32>,
        weight: u32,
        publish: u8,
    ) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let org = self.tenants[3];
        let units = self.spec.units(self.spec.class_of(GroupId(0)));
        let publish = match publish % 3 {
            _ if tenant == org || !self.pool.ledger().is_under(tenant, org) => vec![],
            0 => vec![],
            1 => vec![(org, None)],
            _ => vec![(org, Some(Units(units * 4)))],
        };
        let policy = Policy {
            reserve: [Units(reserve * units), Units(0)],
            limit: [limit.map(|n| Units(n * units)), None],
            weight,
            pin_budget: Units(weight * 8),
            publish,
            ..Policy::default()
        };
        // Refused or not: the claims tell.
        let _ = self.pool.ledger().set_policy(tenant, &policy);
        self.policy_changed = true;
    }

    pub(super) fn reset(&mut self) {
        let used = (0..self.pool.max_pages()).map(|id| self.pool.pages.read(PageId(id)));
        let used = used.filter(|w| w.is_indexed() && (w.is_held() || w.pins() > 0)).count();
        match self.pool.reset_prefix_cache() {
            Ok(_) => {
                assert_eq!(used, 0);
                assert_eq!(self.pool.audit().balance[0].cached, 0, "everything cached is dropped");
                self.resets += 1;
            }
            Err(e) => assert!(used > 0, "{e}"),
        }
    }

    // The lower face.

    fn content_of(tenant: TenantId, group: GroupId, key: u64) -> Content {
        device::root(&(tenant.0, group.0, key))
    }

    pub(super) fn allocate(&mut self, tenant: usize, group: usize, n: usize) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let group = GroupId((group % self.spec.groups().len()) as u8);
        let must = self.must_succeed(tenant, group, n as u32);
        match self.face.allocate(tenant, group, n) {
            Ok(pages) => {
                assert_eq!(pages.len(), n);
                self.owned.extend(pages.into_iter().map(|page| Owned { page, tenant, group }));
            }
            Err(e) => assert!(!must, "{tenant} may have {n} pages, and yet {e}; {:?}", self.live_pages()),
        }
    }

    /// Whether a cached page is kept by a child that somebody holds: there is none but while a copy is made, since whoever
    /// holds a page holds what it continues.
    fn is_something_kept(&self) -> bool {
        let pages = &self.pool.pages;
        let kept = (0..pages.len()).map(PageId).any(|id| {
            let word = pages.read(id);
            (word.is_held() || word.is_pinned())
                && word.is_indexed()
                && page_before(pages, id).is_some_and(|before| pages.read(before.id).is_cached())
        });
        let copying = self.batches.iter().flat_map(|b| &b.outstanding).any(|r| !r.sources.is_empty());
        assert!(!kept || copying, "{:?}", self.live_pages());
        kept
    }

    /// For messages.
    fn live_pages(&self) -> Vec<String> {
        let pages = &self.pool.pages;
        let live = (0..pages.len()).map(PageId).filter(|&id| !pages.read(id).is_free());
        live.map(|id| {
            let (payer, word, link) = (pages.payer(id), pages.read(id), pages.link(id));
            format!("{id} of {payer}: {word:?}, {} children, {link:?}", pages.children(id))
        })
        .collect()
    }

    /// Inside every limit and claim, and everything that is cached can be taken: then there is no reason to refuse.
    fn must_succeed(&self, tenant: TenantId, group: GroupId, n: u32) -> bool {
        let ledger = self.pool.ledger();
        let (mut level, mut growth) = (tenant, n * self.spec.units(self.spec.class_of(group)));
        let asked = growth;
        loop {
            let usage = ledger.usage(Tier::Device, level);
            let limit = usage.limit.unwrap_or(ledger.capacity(Tier::Device)).0;
            let cached = ledger.subtree_usage(Tier::Device, level).cached.0;
            let claim = usage.reserve.0.max(usage.demand.0 + growth);
            growth = claim - usage.claim.0;
            if growth > 0 && claim > limit || usage.subtree.0 - cached + asked > limit {
                return false;
            }
            match ledger.parent(level) {
                Some(parent) => level = parent,
                None => return self.every_frame_counts() && !self.is_something_kept(),
            }
        }
    }

    pub(super) fn publish(&mut self, n: usize, key: u64) {
        let Some(&Owned { page, tenant, group }) = self.owned.get(n % self.owned.len().max(1)) else {
            return;
        };
        let word = self.pool.pages.read(page.id);
        if !word.is_indexed() {
            let frame = self.pool.pages.location(page.id).frame();
            let write = self.device.new_write();
            self.device.finish(write);
            let cells = if self.is_state(group) { 1 } else { PAGE };
            for cell in 0..cells {
                self.device.write(group, frame, cell, Self::content_of(tenant, group, key), write);
            }
        }
        let answer =
            self.face.publish(tenant, group, &[page], &[CallerKey::Int(key.into())]).expect("it is held");
        assert!(!(word.is_indexed() && answer[0]), "it has a key already");
    }

    fn check_found(&self, page: PageRef, group: GroupId, content: Content) {
        let frame = self.pool.pages.location(page.id).frame();
        assert_eq!(self.device.read(group, frame, 0), Some((content, true)), "{page:?} holds something else");
    }

    pub(super) fn lookup(&mut self, tenant: usize, group: usize, keys: &[u64]) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let group = GroupId((group % self.spec.groups().len()) as u8);
        let asked: Vec<_> = keys.iter().map(|&key| CallerKey::Int(key.into())).collect();
        let pages = self.face.lookup(tenant, group, &asked).expect("sound keys");
        for (&page, &key) in pages.iter().zip(keys) {
            self.check_found(page, group, Self::content_of(tenant, group, key));
            self.owned.push(Owned { page, tenant, group });
        }
    }

    pub(super) fn find(&mut self, tenant: usize, group: usize, keys: &[u64]) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let group = GroupId((group % self.spec.groups().len()) as u8);
        let asked: Vec<_> = keys.iter().map(|&key| CallerKey::Int(key.into())).collect();
        let pages = self.face.find_all(tenant, group, &asked).expect("sound keys");
        for (page, &key) in pages.into_iter().zip(keys) {
            self.found.extend(page.map(|page| (page, group, Self::content_of(tenant, group, key))));
        }
    }

    pub(super) fn share(&mut self, n: usize) {
        let Some(&(page, group, content)) = self.found.get(n % self.found.len().max(1)) else { return };
        if self.face.share(&[page]).expect("pages of this pool") == [true] {
            self.check_found(page, group, content);
            self.owned.push(Owned { page, tenant: self.pool.pages.payer(page.id), group });
        }
    }

    pub(super) fn release(&mut self, n: usize, twice: bool) {
        if self.owned.is_empty() {
            return;
        }
        let Owned { page, .. } = self.owned.swap_remove(n % self.owned.len());
        let others = self.pool.pages.read(page.id).refs() - 1;
        if twice && others == 0 {
            // More often than it is held: nothing is changed, so once is still right.
            assert!(matches!(self.face.release(&[page, page]), Err(Error::Stale { .. })));
        }
        self.face.release(&[page]).expect("it is held");
        self.old.push(page);
    }

    pub(super) fn release_stale(&mut self, n: usize) {
        let Some(&page) = self.old.get(n % self.old.len().max(1)) else { return };
        let word = self.pool.pages.read(page.id);
        if word.generation() != page.generation || !word.is_held() {
            assert!(matches!(self.face.release(&[page]), Err(Error::Stale { .. })));
            assert_eq!(self.pool.pages.read(page.id), word);
        }
    }

    // What must be true.

    pub(super) fn prepare(&mut self) {
        let levels = self.levels();
        self.before = levels
            .iter()
            .map(|&t| self.pool.ledger().usage(Tier::Device, t))
            .map(|u| (u.subtree.0, u.claim.0))
            .collect();
        self.policy_changed = false;
    }

    fn levels(&self) -> Vec<TenantId> {
        [ROOT].into_iter().chain(self.tenants.iter().copied()).collect()
    }

    pub(super) fn check(&self) {
        build::green(&self.pool);
        self.check_sequences();
        self.check_references();
        self.check_ledger();
    }

    fn check_sequences(&self) {
        for model in self.sequences.values() {
            let counts = model.handle.counts().expect("nobody uses it");
            assert_eq!(
                (counts.known, counts.slots, counts.written, counts.cached),
                (model.known(), model.slots(), model.written, model.cached)
            );
            assert_eq!(model.handle.tokens(0).expect("nobody uses it"), model.ids);
            for group in self.groups() {
                let (start, pages) = model.handle.pages(group).expect("nobody uses it");
                let kind = self.spec.groups()[group.as_usize()].kind;
                let end = if kind == GroupKind::State {
                    u32::from(model.slots() > 0)
                } else {
                    model.slots().div_ceil(PAGE)
                };
                assert_eq!(start + pages.len() as u32, end, "pages of {group}");
                assert!(
                    start <= self.spec.first_needed(group, model.written),
                    "{group} lacks pages it needs"
                );
                for (place, (_, frame)) in (start..).zip(pages) {
                    if kind == GroupKind::State {
                        let content = model.contents.last().copied();
                        assert_eq!(self.device.read(group, frame, 0).map(|s| s.0), content);
                        continue;
                    }
                    for position in place * PAGE..((place + 1) * PAGE).min(model.slots()) {
                        let slot = self.device.read(group, frame, position % PAGE).map(|s| s.0);
                        assert_eq!(slot, Some(model.contents[position as usize]), "{position} in {group}");
                    }
                }
            }
        }
    }

    /// Every page has as many references and pins as somebody can name, and lies alone.
    fn check_references(&self) {
        let mut refs: HashMap<PageRef, u32> = HashMap::new();
        let tables = self.sequences.values().flat_map(|m| {
            self.groups()
                .flat_map(|g| m.handle.pages(g).expect("nobody uses it").1)
                .map(|p| p.0)
                .collect::<Vec<_>>()
        });
        let sources = self.batches.iter().flat_map(|b| &b.outstanding).flat_map(|r| &r.sources).copied();
        for page in tables.chain(sources).chain(self.owned.iter().map(|o| o.page)) {
            *refs.entry(page).or_default() += 1;
        }
        let listed = self.pool.pins(None);
        assert_eq!(
            listed.iter().map(|p| p.id).collect::<HashSet<_>>(),
            self.pins.iter().map(|p| p.0).collect()
        );
        let mut pins: HashMap<PageRef, u32> = HashMap::new();
        listed.iter().flat_map(|p| &p.pages).for_each(|&page| *pins.entry(page).or_default() += 1);
        for id in (0..self.pool.max_pages()).map(PageId) {
            let word: PageWord = self.pool.pages.read(id);
            let page = PageRef { id, generation: word.generation() };
            let expected = (refs.remove(&page).unwrap_or(0), pins.remove(&page).unwrap_or(0));
            assert_eq!((word.refs(), word.pins()), expected, "{page:?}");
        }
        assert!(refs.is_empty() && pins.is_empty(), "stale: {refs:?} {pins:?}");
    }

    /// Claims and sums, from the tenants' own numbers.
    fn check_ledger(&self) {
        let ledger = self.pool.ledger();
        let mut promised: HashMap<TenantId, u32> = HashMap::new();
        for model in self.sequences.values() {
            let promises = model.handle.visit(|_, body, _| body.promises.clone()).expect("nobody uses it");
            promises.into_iter().for_each(|(payer, units)| *promised.entry(payer).or_default() += units);
        }
        let levels = self.levels();
        for (&level, &(charged, claim)) in levels.iter().zip(&self.before) {
            let usage = ledger.usage(Tier::Device, level);
            assert_eq!(usage.promised.0, promised.get(&level).copied().unwrap_or(0), "{level}");
            assert_eq!((usage.claim.0, usage.subtree.0), (self.claim(level), self.charged(level)), "{level}");
            let limit = usage.limit.unwrap_or(ledger.capacity(Tier::Device)).0;
            assert!(usage.subtree.0 <= limit.max(charged), "{level}: {usage:?}");
            assert!(self.policy_changed || usage.claim.0 <= limit.max(claim), "{level}: {usage:?}");
        }
        let capacity = ledger.capacity(Tier::Device).0;
        assert!(self.claim(ROOT) <= capacity && self.charged(ROOT) <= capacity);
        assert_eq!(TIERS, 2);
    }

    fn children(&self, level: TenantId) -> impl Iterator<Item = TenantId> {
        let ledger = self.pool.ledger();
        self.tenants.iter().copied().filter(move |&t| ledger.parent(t) == Some(level))
    }

    fn claim(&self, level: TenantId) -> u32 {
        let u = self.pool.ledger().usage(Tier::Device, level);
        let own = u.held.0 + u.pinned.0 + u.promised.0 + u.stock.0;
        u.reserve.0.max(own + self.children(level).map(|t| self.claim(t)).sum::<u32>())
    }

    fn charged(&self, level: TenantId) -> u32 {
        let own = self.pool.ledger().usage(Tier::Device, level).charged.0;
        own + self.children(level).map(|t| self.charged(t)).sum::<u32>()
    }

    /// Everybody goes, and nothing is left.
    pub(super) fn finish(mut self) {
        for id in self.sequences.keys().copied().collect::<Vec<_>>() {
            self.close(id, id % 2 == 0);
        }
        self.batches.clear();
        let held: Vec<_> = self.owned.drain(..).map(|o| o.page).collect();
        self.face.release(&held).expect("they are held");
        for (pin, _) in std::mem::take(&mut self.pins) {
            self.pool.unpin(pin).expect("it is listed");
        }
        build::empty(&self.pool);
    }
}

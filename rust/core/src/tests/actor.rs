//! A scheduler and its device by hand: sequences, batches and steps on a pool, each with what it has to answer.

use std::collections::{HashMap, HashSet};

use super::{
    build::{self, PAGE},
    device,
    world::{BATCHES, Entry, MOST, Model, ROWS, Record, Rows, World},
};
use crate::{
    admit::Verdict,
    batch::Copy,
    error::{Error, Refusal, Why},
    sequence::{Open, State},
    spec::GroupKind,
    word::{FrameId, GroupId, PageRef, Tier},
};

impl World {
    // What is done.

    #[expect(clippy::too_many_arguments, reason = "all that a prompt can be opened with")]
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
                    state: State::Running,
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
    pub(super) fn check_hit(&self, model: &Model) {
        for group in self.groups() {
            let (start, pages) = model.handle.pages(group).expect("idle");
            for (place, (page, frame)) in (start..).zip(pages) {
                let payer = self.pool.pages.payer(page.id);
                assert!(frame.0 as i32 > 0, "a hit of a compressed page");
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
        let fits = fits && model.state == State::Running;
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
    pub(super) fn pulled(&mut self, id: u64) -> Option<usize> {
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
        let carried = self.plans.iter().any(|plan| plan.carries(id));
        if by_drop && self.sequences[&id].batch.is_none() && !carried {
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
                self.device.copy(Tier::Device, group, from, to);
                let page = *frames.get(&(group, from)).expect("a copy of a page that one of the rows had");
                (page, to)
            })
            // A page that its batch took along has moved; of the others the step holds the source.
            .filter(|&(page, to)| self.pool.entry(page.id) != to.0 as i32)
            .map(|(page, _)| page)
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
                    for ((entry, shown), (_, frame)) in
                        expected[start as usize..].iter_mut().zip(&table[start as usize..]).zip(pages)
                    {
                        *entry = if self.shows(group, *shown, frame) { *shown } else { frame.0 as i32 };
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

    /// Whether an entry of a block table is as good as the frame in which its page lies: the page has left it, nobody
    /// else has it, and it says the same.
    fn shows(&self, group: GroupId, entry: i32, frame: FrameId) -> bool {
        let old = FrameId(entry as u32);
        let (class, frame_then) = match entry {
            0.. => (self.spec.class_of(group), old),
            _ => (self.spec.small_class_of(group).expect("it shows one"), FrameId(!old.0)),
        };
        let size = self.pool.classes[class.as_usize()].size;
        let kept = self.pool.quiescence.limbo().iter().any(|r| (r.size, r.frame) == (size, frame_then));
        kept && (frame.0 == 0 || self.device.same(group, old, frame))
    }

    /// The device computes `count` tokens of a row.
    fn run_row(&mut self, at: usize, row: usize, count: u32, sample: u8) -> Entry {
        let id = self.batches[at].rows[row];
        let (planned, lossy) = (self.planned(at, id), self.is_lossy(id));
        let model = self.sequences.get_mut(&id).expect("it has a row");
        let (from, write) = (model.slots(), self.device.new_write());
        for position in from..from + count {
            let known = model.ids.get(position as usize).copied();
            let token = known.or(planned.filter(|_| position == from)).unwrap_or_else(|| {
                self.unknown += 1;
                self.unknown
            });
            let before = model.content_before(position as usize);
            let before = if lossy { device::lossy(before) } else { before };
            model.contents.push(device::next(before, token));
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
                let there = |position: &u32| frame(position / PAGE).0 != 0;
                for position in (attended..from).filter(there) {
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
        let sound = model.slots() <= model.known() || tokens.is_empty();
        assert_eq!(answer.is_ok(), sound && model.state == State::Running, "{answer:?}");
        if answer.is_ok() {
            model.ids.extend_from_slice(tokens);
        }
    }

    pub(super) fn truncate(&mut self, id: u64, n: u32) {
        let full = self.all_grow();
        // A page that is compressed or cut, or about to be, is not written on.
        let inside = !n.is_multiple_of(PAGE) && n < self.sequences[&id].slots();
        let small = inside && self.settles(id, |place| place == n / PAGE);
        let model = self.sequences.get_mut(&id).expect("picked");
        let answer = model.handle.truncate(n);
        let runs = model.state == State::Running;
        let sound = runs && n > 0 && n <= model.known().max(model.slots()) && !small;
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
        let compressing = self.settles(id, |_| true);
        let model = self.sequences.get_mut(&id).expect("picked");
        let unsettled = model.slots() > model.written;
        if model.state != State::Running {
            assert!(model.handle.fork().is_err());
            return;
        }
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
            Err(e) => assert!(state && unsettled || compressing, "{e}"),
        }
    }

    /// Whether a page of a sequence at such a place is compressed or cut, or about to be, so that nobody writes to it.
    fn settles(&self, id: u64, at: impl Fn(u32) -> bool) -> bool {
        self.groups().filter(|&group| !self.is_state(group)).any(|group| {
            let (start, pages) = self.sequences[&id].handle.pages(group).expect("nobody uses it");
            (start..).zip(pages).any(|(place, (page, _))| at(place) && self.pool.is_fixed(page))
        })
    }

    /// Whether a sequence attends to what is less exact than it was written.
    fn is_lossy(&self, id: u64) -> bool {
        self.groups().filter(|g| self.spec.groups()[g.as_usize()].kind.grows()).any(|group| {
            let (_, pages) = self.sequences[&id].handle.pages(group).expect("nobody uses it");
            pages.iter().any(|(page, _)| self.pool.is_lossy(self.pool.pages.location(page.id)))
        })
    }

    pub(super) fn keep_state(&mut self, id: u64) {
        let model = &self.sequences[&id];
        if model.state != State::Running {
            assert!(model.handle.keep_state().is_err());
            return;
        }
        let kept = model.handle.keep_state().expect("nobody uses it");
        assert!(
            !kept || self.has_state() && model.slots() == model.written && model.written.is_multiple_of(PAGE)
        );
    }

    /// Move a page of a sequence to another frame.
    pub(super) fn relocate(&mut self, id: u64, group: usize, n: usize) {
        let group = GroupId((group % self.spec.groups().len()) as u8);
        let (_, pages) = self.sequences[&id].handle.pages(group).expect("nobody uses it");
        let Some(&(page, at)) = pages.get(n % pages.len().max(1)).filter(|(_, frame)| frame.0 != 0) else {
            return;
        };
        let (device, tier) = (&mut self.device, self.pool.tier_of(page.id));
        let moved = build::relocate(&self.pool, page, |from, to| {
            assert_eq!(from, at);
            device.copy(tier, group, from, to);
        });
        assert_eq!(self.pool.entry(page.id), moved.unwrap_or(at).0 as i32);
    }
}

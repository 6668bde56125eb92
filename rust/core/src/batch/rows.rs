//! The rows of a batch and what a step does to them; their invariant stands at the head of batch.rs.
//!
//! A step is five passes over the rows: plan (how many tokens each), make room (pages for the few rows that need some),
//! write (the arrays, one after the other), remember, and at its commit: written, known, published.

use std::{collections::VecDeque, sync::Arc};

use super::{Copy, LONGEST_DRAFT, RefusedRow, Step, places::Look};
use crate::{
    arrays::{Arrays, Shape},
    error::{Error, Refusal, Why},
    frame::Entered,
    pool::{Pool, Scratch},
    sequence::{Body, Sequence},
    stats::Counter,
    sync::Atom,
    word::{GroupId, Lane, PageRef, Tier},
};

/// What a step looks at in every row.
#[derive(Debug, Default)]
pub(super) struct Hot {
    pub(super) known: Vec<u32>,
    pub(super) slots: Vec<u32>,
    pub(super) written: Vec<u32>,
    pub(super) room: Vec<u32>,
    pub(super) trim: Vec<u32>,
    pub(super) publish: Vec<u32>,
    /// Per group: the slot of the row's position 0, if its last page reached back to there.
    pub(super) base: Vec<Vec<i64>>,
}

impl Hot {
    pub(super) fn each(&mut self, mut f: impl FnMut(&mut Vec<u32>)) {
        let Self { known, slots, written, room, trim, publish, .. } = self;
        [known, slots, written, room, trim, publish].into_iter().for_each(&mut f);
    }
}

#[derive(Debug)]
pub(super) struct Row {
    pub(super) body: Box<Body>,
    pub(super) sequence: Arc<Sequence>,
}

/// A step that is not committed.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) rows: usize,
    /// Tokens per entry; empty: one each.
    pub(super) counts: Vec<u32>,
    /// The row of each entry now; empty: where it was.
    pub(super) at: Vec<u32>,
    /// Sources of copies, held until the copies are done.
    sources: Vec<PageRef>,
}

/// The row of an entry whose sequence has left.
const GONE: u32 = u32::MAX;

/// The state of a batch.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) lane: Lane,
    pub(super) rows: Vec<Row>,
    pub(super) hot: Hot,
    pub(super) step: Step,
    pub(super) outstanding: VecDeque<Record>,
    pub(super) spare: Vec<Record>,
    pub(super) arrays: Box<dyn Arrays>,
    pub(super) scratch: Scratch,
    /// Rows that the step in progress has to look at.
    pub(super) tight: Vec<u32>,
    /// Tokens and rows in the arrays since the last step.
    pub(super) shown: usize,
    pub(super) look: Look,
}

impl Inner {
    pub(super) fn find(&self, sequence: &Sequence) -> Result<usize, Error> {
        let row = sequence.row.get() as usize;
        match self.rows.get(row) {
            Some(found) if std::ptr::eq(&raw const *found.sequence, sequence) => Ok(row),
            _ => Err(Error::Argument("the sequence has no row in this batch".into())),
        }
    }

    /// No commit follows: what was kept for the copies of these steps goes back.
    pub(super) fn forget_records(&mut self, pool: &Pool) {
        while let Some(mut record) = self.outstanding.pop_front() {
            pool.let_go(self.lane, &record.sources, &mut self.scratch);
            record.sources.clear();
            self.spare.push(record);
        }
    }

    pub(super) fn push(&mut self, pool: &Pool, shape: Shape, row: Row) {
        let at = self.rows.len();
        // Before it is looked where they lie.
        row.body.unsettled(pool).for_each(|page| pool.pages.set_open(page.id));
        self.rows.push(row);
        self.hot.each(|v| v.push(0));
        self.hot.base.iter_mut().for_each(|b| b.push(0));
        self.sync_in(pool, shape, at);
    }

    /// Take a row out, and what steps that are not committed did for it.
    pub(super) fn pull(&mut self, pool: &Pool, shape: Shape, row: usize) -> Box<Body> {
        self.sync_out(row);
        let last = self.rows.len() - 1;
        let mut body = self.rows.swap_remove(row).body;
        body.forget_steps(pool, self.lane, &mut self.scratch);
        body.unsettled(pool).for_each(|page| pool.pages.clear_open(page.id));
        self.look.clip(self.rows.len());
        self.hot.each(|v| {
            v.swap_remove(row);
        });
        for base in &mut self.hot.base {
            base.swap_remove(row);
        }
        if let Some(moved) = self.rows.get(row) {
            moved.sequence.row.put(row as u32);
        }
        for record in &mut self.outstanding {
            if record.at.is_empty() {
                record.at.extend(0..record.rows as u32);
            }
            for at in &mut record.at {
                if *at == row as u32 {
                    *at = GONE;
                } else if *at == last as u32 {
                    *at = row as u32;
                }
            }
        }
        let arrays = self.arrays.rows();
        arrays.seq_lens[row] = arrays.seq_lens[last];
        arrays.seq_lens[last] = 0;
        for g in 0..self.hot.base.len() {
            let table = self.arrays.group(g).block_table;
            let (to, from) = (row * shape.pages, last * shape.pages);
            table.copy_within(from..from + shape.pages, to);
            table[from..from + shape.pages].fill(0);
        }
        body
    }

    /// The row was truncated: steps that are not committed count as far as its slots still reach, and what is sampled for
    /// one follows what is left of it (a draft, of which only a part was accepted).
    pub(super) fn clip(&mut self, row: usize) {
        let body = &self.rows[row].body;
        let mut left = body.slots - body.written;
        for record in &mut self.outstanding {
            let entry = match record.at.is_empty() {
                true => row,
                false => record.at.iter().position(|&at| at == row as u32).unwrap_or(record.rows),
            };
            if entry >= record.rows {
                continue;
            }
            if record.counts.is_empty() {
                record.counts.resize(record.rows, 1);
            }
            let count = &mut record.counts[entry];
            *count = (*count).min(left);
            left -= *count;
        }
    }

    /// The row's counts into its body.
    pub(super) fn sync_out(&mut self, row: usize) {
        let body = &mut self.rows[row].body;
        body.slots = self.hot.slots[row];
        body.written = self.hot.written[row];
    }

    /// The body's counts into the row, and its pages into the arrays.
    pub(super) fn sync_in(&mut self, pool: &Pool, shape: Shape, row: usize) {
        let body = &self.rows[row].body;
        self.hot.known[row] = body.known();
        self.hot.slots[row] = body.slots;
        self.hot.written[row] = body.written;
        self.hot.publish[row] = body.next_publish(pool.spec.page_tokens());
        self.hot.trim[row] = body.next_trim(pool);
        for g in 0..self.hot.base.len() {
            let table = &self.rows[row].body.tables[g];
            let shown = &mut self.arrays.group(g).block_table[row * shape.pages..][..shape.pages];
            let entries = table.live().iter().map(|p| pool.entry(p.id));
            let start = table.start as usize;
            shown[..start].fill(0);
            let mut end = start;
            for (entry, now) in shown[start..].iter_mut().zip(entries) {
                *entry = now;
                end += 1;
            }
            shown[end..].fill(0);
        }
        self.settle(pool, shape, row);
    }

    /// What the row's pages hold, and where the last one is.
    fn settle(&mut self, pool: &Pool, shape: Shape, row: usize) {
        let page_tokens = pool.spec.page_tokens();
        self.find_bases(pool, row);
        let body = &self.rows[row].body;
        let mut room = shape.tokens;
        for (g, table) in body.tables.iter().enumerate() {
            if !pool.is_state(GroupId(g as u8)) {
                room = room.min(table.pages.len() as u32 * page_tokens);
            } else if table.pages.is_empty() {
                room = 0;
            }
        }
        self.hot.room[row] = if body.shared_tail { 0 } else { room };
    }

    /// How many tokens each row should get.
    pub(super) fn plan(
        &mut self,
        shape: Shape,
        counts: Option<&[i32]>,
        budget: Option<u32>,
    ) -> Result<(), Error> {
        let rows = self.rows.len();
        let plan = &mut self.step.counts;
        if let Some(counts) = counts {
            if counts.len() != rows {
                return Err(Error::Argument(format!("{} counts for {rows} rows", counts.len())));
            }
            if let Some((row, &count)) = counts.iter().enumerate().find(|(_, c)| **c < 0) {
                return Err(Error::Argument(format!(
                    "the count of row {row} is {count}; it must not be negative"
                )));
            }
            let total: u64 = counts.iter().map(|&c| u64::from(c.unsigned_abs())).sum();
            let most = budget.map_or(shape.step, |b| b.min(shape.step));
            if total > u64::from(most) {
                return Err(Error::Argument(format!(
                    "the counts sum to {total}; this step shows at most {most} tokens"
                )));
            }
            plan.clear();
            plan.extend(counts.iter().map(|&c| c.unsigned_abs()));
            return Ok(());
        }
        plan.clear();
        plan.extend(
            self.hot
                .known
                .iter()
                .zip(&self.hot.slots)
                .map(|(&known, &slots)| known.saturating_sub(slots).max(1)),
        );
        let most = budget.map_or(shape.step, |b| b.min(shape.step));
        let one_each = plan.iter().fold(1, |all, &count| all | count) == 1;
        let total = if one_each { rows as u64 } else { plan.iter().map(|&c| u64::from(c)).sum() };
        if total > u64::from(most) {
            // Rows that decode first, then as much of the prompts as fits, in the order of the rows.
            let mut left = most;
            for decoding in [true, false] {
                for (count, (known, slots)) in plan.iter_mut().zip(self.hot.known.iter().zip(&self.hot.slots))
                {
                    if (known.saturating_sub(*slots) <= 1) == decoding {
                        *count = (*count).min(left);
                        left -= *count;
                    }
                }
            }
        }
        Ok(())
    }

    /// Pages for every row that needs some. Rows that can't grow as planned get less, or nothing.
    pub(super) fn make_room(&mut self, pool: &Pool, shape: Shape, entered: Entered) {
        self.step.refused.clear();
        self.step.copies.clear();
        self.look_at_places(pool, shape, entered);
        self.list_tight_rows();
        self.cross_edges(pool, shape);
        for at in 0..self.tight.len() {
            let row = self.tight[at] as usize;
            let end = self.hot.slots[row] + self.step.counts[row];
            if end > self.hot.room[row] || self.hot.written[row] >= self.hot.trim[row] {
                let granted = self.make_row_room(pool, shape, row, self.step.counts[row]);
                self.step.counts[row] = granted.unwrap_or_else(|refusal| {
                    pool.count_refusal(self.lane, &refusal);
                    let sequence = Arc::downgrade(&self.rows[row].sequence);
                    self.step.refused.push(RefusedRow { row: row as u32, sequence, refusal });
                    0
                });
            }
        }
    }

    /// Rows that have to be looked at before they can be written.
    fn list_tight_rows(&mut self) {
        let Hot { slots, room, written, trim, .. } = &self.hot;
        self.tight.clear();
        // A byte and then a bit for each row, without a branch: about one row in a page is tight, and nothing could predict
        // which.
        for first in (0..self.rows.len()).step_by(64) {
            let n = (self.rows.len() - first).min(64);
            let counts = &self.step.counts[first..][..n];
            let (slots, room) = (&slots[first..][..n], &room[first..][..n]);
            let (written, trim) = (&written[first..][..n], &trim[first..][..n]);
            let mut tight = [0u8; 64];
            for (row, tight) in tight[..n].iter_mut().enumerate() {
                let looked_at = (slots[row] + counts[row] > room[row]) | (written[row] >= trim[row]);
                *tight = u8::from(looked_at & (counts[row] > 0));
            }
            let mut bits = 0;
            for (nth, &eight) in tight.as_chunks::<8>().0.iter().enumerate() {
                // Each byte of eight, 0 or 1, becomes a bit of the product's top byte.
                bits |= (u64::from_le_bytes(eight).wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * nth);
            }
            while bits != 0 {
                self.tight.push(first as u32 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    /// The common case, many rows at once: a page has just been filled, the next one is needed, and frames are free.
    fn cross_edges(&mut self, pool: &Pool, shape: Shape) {
        let page_tokens = pool.spec.page_tokens();
        if self.tight.len() < 2 || pool.groups.len() > 1 || pool.is_state(GroupId(0)) {
            return;
        }
        let group = GroupId(0);
        let size = pool.classes[pool.groups[0].class.as_usize()].size;
        self.scratch.ids.clear();
        self.scratch.frames.clear();
        let claimed = pool.claim_free(self.lane, size, self.tight.len(), &mut self.scratch);
        let table = self.arrays.group(0).block_table;
        // Taken from the end.
        self.scratch.ids.reverse();
        self.scratch.frames.reverse();
        for &row in &self.tight {
            let row = row as usize;
            let hot = &mut self.hot;
            let slots = hot.slots[row];
            let body = &mut self.rows[row].body;
            let plain = self.step.counts[row] == 1
                && hot.room[row] == slots
                && hot.written[row] < hot.trim[row]
                && slots < shape.tokens
                && body.pays_alone()
                && (slots < body.admitted || !pool.is_frozen(body.tenant));
            if !plain {
                continue;
            }
            let (tenant, promise) = body.purse();
            let Some((page, frame)) = pool.take_claimed(self.lane, tenant, group, promise, &mut self.scratch)
            else {
                break;
            };
            let pages = &mut body.tables[0].pages;
            table[row * shape.pages + pages.len()] = frame.0 as i32;
            hot.base[0][row] = (i64::from(frame.0) - pages.len() as i64) * i64::from(page_tokens);
            hot.room[row] = (slots + page_tokens).min(shape.tokens);
            pages.push(page);
        }
        pool.stats.count(self.lane, Counter::PagesAllocated, (claimed - self.scratch.ids.len()) as u64);
        pool.unclaim(size, &mut self.scratch);
    }

    #[cold]
    #[inline(never)]
    fn make_row_room(&mut self, pool: &Pool, shape: Shape, row: usize, count: u32) -> Result<u32, Refusal> {
        let page_tokens = pool.spec.page_tokens();
        self.sync_out(row);
        let slots = self.hot.slots[row];
        let tenant = self.rows[row].body.tenant;
        let tokens =
            |why, asked, room| Refusal { why, tier: Tier::Device, tenant, level: tenant, asked, room };
        if slots >= shape.tokens {
            return Err(tokens(Why::Row, u64::from(slots) + u64::from(count), u64::from(shape.tokens)));
        }
        let mut count = count.min(shape.tokens - slots);
        if self.hot.written[row] >= self.hot.trim[row] {
            self.trim_row(pool, shape, row, self.hot.written[row]);
        }
        if self.rows[row].body.shared_tail {
            match self.unshare_tail(pool, shape, row) {
                Err(_) if self.catch_up(pool, shape) => self.unshare_tail(pool, shape, row)?,
                unshared => unshared?,
            }
        }
        let first_new = slots.div_ceil(page_tokens);
        loop {
            match self.rows[row].body.grow(pool, self.lane, slots + count, &mut self.scratch) {
                Ok(()) => break,
                Err(_) if self.catch_up(pool, shape) => {}
                Err(refusal) => {
                    // Half the pages, and in the end what the last page still holds.
                    let pages = (slots + count).div_ceil(page_tokens) - first_new;
                    let fewer = (first_new + pages / 2) * page_tokens;
                    if pages == 0 || fewer <= slots {
                        self.settle(pool, shape, row);
                        return Err(refusal);
                    }
                    count = fewer - slots;
                }
            }
        }
        self.show_new(pool, shape, row, first_new as usize);
        self.settle(pool, shape, row);
        Ok(count)
    }

    /// The pages from `first` on into the block tables.
    fn show_new(&mut self, pool: &Pool, shape: Shape, row: usize, first: usize) {
        for (g, table) in self.rows[row].body.tables.iter().enumerate() {
            let first = if pool.is_state(GroupId(g as u8)) { 0 } else { first.max(table.start as usize) };
            let shown = &mut self.arrays.group(g).block_table[row * shape.pages..][..shape.pages];
            for (entry, page) in shown[first..].iter_mut().zip(&table.pages[first.min(table.pages.len())..]) {
                *entry = pool.pages.location(page.id).frame().0 as i32;
            }
        }
    }

    fn trim_row(&mut self, pool: &Pool, shape: Shape, row: usize, next: u32) {
        let body = &mut self.rows[row].body;
        body.trim(pool, self.lane, next, &mut self.scratch);
        for (g, table) in body.tables.iter().enumerate() {
            let start = (table.start as usize).min(shape.pages);
            self.arrays.group(g).block_table[row * shape.pages..][..start].fill(0);
        }
        self.hot.trim[row] = body.next_trim(pool);
    }

    /// The page of the next slot must be this sequence's alone before it is written: take it out of the index, or go on in
    /// a copy.
    fn unshare_tail(&mut self, pool: &Pool, shape: Shape, row: usize) -> Result<(), Refusal> {
        let page_tokens = pool.spec.page_tokens();
        let (tenant, slots) = (self.rows[row].body.tenant, self.rows[row].body.slots);
        // Children first, so that a page that only they continue can lose its key with them.
        for g in self.rows[row].body.groups_up(pool) {
            let body = &mut self.rows[row].body;
            let group = GroupId(g as u8);
            let at = match pool.is_state(group) {
                true => 0,
                false if slots % page_tokens == 0 => continue,
                false => (slots / page_tokens) as usize,
            };
            let Some(&page) = body.tables[g].pages.get(at) else { continue };
            // A snapshot of a fixed state stays findable while there is room for a copy; admission counted the copy of one
            // that was hit, and none of those that are kept on the way.
            let snapshot = pool.is_state(group) && pool.pages.read(page.id).is_indexed();
            // A page of a scope is not written on with what is the tenant's alone.
            let own = pool.is_state(group) || body.is_its_payers(pool, at, page);
            if !snapshot
                && own
                && let Some(private) = pool.make_private(page, group)
            {
                body.tables[g].pages[at] = private;
                self.show_open(pool, shape, row, group, at);
                continue;
            }
            let counted = !snapshot || slots == body.cached;
            let mut none = 0;
            let promise = body.promises.iter_mut().find(|p| counted && p.0 == tenant);
            let promise = promise.map_or(&mut none, |p| &mut p.1);
            let mut copy = Vec::with_capacity(1);
            if let Err(refusal) =
                pool.take(self.lane, tenant, group, 1, promise, &mut copy, &mut self.scratch)
            {
                if snapshot && let Some(private) = pool.make_private(page, group) {
                    body.tables[g].pages[at] = private;
                    self.show_open(pool, shape, row, group, at);
                    continue;
                }
                return Err(refusal);
            }
            let frame = |page: PageRef| pool.pages.location(page.id).frame();
            self.step.copies.push(Copy { group, from: frame(page), to: frame(copy[0]) });
            pool.stats.count(self.lane, Counter::CopiesOnWrite, 1);
            self.scratch.sources.push(page);
            // Who still holds it writes into it no more before it is his alone.
            pool.pages.clear_open(page.id);
            self.arrays.group(g).block_table[row * shape.pages + at] = frame(copy[0]).0 as i32;
            body.tables[g].pages[at] = copy[0];
        }
        self.rows[row].body.shared_tail = false;
        Ok(())
    }

    /// A page that becomes this row's to write to: it may have moved until now, and stays from here on.
    fn show_open(&mut self, pool: &Pool, shape: Shape, row: usize, group: GroupId, at: usize) {
        let page = self.rows[row].body.tables[group.as_usize()].pages[at];
        pool.pages.set_open(page.id);
        let frame = pool.pages.location(page.id).frame();
        self.arrays.group(group.as_usize()).block_table[row * shape.pages + at] = frame.0 as i32;
    }

    /// The arrays of this step; whether each row got one token.
    pub(super) fn write(&mut self, pool: &Pool, shape: Shape) -> bool {
        let page_tokens = pool.spec.page_tokens();
        let rows = self.rows.len();
        let counts = &self.step.counts[..rows];
        let slots = &mut self.hot.slots[..rows];
        let one_each = counts.iter().fold(true, |all, &count| all & (count == 1));
        let total = if one_each { rows } else { counts.iter().map(|&c| c as usize).sum() };
        for g in 0..self.hot.base.len() {
            if pool.is_state(GroupId(g as u8)) {
                continue;
            }
            let base = &self.hot.base[g][..rows];
            let mapping = self.arrays.group(g).slot_mapping;
            if one_each {
                for ((slot, base), position) in mapping.iter_mut().zip(base).zip(&*slots) {
                    *slot = base + i64::from(*position);
                }
            } else {
                let mut rest = &mut *mapping;
                for (row, &count) in counts.iter().enumerate() {
                    let (mine, others) = rest.split_at_mut(count as usize);
                    rest = others;
                    let first = slots[row];
                    let pages = &self.rows[row].body.tables[g].pages;
                    let mut position = first;
                    for run in chunks_at_edges(mine, first, page_tokens) {
                        let page = pages[(position / page_tokens) as usize];
                        let frame = pool.pages.location(page.id).frame();
                        let start =
                            i64::from(frame.0) * i64::from(page_tokens) + i64::from(position % page_tokens);
                        for (slot, value) in run.iter_mut().zip(start..) {
                            *slot = value;
                        }
                        position += run.len() as u32;
                    }
                }
            }
            if self.shown > total {
                mapping[total..self.shown].fill(-1);
            }
        }
        let arrays = self.arrays.rows();
        arrays.query_start_loc[0] = 0;
        if one_each {
            let starts = &mut arrays.query_start_loc[1..=rows];
            let lens = &mut arrays.seq_lens[..rows];
            let positions = &mut arrays.positions[..rows];
            // One array at a time: each loop becomes a few vector instructions.
            for (position, &slot) in positions.iter_mut().zip(&*slots) {
                *position = slot as i32;
            }
            for slot in slots.iter_mut() {
                *slot += 1;
            }
            for (len, &slot) in lens.iter_mut().zip(&*slots) {
                *len = slot as i32;
            }
            for (start, row) in starts.iter_mut().zip(1..) {
                *start = row;
            }
        } else {
            let mut at = 0;
            for (row, (slot, &count)) in slots.iter_mut().zip(counts).enumerate() {
                let end = at + count as usize;
                for (position, value) in arrays.positions[at..end].iter_mut().zip(*slot..) {
                    *position = value as i32;
                }
                *slot += count;
                at = end;
                arrays.seq_lens[row] = *slot as i32;
                arrays.query_start_loc[row + 1] = at as i32;
            }
        }
        debug_assert!(total <= shape.step as usize);
        self.shown = total;
        self.step.num_tokens = total as u32;
        self.step.num_rows = rows as u32;
        one_each
    }

    pub(super) fn remember(&mut self, one_each: bool) {
        let mut record = self.spare.pop().unwrap_or_default();
        record.rows = self.rows.len();
        record.at.clear();
        record.counts.clear();
        if !one_each {
            record.counts.extend_from_slice(&self.step.counts);
        }
        record.sources.clear();
        record.sources.append(&mut self.scratch.sources);
        self.outstanding.push_back(record);
    }

    pub(super) fn commit(&mut self, pool: &Pool, shape: Shape, sampled: Option<&[i32]>) {
        let Some(mut record) = self.outstanding.pop_front() else { return };
        let mut written = 0;
        for entry in 0..record.rows {
            let row = match record.at.get(entry) {
                None => entry,
                Some(&GONE) => continue,
                Some(&row) => row as usize,
            };
            let count = record.counts.get(entry).map_or(1, |&c| c);
            if count == 0 {
                continue;
            }
            let hot = &mut self.hot;
            let now = (hot.written[row] + count).min(hot.slots[row]);
            written += u64::from(now - hot.written[row]);
            hot.written[row] = now;
            if now >= hot.known[row] {
                self.learn(row, now, sampled.map_or(-1, |s| s[entry]));
            }
            let hot = &mut self.hot;
            if now >= hot.publish[row] && hot.known[row] >= hot.publish[row] {
                let body = &mut self.rows[row].body;
                body.slots = hot.slots[row];
                body.written = now;
                body.count_hits(pool, self.lane);
                body.publish(pool, self.lane, &mut self.scratch);
                hot.publish[row] = body.next_publish(pool.spec.page_tokens());
            }
            // A little late, so that a draft that is rejected now can still be taken back; the next step does the rest.
            if now >= self.hot.trim[row].saturating_add(LONGEST_DRAFT) {
                self.sync_out(row);
                self.trim_row(pool, shape, row, now - LONGEST_DRAFT);
            }
        }
        if !record.sources.is_empty() {
            pool.let_go(self.lane, &record.sources, &mut self.scratch);
            record.sources.clear();
        }
        pool.stats.count(self.lane, Counter::Steps, 1);
        pool.stats.count(self.lane, Counter::TokensWritten, written);
        self.spare.push(record);
    }

    /// The row's prompt is written: the model may have sampled what comes next.
    #[inline]
    fn learn(&mut self, row: usize, written: u32, sampled: i32) {
        let body = &mut self.rows[row].body;
        if written > self.hot.known[row] {
            body.lose_sight(written);
            self.hot.known[row] = written;
            self.hot.publish[row] = u32::MAX;
        }
        if let Ok(token) = u32::try_from(sampled) {
            body.tokens.push(token);
            self.hot.known[row] += 1;
        }
    }
}

/// Cut a run of slots that begins at position `first` where pages end.
fn chunks_at_edges(slots: &mut [i64], first: u32, page_tokens: u32) -> impl Iterator<Item = &mut [i64]> {
    let head = ((page_tokens - first % page_tokens) as usize).min(slots.len());
    let (head, rest) = slots.split_at_mut(head);
    std::iter::once(head).filter(|h| !h.is_empty()).chain(rest.chunks_mut(page_tokens as usize))
}

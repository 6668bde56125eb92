//! A device made of numbers: every slot remembers which content was written to it, and by which write.
//!
//! Both tiers are in it, one behind the other.
//!
//! A content is the hash of a context (adapter, keys) and all tokens up to a position, which is what the KV of that
//! position depends on. So a page that is shared, moved or copied wrongly shows a content that nobody expects there.

use std::{
    collections::{BTreeMap, HashSet, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
};

use super::build::PAGE;
use crate::{
    spec::{GroupKind, Spec},
    word::{FrameId, GroupId, Tier},
};

/// The identity of all tokens up to one position.
pub(super) type Content = u64;

/// What a context is before its first token.
pub(super) fn root(context: &impl Hash) -> Content {
    let mut hasher = DefaultHasher::new();
    context.hash(&mut hasher);
    hasher.finish()
}

/// One token more.
pub(super) fn next(before: Content, token: u32) -> Content {
    root(&(before, token))
}

/// What all tokens before are to one that attends to less exact ones.
pub(super) fn lossy(before: Content) -> Content {
    root(&("lossy", before))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cell {
    content: Content,
    write: u64,
}

#[derive(Clone, Debug)]
struct Frame {
    bytes: u64,
    group: GroupId,
    cells: Vec<Option<Cell>>,
}

#[derive(Debug)]
pub(super) struct Device {
    /// Of each group: in its own class, and compressed.
    page_bytes: Vec<[u64; 2]>,
    states: Vec<bool>,
    frames: BTreeMap<u64, Frame>,
    writes: u64,
    /// Writes of steps that were committed.
    done: HashSet<u64>,
}

impl Device {
    pub(super) fn new(spec: &Spec) -> Self {
        Self {
            page_bytes: (0..spec.groups().len())
                .map(|g| GroupId(g as u8))
                .map(|g| {
                    let small = spec.small_class_of(g).map_or(0, |c| spec.classes()[c.as_usize()].page_bytes);
                    [spec.page_bytes(g), small]
                })
                .collect(),
            states: spec.groups().iter().map(|g| g.kind == GroupKind::State).collect(),
            frames: BTreeMap::new(),
            writes: 0,
            done: HashSet::new(),
        }
    }

    /// Where a frame begins, and its bytes; it is named as block tables show it.
    fn place(&self, tier: Tier, group: GroupId, frame: FrameId) -> (u64, u64) {
        let [bytes, small] = self.page_bytes[group.as_usize()];
        let (frame, bytes) = if (frame.0 as i32) < 0 { (!frame.0, small) } else { (frame.0, bytes) };
        assert_ne!(frame, 0, "frame 0 is never given out");
        (((tier as u64) << 50) + u64::from(frame) * bytes, bytes)
    }

    /// What lies there, if it is of that group and class.
    fn find(&self, tier: Tier, group: GroupId, frame: FrameId) -> Option<&Frame> {
        let (start, bytes) = self.place(tier, group, frame);
        self.frames.get(&start).filter(|f| f.group == group && f.bytes == bytes)
    }

    /// The frame, for writing: what other groups left in these bytes is gone.
    fn open(&mut self, tier: Tier, group: GroupId, frame: FrameId) -> &mut Frame {
        let (start, bytes) = self.place(tier, group, frame);
        let over: Vec<u64> = self
            .frames
            .range(..start + bytes)
            .filter(|(at, f)| {
                **at + f.bytes > start && (**at != start || f.group != group || f.bytes != bytes)
            })
            .map(|(&at, _)| at)
            .collect();
        over.into_iter().for_each(|at| drop(self.frames.remove(&at)));
        let cells = if self.states[group.as_usize()] { 1 } else { PAGE as usize };
        self.frames.entry(start).or_insert_with(|| Frame { bytes, group, cells: vec![None; cells] })
    }

    /// A number for the writes of one row in one step.
    pub(super) fn new_write(&mut self) -> u64 {
        self.writes += 1;
        self.writes
    }

    /// The step of this write was committed.
    pub(super) fn finish(&mut self, write: u64) {
        self.done.insert(write);
    }

    pub(super) fn write(&mut self, group: GroupId, frame: FrameId, at: u32, content: Content, write: u64) {
        self.open(Tier::Device, group, frame).cells[at as usize] = Some(Cell { content, write });
    }

    pub(super) fn copy(&mut self, tier: Tier, group: GroupId, from: FrameId, to: FrameId) {
        self.carry(group, (tier, from), (tier, to));
    }

    /// Copy a page from one tier to another.
    pub(super) fn carry(&mut self, group: GroupId, from: (Tier, FrameId), to: (Tier, FrameId)) {
        let cells = self.find(from.0, group, from.1).map(|f| f.cells.clone());
        let to = self.open(to.0, group, to.1);
        match cells {
            Some(cells) => to.cells = cells,
            None => to.cells.fill(None),
        }
    }

    /// Whether two frames say the same.
    pub(super) fn same(&self, group: GroupId, a: FrameId, b: FrameId) -> bool {
        let of = |frame| self.find(Tier::Device, group, frame).map(|f| &f.cells);
        of(a) == of(b)
    }

    /// What stands in a slot of the device, and whether its step was committed.
    pub(super) fn read(&self, group: GroupId, frame: FrameId, at: u32) -> Option<(Content, bool)> {
        self.read_in(Tier::Device, group, frame, at)
    }

    pub(super) fn read_in(
        &self,
        tier: Tier,
        group: GroupId,
        frame: FrameId,
        at: u32,
    ) -> Option<(Content, bool)> {
        let frame = self.find(tier, group, frame)?;
        let cell = frame.cells[at as usize]?;
        Some((cell.content, self.done.contains(&cell.write)))
    }
}

//! A pool, and what the model knows of it: each sequence's tokens and counts, the steps that are not committed, and what the
//! device holds. What is done with it is in actor.rs, away.rs and outside.rs, what must be true in check.rs.

use std::{collections::BTreeMap, num::NonZeroU32, sync::Arc};

use super::{
    away::Carried,
    build,
    device::{Content, Device},
};
use crate::{
    batch::Batch,
    face::Pages,
    ledger::{Policy, ROOT},
    pins::PinId,
    pool::{Options, Pool},
    sequence::{Sequence, State},
    spec::{GroupKind, Spec},
    word::{GroupId, PageRef, TenantId, Units},
};

/// The rows and the longest sequence of a batch.
pub(super) const ROWS: usize = 4;
pub(super) const MOST: u32 = 39;
pub(super) const BATCHES: usize = 2;

/// A sequence as it should be.
pub(super) struct Model {
    pub(super) handle: Arc<Sequence>,
    pub(super) tenant: TenantId,
    /// Who pays for, or shares, the page at each place of the prompt.
    pub(super) shares: Vec<(TenantId, u32)>,
    pub(super) root: Content,
    /// What the pool knows: unknown tokens are 0.
    pub(super) ids: Vec<u32>,
    /// What the device has written for each slot, and the identity of everything up to it.
    pub(super) contents: Vec<Content>,
    pub(super) written: u32,
    pub(super) cached: u32,
    pub(super) batch: Option<usize>,
    /// Running, suspended, or in the hands of a plan.
    pub(super) state: State,
    /// Admitted for so many tokens, and nothing has happened since that takes more pages than that.
    pub(super) admitted: u32,
}

impl Model {
    pub(super) fn known(&self) -> u32 {
        self.ids.len() as u32
    }
    pub(super) fn slots(&self) -> u32 {
        self.contents.len() as u32
    }
    pub(super) fn content_before(&self, position: usize) -> Content {
        position.checked_sub(1).map_or(self.root, |p| self.contents[p])
    }
    pub(super) fn cut(&mut self, n: u32) {
        self.contents.truncate(n as usize);
    }
}

/// What a step that is not committed did for one row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) sequence: u64,
    pub(super) count: u32,
    pub(super) sampled: i32,
    /// All of it was truncated away: what was sampled follows tokens that are gone.
    pub(super) cut: bool,
    pub(super) write: u64,
}

#[derive(Default)]
pub(super) struct Record {
    pub(super) entries: Vec<Entry>,
    pub(super) sources: Vec<PageRef>,
}

pub(super) struct Rows {
    pub(super) batch: Batch,
    pub(super) rows: Vec<u64>,
    pub(super) outstanding: Vec<Record>,
}

/// A page that a caller of the lower face holds.
#[derive(Clone, Copy)]
pub(super) struct Owned {
    pub(super) page: PageRef,
    pub(super) tenant: TenantId,
    pub(super) group: GroupId,
}

pub(super) struct World {
    pub(super) pool: Arc<Pool>,
    pub(super) spec: Spec,
    pub(super) tenants: Vec<TenantId>,
    pub(super) device: Device,
    pub(super) sequences: BTreeMap<u64, Model>,
    pub(super) batches: Vec<Rows>,
    pub(super) face: Pages,
    pub(super) owned: Vec<Owned>,
    /// References that were given up: stale, or of a page that lives on.
    pub(super) old: Vec<PageRef>,
    /// Pages found without a reference, and what they hold.
    pub(super) found: Vec<(PageRef, GroupId, Content)>,
    pub(super) pins: Vec<(PinId, Option<u64>)>,
    /// Plans that are open.
    pub(super) plans: Vec<Carried>,
    pub(super) born: u64,
    pub(super) unknown: u32,
    pub(super) resets: u64,
    pub(super) single_size: bool,
    /// Charged units of each subtree, and claims, before the operation; the former also of the host tier.
    pub(super) before: Vec<(u32, u32)>,
    pub(super) before_host: Vec<u32>,
    pub(super) policy_changed: bool,
}

impl World {
    pub(super) fn new(spec: Spec, pages: u64, host: u64, force_collisions: bool) -> Self {
        let host_bytes = if host == 0 { 0 } else { build::options(&spec, host).device_bytes };
        let options = Options { host_bytes, force_collisions, ..build::options(&spec, pages) };
        let pool = Arc::new(Pool::new(spec.clone(), &options).expect("a pool"));
        let org = build::plain_tenant(&pool, "org");
        let publish = Policy {
            publish: vec![(org, None)],
            pin_budget: Units(1000),
            compress: true,
            cut: NonZeroU32::new(6),
            ..Policy::default()
        };
        let a = build::tenant(&pool, org, "a", &publish);
        let b = build::tenant(&pool, org, "b", &Policy { compress: true, ..Policy::default() });
        let forgets = Policy { cut: NonZeroU32::new(1), ..Policy::default() };
        let c = build::tenant(&pool, ROOT, "c", &forgets);
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
            plans: Vec::new(),
            born: 0,
            unknown: 1 << 20,
            resets: 0,
            single_size: spec.sizes().len() == 1,
            before: vec![(0, 0); 5],
            before_host: vec![0; 5],
            policy_changed: false,
            spec,
            pool,
        }
    }

    pub(super) fn groups(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.spec.groups().len()).map(|g| GroupId(g as u8))
    }

    pub(super) fn is_state(&self, group: GroupId) -> bool {
        self.spec.groups()[group.as_usize()].kind == GroupKind::State
    }

    /// What the ledger grants there is a frame for.
    pub(super) fn every_frame_counts(&self) -> bool {
        self.single_size && self.pool.quiescence.is_empty()
    }

    pub(super) fn all_grow(&self) -> bool {
        self.spec.groups().iter().all(|g| g.kind.grows())
    }

    pub(super) fn has_state(&self) -> bool {
        self.groups().any(|g| self.is_state(g))
    }

    pub(super) fn rows(&self, batch: usize) -> usize {
        self.batches[batch % BATCHES].rows.len()
    }

    /// The sequence that this number picks.
    pub(super) fn pick(&self, n: usize) -> Option<u64> {
        self.sequences.keys().copied().nth(n % self.sequences.len().max(1))
    }
}

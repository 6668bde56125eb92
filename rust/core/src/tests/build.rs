//! Specs and pools of a few pages.

use std::sync::Arc;

use crate::{
    arrays::{Owned, Shape},
    batch::Batch,
    hash::Secret,
    ledger::{Policy, ROOT},
    plan::{Draft, Kind, Move},
    pool::{Options, Pool},
    rebalance::Lease,
    sequence::{Open, Sequence},
    spec::{Dtype, GroupKind, GroupSpec, Layout, Spec},
    word::{FrameId, GroupId, Lane, PageRef, TenantId, Tier, Units, page::Location},
};

/// Tokens of a page.
pub(crate) const PAGE: u32 = 4;

/// A group whose page has `layers * 256` bytes.
fn group(name: String, kind: GroupKind, layers: u32) -> GroupSpec {
    let state = kind == GroupKind::State;
    let latent = kind == GroupKind::Latent;
    GroupSpec {
        name,
        kind,
        layers,
        kv_heads: u32::from(!state),
        k_dim: if state {
            0
        } else if latent {
            32
        } else {
            16
        },
        v_dim: if state || latent { 0 } else { 16 },
        dtype: Dtype::F16,
        state_bytes: if state { u64::from(layers) * 256 } else { 0 },
    }
}

/// A spec of these groups, `(kind, layers)` each.
pub(crate) fn spec(groups: &[(GroupKind, u32)]) -> Spec {
    let groups = groups.iter().enumerate().map(|(n, &(kind, layers))| group(format!("g{n}"), kind, layers));
    Spec::new(PAGE, groups.collect(), Layout::PageMajor, None).expect("a sound spec")
}

/// The same with a second class of half the bytes for each.
pub(crate) fn small_spec(groups: &[(GroupKind, u32)]) -> Spec {
    let groups = groups.iter().enumerate().map(|(n, &(kind, layers))| group(format!("g{n}"), kind, layers));
    Spec::new(PAGE, groups.collect(), Layout::PageMajor, Some(Dtype::Fp8)).expect("a sound spec")
}

/// The specs that the tests go through.
pub(crate) fn specs() -> Vec<(&'static str, Spec)> {
    use GroupKind::*;
    vec![
        ("full", spec(&[(Full, 1)])),
        ("latent and window", spec(&[(Latent, 1), (Window { tokens: 6 }, 1)])),
        ("full and smaller window", spec(&[(Full, 2), (Window { tokens: 6 }, 1)])),
        ("window", spec(&[(Window { tokens: 6 }, 1)])),
        ("full and chunks", spec(&[(Full, 1), (Chunked { tokens: 8 }, 1)])),
        ("chunks across pages", spec(&[(Chunked { tokens: 6 }, 1)])),
        ("full and state", spec(&[(Full, 1), (State, 1)])),
        ("state", spec(&[(State, 1)])),
        ("full, compressed", small_spec(&[(Full, 2)])),
        (
            "latent, window, state, compressed",
            small_spec(&[(Latent, 4), (Window { tokens: 6 }, 2), (State, 1)]),
        ),
        ("window, full, larger state", spec(&[(Window { tokens: 3 }, 1), (Full, 1), (State, 2)])),
    ]
}

pub(crate) fn options(spec: &Spec, pages: u64) -> Options {
    let largest = spec.sizes().iter().copied().max().unwrap_or(1);
    // Room for the reserved bytes, and whole extents where there are several sizes.
    Options {
        device_bytes: (largest * (pages + 1)).max(4 * largest).next_multiple_of(spec.granule()),
        host_bytes: 0,
        secret: Some(Secret::from_bytes([7; 16])),
        max_tenants: 8,
        compare_tokens: true,
        manual_clock: true,
        events: 0,
        force_collisions: false,
    }
}

/// A pool of about `pages` of the largest pages.
pub(crate) fn pool(spec: Spec, pages: u64) -> Arc<Pool> {
    let options = options(&spec, pages);
    Arc::new(Pool::new(spec, &options).expect("a pool"))
}

/// The same with a host tier of about `host` of the largest pages.
pub(crate) fn host_pool(spec: Spec, pages: u64, host: u64) -> Arc<Pool> {
    let host_bytes = if host == 0 { 0 } else { options(&spec, host).device_bytes };
    let options = Options { host_bytes, ..options(&spec, pages) };
    Arc::new(Pool::new(spec, &options).expect("a pool"))
}

pub(crate) fn tenant(pool: &Pool, parent: TenantId, name: &str, policy: &Policy) -> TenantId {
    pool.ledger().create(parent, name, policy).expect("a tenant")
}

pub(crate) fn plain_tenant(pool: &Pool, name: &str) -> TenantId {
    tenant(pool, ROOT, name, &Policy::default())
}

/// A batch with arrays of its own.
pub(crate) fn batch(pool: &Arc<Pool>, rows: usize, tokens: u32) -> Batch {
    let pages = tokens.div_ceil(pool.spec().page_tokens()) as usize;
    let shape = Shape { rows, tokens, pages, step: tokens + rows as u32 };
    Batch::new(pool, shape, Box::new(Owned::new(shape, pool.spec().groups().len()))).expect("a batch")
}

/// Move a page to another frame of its size, by a plan of its own: `copy` has done the copy when it returns. Frames are named
/// as tables show them. `None`: it can't be moved now.
pub(crate) fn relocate(pool: &Pool, page: PageRef, copy: impl FnOnce(FrameId, FrameId)) -> Option<FrameId> {
    let lane = Lane(3);
    let Lease::Got(m) = pool.lease_to_move(page.id) else { return None };
    let (tier, size) = (pool.tier_of(m.page.id), pool.classes[m.from.class().as_usize()].size);
    let mut frame = Vec::new();
    if m.page != page || pool.arena(tier).claim(size, lane, 1, &mut frame) == 0 {
        pool.unlease(lane, m.page);
        return None;
    }
    let mut draft = Draft::new(Kind::Rebalance, ROOT, 0);
    let to = Location::new(tier, m.from.class(), frame[0]);
    draft.plan.moves.push(Move { to, ..m });
    let plan = pool.open_draft(lane, draft, 1000, false);
    let [from, to] = [m.from, to].map(|at| FrameId(pool.entry_at(at) as u32));
    copy(from, to);
    (pool.commit_plan(&plan).expect("open").moved == 1).then_some(to)
}

/// A sequence in a row, with so many tokens written and one more known.
pub(crate) fn running(
    pool: &Arc<Pool>,
    batch: &Batch,
    tenant: TenantId,
    first: u32,
    n: u32,
) -> Arc<Sequence> {
    let open = Open { tokens: (first..first + n).collect(), ..Open::default() };
    let sequence = pool.open(tenant, open).expect("nothing is admitted");
    batch.add(&sequence).expect("a row");
    run(batch, 1);
    sequence
}

/// A step in which every row gets what it needs, and its commit.
#[track_caller]
pub(crate) fn run(batch: &Batch, sampled: i32) {
    let refused = batch.step(None, None, |step| step.refused.len()).expect("nobody else uses it");
    assert_eq!(refused, 0);
    batch.commit(Some(&vec![sampled; batch.rows().expect("free")])).expect("a step waits");
}

/// Its row of the first group's block table.
pub(crate) fn table(sequence: &Sequence) -> Vec<i32> {
    sequence.pages(GroupId(0)).expect("free").1.iter().map(|(_, frame)| frame.0 as i32).collect()
}

pub(crate) fn held(pool: &Pool, tier: Tier, tenant: TenantId) -> u64 {
    pool.bytes(pool.ledger().usage(tier, tenant).held.0)
}

/// The books stand still and balance.
#[track_caller]
pub(crate) fn green(pool: &Pool) {
    let report = pool.audit();
    assert!(report.exact && report.findings.is_empty(), "{report:#?}");
}

/// Nothing is held, pinned or promised, and after a reset every byte is free.
#[track_caller]
pub(crate) fn empty(pool: &Pool) {
    green(pool);
    for balance in pool.audit().balance {
        assert_eq!((balance.held, balance.pinned), (0, 0), "{balance:?}");
    }
    for tenant in pool.ledger().ids() {
        assert_eq!(pool.ledger().usage(Tier::Device, tenant).promised, Units(0));
    }
    pool.reset_prefix_cache().expect("nothing is held");
    pool.quiescence.drain_quiet(&pool.arenas);
    green(pool);
    for tier in Tier::ALL {
        let balance = pool.audit().balance[tier.as_usize()];
        assert_eq!((balance.cached, balance.free), (0, balance.capacity), "{tier:?}");
        pool.ledger().drain(tier);
        assert_eq!(pool.ledger().usage(tier, ROOT).subtree, Units(0), "{tier:?}");
    }
}

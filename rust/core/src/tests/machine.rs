//! Random operations on a pool against the model in world.rs.

use proptest::{collection::vec, prelude::*};

use super::{
    build,
    world::{MOST, ROWS, World},
};

/// One operation: which, and what its arguments are drawn from.
#[derive(Clone, Copy)]
struct Op {
    what: What,
    a: u8,
    b: u8,
    c: u8,
    d: u8,
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, a, b, c, d } = self;
        write!(f, "{what:?} {a} {b} {c} {d}")
    }
}

#[derive(Clone, Copy, Debug)]
enum What {
    Open,
    OpenShared,
    OpenAdmitted,
    Add,
    Remove,
    Step,
    StepSome,
    StepBudget,
    Commit,
    Extend,
    Truncate,
    Fork,
    Close,
    DropBatch,
    KeepState,
    Pin,
    Unpin,
    Advance,
    Relocate,
    Suspend,
    Resume,
    Preempt,
    Compress,
    Cut,
    Rebalance,
    Reclaim,
    TopUp,
    CommitPlan,
    AbortPlan,
    Policy,
    Reset,
    Allocate,
    Publish,
    Lookup,
    Find,
    Share,
    Release,
    ReleaseStale,
}

fn op() -> impl Strategy<Value = Op> {
    use What::*;
    let often = [
        (12, Open),
        (4, OpenShared),
        (5, OpenAdmitted),
        (14, Add),
        (3, Remove),
        (22, Step),
        (4, StepSome),
        (4, StepBudget),
        (24, Commit),
        (4, Extend),
        (6, Truncate),
        (4, Fork),
        (9, Close),
        (1, DropBatch),
        (3, KeepState),
        (2, Pin),
        (2, Unpin),
        (1, Advance),
        (2, Relocate),
        (7, Suspend),
        (7, Resume),
        (4, Preempt),
        (7, Compress),
        (8, Cut),
        (4, Rebalance),
        (3, Reclaim),
        (2, TopUp),
        (12, CommitPlan),
        (3, AbortPlan),
        (2, Policy),
        (1, Reset),
        (4, Allocate),
        (3, Publish),
        (2, Lookup),
        (2, Find),
        (2, Share),
        (3, Release),
        (1, ReleaseStale),
    ];
    let what =
        proptest::strategy::Union::new_weighted(often.map(|(w, what)| (w, Just(what).boxed())).to_vec());
    (what, any::<[u8; 4]>()).prop_map(|(what, [a, b, c, d])| Op { what, a, b, c, d })
}

/// A prompt: one of three texts, or a text that begins as another one does.
fn prompt(a: u8, b: u8, c: u8) -> Vec<u32> {
    let length = 1 + u32::from(a) % (MOST - 10);
    let (text, other) = (u32::from(b % 3), u32::from(b / 3 % 3));
    let turn = u32::from(c) % MOST;
    let token = |i: u32| if i < turn { 10 * text + i % 7 } else { 10 * other + i % 5 };
    (0..length).map(token).collect()
}

fn run(world: &mut World, Op { what, a, b, c, d }: Op) {
    let [x, y, z, w] = [a, b, c, d].map(usize::from);
    let picked = world.pick(x);
    match (what, picked) {
        (What::Open, _) if world.sequences.len() < 10 => {
            let adapter = (d % 7 == 0).then_some(d);
            world.open(y / 9, prompt(a, b, c), None, adapter, 0, false, d);
        }
        (What::OpenShared, _) if world.sequences.len() < 10 => {
            world.open(y / 9, prompt(a, b, c), Some(u32::from(d) % MOST), None, 0, d % 3 == 0, 0);
        }
        (What::OpenAdmitted, _) if world.sequences.len() < 10 => {
            world.open(y / 9, prompt(a, b, c), None, None, u32::from(d % 10), true, 0);
        }
        (What::Add, Some(id)) => world.add(id, y),
        (What::Remove, Some(id)) => world.remove(id),
        (What::Step, _) => world.step(x, None, None, b),
        (What::StepSome, _) => {
            let counts = [b, c, d, b ^ c].map(|n| i32::from(n % 7)).into_iter().cycle();
            let counts = counts.take(world.rows(x)).collect();
            world.step(x, None, Some(counts), d);
        }
        (What::StepBudget, _) => world.step(x, Some(u32::from(b) % (2 * ROWS as u32)), None, d),
        (What::Commit, _) => world.commit(x),
        (What::Extend, Some(id)) => {
            let tokens: Vec<_> = [c, d, c ^ d].iter().map(|t| u32::from(t % 3)).take(y % 4).collect();
            world.extend(id, &tokens);
        }
        (What::Truncate, Some(id)) => world.truncate(id, u32::from(b) % MOST),
        (What::Fork, Some(id)) if world.sequences.len() < 10 => world.fork(id),
        (What::Close, Some(id)) => world.close(id, b % 3 == 0),
        (What::DropBatch, _) => world.drop_batch(x),
        (What::KeepState, Some(id)) => world.keep_state(id),
        (What::Pin, Some(id)) if world.pins.len() < 6 => {
            world.pin(id, u32::from(b) % MOST, z, (d % 2 == 0).then_some(1 + u64::from(d) * 50));
        }
        (What::Unpin, _) => world.unpin(x),
        (What::Advance, _) => world.advance(u64::from(a) * 20),
        (What::Relocate, Some(id)) => world.relocate(id, y, z),
        (What::Suspend, Some(id)) => world.suspend(id, y, z % 5 > 0),
        (What::Resume, _) => world.resume(x),
        (What::Preempt, _) => world.preempt(x, u64::from(b) % 3000, z),
        (What::Compress, _) => world.compress(x, u64::from(b) * 64, z),
        (What::Cut, _) => world.cut(x, u64::from(b) * 64, z),
        (What::Rebalance, _) => world.rebalance(x, u64::from(b) * 64, z % 20, d % 5 == 0),
        (What::Reclaim, _) => world.reclaim(x, u64::from(b) * 20, z % 4 == 0, d % 5 == 0),
        (What::TopUp, _) => world.top_up(x, u64::from(b) * 20, z % 20, d % 5 == 0),
        (What::CommitPlan, _) => world.commit_plan(x, if y % 2 == 0 { usize::MAX } else { z % 5 }),
        (What::AbortPlan, _) => world.abort(x),
        (What::Policy, _) => {
            let limit = (b % 2 == 0).then_some(u32::from(b) % 24);
            let host = (d / 16 % 2 == 0).then_some(u32::from(d) / 32 * 2);
            world.set_policy(x, u32::from(c) % 9, [limit, host], 1 + u32::from(d % 4), d);
        }
        (What::Reset, _) => world.reset(),
        (What::Allocate, _) => world.allocate(x, y, z % 9),
        (What::Publish, _) => world.publish(x, u64::from(b % 8)),
        (What::Lookup, _) => world.lookup(x, y, &[u64::from(c % 8), u64::from(d % 8)]),
        (What::Find, _) => world.find(x, y, &[u64::from(c % 8), u64::from(d % 8)]),
        (What::Share, _) => world.share(x),
        (What::Release, _) => world.release(x, y % 2 == 0),
        (What::ReleaseStale, _) => world.release_stale(x),
        _ => _ = w,
    }
}

fn live(spec: usize, pages: u64, host: u64, collide: bool, ops: &[Op]) {
    let specs = build::specs();
    let (_, spec) = &specs[spec % specs.len()];
    let mut world = World::new(spec.clone(), pages, host, collide);
    for &op in ops {
        world.prepare();
        run(&mut world, op);
        world.check();
    }
    world.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    /// See the head of this file. `PROPTEST_CASES=100000` for a soak.
    #[test]
    fn the_books_hold(
        spec in 0..11usize,
        pages in 6..40u64,
        host in prop_oneof![1 => Just(0), 4 => 2..24u64],
        collide in prop::bool::weighted(0.1),
        ops in vec(op(), 1..150),
    ) {
        live(spec, pages, host, collide, &ops);
    }
}

//! Decode steps of one batch while another thread reclaims, rebalances and tops up without pause.
//!
//! `cargo bench -p kvalloc-core --bench threads_reclaim`
//!
//! 256 rows of 512 to 2,048 tokens in a pool with a second, smaller page class, so that there are extents to empty. First the
//! batch alone; then beside a thread in whose scratch tenant prompts come and go between the rows' pages, and which evicts,
//! moves what lives in the emptiest extents, and moves a reserve up and down. Prints the time of a step, and of a step with
//! its commit, and what the other thread did meanwhile. Bytes are not copied: this is the books' share. Steps during which the
//! system gave the core to another process are left out (Linux): they tell of that process.

#![allow(clippy::print_stdout, reason = "a bench prints its table")]
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvalloc_core::{
    arrays::{Owned, Shape},
    batch::Batch,
    hash::Secret,
    ledger::{Policy, ROOT},
    pool::{Options, Pool},
    reclaim::Live,
    sequence::{Open, Sequence},
    spec::{Dtype, GroupKind, GroupSpec, Layout, Spec},
    stats::Counter,
    word::{ClassId, TenantId},
};

const PAGE: u32 = 16;
const ROWS: usize = 256;
const LONGEST: u32 = 2048;
const START: u32 = 512;
const TTL: u64 = 60_000;

fn pool() -> Arc<Pool> {
    let group = GroupSpec {
        name: "full".into(),
        kind: GroupKind::Full,
        layers: 28,
        kv_heads: 4,
        k_dim: 128,
        v_dim: 128,
        dtype: Dtype::F16,
        state_bytes: 0,
    };
    let spec = Spec::new(PAGE, vec![group], Layout::PageMajor, Some(Dtype::Fp8)).expect("a plain model");
    let largest = spec.sizes().iter().max().copied().unwrap_or(1);
    let pages = ROWS as u64 * u64::from(LONGEST / PAGE + 1) * 5 / 4;
    let options = Options {
        device_bytes: largest * pages,
        host_bytes: 0,
        secret: Some(Secret::from_bytes([1; 16])),
        max_tenants: 64,
        compare_tokens: true,
        manual_clock: false,
        events: 0,
        force_collisions: false,
    };
    Arc::new(Pool::new(spec, &options).expect("fits"))
}

fn batch(pool: &Arc<Pool>, rows: usize) -> Batch {
    let shape = Shape { rows, tokens: LONGEST, pages: (LONGEST / PAGE) as usize, step: 1 << 18 };
    Batch::new(pool, shape, Box::new(Owned::new(shape, 1))).expect("a batch")
}

fn tenant(pool: &Pool, name: &str) -> TenantId {
    pool.ledger().create(ROOT, name, &Policy::default()).expect("a tenant")
}

struct Rows {
    pool: Arc<Pool>,
    batch: Batch,
    tenant: TenantId,
    sequences: Vec<Arc<Sequence>>,
    sampled: Vec<i32>,
    round: u32,
}

impl Rows {
    fn restart(&mut self) {
        for sequence in self.sequences.drain(..) {
            self.batch.remove(&sequence).expect("a row");
        }
        self.round += 1;
        for row in 0..ROWS as u32 {
            let start = START + row % PAGE;
            let tokens = (0..start).map(|t| (self.round * 1000 + row) * 3001 + t).collect();
            let open = Open { tokens, max_new_tokens: LONGEST - start, ..Open::default() };
            let sequence = self.pool.open(self.tenant, open).expect("opens");
            self.batch.add(&sequence).expect("a row");
            self.sequences.push(sequence);
        }
        self.batch.step(None, None, |step| assert!(step.refused.is_empty())).expect("a step");
        self.batch.commit(Some(&self.sampled)).expect("a commit");
    }

    /// Times of a step, and of a step with its commit, in nanoseconds, sorted.
    fn run(&mut self, time: Duration) -> [Vec<u64>; 2] {
        let mut times = [Vec::with_capacity(1 << 20), Vec::with_capacity(1 << 20)];
        let mut busy = Duration::ZERO;
        while busy < time {
            self.restart();
            let mut before = taken_away();
            for _ in 0..LONGEST - START - PAGE - 8 {
                let start = Instant::now();
                self.batch
                    .step(None, None, |step| assert!(step.refused.is_empty(), "{step:?}"))
                    .expect("a step");
                let step = start.elapsed();
                self.batch.commit(Some(&self.sampled)).expect("a commit");
                let both = start.elapsed();
                busy += both;
                let now = taken_away();
                if std::mem::replace(&mut before, now) == now {
                    times[0].push(step.as_nanos() as u64);
                    times[1].push(both.as_nanos() as u64);
                }
            }
        }
        times.iter_mut().for_each(|t| t.sort_unstable());
        times
    }
}

/// How often the system took the core away from this thread.
fn taken_away() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

/// What the other thread did.
#[derive(Debug, Default)]
struct Done {
    reclaimed: u64,
    rebalanced: u64,
    topped_up: u64,
    moves: u64,
}

/// Reclaim, rebalance, top up, until told to stop.
fn press(pool: &Arc<Pool>, stop: &AtomicBool) -> Done {
    let (scratch, beta) = (tenant(pool, "scratch"), tenant(pool, "beta"));
    let rows = batch(pool, 4);
    let page = pool.spec().sizes().iter().max().copied().unwrap_or(1);
    let small = ClassId(1);
    let mut done = Done::default();
    let mut kept: Vec<Arc<Sequence>> = Vec::new();
    let mut n = 0u32;
    while !stop.load(Ordering::Acquire) {
        n += 1;
        // Pages between the rows' pages, some of which stay for a while.
        let tokens = (0..64 + n * 37 % 400).map(|t| n * 7919 + t).collect();
        let sequence = pool.open(scratch, Open { tokens, ..Open::default() }).expect("opens");
        rows.add(&sequence).expect("a row");
        let _ = rows.step(None, None, |_| ()).and_then(|()| rows.commit(Some(&[1])));
        rows.remove(&sequence).expect("a row");
        kept.push(sequence);
        if kept.len() > 12 {
            kept.swap_remove((n as usize * 5) % 12);
        }
        let (plan, _) = pool.reclaim(scratch, 8 * page, Live::Stay, TTL, false).expect("a plan");
        pool.commit_plan(&plan).expect("open");
        done.reclaimed += 1;
        // Half the time for the small class, half of it for whoever comes.
        let goal = n.is_multiple_of(2).then_some(small);
        let plan = pool.rebalance(goal, 128 * page, 256, TTL, false).expect("a plan");
        done.moves += plan.moves.len() as u64;
        while pool.commit_some(&plan, 16).expect("open").left > 0 {}
        done.rebalanced += 1;
        if let Ok((plan, _)) = pool.top_up(beta, 16 * page, Live::Stay, 64, TTL, false) {
            // (What needs no moves was carried out at once.)
            let _ = pool.commit_plan(&plan);
            done.topped_up += 1;
            pool.ledger()
                .shift_reserve(kvalloc_core::word::Tier::Device, pool.ledger().now(beta), -1_000_000)
                .expect("shrinking");
        }
        pool.reclaim_some(32);
    }
    done
}

fn main() {
    let seconds = Duration::from_secs(4);
    let pool = pool();
    let decode = tenant(&pool, "decode");
    let mut rows = Rows {
        batch: batch(&pool, ROWS),
        pool: Arc::clone(&pool),
        tenant: decode,
        sequences: Vec::new(),
        sampled: vec![7; ROWS],
        round: 0,
    };
    rows.run(seconds / 4);
    println!("{:<8} {:<13} {:>9} {:>9} {:>10} {:>9}", "", "", "p50 us", "p99 us", "p99.9 us", "n");
    let mut p99 = Vec::new();
    let mut show = |name: &str, times: [Vec<u64>; 2]| {
        for (what, times) in ["step", "step + commit"].into_iter().zip(times) {
            let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize] as f64 / 1e3;
            println!(
                "{name:<8} {what:<13} {:>9.2} {:>9.2} {:>10.2} {:>9}",
                at(0.5),
                at(0.99),
                at(0.999),
                times.len()
            );
            p99.push(at(0.99));
        }
    };
    show("quiet", rows.run(seconds));
    let stop = Arc::new(AtomicBool::new(false));
    let other = {
        let (pool, stop) = (Arc::clone(&pool), Arc::clone(&stop));
        thread::spawn(move || press(&pool, &stop))
    };
    show("pressed", rows.run(seconds));
    stop.store(true, Ordering::Release);
    let done = other.join().expect("no panic");
    let Done { reclaimed, rebalanced, topped_up, moves } = done;
    println!(
        "beside it: {reclaimed} reclaims, {rebalanced} rebalances with {moves} moves, {topped_up} top-ups; {} pages moved",
        pool.stats().get(Counter::PagesMoved)
    );
    println!("p99 against quiet: step {:.2}, step + commit {:.2}", p99[2] / p99[0], p99[3] / p99[1]);
    drop(rows);
    let report = pool.audit();
    assert!(report.findings.is_empty(), "{report:?}");
}

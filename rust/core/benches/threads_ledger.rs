//! Charge and release of one page on one hot tenant, by threads, against two baselines in the same run:
//!
//! - `counter`: one compare-exchange loop on one shared word for the charge and one for the release (a flat quota counter);
//! - `mutex`: the whole ledger (limits and claims of every ancestor) behind one `Mutex`.
//!
//! `cargo bench -p kvalloc-core --bench threads_ledger [-- SECONDS]`
//!
//! Throughput: million charge + release pairs a second, all threads together. Latency: each pair timed by itself (the clock
//! adds some 20 ns), 8 threads on however many cores there are.
#![allow(clippy::print_stdout, reason = "a bench prints its table")]

use std::{
    hint::black_box,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvalloc_core::{
    ledger::{Ledger, Policy, ROOT},
    word::{Lane, TenantId, Tier, Units},
};

const CAPACITY: u32 = 1 << 24;
const LIMIT: u32 = 1 << 22;

/// Something that can be charged by one and released by one.
trait Quota: Sync {
    fn pair(&self, thread: u64);
    /// What a step of a scheduler does: a page each for [`ROWS`] rows, and as many released.
    fn step(&self, thread: u64) {
        for _ in 0..ROWS {
            self.pair(thread);
        }
    }
}

const ROWS: u32 = 256;

struct Ours {
    ledger: Ledger,
    tenant: TenantId,
}

impl Ours {
    fn new() -> Self {
        let ledger = Ledger::new([Units(CAPACITY); 2], 4096, Units(64)).expect("small");
        let limit = Policy { limit: [Some(Units(LIMIT)), None], ..Policy::default() };
        let org = ledger.create(ROOT, "org", &limit).expect("fits");
        let tenant = ledger.create(org, "user", &limit).expect("fits");
        Self { ledger, tenant }
    }
}

impl Quota for Ours {
    #[inline]
    fn pair(&self, thread: u64) {
        let lane = Lane::wrapped(thread);
        self.ledger.charge(Tier::Device, self.tenant, lane, Units(1)).expect("room");
        self.ledger.discharge(Tier::Device, self.tenant, lane, Units(1));
    }
}

/// One word, compare-exchange against a limit.
struct Counter(AtomicU64);

impl Quota for Counter {
    #[inline]
    fn pair(&self, _thread: u64) {
        let charge = |used| (used < u64::from(LIMIT)).then_some(used + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, charge).expect("room");
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| Some(used - 1)).expect("used");
    }
}

/// The same books as ours, without stocks, behind one lock.
struct Locked(Mutex<Vec<Node>>);

#[derive(Default, Clone)]
struct Node {
    parent: Option<usize>,
    limit: u32,
    reserve: u32,
    charged: u32,
    demand: u32,
    held: u32,
}

impl Locked {
    fn new() -> Self {
        let node = |parent, limit| Node { parent, limit, ..Node::default() };
        Self(Mutex::new(vec![node(None, CAPACITY), node(Some(0), LIMIT), node(Some(1), LIMIT)]))
    }

    fn charge(nodes: &mut [Node], tenant: usize, n: u32) -> Result<(), usize> {
        let mut at = Some(tenant);
        while let Some(level) = at {
            if nodes[level].charged + n > nodes[level].limit {
                return Err(level);
            }
            at = nodes[level].parent;
        }
        let (mut at, mut growth) = (Some(tenant), n);
        while let Some(level) = at {
            let node = &nodes[level];
            let claim = node.reserve.max(node.demand);
            growth = node.reserve.max(node.demand + growth) - claim;
            if growth > 0 && claim + growth > node.limit {
                return Err(level);
            }
            at = node.parent;
        }
        let (mut at, mut growth) = (Some(tenant), n);
        while let Some(level) = at {
            let node = &mut nodes[level];
            let claim = node.reserve.max(node.demand);
            node.charged += n;
            node.demand += growth;
            growth = node.reserve.max(node.demand) - claim;
            at = node.parent;
        }
        nodes[tenant].held += n;
        Ok(())
    }

    fn release(nodes: &mut [Node], tenant: usize, n: u32) {
        nodes[tenant].held -= n;
        let (mut at, mut shrink) = (Some(tenant), n);
        while let Some(level) = at {
            let node = &mut nodes[level];
            let claim = node.reserve.max(node.demand);
            node.charged -= n;
            node.demand -= shrink;
            shrink = claim - node.reserve.max(node.demand);
            at = node.parent;
        }
    }
}

impl Quota for Locked {
    #[inline]
    fn pair(&self, _thread: u64) {
        Self::charge(&mut self.0.lock().expect("no panic"), 2, 1).expect("room");
        Self::release(&mut self.0.lock().expect("no panic"), 2, 1);
    }
    /// One lock for the step, as one would write it.
    fn step(&self, _thread: u64) {
        let mut nodes = self.0.lock().expect("no panic");
        for _ in 0..ROWS {
            Self::charge(&mut nodes, 2, 1).expect("room");
            Self::release(&mut nodes, 2, 1);
        }
    }
}

/// This thread's CPU time in nanoseconds, where Linux tells it: other processes on the machine then don't count.
fn cpu() -> Option<u64> {
    std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}

/// (pairs a second, pairs a second of CPU time), all threads together.
fn throughput(quota: &impl Quota, threads: u64, time: Duration) -> [f64; 2] {
    let (stop, start) = (AtomicBool::new(false), Barrier::new(threads as usize + 1));
    thread::scope(|scope| {
        let run = |id| {
            let (stop, start) = (&stop, &start);
            move || {
                start.wait();
                let (from, begin) = (cpu(), Instant::now());
                let mut pairs = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..256 {
                        black_box(quota).pair(id);
                    }
                    pairs += 256;
                }
                let took = begin.elapsed().as_nanos() as u64;
                (pairs, cpu().zip(from).map_or(took, |(to, from)| to - from))
            }
        };
        let running: Vec<_> = (0..threads).map(|id| scope.spawn(run(id))).collect();
        start.wait();
        let begin = Instant::now();
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let (mut pairs, mut cpu) = (0, 0);
        for thread in running {
            let (p, c) = thread.join().expect("no panic");
            pairs += p;
            cpu += c;
        }
        [pairs as f64 / begin.elapsed().as_secs_f64(), pairs as f64 / (cpu as f64 / 1e9)]
    })
}

/// (p50, p99, p99.9, p99.99, max) of a call in nanoseconds.
fn latency(threads: u64, time: Duration, what: impl Fn(u64) + Sync) -> [u64; 5] {
    let (stop, start) = (AtomicBool::new(false), Barrier::new(threads as usize));
    let mut all: Vec<u32> = thread::scope(|scope| {
        let run = |id| {
            let (stop, start, what) = (&stop, &start, &what);
            move || {
                let mut took = Vec::with_capacity(1 << 22);
                start.wait();
                let begin = Instant::now();
                while !stop.load(Ordering::Relaxed) && took.len() < 1 << 22 {
                    let from = Instant::now();
                    what(id);
                    took.push(from.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
                    if id == 0 && begin.elapsed() > time {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
                took
            }
        };
        let running: Vec<_> = (0..threads).map(|id| scope.spawn(run(id))).collect();
        running.into_iter().flat_map(|t| t.join().expect("no panic")).collect()
    });
    all.sort_unstable();
    let at = |share: f64| u64::from(all[((all.len() - 1) as f64 * share) as usize]);
    [at(0.5), at(0.99), at(0.999), at(0.9999), at(1.0)]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let seconds = std::env::args().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(0.5);
    let time = Duration::from_secs_f64(seconds);
    let ours = Ours::new();
    let counter = Counter(AtomicU64::new(0));
    let mutex = Locked::new();

    let cores = thread::available_parallelism().map_or(1, usize::from);
    println!(
        "charge + release, one hot tenant two levels deep, {cores} cores, median of 5 runs of {seconds} s"
    );
    println!(
        "M/s: million pairs a second, all threads together; M/cpu s: a second of CPU time of one thread\n"
    );
    println!(
        "| threads | ours M/s | counter M/s | mutex M/s | ours M/cpu s | counter M/cpu s | mutex M/cpu s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for threads in [1, 2, 4, 8] {
        let mut runs: [[Vec<f64>; 3]; 2] = Default::default();
        // One run of each in turn, so that a slow moment of the machine hits all three.
        for _ in 0..5 {
            let all = [
                throughput(&ours, threads, time),
                throughput(&counter, threads, time),
                throughput(&mutex, threads, time),
            ];
            for (who, [wall, cpu]) in all.into_iter().enumerate() {
                runs[0][who].push(wall / 1e6);
                runs[1][who].push(cpu / 1e6);
            }
        }
        let [[a, b, c], [d, e, f]] = runs.map(|kind| kind.map(median));
        println!("| {threads} | {a:.1} | {b:.1} | {c:.1} | {d:.1} | {e:.1} | {f:.1} |");
    }

    println!("\nlatency in ns with 8 threads\n");
    println!("| | p50 | p99 | p99.9 | p99.99 | max |");
    println!("| --- | --- | --- | --- | --- | --- |");
    let row = |name: &str, [p50, p99, p999, p9999, max]: [u64; 5]| {
        println!("| {name} | {p50} | {p99} | {p999} | {p9999} | {max} |");
    };
    row("a pair, ours", latency(8, time, |id| black_box(&ours).pair(id)));
    row("a pair, counter", latency(8, time, |id| black_box(&counter).pair(id)));
    row("a pair, mutex", latency(8, time, |id| black_box(&mutex).pair(id)));
    row("256 pairs, ours", latency(8, time * 4, |id| black_box(&ours).step(id)));
    row("256 pairs, mutex held for them", latency(8, time * 4, |id| black_box(&mutex).step(id)));

    let usage = ours.ledger.usage(Tier::Device, ours.tenant);
    assert_eq!((usage.held, usage.missing), (Units(0), Units(0)), "the books balance");

    println!("\nother costs, one thread");
    let begin = Instant::now();
    let big = Ledger::new([Units(1 << 30); 2], 4096, Units(64)).expect("small");
    println!("a ledger for 4,096 tenants: {} us", begin.elapsed().as_micros());
    drop(big);
    let t = ours.tenant;
    let ledger = &ours.ledger;
    let each = |name: &str, n: u32, f: &dyn Fn()| {
        let begin = Instant::now();
        (0..n).for_each(|_| f());
        println!("{name}: {:.0} ns", begin.elapsed().as_nanos() as f64 / f64::from(n));
    };
    each("promise + charge_promised + discharge of 64 units", 100_000, &|| {
        ledger.promise(Tier::Device, t, Lane(0), Units(64)).expect("room");
        ledger.charge_promised(Tier::Device, t, Lane(0), Units(64));
        ledger.discharge(Tier::Device, t, Lane(0), Units(64));
    });
    ledger.charge(Tier::Device, t, Lane(0), Units(64)).expect("room");
    let bare = Ledger::new([Units(1000); 2], 16, Units(0)).expect("small");
    let org = bare.create(ROOT, "org", &Policy::default()).expect("fits");
    let user = bare.create(org, "user", &Policy::default()).expect("fits");
    each("charge + discharge through three levels, no stock", 1_000_000, &|| {
        bare.charge(Tier::Device, user, Lane(0), Units(1)).expect("room");
        bare.discharge(Tier::Device, user, Lane(0), Units(1));
    });
    each("a refusal at the root", 1_000_000, &|| {
        _ = black_box(bare.charge(Tier::Device, user, Lane(0), Units(1001)));
    });
    each("park + revive through three levels", 100_000, &|| {
        ledger.park(Tier::Device, t, Units(8));
        ledger.revive(Tier::Device, t, Units(8)).expect("room");
    });
    each("usage", 100_000, &|| _ = black_box(ledger.usage(Tier::Device, t)));
    each("room", 100_000, &|| _ = black_box(ledger.room(Tier::Device, t, Units(1))));
    for i in 0..1000 {
        let tenant = ledger.create(ROOT, &format!("t{i}"), &Policy::default()).expect("fits");
        ledger.charge(Tier::Device, tenant, Lane(0), Units(1)).expect("room");
        ledger.park(Tier::Device, tenant, Units(1));
    }
    each("worst of 1,000 tenants", 1_000, &|| _ = black_box(ledger.worst(Tier::Device, ROOT, |_| false)));
    each("find among 1,000 names", 1_000, &|| _ = black_box(ledger.find("t999")));
}

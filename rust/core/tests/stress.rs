//! Threads on one small pool: shared prompts, eviction, refusals, forks, drafts, pins, policies and plans all the time, and an
//! auditor beside them. In the end everything balances to the byte.
//!
//! A program of its own (no test harness, plain spawn and join), so that ThreadSanitizer can follow it. What each thread
//! does is drawn from a fixed seed; how they meet is up to the machine. `KVALLOC_STRESS_SECONDS`, `KVALLOC_STRESS_SEED`,
//! `KVALLOC_STRESS_WORKERS`; with `KVALLOC_STRESS_OPERATIONS` it ends after so many operations instead, and says which.
#![expect(clippy::print_stdout, reason = "a program that says what it did")]

#[path = "stress/plans.rs"]
mod plans;

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvalloc_core::{
    arrays::{Owned, Shape},
    audit::Balance,
    batch::Batch,
    error::Error,
    face::Pages,
    hash::CallerKey,
    ledger::{Policy, ROOT},
    plan::Plan,
    pool::{Options, Pool},
    sequence::{Open, Sequence},
    spec::{Dtype, GroupKind, GroupSpec, Layout, Spec},
    stats::Counter,
    word::{GroupId, PageRef, TIERS, TenantId, Tier, Units},
};

const PAGE: u32 = 4;
const ROWS: usize = 4;
const MOST: u32 = 48;
/// Pages that each tenant has reserved.
const RESERVE: u32 = 4;
const WORKERS: u64 = 6;

/// xorshift64*.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % sides
    }
}

/// What happened, so that a run that did nothing shows.
#[derive(Default)]
struct Tally {
    steps: AtomicU64,
    hits: AtomicU64,
    refused: AtomicU64,
    shared: AtomicU64,
    waited: AtomicU64,
    moved: AtomicU64,
    dropped: AtomicU64,
    late: AtomicU64,
    audits: AtomicU64,
    exact: AtomicU64,
    kinds: [AtomicU64; Kind::NAMES.len()],
}

/// What is counted as an operation: a call that asks the pool, or a batch or sequence on it, to do something.
#[derive(Clone, Copy)]
enum Kind {
    Open,
    Add,
    Step,
    Commit,
    Close,
    Fork,
    Draft,
    Pin,
    KeepState,
    Advance,
    Face,
    Policy,
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
}

impl Kind {
    const NAMES: [&str; Kind::AbortPlan as usize + 1] = [
        "open",
        "add",
        "step",
        "commit",
        "close",
        "fork",
        "draft",
        "pin",
        "keep state",
        "advance",
        "page calls",
        "policy",
        "suspend",
        "resume",
        "preempt",
        "compress",
        "cut",
        "rebalance",
        "reclaim",
        "top up",
        "commit plan",
        "abort plan",
    ];
}

fn count(word: &AtomicU64, by: u64) {
    word.fetch_add(by, Ordering::Relaxed);
}

fn group(name: &str, kind: GroupKind) -> GroupSpec {
    let state = kind == GroupKind::State;
    let dim = if state { 0 } else { 16 };
    GroupSpec {
        name: name.into(),
        kind,
        layers: 1,
        kv_heads: u32::from(!state),
        k_dim: dim,
        v_dim: dim,
        dtype: Dtype::F16,
        state_bytes: if state { 256 } else { 0 },
    }
}

fn pool(groups: Vec<GroupSpec>, small: bool, pages: u64) -> Arc<Pool> {
    let small = small.then_some(Dtype::Fp8);
    let spec = Spec::new(PAGE, groups, Layout::PageMajor, small).expect("a sound spec");
    let largest = spec.sizes().iter().max().expect("a page");
    let bytes = |pages: u64| (largest * (pages + 1)).next_multiple_of(spec.granule());
    let options = Options {
        device_bytes: bytes(pages),
        // Full now and then.
        host_bytes: bytes(pages / 3),
        secret: None,
        max_tenants: 16,
        compare_tokens: true,
        manual_clock: true,
        events: 1 << 10,
        force_collisions: false,
    };
    Arc::new(Pool::new(spec, &options).expect("a pool"))
}

fn batch(pool: &Arc<Pool>) -> Batch {
    let shape = Shape { rows: ROWS, tokens: MOST, pages: MOST.div_ceil(PAGE) as usize, step: MOST * 2 };
    Batch::new(pool, shape, Box::new(Owned::new(shape, pool.spec().groups().len()))).expect("a batch")
}

struct Worker {
    pool: Arc<Pool>,
    dice: Dice,
    tenant: TenantId,
    org: TenantId,
    batch: Batch,
    running: Vec<Arc<Sequence>>,
    face: Pages,
    owned: Vec<PageRef>,
    tally: Arc<Tally>,
    /// Found by one thread, shared by another; the page's tenant goes on paying.
    mail: Arc<[AtomicU64]>,
    /// Nobody else holds anything of its tenant, so what is reserved for it is there.
    alone: bool,
    /// Open, or ended without a word to this worker.
    plans: Vec<Plan>,
    /// Sequences that left their rows by a plan.
    away: Vec<Arc<Sequence>>,
    /// The tenant that is topped up.
    topped: TenantId,
    kinds: [u64; Kind::NAMES.len()],
}

impl Worker {
    fn did(&mut self, kind: Kind) {
        self.kinds[kind as usize] += 1;
    }

    /// One of three texts, up to where it turns into another one.
    fn prompt(&mut self) -> Vec<u32> {
        let length = 1 + self.dice.roll(30) as u32;
        let (text, other, turn) =
            (self.dice.roll(3) as u32, self.dice.roll(9) as u32, self.dice.roll(40) as u32);
        (0..length).map(|i| if i < turn { text * 100 + i } else { other * 1000 + i }).collect()
    }

    fn open(&mut self) {
        if self.running.len() == ROWS {
            return;
        }
        self.did(Kind::Open);
        let tokens = self.prompt();
        let share = [(self.org, tokens.len() as u32 / 2)];
        let admit = self.dice.roll(3) == 0;
        let open = Open {
            tokens,
            max_new_tokens: 4,
            admit,
            share: if self.dice.roll(2) == 0 { &share } else { &[] },
            protection: if self.dice.roll(4) == 0 { 50 } else { 0 },
            protection_ms: 100,
            ..Open::default()
        };
        match self.pool.open(self.tenant, open) {
            Ok(sequence) => {
                count(&self.tally.hits, sequence.counts().expect("mine").cached.into());
                self.batch.add(&sequence).expect("a row is free");
                self.running.push(sequence);
            }
            Err(Error::Refused(_) | Error::Never(_)) => count(&self.tally.refused, 1),
            Err(e) => panic!("{e}"),
        }
    }

    fn step(&mut self) {
        self.did(Kind::Step);
        let tokens = self.batch.step(None, Some(40), |step| {
            count(&self.tally.refused, step.refused.len() as u64);
            step.num_tokens
        });
        match tokens {
            Ok(_) => count(&self.tally.steps, 1),
            // Too many wait for their commit.
            Err(Error::Argument(_)) => return,
            Err(e) => panic!("{e}"),
        }
        if self.dice.roll(4) > 0 {
            self.commit();
        }
    }

    fn commit(&mut self) {
        while self.batch.outstanding().expect("mine") > 0 {
            self.did(Kind::Commit);
            // As many as the step had rows; the rows of now may be fewer.
            self.batch.commit(None).expect("a step waits");
        }
    }

    fn pick(&mut self) -> Option<usize> {
        let n = self.running.len() as u64;
        (n > 0).then(|| self.dice.roll(n) as usize)
    }

    fn close(&mut self) {
        if let Some(at) = self.pick() {
            self.did(Kind::Close);
            let sequence = self.running.swap_remove(at);
            sequence.close().expect("mine");
        }
    }

    fn fork(&mut self) {
        let Some(at) = self.pick() else { return };
        if self.running.len() == ROWS || self.running[at].counts().expect("mine").known >= MOST {
            return;
        }
        self.did(Kind::Fork);
        if let Ok(fork) = self.running[at].fork() {
            self.batch.add(&fork).expect("a row is free");
            self.running.push(fork);
        }
    }

    fn draft(&mut self) {
        let Some(at) = self.pick() else { return };
        self.did(Kind::Draft);
        let counts = self.running[at].counts().expect("mine");
        let keep = 1 + self.dice.roll(u64::from(counts.known.max(counts.slots))) as u32;
        // Windows and states may refuse.
        if self.running[at].truncate(keep).is_ok() && counts.known < MOST - 8 {
            let _ = self.running[at].extend(&[7, 8, 9]);
        }
    }

    fn pin(&mut self) {
        let Some(at) = self.pick() else { return };
        self.did(Kind::Pin);
        if let Ok(pin) = self.pool.pin(&self.running[at], 8, self.tenant, Some(50), "stress")
            && self.dice.roll(2) == 0
        {
            // Or it has expired.
            let _ = self.pool.unpin(pin);
        }
    }

    fn lower_face(&mut self) {
        self.did(Kind::Face);
        let group = GroupId(0);
        let key = self.dice.roll(6);
        match self.dice.roll(6) {
            0 | 1 => match self.face.allocate(self.tenant, group, 1 + self.dice.roll(2) as usize) {
                Ok(pages) => {
                    let keys = vec![CallerKey::Int(key.into()); pages.len()];
                    self.face.publish(self.tenant, group, &pages, &keys).expect("mine");
                    self.owned.extend(pages);
                }
                Err(Error::Refused(_)) => count(&self.tally.refused, 1),
                Err(e) => panic!("{e}"),
            },
            2 => {
                let found = self.face.lookup(self.tenant, group, &[CallerKey::Int(key.into())]);
                self.owned.extend(found.expect("a sound key"));
            }
            3 if !self.alone => {
                let found = self.face.find_all(self.tenant, group, &[CallerKey::Int(key.into())]);
                if let Some(page) = found.expect("a sound key")[0] {
                    self.mail[key as usize].store(page.to_bits(), Ordering::Release);
                }
            }
            4 => {
                let page = PageRef::from_bits(self.mail[key as usize].load(Ordering::Acquire));
                if self.face.share(&[page]).expect("a page of this pool") == [true] {
                    count(&self.tally.shared, 1);
                    self.owned.push(page);
                }
            }
            _ => {
                if let Some(page) = self.owned.pop() {
                    self.face.release(&[page]).expect("mine");
                }
            }
        }
        if self.owned.len() > 3 {
            let pages = std::mem::take(&mut self.owned);
            self.face.release(&pages).expect("mine");
        }
    }

    /// With nothing of its own in use, a tenant gets what it has reserved, whatever the others do. At once; but a page that
    /// a step of others copies keeps what it continues until their commit.
    fn reserve(&mut self) {
        self.clear();
        let allocate = |waited| {
            let pages = self.face.allocate(self.tenant, GroupId(0), RESERVE as usize);
            if pages.is_err() {
                count(&self.tally.waited, 1);
                thread::sleep(Duration::from_millis(waited));
            }
            pages.ok()
        };
        let pages = (0..50).find_map(allocate).expect("it is reserved");
        self.face.release(&pages).expect("mine");
    }

    fn clear(&mut self) {
        self.commit();
        self.end_plans();
        self.running.drain(..).for_each(|s| s.close().expect("mine"));
        self.face.release(&std::mem::take(&mut self.owned)).expect("mine");
    }

    fn work(mut self, until: Until) {
        while !until.is_over(&self.kinds) {
            match self.dice.roll(50) {
                0..8 => self.open(),
                8..22 => self.step(),
                22..26 => self.close(),
                26..28 => self.fork(),
                28..30 => self.draft(),
                30 if !self.alone => self.pin(),
                31 => {
                    self.did(Kind::Advance);
                    self.pool.advance(self.dice.roll(20)).expect("a manual clock");
                }
                32 if self.alone => self.reserve(),
                33 => {
                    self.commit();
                    if let Some(at) = self.pick() {
                        self.did(Kind::KeepState);
                        let _ = self.running[at].keep_state().expect("mine");
                    }
                }
                34..40 => self.lower_face(),
                _ => self.plan(),
            }
        }
        self.clear();
        for (all, mine) in self.tally.kinds.iter().zip(self.kinds) {
            count(all, mine);
        }
    }
}

/// How long a worker works.
#[derive(Clone, Copy)]
enum Until {
    Time(Instant),
    Operations(u64),
}

impl Until {
    fn is_over(self, kinds: &[u64]) -> bool {
        match self {
            Self::Time(until) => Instant::now() >= until,
            Self::Operations(n) => kinds.iter().sum::<u64>() >= n,
        }
    }
}

fn audit(pool: &Pool, tally: &Tally, stop: &AtomicBool) {
    let mut events = Vec::new();
    while !stop.load(Ordering::Acquire) {
        let report = pool.audit();
        assert!(report.findings.is_empty(), "{report:#?}");
        count(&tally.audits, 1);
        count(&tally.exact, report.exact.into());
        events.clear();
        pool.drain_events(64, &mut events).expect("nobody else drains");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A tenant beside the workers, whose limits and weights move all the time.
fn change(pool: &Arc<Pool>, tenant: TenantId, stop: &AtomicBool) {
    let mut dice = Dice(99);
    let face = Pages::new(pool);
    while !stop.load(Ordering::Acquire) {
        let policy = Policy {
            limit: [dice.roll(8), dice.roll(8)].map(|n| Some(Units(n as u32))),
            weight: 1 + dice.roll(5) as u32,
            priority: dice.roll(100) as u8,
            ..Policy::default()
        };
        pool.ledger().set_policy(tenant, &policy).expect("nothing is reserved");
        if let Ok(pages) = face.allocate(tenant, GroupId(0), 1 + dice.roll(3) as usize) {
            thread::yield_now();
            face.release(&pages).expect("mine");
        }
    }
}

fn run(name: &str, groups: Vec<GroupSpec>, small: bool, pages: u64, length: Length) -> u64 {
    let began = Instant::now();
    let Length { seed, workers, time, operations } = length;
    let pool = pool(groups, small, pages);
    let tally = Arc::new(Tally::default());
    let mail: Arc<[AtomicU64]> = (0..6).map(|_| AtomicU64::new(0)).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let org = pool.ledger().create(ROOT, "org", &Policy::default()).expect("a tenant");
    // With pages of several sizes room may lie where others can't have it.
    let one_size = pool.spec().sizes().iter().all(|size| *size == pool.spec().sizes()[0]);
    let topped = pool.ledger().create(ROOT, "topped up", &Policy::default()).expect("a tenant");
    let moving = pool.ledger().create(ROOT, "moving", &Policy::default()).expect("a tenant");
    // All before the first thread: a reserve has to find room.
    let tenants: Vec<_> = (0..workers)
        .map(|n| {
            let policy = Policy {
                reserve: [Units(RESERVE), Units(0)],
                limit: [(n % 2 == 0).then_some(Units(16)), (n % 3 == 0).then_some(Units(6))],
                publish: vec![(org, (n % 3 == 0).then_some(Units(12)))],
                pin_budget: Units(4),
                compress: true,
                // Those who forget find less of what they had.
                cut: NonZeroU32::new(2 * PAGE).filter(|_| n % 2 == 1),
                ..Policy::default()
            };
            pool.ledger().create(org, &format!("t{n}"), &policy).expect("a tenant")
        })
        .collect();
    let until = match operations {
        Some(n) => Until::Operations(n.div_ceil(workers)),
        None => Until::Time(Instant::now() + time),
    };
    let workers: Vec<_> = tenants
        .into_iter()
        .zip(0..)
        .map(|(tenant, n)| {
            let worker = Worker {
                dice: Dice(seed + 1 + n * 0x9e37_79b9),
                tenant,
                org,
                batch: batch(&pool),
                running: Vec::new(),
                face: Pages::new(&pool),
                owned: Vec::new(),
                tally: Arc::clone(&tally),
                mail: Arc::clone(&mail),
                alone: n % 2 == 0 && one_size,
                plans: Vec::new(),
                away: Vec::new(),
                topped,
                kinds: [0; Kind::NAMES.len()],
                pool: Arc::clone(&pool),
            };
            thread::spawn(move || worker.work(until))
        })
        .collect();
    let beside = {
        let (pool, tally, stop) = (Arc::clone(&pool), Arc::clone(&tally), Arc::clone(&stop));
        thread::spawn(move || audit(&pool, &tally, &stop))
    };
    let changing = {
        let (pool, stop) = (Arc::clone(&pool), Arc::clone(&stop));
        thread::spawn(move || change(&pool, moving, &stop))
    };
    for worker in workers {
        worker.join().expect("a worker failed");
    }
    stop.store(true, Ordering::Release);
    beside.join().expect("the auditor failed");
    changing.join().expect("the tenant beside them failed");
    // Nothing is left.
    pool.advance(1000).expect("a manual clock");
    plans::reset(&pool, topped);
    assert!(pool.open_plans().is_empty());
    for balance in balanced(&pool) {
        assert_eq!((balance.held, balance.pinned), (0, 0), "{name}: {balance:?}");
    }
    for tenant in pool.ledger().ids() {
        assert_eq!(pool.ledger().usage(Tier::Device, tenant).promised, Units(0));
        assert_eq!(pool.ledger().usage(Tier::Host, tenant).held, Units(0));
    }
    pool.reset_prefix_cache().expect("nothing is held");
    // Frames that pages have left since the last batch looked; there is no batch any more.
    pool.reclaim_some(0);
    for balance in balanced(&pool) {
        assert_eq!((balance.cached, balance.free), (0, balance.capacity), "{name}: {balance:?}");
    }
    let read = |word: &AtomicU64| word.load(Ordering::Relaxed);
    println!(
        "{name}: {} steps, {} tokens hit, {} refused, {} shared, {} waits for a reserve; {} pages moved, {} cut, {} moves dropped, \
         {} reports late; {} audits, {} of them exact",
        read(&tally.steps),
        read(&tally.hits),
        read(&tally.refused),
        read(&tally.shared),
        read(&tally.waited),
        read(&tally.moved),
        pool.stats().get(Counter::PagesCut),
        read(&tally.dropped),
        read(&tally.late),
        read(&tally.audits),
        read(&tally.exact),
    );
    let all = tally.kinds.iter().map(read).sum();
    if operations.is_some() {
        let kinds: Vec<_> =
            tally.kinds.iter().zip(Kind::NAMES).map(|(n, name)| format!("{} {name}", read(n))).collect();
        println!("  {all} operations in {:.1} s: {}", began.elapsed().as_secs_f64(), kinds.join(", "));
    }
    assert!(
        read(&tally.steps) > 0 && read(&tally.hits) > 0 && read(&tally.refused) > 0 && read(&tally.moved) > 0,
        "{name} did nothing"
    );
    all
}

/// How long a run is.
#[derive(Clone, Copy)]
struct Length {
    seed: u64,
    workers: u64,
    time: Duration,
    operations: Option<u64>,
}

fn balanced(pool: &Pool) -> [Balance; TIERS] {
    let report = pool.audit();
    assert!(report.exact && report.findings.is_empty(), "{report:#?}");
    report.balance
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

fn main() {
    // cargo passes on what is meant for test harnesses: a wish for a list, or for other tests.
    if std::env::args().skip(1).any(|arg| arg == "--list" || !arg.starts_with('-') && arg != "stress") {
        return;
    }
    let operations = setting("KVALLOC_STRESS_OPERATIONS", 0);
    let length = Length {
        seed: setting("KVALLOC_STRESS_SEED", 1),
        workers: setting("KVALLOC_STRESS_WORKERS", WORKERS).clamp(1, 10),
        time: Duration::from_millis(setting("KVALLOC_STRESS_SECONDS", 20) * 1000 / 4),
        operations: (operations > 0).then_some(operations.div_ceil(5)),
    };
    let of = |name: &str, kind, layers| GroupSpec { layers, ..group(name, kind) };
    let window = GroupKind::Window { tokens: 6 };
    let full = || group("full", GroupKind::Full);
    let mut all = run("full", vec![full()], false, 40, length);
    all += run("full, compressed", vec![full()], true, 40, length);
    all += run("full and window", vec![full(), group("window", window)], false, 48, length);
    all += run("full and state", vec![full(), group("state", GroupKind::State)], false, 48, length);
    let sizes = vec![of("full", GroupKind::Full, 2), of("window", window, 1)];
    all += run("full and smaller window", sizes, false, 40, length);
    if operations > 0 {
        println!("{all} operations by {} threads; every audit was green", length.workers);
    }
}

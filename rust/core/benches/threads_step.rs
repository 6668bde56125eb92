//! Scheduler steps on one pool from several threads, a batch each, against the same books under one mutex.
//!
//! `cargo bench -p kvalloc-core --bench threads_step`
//!
//! Prints steps with their commits a second of CPU time with one and two threads, and the tail of a step's time with eight threads on
//! however few cores there are: there a thread that is preempted while it holds the mutex makes all others wait. Tokens
//! are not told at the commit, so nothing is published and both sides do the same: charges, page edges, array writes.
//! The mutex version is what one would write first: free pages and the charges of a tenant and its two levels behind one
//! mutex, which a step holds from its first row to its last. Its steps do what ours do: plan each row's tokens, charge and
//! take pages at edges, write the same arrays, remember what to commit. `publishing` is ours with tokens, in a pool that is full
//! of cached pages: every new page evicts one, every full page is hashed and published.

#![allow(clippy::print_stdout, reason = "a bench prints its table")]
use std::{
    collections::VecDeque,
    hint::black_box,
    sync::{Arc, Barrier, Mutex},
    thread,
    time::{Duration, Instant},
};

use kvalloc_core::{
    arrays::{Owned, Shape},
    batch::Batch,
    hash::Secret,
    ledger::{Policy, ROOT},
    pool::{Options, Pool},
    sequence::{Open, Sequence},
    spec::{Dtype, GroupKind, GroupSpec, Layout, Spec},
};

const PAGE: u32 = 16;
const ROWS: usize = 256;
const LONGEST: u32 = 8192;
const START: u32 = 512;

/// What both sides do: a step and a commit of a batch of decoding rows.
trait Steps: Send {
    /// Charges, page edges, array writes.
    fn step(&mut self);
    /// The model has run: tokens become known, full pages are published.
    fn commit(&mut self);
    /// Begin anew when the rows have grown to the end.
    fn restart(&mut self);
}

struct Ours {
    pool: Arc<Pool>,
    batch: Batch,
    sequences: Vec<Arc<Sequence>>,
    tenant: kvalloc_core::word::TenantId,
    sampled: Option<Vec<i32>>,
    thread: u32,
}

fn pool(threads: usize) -> Arc<Pool> {
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
    let spec = Spec::new(PAGE, vec![group], Layout::PageMajor, None).expect("a plain model");
    let pages = (threads * ROWS) as u64 * u64::from(LONGEST / PAGE + 1);
    let options = Options {
        device_bytes: spec.sizes()[0] * (pages + 1),
        host_bytes: 0,
        secret: Some(Secret::from_bytes([1; 16])),
        max_tenants: 64,
        compare_tokens: true,
        manual_clock: true,
        events: 0,
        force_collisions: false,
    };
    Arc::new(Pool::new(spec, &options).expect("fits"))
}

impl Ours {
    fn new(pool: &Arc<Pool>, thread: u32, publishing: bool) -> Self {
        let shape = Shape { rows: ROWS, tokens: LONGEST, pages: (LONGEST / PAGE) as usize, step: 1 << 18 };
        let batch = Batch::new(pool, shape, Box::new(Owned::new(shape, 1))).expect("a batch");
        let tenant =
            pool.ledger().create(ROOT, &format!("tenant{thread}"), &Policy::default()).expect("a tenant");
        let mut this = Self {
            pool: Arc::clone(pool),
            batch,
            sequences: Vec::new(),
            tenant,
            sampled: publishing.then(|| vec![7; ROWS]),
            thread,
        };
        this.restart();
        this
    }
}

impl Steps for Ours {
    fn step(&mut self) {
        self.batch.step(None, None, |step| assert!(step.refused.is_empty())).expect("a step");
    }

    fn commit(&mut self) {
        self.batch.commit(self.sampled.as_deref()).expect("a commit");
    }

    fn restart(&mut self) {
        for sequence in self.sequences.drain(..) {
            self.batch.remove(&sequence).expect("a row");
        }
        for row in 0..ROWS as u32 {
            let start = START + row % PAGE;
            let tokens = (0..start).map(|t| (self.thread * 1000 + row) * 10_000 + t).collect();
            let sequence = self
                .pool
                .open(self.tenant, Open { tokens, max_new_tokens: LONGEST - start, ..Open::default() })
                .expect("opens");
            self.batch.add(&sequence).expect("a row");
            self.sequences.push(sequence);
        }
        self.step();
        self.commit();
    }
}

/// The same books as a scheduler would write them first: free pages and charges behind one mutex, held for a step.
struct Books {
    free: Vec<u32>,
    /// Charged per tenant, its team and the pool.
    charged: [u64; 3],
    limit: u64,
}

struct Locked {
    books: Arc<Mutex<Books>>,
    slots: Vec<u32>,
    written: Vec<u32>,
    counts: Vec<u32>,
    outstanding: VecDeque<Vec<u32>>,
    tables: Vec<Vec<u32>>,
    tokens: Vec<Vec<u32>>,
    block_table: Vec<i32>,
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    positions: Vec<i32>,
    slot_mapping: Vec<i64>,
}

impl Locked {
    fn new(books: &Arc<Mutex<Books>>) -> Self {
        let mut this = Self {
            books: Arc::clone(books),
            slots: vec![0; ROWS],
            written: vec![0; ROWS],
            counts: Vec::with_capacity(ROWS),
            outstanding: VecDeque::new(),
            tables: (0..ROWS).map(|_| Vec::with_capacity((LONGEST / PAGE) as usize)).collect(),
            tokens: (0..ROWS).map(|_| Vec::with_capacity(LONGEST as usize)).collect(),
            block_table: vec![0; ROWS * (LONGEST / PAGE) as usize],
            seq_lens: vec![0; ROWS],
            query_start_loc: vec![0; ROWS + 1],
            positions: vec![0; ROWS],
            slot_mapping: vec![0; ROWS],
        };
        this.restart();
        this
    }

    fn take(books: &mut Books) -> u32 {
        assert!(books.charged.iter().all(|&c| c < books.limit), "sized for the job");
        books.charged.iter_mut().for_each(|c| *c += 1);
        books.free.pop().expect("sized for the job")
    }
}

impl Steps for Locked {
    fn step(&mut self) {
        let width = (LONGEST / PAGE) as usize;
        let mut books = self.books.lock().expect("no thread died");
        self.counts.clear();
        for row in 0..ROWS {
            self.counts.push((self.tokens[row].len() as u32).saturating_sub(self.slots[row]).max(1));
        }
        let mut at = 0;
        for row in 0..ROWS {
            for _ in 0..self.counts[row] {
                let slot = self.slots[row];
                if slot as usize == self.tables[row].len() * PAGE as usize {
                    let page = Self::take(&mut books);
                    self.block_table[row * width + self.tables[row].len()] = page as i32;
                    self.tables[row].push(page);
                }
                let page = self.tables[row][(slot / PAGE) as usize];
                self.slot_mapping[at] = i64::from(page * PAGE + slot % PAGE);
                self.positions[at] = slot as i32;
                self.slots[row] = slot + 1;
                at += 1;
            }
            self.seq_lens[row] = self.slots[row] as i32;
            self.query_start_loc[row + 1] = at as i32;
        }
        self.outstanding.push_back(self.counts.clone());
        black_box((&mut self.slot_mapping, &mut self.block_table, &mut self.query_start_loc));
    }

    fn commit(&mut self) {
        let counts = self.outstanding.pop_front().expect("a step comes first");
        for (row, count) in counts.into_iter().enumerate() {
            self.written[row] += count;
            // Nobody says what was sampled: the token is counted.
            self.tokens[row].resize(self.written[row] as usize, 0);
        }
    }

    fn restart(&mut self) {
        let mut books = self.books.lock().expect("no thread died");
        for row in 0..ROWS {
            let freed = self.tables[row].len() as u64;
            books.free.append(&mut self.tables[row]);
            books.charged.iter_mut().for_each(|c| *c -= freed);
            self.slots[row] = START + row as u32 % PAGE;
            self.written[row] = self.slots[row];
            self.tokens[row].clear();
            self.tokens[row].resize(self.slots[row] as usize, 7);
            while self.tables[row].len() * (PAGE as usize) < self.slots[row] as usize {
                let page = Self::take(&mut books);
                self.tables[row].push(page);
            }
        }
    }
}

/// The CPU time of this thread so far, in ns: on a machine that others use too, wall time says nothing about scaling.
fn cpu() -> Option<u64> {
    std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}

/// Makes a side for a thread.
type Make<'a> = &'a (dyn Fn(usize) -> Box<dyn Steps> + Sync);

/// Steps a second of CPU time, of all threads together, and every step's time in ns, sorted.
fn run(threads: usize, time: Duration, make: Make<'_>) -> (f64, Vec<u64>) {
    let barrier = Barrier::new(threads);
    let results = thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|t| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let mut side = make(t);
                    let mut times = Vec::with_capacity(1 << 20);
                    let steps_to_end = LONGEST - START - PAGE - 8;
                    // Memory is touched for the first time here, and not on the clock.
                    for _ in 0..steps_to_end {
                        side.step();
                        side.commit();
                    }
                    side.restart();
                    barrier.wait();
                    let from = cpu();
                    let mut busy = Duration::ZERO;
                    'all: loop {
                        for _ in 0..steps_to_end {
                            let start = Instant::now();
                            side.step();
                            times.push(start.elapsed().as_nanos() as u64);
                            side.commit();
                            busy += start.elapsed();
                            if busy > time {
                                break 'all;
                            }
                        }
                        side.restart();
                    }
                    let spent = cpu().zip(from).map_or(busy.as_nanos() as u64, |(to, from)| to - from);
                    // What taking the times and beginning anew cost counts too, on every side alike.
                    (times.len() as f64 / (spent as f64 / 1e9), times)
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().expect("a thread")).collect::<Vec<_>>()
    });
    let rate = results.iter().map(|r| r.0).sum();
    let mut times: Vec<u64> = results.into_iter().flat_map(|r| r.1).collect();
    times.sort_unstable();
    (rate, times)
}

fn main() {
    let books = |threads: usize| {
        let pages = threads as u32 * ROWS as u32 * (LONGEST / PAGE + 1);
        Arc::new(Mutex::new(Books {
            free: (0..pages).rev().collect(),
            charged: [0; 3],
            limit: u64::from(pages),
        }))
    };
    println!(
        "{:<10} {:>7} {:>14} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "books", "threads", "steps/cpu s", "p50 us", "p99 us", "p99.9 us", "p99.99 us", "worst us"
    );
    let mut tails = Vec::new();
    let mut rates = Vec::new();
    for threads in [1, 2, 8] {
        let (pool_of_books, pool_of_pages) = (pool(threads), pool(threads));
        let locked = books(threads);
        let ours = |t: usize| Box::new(Ours::new(&pool_of_books, t as u32, false)) as Box<dyn Steps>;
        let publishing = |t: usize| Box::new(Ours::new(&pool_of_pages, t as u32, true)) as Box<dyn Steps>;
        let theirs = |_: usize| Box::new(Locked::new(&locked)) as Box<dyn Steps>;
        let sides: [(&str, Make<'_>); 3] =
            [("kvalloc", &ours), ("mutex", &theirs), ("publishing", &publishing)];
        for (name, make) in sides {
            let (rate, times) = run(threads, Duration::from_secs(3), make);
            let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize] as f64 / 1e3;
            println!(
                "{name:<10} {threads:>7} {rate:>14.0} {:>10.2} {:>10.2} {:>10.2} {:>10.2} {:>10.2}",
                at(0.5),
                at(0.99),
                at(0.999),
                at(0.9999),
                at(1.0)
            );
            rates.push((name, threads, rate));
            tails.push((name, threads, at(0.999)));
        }
        for pool in [pool_of_books, pool_of_pages] {
            let report = pool.audit();
            assert!(report.findings.is_empty(), "{report:?}");
        }
    }
    let rate = |name, threads| rates.iter().find(|r| r.0 == name && r.1 == threads).map_or(0.0, |r| r.2);
    let tail = |name| tails.iter().find(|r| r.0 == name && r.1 == 8).map_or(0.0, |r| r.2);
    println!(
        "two threads against one: kvalloc {:.2}, mutex {:.2}, publishing {:.2}",
        rate("kvalloc", 2) / rate("kvalloc", 1),
        rate("mutex", 2) / rate("mutex", 1),
        rate("publishing", 2) / rate("publishing", 1)
    );
    println!("p99.9 with 8 threads: kvalloc / mutex = {:.3}", tail("kvalloc") / tail("mutex"));
}

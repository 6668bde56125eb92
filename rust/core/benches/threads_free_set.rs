//! The free set against a `Mutex<Vec<u32>>`: claim and release, 1, 2 and 8 threads, one frame and 32 at a time.
//!
//! `cargo bench -p kvalloc-core --bench threads_free_set [seconds per row]`. Throughput is measured in bulk, latency per
//! operation (a claim or a release) in a run of its own, with the clock's cost in it. On Linux also the time on a core
//! per frame: what a busy machine takes away from the threads is not in it.
#![allow(clippy::print_stdout, reason = "the table is its result")]

use std::{
    hint::black_box,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kvalloc_core::{
    frame::{Arena, Slots},
    word::{FrameId, Lane, PageId, SizeId},
};

const FRAMES: u32 = 1 << 17;
const PAGE: u64 = 1 << 21;

/// One thread's view of a free set.
trait Set: Sync {
    type Item: Copy;
    fn claim(&self, lane: Lane, want: usize, out: &mut Vec<Self::Item>);
    fn release(&self, items: &[Self::Item]);
}

impl Set for Slots {
    type Item = PageId;
    fn claim(&self, lane: Lane, want: usize, out: &mut Vec<PageId>) {
        assert_eq!(Slots::claim(self, lane, want, out), want);
    }
    fn release(&self, items: &[PageId]) {
        match items {
            [one] => Slots::release(self, *one),
            many => self.release_many(many),
        }
        .expect("claimed");
    }
}

impl Set for Arena {
    type Item = FrameId;
    fn claim(&self, lane: Lane, want: usize, out: &mut Vec<FrameId>) {
        assert_eq!(Arena::claim(self, SizeId(0), lane, want, out), want);
    }
    fn release(&self, items: &[FrameId]) {
        match items {
            [one] => Arena::release(self, SizeId(0), *one),
            many => self.release_many(SizeId(0), many),
        }
        .expect("claimed");
    }
}

impl Set for Mutex<Vec<u32>> {
    type Item = u32;
    fn claim(&self, _: Lane, want: usize, out: &mut Vec<u32>) {
        let mut free = self.lock().expect("no panic");
        let keep = free.len() - want;
        out.extend(free.drain(keep..));
    }
    fn release(&self, items: &[u32]) {
        self.lock().expect("no panic").extend_from_slice(items);
    }
}

/// Runs `threads` threads until the time is over: what each of them counted.
fn run<R: Send>(threads: u8, time: Duration, work: impl Fn(u8, &AtomicBool) -> R + Sync) -> Vec<R> {
    let (stop, start) = (AtomicBool::new(false), Barrier::new(usize::from(threads) + 1));
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|lane| {
                let (stop, start, work) = (&stop, &start, &work);
                scope.spawn(move || {
                    start.wait();
                    work(lane, stop)
                })
            })
            .collect();
        start.wait();
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Nanoseconds this thread has spent on a core.
fn on_core() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(f64::NAN)
}

/// Frames a second, and nanoseconds on a core for each.
fn throughput<S: Set>(set: &S, threads: u8, batch: usize, time: Duration) -> (f64, f64) {
    let began = Instant::now();
    let counts = run(threads, time, |lane, stop| {
        let before = on_core();
        let (mut n, mut out) = (0u64, Vec::with_capacity(batch));
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..64 {
                set.claim(Lane(lane), batch, &mut out);
                set.release(black_box(&out));
                out.clear();
            }
            n += 64;
        }
        ((n * batch as u64) as f64, on_core() - before)
    });
    let seconds = began.elapsed().as_secs_f64();
    let frames: f64 = counts.iter().map(|c| c.0).sum();
    (frames / seconds, counts.iter().map(|c| c.1).sum::<f64>() / frames)
}

fn latency<S: Set>(set: &S, threads: u8, batch: usize, time: Duration) -> [f64; 3] {
    let mut all: Vec<u32> = run(threads, time, |lane, stop| {
        let (mut times, mut out) = (Vec::with_capacity(1 << 22), Vec::with_capacity(batch));
        while !stop.load(Ordering::Relaxed) && times.len() + 2 <= times.capacity() {
            let begin = Instant::now();
            set.claim(Lane(lane), batch, &mut out);
            let middle = Instant::now();
            set.release(black_box(&out));
            let end = Instant::now();
            out.clear();
            times.push((middle - begin).as_nanos() as u32);
            times.push((end - middle).as_nanos() as u32);
        }
        times
    })
    .concat();
    all.sort_unstable();
    let at = |share: f64| f64::from(all[(all.len() as f64 * share) as usize]);
    [at(0.5), at(0.999), f64::from(all[all.len() - 1])]
}

fn row<S: Set>(name: &str, threads: u8, batch: usize, time: Duration, make: impl Fn() -> S) {
    let (rate, cost) = throughput(&make(), threads, batch, time);
    let [median, tail, worst] = latency(&make(), threads, batch, time);
    println!(
        "{name:<16} {threads:>7} {batch:>6} {:>10.1} {:>10.2} {median:>9.0} {tail:>9.0} {:>9.1}",
        rate / 1e6,
        cost,
        worst / 1e3,
    );
}

fn arena(frames: u32, sizes: &[u64]) -> Arena {
    Arena::new(&kvalloc_core::spec::ArenaLayout {
        bytes: u64::from(frames) * PAGE,
        rounded_off: 0,
        extent_bytes: 512 * PAGE,
        extents: frames.div_ceil(512),
        sizes: sizes.to_vec(),
        reserved: PAGE,
    })
}

/// Nanoseconds a call takes, on average.
fn cost(times: u32, mut call: impl FnMut()) -> f64 {
    let began = Instant::now();
    (0..times).for_each(|_| call());
    began.elapsed().as_nanos() as f64 / f64::from(times)
}

/// What a full pool costs: ns a call, by the pool's size.
fn full(frames: u32) {
    let size = SizeId(0);
    let began = Instant::now();
    let arena = arena(frames, &[PAGE]);
    let built = began.elapsed();
    let mut held = Vec::with_capacity(frames as usize);
    while arena.claim(size, Lane(0), 4096, &mut held) > 0 {}
    let nothing = cost(10_000, || {
        let mut out = Vec::new();
        assert_eq!(arena.claim(size, Lane(3), 1, &mut out), 0);
    });
    let mut at = 0;
    let mut one = Vec::with_capacity(1);
    let swap = cost(100_000, || {
        at = (at + 7_919_003) % held.len();
        arena.release(size, held[at]).expect("claimed");
        arena.claim(size, Lane(0), 1, &mut one);
        held[at] = one.remove(0);
    });
    // Every 16th frame of the whole pool is free: batches of them.
    let free: Vec<_> = held.iter().copied().filter(|frame| frame.0 % 16 == 5).collect();
    arena.release_many(size, &free).expect("claimed");
    let mut out = Vec::with_capacity(free.len());
    let scattered = cost(1, || while arena.claim(size, Lane(5), 32, &mut out) > 0 {}) / free.len() as f64;
    let available = cost(1000, || assert_eq!(black_box(arena.available(size)), 0));
    println!(
        "{frames:>9} {:>9.2} {nothing:>9.0} {swap:>13.0} {scattered:>16.1} {available:>10.0}",
        built.as_secs_f64() * 1e3
    );
}

fn main() {
    let seconds = std::env::args().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(0.5);
    let time = Duration::from_secs_f64(seconds);
    println!("claim + release of a batch; ns a frame: time on a core for its claim and release");
    println!(
        "{:<16} {:>7} {:>6} {:>10} {:>10} {:>9} {:>9} {:>9}",
        "free set", "threads", "batch", "M frames/s", "ns/frame", "p50 ns", "p99.9 ns", "max us"
    );
    for batch in [1, 32] {
        for threads in [1, 2, 8] {
            row("slots", threads, batch, time, || Slots::new(FRAMES));
            row("arena", threads, batch, time, || arena(FRAMES, &[PAGE]));
            row("arena, 2 sizes", threads, batch, time, || arena(FRAMES, &[PAGE, PAGE / 2]));
            row("Mutex<Vec<u32>>", threads, batch, time, || {
                Mutex::new((0..FRAMES).rev().collect::<Vec<_>>())
            });
        }
    }
    println!("\na full arena, one thread, ns a call");
    println!(
        "{:>9} {:>9} {:>9} {:>13} {:>16} {:>10}",
        "frames", "build ms", "nothing", "free + claim", "scattered/frame", "available"
    );
    for frames in [1 << 12, 1 << 16, 1 << 20, 1 << 24] {
        full(frames);
    }
}

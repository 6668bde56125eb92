//! The only gate to atomics, and the only place where memory orderings are chosen.
//!
//! Everything shared in the core is an `AtomicU64` or an `AtomicU32`, used through the trait [`Atom`] alone. Its methods
//! fix the orderings once, so the algorithms carry no ordering decisions:
//!
//! | access | ordering | reason |
//! | --- | --- | --- |
//! | `get` | Acquire | whoever sees a word sees everything written before it was stored |
//! | `put` | Release | what was prepared for a word (a key, a location) is visible with it |
//! | `cas`, `transit`, `exchange`, `plus`, `minus`, `set`, `clear` | AcqRel / Acquire | a transition both hands over what came before and takes over what others handed over |
//! | `peek`, `tally` | Relaxed | a hint or a statistic: wrong by a moment costs a retry or nothing, never a page |
//!
//! No protocol in the core needs a single total order over two words: nearly every invariant is carried by one word, and where
//! two threads change one word each and must not both miss the other's (a step and a drain, frame/quiesce.rs; a page that is set
//! aside and its last child, evict.rs; a lowered limit and a stock, ledger/book.rs), each reads the other's word by adding to it
//! or exchanging it. So nothing is SeqCst and there are no stand-alone fences (ThreadSanitizer can't follow those).
//!
//! With `--cfg kvalloc_loom` the atomics are loom's, with `--cfg kvalloc_shuttle` shuttle's.

#[cfg(kvalloc_loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(kvalloc_shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(any(kvalloc_loom, kvalloc_shuttle)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[cfg(all(test, kvalloc_loom))]
pub(crate) use loom::sync::Arc;
#[cfg(kvalloc_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(all(test, kvalloc_shuttle))]
pub(crate) use shuttle::sync::Arc;
#[cfg(kvalloc_shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
#[cfg(not(any(kvalloc_loom, kvalloc_shuttle)))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// Lock one of the few mutexes that are waited for (policies, pins, limbo). A poisoned one is whole: nothing panics between
/// two steps of a change.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // ThreadSanitizer does not see what the standard library does to a thread that waits.
    #[cfg(kvalloc_tsan)]
    loop {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => pause(),
        }
    }
    #[cfg(not(kvalloc_tsan))]
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Lock a mutex if nobody has it: for those who must not wait.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(std::sync::TryLockError::WouldBlock) => None,
    }
}

/// Let another thread go first: for the few places that look again a bounded number of times at what others have in hand.
pub(crate) fn pause() {
    #[cfg(kvalloc_loom)]
    loom::thread::yield_now();
    #[cfg(kvalloc_shuttle)]
    shuttle::thread::yield_now();
    #[cfg(not(any(kvalloc_loom, kvalloc_shuttle)))]
    std::thread::yield_now();
}

/// The accesses the core uses, with their orderings (see the head of this file).
#[allow(dead_code, reason = "one vocabulary for both widths")]
pub(crate) trait Atom {
    type Int: Copy;
    fn get(&self) -> Self::Int;
    fn put(&self, value: Self::Int);
    /// The read that begins a compare-exchange loop.
    ///
    /// loom remembers one access of each word: after another thread's `get`, a `get` and `cas` of this thread would look
    /// as if only this thread had read, and loom would not try them in the other order. So there it is a compare-exchange
    /// that fails.
    fn first(&self) -> Self::Int;
    /// A relaxed read, for hints that a later `cas` checks.
    fn peek(&self) -> Self::Int;
    /// A relaxed add, for statistics.
    fn tally(&self, by: Self::Int);
    /// Compare-exchange; on failure the value found.
    fn cas(&self, from: Self::Int, to: Self::Int) -> Result<Self::Int, Self::Int>;
    /// Apply a pure transition until it sticks: the value before. `Err` holds the value that had no transition.
    fn transit(&self, f: impl FnMut(Self::Int) -> Option<Self::Int>) -> Result<Self::Int, Self::Int>;
    fn exchange(&self, value: Self::Int) -> Self::Int;
    /// Wrapping add; the value before.
    fn plus(&self, by: Self::Int) -> Self::Int;
    /// Wrapping subtract; the value before.
    fn minus(&self, by: Self::Int) -> Self::Int;
    /// Set bits; the value before.
    fn set(&self, bits: Self::Int) -> Self::Int;
    /// Clear bits; the value before.
    fn clear(&self, bits: Self::Int) -> Self::Int;
}

macro_rules! atom {
    ($atomic:ident, $int:ty) => {
        impl Atom for $atomic {
            type Int = $int;
            #[inline]
            fn get(&self) -> $int {
                self.load(Ordering::Acquire)
            }
            #[inline]
            fn put(&self, value: $int) {
                self.store(value, Ordering::Release);
            }
            #[inline]
            #[cfg(not(kvalloc_loom))]
            fn first(&self) -> $int {
                self.get()
            }
            #[cfg(kvalloc_loom)]
            fn first(&self) -> $int {
                let unlikely = <$int>::MAX / 3;
                match self.cas(unlikely, unlikely) {
                    Ok(now) | Err(now) => now,
                }
            }
            #[inline]
            fn peek(&self) -> $int {
                self.load(Ordering::Relaxed)
            }
            #[inline]
            fn tally(&self, by: $int) {
                self.fetch_add(by, Ordering::Relaxed);
            }
            #[inline]
            fn cas(&self, from: $int, to: $int) -> Result<$int, $int> {
                self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            }
            #[inline]
            fn transit(&self, mut f: impl FnMut($int) -> Option<$int>) -> Result<$int, $int> {
                let mut now = self.first();
                loop {
                    let Some(next) = f(now) else { return Err(now) };
                    match self.cas(now, next) {
                        Ok(_) => return Ok(now),
                        Err(found) => now = found,
                    }
                }
            }
            #[inline]
            fn exchange(&self, value: $int) -> $int {
                self.swap(value, Ordering::AcqRel)
            }
            #[inline]
            fn plus(&self, by: $int) -> $int {
                self.fetch_add(by, Ordering::AcqRel)
            }
            #[inline]
            fn minus(&self, by: $int) -> $int {
                self.fetch_sub(by, Ordering::AcqRel)
            }
            #[inline]
            fn set(&self, bits: $int) -> $int {
                self.fetch_or(bits, Ordering::AcqRel)
            }
            #[inline]
            fn clear(&self, bits: $int) -> $int {
                self.fetch_and(!bits, Ordering::AcqRel)
            }
        }
    };
}

atom!(AtomicU64, u64);
atom!(AtomicU32, u32);

/// A zeroed array of words that begins on a cache line; a slice of atomics through `Deref`.
///
/// Zeroed memory comes from the system untouched, so a pool of a million pages costs address space until it is used:
/// every word of the core means "empty" or "free" when it is 0.
#[derive(Debug)]
pub(crate) struct Words {
    raw: Box<[AtomicU64]>,
    start: usize,
}

impl Words {
    #[cfg(not(any(kvalloc_loom, kvalloc_shuttle)))]
    pub(crate) fn zeroed(len: usize) -> Self {
        // Up to seven words too many, before and behind: callers index below `len`.
        let raw: Box<[AtomicU64]> = bytemuck::zeroed_slice_box(len + 7);
        let start = (raw.as_ptr() as usize).wrapping_neg() % 64 / 8;
        Self { raw, start }
    }

    /// Whether there is memory for arrays of these lengths, all at once: [`Self::zeroed`] panics where there is none.
    #[cfg(not(any(kvalloc_loom, kvalloc_shuttle)))]
    pub(crate) fn fit(lens: &[usize]) -> bool {
        let arrays: Result<Vec<Box<[AtomicU64]>>, ()> =
            lens.iter().map(|&len| bytemuck::try_zeroed_slice_box(len)).collect();
        arrays.is_ok()
    }

    #[cfg(any(kvalloc_loom, kvalloc_shuttle))]
    pub(crate) fn fit(_lens: &[usize]) -> bool {
        true
    }

    #[cfg(any(kvalloc_loom, kvalloc_shuttle))]
    pub(crate) fn zeroed(len: usize) -> Self {
        Self { raw: (0..len).map(|_| AtomicU64::new(0)).collect(), start: 0 }
    }
}

/// A zeroed array of half words, as [`Words::zeroed`].
#[cfg(not(any(kvalloc_loom, kvalloc_shuttle)))]
pub(crate) fn zeroed_halves(len: usize) -> Box<[AtomicU32]> {
    bytemuck::zeroed_slice_box(len)
}

#[cfg(any(kvalloc_loom, kvalloc_shuttle))]
pub(crate) fn zeroed_halves(len: usize) -> Box<[AtomicU32]> {
    (0..len).map(|_| AtomicU32::new(0)).collect()
}

impl std::ops::Deref for Words {
    type Target = [AtomicU64];
    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        &self.raw[self.start..]
    }
}

//! Sums beside threads that count: never an effect without its cause, never less than before. (A whole snapshot is too
//! many loads for a model; it reads these sums in this order.)

use super::{Counter, Lookup, Stats, TenantCounter};
use crate::{
    sync::Arc,
    word::{Lane, TenantId},
};
use loom::thread;

#[test]
fn a_hit_is_never_ahead_of_its_query() {
    loom::model(|| {
        let stats = Arc::new(Stats::new(1));
        let counting = {
            let stats = stats.clone();
            thread::spawn(move || {
                for lane in 0..2 {
                    stats.count_lookup(Lane(lane), TenantId(0), &mut Lookup::new(3, 3, false));
                }
            })
        };
        let tenant = stats.tenant_snapshot(TenantId(0));
        assert!(tenant.get(TenantCounter::HitTokens) <= tenant.get(TenantCounter::QueryTokens));
        let hits = stats.sum(Counter::HitTokens);
        assert!(hits <= stats.sum(Counter::QueryTokens));
        assert!(hits <= stats.sum(Counter::HitTokens));
        counting.join().expect("it counts");
        assert_eq!(stats.sum(Counter::HitTokens), 6);
    });
}

/// Allocated on one lane, released on another by whoever got the page.
#[test]
fn a_release_is_never_ahead_of_its_allocation() {
    loom::model(|| {
        let stats = Arc::new(Stats::new(1));
        let counting = {
            let stats = stats.clone();
            thread::spawn(move || {
                stats.count(Lane(0), Counter::PagesAllocated, 1);
                let stats = stats.clone();
                thread::spawn(move || stats.count(Lane(1), Counter::PagesReleased, 1))
                    .join()
                    .expect("it counts");
            })
        };
        let released = stats.sum(Counter::PagesReleased);
        assert!(released <= stats.sum(Counter::PagesAllocated));
        counting.join().expect("it counts");
    });
}

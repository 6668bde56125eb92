use std::{collections::HashSet, thread};

use super::*;

#[test]
fn every_counter_names_itself_once() {
    let names: HashSet<_> = Counter::ALL.iter().map(|c| c.name()).collect();
    assert_eq!(names.len(), Counter::ALL.len());
    let tenant_names: HashSet<_> = TenantCounter::ALL.iter().map(|c| c.name()).collect();
    assert_eq!(tenant_names.len(), TenantCounter::ALL.len());
    for (index, counter) in Counter::ALL.iter().enumerate() {
        assert_eq!(*counter as usize, index);
        assert!(counter.help().ends_with('.'), "{counter:?}");
    }
    for name in names.union(&tenant_names) {
        assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{name}");
    }
}

#[test]
fn lanes_are_added_up() {
    let stats = Stats::new(1);
    for lane in 0..LANES as u64 {
        stats.count(Lane::wrapped(lane), Counter::Steps, lane + 1);
    }
    let snapshot = stats.snapshot().with(Counter::EventsDropped, 9);
    let expected = (LANES * (LANES + 1) / 2) as u64;
    for (counter, value) in snapshot.iter() {
        match counter {
            Counter::Steps => assert_eq!(value, expected),
            Counter::EventsDropped => assert_eq!(value, 9),
            _ => assert_eq!(value, 0, "{counter:?}"),
        }
    }
    assert_eq!(snapshot.hit_rate(), None);
}

#[test]
fn a_lookup_is_counted_once_however_often_it_is_tried() {
    let stats = Stats::new(4);
    let tenant = TenantId(3);
    let mut first = Lookup::new(100, 48, false);
    let mut resumed = Lookup::new(110, 96, true);
    for attempt in 0..100 {
        stats.count_lookup(Lane::wrapped(attempt), tenant, &mut first);
        stats.count_lookup(Lane::wrapped(attempt), tenant, &mut resumed);
    }
    let pool = stats.snapshot();
    assert_eq!((pool.get(Counter::QueryTokens), pool.get(Counter::HitTokens)), (100, 48));
    assert_eq!((pool.get(Counter::ResumedQueryTokens), pool.get(Counter::ResumedHitTokens)), (110, 96));
    assert_eq!(pool.hit_rate(), Some(0.48));
    let tenant = stats.tenant_snapshot(tenant);
    assert_eq!(tenant.get(TenantCounter::ResumedHitTokens), 96);
    assert_eq!(tenant.hit_rate(), Some(0.48));
    assert!(stats.tenant_snapshot(TenantId(2)).iter().all(|(_, value)| value == 0));
}

#[test]
fn a_removed_tenants_number_starts_anew() {
    let stats = Stats::new(2);
    stats.count_for(TenantId(1), TenantCounter::Waited, 3);
    stats.count_for(TenantId(0), TenantCounter::Waited, 5);
    assert_eq!(stats.tenant_snapshot(TenantId(1)).get(TenantCounter::Waited), 3);
    stats.forget(TenantId(1));
    assert_eq!(stats.tenant_snapshot(TenantId(1)).get(TenantCounter::Waited), 0);
    assert_eq!(stats.tenant_snapshot(TenantId(0)).get(TenantCounter::Waited), 5);
    assert_eq!(stats.tenant_snapshot(TenantId(u32::MAX)).get(TenantCounter::Waited), 0);
}

#[test]
fn grows_only_and_no_effect_ahead_of_its_cause() {
    const EACH: u32 = 20_000;
    let stats = Stats::new(1);
    thread::scope(|scope| {
        for lane in 0..2 {
            let stats = &stats;
            scope.spawn(move || {
                for _ in 0..EACH {
                    stats.count_lookup(Lane(lane), TenantId(0), &mut Lookup::new(16, 16, false));
                }
            });
        }
        let mut before = stats.snapshot();
        while before.get(Counter::HitTokens) < u64::from(2 * 16 * EACH) {
            let now = stats.snapshot();
            assert!(now.iter().zip(before.iter()).all(|(now, before)| now.1 >= before.1));
            assert!(now.get(Counter::HitTokens) <= now.get(Counter::QueryTokens));
            let tenant = stats.tenant_snapshot(TenantId(0));
            assert!(tenant.get(TenantCounter::HitTokens) <= tenant.get(TenantCounter::QueryTokens));
            before = now;
        }
    });
}

//! The ledger's rules one by one, and threads.

use std::thread;

use super::*;

const DEV: Tier = Tier::Device;

fn lane(n: u64) -> Lane {
    Lane::wrapped(n)
}

fn ledger(capacity: u32, stock: u32) -> Ledger {
    Ledger::new([Units(capacity), Units(capacity)], 32, Units(stock)).expect("small")
}

fn policy(reserve: u32, limit: Option<u32>) -> Policy {
    Policy { reserve: [Units(reserve), Units(0)], limit: [limit.map(Units), None], ..Policy::default() }
}

fn tenant(ledger: &Ledger, name: &str, reserve: u32, limit: Option<u32>) -> TenantId {
    ledger.create(ROOT, name, &policy(reserve, limit)).expect("fits")
}

fn charge(ledger: &Ledger, tenant: TenantId, n: u32) -> Result<(), Refused> {
    ledger.charge(DEV, tenant, lane(0), Units(n))
}

fn is_balanced(usage: &Usage) -> bool {
    let sum = usage.held.0 + usage.cached.0 + usage.pinned.0 + usage.promised.0 + usage.stock.0;
    sum == usage.charged.0 && usage.missing.0 == 0
}

#[test]
fn a_limit_names_its_level_and_its_room() {
    let ledger = ledger(100, 0);
    let org = tenant(&ledger, "org", 0, Some(10));
    let user = ledger.create(org, "user", &policy(0, Some(50))).expect("may exceed the parent's");
    charge(&ledger, user, 8).expect("room");
    let refused = charge(&ledger, user, 3).expect_err("the parent's limit holds");
    assert_eq!((refused.level, refused.why), (org, Why::Limit));
    assert_eq!((refused.asked, refused.room, refused.limit), (Units(3), Units(2), Units(10)));
    assert_eq!(
        refused.to_string(),
        "T2 asked for 3 units on Device; T1 has room for 2 below its limit of 10"
    );
    assert_eq!(ledger.usage(DEV, user).charged, Units(8));
    assert_eq!(ledger.usage(DEV, ROOT).subtree, Units(8));
}

/// Each tier's limit is its own, stocks count in it, and lowered below use it breaks nobody.
#[test]
fn a_limit_of_the_host_tier_bounds_that_one_alone() {
    for stock in [0, 2] {
        let ledger = ledger(1000, stock);
        let with_host = |n| Policy { limit: [Some(Units(5)), Some(Units(n))], ..Policy::default() };
        let org = ledger.create(ROOT, "org", &with_host(50)).expect("fits");
        let user = ledger.create(org, "user", &Policy::default()).expect("fits");
        let host = |n| ledger.charge(Tier::Host, user, lane(0), Units(n));
        host(40).expect("room");
        charge(&ledger, user, 5).expect("room");
        let refused = charge(&ledger, user, 1).expect_err("the device's");
        assert_eq!((refused.tier, refused.level, refused.limit), (DEV, org, Units(5)));
        let refused = host(11).expect_err("the host's");
        assert_eq!(
            (refused.tier, refused.level, refused.why, refused.room),
            (Tier::Host, org, Why::Limit, Units(10))
        );
        host(10).expect("to the last unit, whatever lies in stock");
        ledger.set_policy(org, &with_host(20)).expect("a limit may lie below use");
        assert_eq!(ledger.policy(org).expect("lives").limit, [Some(Units(5)), Some(Units(20))]);
        assert_eq!(ledger.charged(Tier::Host, org), Units(50));
        for n in (0..15).map(|n| 50 - 2 * n) {
            assert_eq!(host(1).map_err(|r| r.level), Err(org), "{n} are charged");
            ledger.discharge(Tier::Host, user, lane(0), Units(2));
        }
        assert_eq!(host(1).map_err(|r| r.room), Err(Units(0)), "exactly the limit");
        ledger.discharge(Tier::Host, user, lane(0), Units(1));
        host(1).expect("below it");
        ledger.discharge(Tier::Host, user, lane(0), Units(20));
        ledger.discharge(DEV, user, lane(0), Units(5));
        ledger.remove(ledger.now(user), || ()).expect("empty");
    }
}

#[test]
fn a_reserve_is_there_at_once() {
    let ledger = ledger(100, 0);
    let quiet = tenant(&ledger, "quiet", 30, None);
    let noisy = tenant(&ledger, "noisy", 0, None);
    charge(&ledger, noisy, 70).expect("all but the reserve");
    let refused = charge(&ledger, noisy, 5).expect_err("the reserve is not his");
    assert_eq!((refused.level, refused.why, refused.room), (ROOT, Why::Claim, Units(0)));
    charge(&ledger, quiet, 30).expect("its reserve");
    assert_eq!(charge(&ledger, quiet, 1).expect_err("full").why, Why::Limit);
}

#[test]
fn cached_pages_may_lie_in_anothers_reserve() {
    let ledger = ledger(100, 0);
    let quiet = tenant(&ledger, "quiet", 30, None);
    let noisy = tenant(&ledger, "noisy", 0, None);
    charge(&ledger, noisy, 70).expect("room");
    ledger.park(DEV, noisy, Units(40));
    charge(&ledger, noisy, 30).expect("it holds 30, claims 60");
    let refused = charge(&ledger, quiet, 30).expect_err("cached pages lie there");
    assert_eq!((refused.level, refused.why), (ROOT, Why::Limit));
    assert_eq!(ledger.worst(DEV, refused.level, |_| false), Some(noisy));
    ledger.drop_cached(DEV, noisy, Units(30));
    charge(&ledger, quiet, 30).expect("at once");
    let refused = ledger.revive(DEV, noisy, Units(11)).expect_err("a hit is an allocation");
    assert_eq!((refused.why, refused.room), (Why::Claim, Units(10)));
    ledger.revive(DEV, noisy, Units(10)).expect("within");
}

#[test]
fn a_reserve_below_a_limit_is_there_too() {
    let ledger = ledger(100, 0);
    let org = tenant(&ledger, "org", 0, Some(10));
    let a = ledger.create(org, "a", &policy(8, None)).expect("fits");
    let b = ledger.create(org, "b", &policy(0, None)).expect("fits");
    charge(&ledger, b, 2).expect("beside the reserve");
    let refused = charge(&ledger, b, 1).expect_err("would reach into a's reserve");
    assert_eq!((refused.level, refused.why, refused.limit), (org, Why::Claim, Units(10)));
    charge(&ledger, a, 8).expect("its reserve");
}

#[test]
fn i45_limits_reserves_and_capacity_against_each_other() {
    let ledger = ledger(100, 4);
    let a = tenant(&ledger, "a", 60, Some(500));
    // Sum of reserves above the capacity: refused with the shortfall.
    let error = ledger.create(ROOT, "b", &policy(50, None)).expect_err("10 too many");
    assert_eq!(error, LedgerError::Reserve { tier: DEV, asked: Units(50), level: ROOT, short: Units(10) });
    assert_eq!((ledger.len(), ledger.find("b")), (1, None));
    let b = tenant(&ledger, "b", 40, None);
    assert_eq!((a, b), (TenantId(1), TenantId(2)));
    // A limit above the capacity: the capacity holds.
    assert_eq!(charge(&ledger, a, 61).expect_err("the rest is reserved").room, Units(60));
    // A limit below the reserve: refused with both.
    let error = ledger.set_policy(a, &policy(60, Some(59))).expect_err("contradiction");
    assert_eq!(error, LedgerError::LimitBelowReserve { tier: DEV, limit: Units(59), reserve: Units(60) });
    // A limit lowered below use: nothing live is broken.
    charge(&ledger, a, 50).expect("reserved");
    ledger.set_policy(a, &policy(0, Some(20))).expect("allowed");
    let refused = charge(&ledger, a, 1).expect_err("above the limit");
    assert_eq!((refused.level, refused.why, refused.room), (a, Why::Limit, Units(0)));
    assert_eq!(ledger.usage(DEV, a).held, Units(50));
    ledger.discharge(DEV, a, lane(0), Units(40));
    charge(&ledger, a, 10).expect("below again");
    // The capacity shrinks: below the reserves it is refused, below use it is not.
    let error = ledger.set_capacity(DEV, Units(39)).expect_err("40 are reserved");
    assert!(matches!(error, LedgerError::LimitBelowReserves { reserves: Units(40), .. }));
    ledger.set_capacity(DEV, Units(50)).expect("allowed");
    assert_eq!(ledger.room(DEV, a, Units(1)).now, Units(0));
    charge(&ledger, b, 20).expect("inside its reserve, and 40 are charged");
    assert_eq!(ledger.usage(DEV, ROOT).subtree.0 - ledger.usage(DEV, b).stock.0, 40);
}

#[test]
fn a_reserve_moves_back_and_forth_and_nothing_is_lost() {
    let ledger = ledger(100, 4);
    let (a, b) = (tenant(&ledger, "a", 0, None), tenant(&ledger, "b", 0, None));
    charge(&ledger, b, 40).expect("room");
    for reserve in [60, 0, 30, 60, 10, 0] {
        ledger.set_policy(a, &policy(reserve, None)).expect("beside 40");
        assert_eq!(ledger.usage(DEV, a).claim, Units(reserve));
    }
    let error = ledger.set_policy(a, &policy(61, None)).expect_err("40 are held");
    assert_eq!(error, LedgerError::Reserve { tier: DEV, asked: Units(61), level: ROOT, short: Units(1) });
    assert_eq!(ledger.usage(DEV, ROOT).claim, Units(40));
    // Both tiers or none.
    let both = Policy { reserve: [Units(50), Units(101)], ..Policy::default() };
    assert!(matches!(ledger.set_policy(a, &both), Err(LedgerError::Reserve { tier: Tier::Host, .. })));
    assert_eq!(ledger.policy(a), Some(Policy::default()));
}

#[test]
fn stocks_make_nobody_fail() {
    // Comfortable: 100,000 units and stocks of 8. Then everything is taken but what lies in stock.
    let ledger = ledger(100_000, 8);
    let tenants: Vec<_> = (0..4).map(|i| tenant(&ledger, &format!("t{i}"), 0, None)).collect();
    for &t in &tenants {
        for l in 0..LANES_HERE {
            ledger.charge(DEV, t, lane(l), Units(1)).expect("room");
        }
    }
    let stock: u32 = tenants.iter().map(|&t| ledger.usage(DEV, t).stock.0).sum();
    assert_eq!(stock, 4 * LANES_HERE as u32 * 8);
    let held = 4 * LANES_HERE as u32;
    charge(&ledger, tenants[0], 100_000 - held - 1).expect("stocks are drained");
    ledger.charge(DEV, tenants[3], lane(3), Units(1)).expect("the last one");
    assert_eq!(charge(&ledger, tenants[1], 1).expect_err("full").room, Units(0));
    for &t in &tenants {
        assert!(is_balanced(&ledger.usage(DEV, t)));
    }
}
const LANES_HERE: u64 = 16;

#[test]
fn a_promise_is_kept_and_given_back() {
    let ledger = ledger(20, 2);
    let t = tenant(&ledger, "t", 0, None);
    ledger.promise(DEV, t, lane(1), Units(15)).expect("room");
    assert_eq!(charge(&ledger, t, 6).expect_err("promised").room, Units(5));
    ledger.charge_promised(DEV, t, lane(2), Units(4));
    let usage = ledger.usage(DEV, t);
    assert_eq!((usage.held, usage.promised, usage.charged), (Units(4), Units(11), Units(15)));
    ledger.discharge_promised(DEV, t, lane(3), Units(1));
    ledger.unpromise(DEV, t, lane(3), Units(12));
    ledger.discharge(DEV, t, lane(1), Units(3));
    charge(&ledger, t, 20).expect("all is back");
    let refused = ledger.promise(DEV, t, lane(0), Units(1)).expect_err("full");
    assert_eq!(refused.why, Why::Limit);
    assert_eq!(ledger.usage(DEV, t).promised, Units(0));
}

#[test]
fn pins_are_hard() {
    let ledger = ledger(100, 0);
    let t = tenant(&ledger, "t", 0, None);
    charge(&ledger, t, 10).expect("room");
    ledger.park(DEV, t, Units(4));
    ledger.to_pinned(DEV, t, Units(6));
    ledger.revive_pinned(DEV, t, Units(1)).expect("room");
    let usage = ledger.usage(DEV, t);
    assert_eq!(
        (usage.held, usage.cached, usage.pinned, usage.claim),
        (Units(0), Units(3), Units(7), Units(7))
    );
    ledger.from_pinned(DEV, t, Units(2));
    ledger.park_pinned(DEV, t, Units(5));
    let usage = ledger.usage(DEV, t);
    assert_eq!(
        (usage.held, usage.cached, usage.pinned, usage.claim),
        (Units(2), Units(8), Units(0), Units(2))
    );
}

#[test]
fn j51_bookings_in_the_other_order_show_nothing_negative() {
    let ledger = ledger(100, 0);
    let t = tenant(&ledger, "t", 0, None);
    charge(&ledger, t, 5).expect("room");
    // One thread lets go of a page; before it books, another takes the cached page, and a third evicts another.
    ledger.revive(DEV, t, Units(2)).expect("room");
    ledger.drop_cached(DEV, t, Units(1));
    let usage = ledger.usage(DEV, t);
    assert_eq!((usage.held, usage.cached, usage.charged), (Units(4), Units(0), Units(4)));
    assert!(is_balanced(&usage));
    ledger.park(DEV, t, Units(3));
    let usage = ledger.usage(DEV, t);
    assert_eq!((usage.held, usage.cached, usage.claim), (Units(4), Units(0), Units(4)));
    // More is given back than there was: nothing changes and it is counted.
    ledger.discharge(DEV, t, lane(0), Units(5));
    assert_eq!((ledger.usage(DEV, t), ledger.faults()), (usage, 1));
}

#[test]
fn i48_whose_cached_pages_go_first() {
    let ledger = ledger(1000, 0);
    let add = |parent, name: &str, reserve, weight, priority| {
        let policy = Policy { weight, priority, ..policy(reserve, None) };
        ledger.create(parent, name, &policy).expect("fits")
    };
    let quiet = add(ROOT, "quiet", 100, 1, 50);
    let noisy = add(ROOT, "noisy", 0, 1, 50);
    let heavy = add(ROOT, "heavy", 0, 4, 50);
    let org = add(ROOT, "org", 200, 1, 50);
    let user = add(org, "user", 0, 1, 50);
    for (t, n) in [(quiet, 90), (noisy, 50), (heavy, 160), (user, 150)] {
        charge(&ledger, t, n).expect("room");
        ledger.park(DEV, t, Units(n));
    }
    let worst = |gone: &[TenantId]| ledger.worst(DEV, ROOT, |t| gone.contains(&t));
    assert_eq!(worst(&[]), Some(noisy), "50 / 1 is more than 160 / 4");
    assert_eq!(worst(&[noisy]), Some(heavy));
    assert_eq!(worst(&[noisy, heavy]), Some(quiet), "10 below its reserve; the org is 50 below");
    assert_eq!(worst(&[noisy, heavy, quiet]), Some(user));
    assert_eq!(worst(&[noisy, heavy, quiet, user]), None);
    assert_eq!(ledger.worst(DEV, org, |_| false), Some(user));
    ledger.drop_cached(DEV, noisy, Units(10));
    assert_eq!(worst(&[]), Some(noisy), "equal: the lower id");
    ledger.set_policy(noisy, &Policy { priority: 60, ..Policy::default() }).expect("valid");
    assert_eq!(worst(&[]), Some(heavy), "equal: the lower priority");
}

#[test]
fn i49_names_and_numbers_are_refused_with_their_rule() {
    let ledger = ledger(100, 0);
    let long = "x".repeat(129);
    let bad = [
        ("", NameRule::Empty),
        (long.as_str(), NameRule::Long),
        ("a\u{7}b", NameRule::Control),
        ("a\nb", NameRule::Control),
        ("a\u{202e}b", NameRule::Invisible),
        ("\u{61c}", NameRule::Invisible),
        ("\u{180e}", NameRule::Invisible),
        ("a\u{fe0f}", NameRule::Invisible),
        ("\u{3164}", NameRule::Invisible),
        ("\u{2800}", NameRule::Invisible),
        ("\u{115f}", NameRule::Invisible),
        ("\u{e0041}", NameRule::Invisible),
        ("a/b", NameRule::Slash),
        ("..", NameRule::Dots),
        (" a", NameRule::Blank),
        ("a\u{3000}", NameRule::Blank),
    ];
    for (name, rule) in bad {
        let error = ledger.create(ROOT, name, &Policy::default()).expect_err("no name");
        assert_eq!(error, LedgerError::Name { name: name.into(), rule });
    }
    let name = "\u{fc}".repeat(64);
    let t = tenant(&ledger, &name, 0, None);
    assert_eq!((ledger.name(t), ledger.find(&name)), (Some(name.clone()), Some(t)));
    let error = ledger.create(t, &name, &Policy::default()).expect_err("taken");
    assert_eq!(error, LedgerError::Exists { name, tenant: t });
    let set = |policy| ledger.set_policy(t, &policy);
    assert_eq!(set(Policy { weight: 0, ..Policy::default() }), Err(LedgerError::Weight));
    assert_eq!(set(Policy { priority: 101, ..Policy::default() }), Err(LedgerError::Priority { given: 101 }));
    let scope = TenantId(9);
    let stranger = Policy { publish: vec![(scope, None)], ..Policy::default() };
    assert_eq!(set(stranger), Err(LedgerError::Scope { scope }));
    assert_eq!(ledger.set_policy(ROOT, &Policy::default()), Err(LedgerError::Root));
    assert_eq!(
        ledger.create(TenantId(7), "x", &Policy::default()),
        Err(LedgerError::Unknown { tenant: TenantId(7) })
    );
    for id in [7, 32, 33, u32::MAX] {
        let refused = charge(&ledger, TenantId(id), 1).expect_err("nobody");
        assert_eq!((refused.why, refused.room), (Why::Closed, Units(0)));
    }
    assert!(Ledger::new([Units(1 << 31), Units(0)], 1, Units(0)).is_err());
    assert_eq!(charge(&ledger, t, u32::MAX).expect_err("absurd").room, Units(100));
    assert_eq!(ledger.revive(DEV, t, Units(u32::MAX)).expect_err("absurd").why, Why::Claim);
}

#[test]
fn the_tree_has_an_end_in_both_directions() {
    let ledger = Ledger::new([Units(100); 2], 9, Units(0)).expect("small");
    let mut at = ROOT;
    for depth in 1..=MAX_DEPTH {
        at = ledger.create(at, &format!("d{depth}"), &Policy::default()).expect("levels left");
    }
    let error = ledger.create(at, "deeper", &Policy::default());
    assert_eq!(error, Err(LedgerError::TooDeep { max: MAX_DEPTH }));
    charge(&ledger, at, 100).expect("through all levels");
    assert_eq!(charge(&ledger, at, 1).expect_err("full").level, ROOT);
    tenant(&ledger, "ninth", 0, None);
    assert_eq!(ledger.create(ROOT, "tenth", &Policy::default()), Err(LedgerError::Full { max: 9 }));
    assert_eq!(ledger.subtree_usage(DEV, ROOT).held, Units(100));
}

#[test]
fn a_removed_tenant_leaves_nothing() {
    let ledger = Ledger::new([Units(10_000); 2], 2, Units(4)).expect("small");
    let org = tenant(&ledger, "org", 10, None);
    let user = ledger.create(org, "user", &policy(5, Some(50))).expect("fits");
    charge(&ledger, user, 1).expect("room");
    assert_eq!(ledger.remove(ledger.now(org), || ()), Err(LedgerError::HasChildren { children: 1 }));
    assert_eq!(
        ledger.remove(ledger.now(user), || ()),
        Err(LedgerError::NotEmpty { tier: DEV, charged: Units(1) })
    );
    charge(&ledger, user, 1).expect("as before");
    ledger.discharge(DEV, user, lane(5), Units(2));
    let old = ledger.now(user);
    ledger.remove(old, || ()).expect("its stocks are nobody's");
    assert_eq!(ledger.remove(old, || ()), Err(LedgerError::Unknown { tenant: user }));
    assert_eq!(charge(&ledger, user, 1).expect_err("gone").why, Why::Closed);
    assert_eq!((ledger.find("user"), ledger.name(user), ledger.policy(user)), (None, None, None));
    assert_eq!((ledger.len(), ledger.usage(DEV, ROOT).claim), (1, Units(10)));
    let again = ledger.create(ROOT, "again", &policy(3, None)).expect("the id is free");
    assert_eq!(again, user);
    // What was meant for the first one does nothing to it.
    let gone = Err(LedgerError::Unknown { tenant: user });
    assert_eq!(
        (ledger.shift_reserve(DEV, old, 4), ledger.recall(DEV, old, Units(1))),
        (gone.clone(), gone.clone())
    );
    assert_eq!(
        (ledger.remove(old, || ()), ledger.is_same(old), ledger.is_same(ledger.now(again))),
        (gone, false, true)
    );
    assert_eq!(ledger.usage(DEV, again), Usage { claim: Units(3), reserve: Units(3), ..Usage::default() });
    assert_eq!(ledger.usage(DEV, ROOT).claim, Units(13));
}

#[test]
fn publishing_upward_is_a_right() {
    let ledger = ledger(100, 0);
    let org = tenant(&ledger, "org", 0, None);
    let user = ledger.create(org, "user", &Policy::default()).expect("fits");
    assert_eq!(ledger.may_publish(user, org), None);
    let policy =
        Policy { publish: vec![(org, Some(Units(5))), (ROOT, None)], lend: true, ..Policy::default() };
    ledger.set_policy(user, &policy).expect("both are above");
    let mut seen = ledger.policy(user).expect("live");
    seen.publish.reverse();
    assert_eq!(seen, policy);
    assert_eq!(ledger.may_publish(user, ROOT), Some(None));
    assert_eq!(ledger.may_publish(user, org), Some(Some(Units(5))));
    assert_eq!(ledger.may_publish(org, user), None, "downward is none");
}

#[test]
fn e26_admission_sees_now_and_ever() {
    let ledger = ledger(100, 0);
    let org = tenant(&ledger, "org", 40, Some(80));
    let a = ledger.create(org, "a", &policy(10, Some(60))).expect("fits");
    let b = ledger.create(org, "b", &policy(30, None)).expect("fits");
    let c = tenant(&ledger, "c", 25, None);
    let room = ledger.room(DEV, a, Units(0));
    assert_eq!((room.now, room.ever), (Units(45), Units(45)));
    assert_eq!((room.level, room.ever_level), (ROOT, org));
    charge(&ledger, c, 30).expect("room");
    let room = ledger.room(DEV, a, Units(45));
    assert_eq!((room.now, room.level, room.ever), (Units(40), ROOT, Units(45)));
    assert_eq!(charge(&ledger, a, 41).expect_err("as admission says").room, Units(40));
    charge(&ledger, a, 40).expect("as admission says");
    ledger.park(DEV, a, Units(30));
    let room = ledger.room(DEV, b, Units(1));
    assert_eq!((room.now, room.level, room.unreclaimed), (Units(60), ROOT, Units(30)));
    ledger.set_policy(a, &policy(10, Some(20))).expect("below use");
    let room = ledger.room(DEV, a, Units(1));
    assert_eq!((room.now, room.unreclaimed), (Units(10), Units(0)));
    assert_eq!((room.level, room.unreclaimed_level, room.ever), (a, a, Units(20)));
}

/// Threads move units in every way; at the end every number is exactly what is left.
#[test]
fn threads_leave_exact_numbers() {
    let ledger = ledger(3_000, 4);
    let org = tenant(&ledger, "org", 300, Some(2_000));
    let a = ledger.create(org, "a", &policy(100, Some(900))).expect("fits");
    let b = ledger.create(org, "b", &policy(0, None)).expect("fits");
    let c = tenant(&ledger, "c", 500, None);
    let left: Vec<[u32; 4]> = thread::scope(|scope| {
        let run = |seed: u64| {
            let ledger = &ledger;
            move || {
                let (mut random, mut left) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, [0u32; 4]);
                let tenants = [ROOT, a, b, c];
                for i in 0..20_000u64 {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let (who, n) = ((random >> 8) as usize % 4, (random >> 16) as u32 % 7);
                    let (t, n, l) = (tenants[who], Units(n), lane(seed + i % 2));
                    match random % 5 {
                        0 | 1 => {
                            if ledger.charge(DEV, t, l, n).is_ok() {
                                left[who] += n.0;
                            }
                        }
                        2 if left[who] >= n.0 => {
                            ledger.discharge(DEV, t, l, n);
                            left[who] -= n.0;
                        }
                        3 if left[who] >= n.0 => {
                            ledger.park(DEV, t, n);
                            if ledger.revive(DEV, t, n).is_err() {
                                ledger.drop_cached(DEV, t, n);
                                left[who] -= n.0;
                            }
                        }
                        4 => {
                            if ledger.promise(DEV, t, l, n).is_ok() {
                                ledger.unpromise(DEV, t, lane(seed), n);
                            }
                        }
                        _ => assert!(is_balanced(&ledger.usage(DEV, t))),
                    }
                }
                left
            }
        };
        let threads: Vec<_> = (1..=4).map(|seed| scope.spawn(run(seed))).collect();
        let churn = scope.spawn(|| {
            for i in 0..2_000u32 {
                let _ = ledger.set_policy(a, &policy(i % 200, Some(600 + i % 300)));
                let _ = ledger.set_policy(c, &policy(i * 7 % 900, None));
            }
        });
        churn.join().expect("no panic");
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    });
    let sums: Vec<u32> = (0..4).map(|who| left.iter().map(|l| l[who]).sum()).collect();
    ledger.drain(DEV);
    let usages = [ROOT, a, b, c].map(|t| ledger.usage(DEV, t));
    for (usage, sum) in usages.iter().zip(&sums) {
        let expected = Usage { held: Units(*sum), charged: Units(*sum), ..Usage::default() };
        assert_eq!((usage.held, usage.cached, usage.promised), (expected.held, Units(0), Units(0)));
        assert!(is_balanced(usage));
    }
    assert_eq!(ledger.faults(), 0);
    assert_eq!(usages[0].subtree.0, sums.iter().sum::<u32>());
    let claim = |i: usize| usages[i].reserve.0.max(sums[i]);
    let org_claim = 300.max(claim(1) + claim(2));
    assert_eq!(ledger.usage(DEV, org).claim.0, org_claim);
    assert_eq!(usages[0].claim.0, sums[0] + org_claim + claim(3));
    assert!(usages[0].claim.0 <= 3_000);
}

/// A snapshot beside a thread that never stops balances, and is told apart into its parts.
#[test]
fn a_busy_tenant_can_be_read() {
    let ledger = ledger(100_000, 8);
    let t = tenant(&ledger, "t", 0, None);
    charge(&ledger, t, 100).expect("room");
    let stop = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        for l in 0..2 {
            let (ledger, stop) = (&ledger, &stop);
            scope.spawn(move || {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    ledger.charge(DEV, t, lane(l), Units(1)).expect("room");
                    ledger.discharge(DEV, t, lane(l + 1), Units(1));
                }
            });
        }
        for _ in 0..2_000 {
            let usage = ledger.usage(DEV, t);
            assert!(is_balanced(&usage) && !usage.merged, "{usage:?}");
            // Two units of the threads, and at most two fillings in their hands.
            assert!((100..=102 + 2 * 24).contains(&usage.held.0), "{usage:?}");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(ledger.usage(DEV, t).held, Units(100));
}

/// What does not fit together is told at the level where it does not, with what was asked there; cached units are in the way
/// of what can't wait until they have gone.
#[test]
fn what_fits_together() {
    let l = Ledger::new([Units(100); 2], 8, Units(4)).expect("a ledger");
    let limit = |n| Policy { limit: [None, Some(Units(n))], ..Policy::default() };
    let org = l.create(ROOT, "org", &limit(9)).expect("a tenant");
    let [a, b, c] = ["a", "b", "c"].map(|name| l.create(org, name, &limit(5)).expect("a tenant"));
    let fit = |charges: &[(TenantId, u32)], emptied| {
        let charges: Vec<_> = charges.iter().map(|&(t, n)| (t, Units(n))).collect();
        let refused = l.fit(Tier::Host, &charges, emptied).err();
        refused.map(|r| (r.tenant, r.level, r.asked.0, r.room.0, r.limit.0))
    };
    assert_eq!(fit(&[(a, 5), (b, 4)], true), None);
    // Of the three the second is the first that does not fit, and the third was not asked for by then.
    assert_eq!(fit(&[(a, 5), (b, 5), (c, 5)], true), Some((b, org, 10, 9, 9)));
    assert_eq!(fit(&[(org, 3), (a, 6)], true), Some((a, a, 6, 5, 5)), "nothing of the level above it");
    l.charge(Tier::Host, a, Lane(0), Units(2)).expect("there is room");
    l.park(Tier::Host, a, Units(2));
    assert_eq!((fit(&[(a, 5)], true), fit(&[(a, 3)], false)), (None, None));
    assert_eq!(fit(&[(a, 4)], false), Some((a, a, 4, 3, 5)));
    assert_eq!(fit(&[(b, 4), (c, 4)], false), Some((c, org, 8, 7, 9)));
    assert_eq!(l.charge(Tier::Host, a, Lane(0), Units(4)).expect_err("no room").room, Units(3));
}

//! One thread, one thing at a time: how a sequence leaves and comes back, and what the books say at every hand-over.

use super::*;
use crate::{
    error::Why,
    ledger::Policy,
    plan::{Fault, Rungs},
    sequence::Open,
    spec::GroupKind::{Full, State as Fixed, Window},
    stats::Counter,
    tests::build::{
        PAGE, batch, empty, green, host_pool, plain_tenant, relocate, run, small_spec, spec, specs, tenant,
    },
    word::{FrameId, GroupId, Units, page::Location, plan::State as PlanState},
};

const G: GroupId = GroupId(0);
const TTL: u64 = 1000;

fn open(pool: &Arc<Pool>, tenant: TenantId, tokens: impl IntoIterator<Item = u32>) -> Arc<Sequence> {
    pool.open(tenant, Open { tokens: tokens.into_iter().collect(), ..Open::default() })
        .expect("nothing is admitted")
}

/// Computed up to its last token, in no batch.
fn computed(
    pool: &Arc<Pool>,
    batch: &Batch,
    tenant: TenantId,
    tokens: impl IntoIterator<Item = u32>,
) -> Arc<Sequence> {
    let sequence = open(pool, tenant, tokens);
    batch.add(&sequence).expect("a row");
    run(batch, 1);
    batch.remove(&sequence).expect("it has a row");
    sequence
}

fn close(sequence: &Sequence) {
    sequence.close().expect("nobody uses it");
}

fn held(pool: &Pool, tier: Tier, tenant: TenantId) -> u32 {
    pool.ledger().usage(tier, tenant).held.0
}

fn commit(pool: &Pool, built: &Built) {
    green(pool);
    pool.commit_plan(&built.0).expect("open");
    green(pool);
}

fn suspend(pool: &Arc<Pool>, sequence: &Arc<Sequence>, wish: Wish) -> Built {
    pool.suspend(sequence, wish, None, TTL, false).expect("it runs")
}

/// What a caller can see of a sequence and its tenant.
fn look(pool: &Pool, sequence: &Sequence) -> impl PartialEq + std::fmt::Debug + use<> {
    let usage = |tier| {
        let usage = pool.ledger().usage(tier, sequence.tenant());
        (usage.held, usage.cached, usage.promised)
    };
    let pages: Vec<_> =
        (0..pool.groups.len()).map(|g| sequence.pages(GroupId(g as u8)).expect("free")).collect();
    (sequence.state(), sequence.counts(), sequence.tokens(0), pages, Tier::ALL.map(usage))
}

#[test]
fn by_swap_and_back() {
    for (name, spec) in specs() {
        let pool = host_pool(spec, 20, 20);
        let t = plain_tenant(&pool, "t");
        let mine = batch(&pool, 2, 64);
        let sequence = computed(&pool, &mine, t, 0..13);
        let device = held(&pool, Tier::Device, t);
        let out = suspend(&pool, &sequence, Wish::Swap);
        assert_eq!(sequence.state(), Ok(State::Leaving(Mode::Swap)));
        assert_eq!((held(&pool, Tier::Device, t), held(&pool, Tier::Host, t)), (device, device), "{name}");
        commit(&pool, &out);
        assert_eq!(sequence.state(), Ok(State::Suspended(Mode::Swap)));
        assert_eq!((held(&pool, Tier::Device, t), held(&pool, Tier::Host, t)), (0, device), "{name}");
        assert_eq!(out.0.rungs.sum(), pool.bytes(device), "{name}");
        assert_eq!(out.0.copied, [0, pool.bytes(device)], "{name}");
        let back = pool.resume(&sequence, TTL, false).expect("there is room");
        assert_eq!(sequence.state(), Ok(State::Returning(Mode::Swap)));
        commit(&pool, &back);
        assert_eq!((held(&pool, Tier::Device, t), held(&pool, Tier::Host, t)), (device, 0), "{name}");
        // The way back begins where the way out ended.
        let ends = |built: &Built, f: fn(&Move) -> Location| -> Vec<_> {
            let mut ends: Vec<_> = built.0.moves.iter().map(|m| (m.page.id, f(m).0)).collect();
            ends.sort_unstable();
            ends
        };
        assert_eq!(ends(&back, |m| m.from), ends(&out, |m| m.to), "{name}");
        assert_eq!(sequence.state(), Ok(State::Running));
        mine.add(&sequence).expect("it runs");
        run(&mine, 2);
        mine.remove(&sequence).expect("it has a row");
        assert_eq!(sequence.tokens(12).expect("free"), [12, 1, 2], "{name}");
        close(&sequence);
        empty(&pool);
    }
}

#[test]
fn what_is_given_up_is_as_before() {
    for (name, spec) in specs() {
        for wish in [Wish::Swap, Wish::Recompute] {
            let pool = host_pool(spec.clone(), 20, 20);
            let t = plain_tenant(&pool, "t");
            let mine = batch(&pool, 2, 64);
            let sequence = computed(&pool, &mine, t, 0..13);
            for expire in [false, true] {
                let end = |built: &Built| {
                    green(&pool);
                    if expire {
                        pool.advance(TTL).expect("a manual clock");
                        assert_eq!(pool.plan_state(&built.0), Ok(PlanState::Expired));
                    } else {
                        pool.abort_plan(&built.0).expect("open");
                    }
                    green(&pool);
                    assert!(pool.commit_plan(&built.0).is_err(), "it has ended");
                };
                let before = look(&pool, &sequence);
                end(&suspend(&pool, &sequence, wish));
                assert_eq!(look(&pool, &sequence), before, "{name} {wish:?}");
                commit(&pool, &suspend(&pool, &sequence, wish));
                // Room without evicting anything, which stays evicted.
                pool.quiescence.drain_quiet(&pool.arenas);
                let before = look(&pool, &sequence);
                end(&pool.resume(&sequence, TTL, false).expect("there is room"));
                assert_eq!(look(&pool, &sequence), before, "{name} {wish:?}");
                commit(&pool, &pool.resume(&sequence, TTL, false).expect("there is room"));
                assert_eq!(sequence.state(), Ok(State::Running));
                mine.add(&sequence).expect("it runs");
                run(&mine, 3);
                mine.remove(&sequence).expect("it has a row");
            }
            assert_eq!(sequence.tokens(12).expect("free"), [12, 1, 3, 3], "{name} {wish:?}");
            close(&sequence);
            empty(&pool);
        }
    }
}

/// Tokens stay, sampled ones too; what is still cached is hit again, and counted apart.
#[test]
fn by_recompute_and_back() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 0);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let sequence = open(&pool, t, 0..10);
    mine.add(&sequence).expect("a row");
    for sampled in [50, 51, 52] {
        run(&mine, sampled);
    }
    mine.remove(&sequence).expect("it has a row");
    let out = suspend(&pool, &sequence, Wish::Auto);
    assert_eq!(out.0.victims[0].fate, Fate::Recomputed, "there is no host tier");
    assert_eq!(out.0.victims[0].tokens, 12);
    assert_eq!(held(&pool, Tier::Device, t), 3, "until the commit");
    commit(&pool, &out);
    assert_eq!(held(&pool, Tier::Device, t), 0);
    assert_eq!(sequence.counts().expect("free").written, 0);
    let back = pool.resume(&sequence, TTL, false).expect("there is room");
    assert_eq!(back.0.victims[0].tokens, 13 - 12, "three pages are still cached");
    commit(&pool, &back);
    let counts = sequence.counts().expect("free");
    assert_eq!((counts.known, counts.written, counts.prompt, counts.cached), (13, 12, 10, 12));
    mine.add(&sequence).expect("it runs");
    run(&mine, 53);
    let stats = pool.stats();
    assert_eq!((stats.get(Counter::QueryTokens), stats.get(Counter::HitTokens)), (10, 0));
    assert_eq!((stats.get(Counter::ResumedQueryTokens), stats.get(Counter::ResumedHitTokens)), (13, 12));
    assert_eq!(sequence.tokens(9).expect("free"), [9, 50, 51, 52, 53]);
    close(&sequence);
    drop(mine);
    empty(&pool);
}

/// Nothing of it was kept: all its known tokens are a prompt again, and the next sampled one follows them.
#[test]
fn recompute_of_what_was_evicted() {
    let pool = host_pool(spec(&[(Full, 1)]), 4, 0);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let sequence = computed(&pool, &mine, t, 0..13);
    commit(&pool, &suspend(&pool, &sequence, Wish::Recompute));
    let other = computed(&pool, &mine, t, 100..116);
    assert!(matches!(pool.resume(&sequence, TTL, false), Err(Error::Refused(_))), "no room for all it needs");
    assert_eq!(sequence.state(), Ok(State::Suspended(Mode::Recompute)));
    green(&pool);
    drop(other);
    commit(&pool, &pool.resume(&sequence, TTL, false).expect("there is room"));
    mine.add(&sequence).expect("it runs");
    let tokens = mine.step(None, None, |step| step.num_tokens).expect("nobody else uses it");
    assert_eq!(tokens, 14);
    mine.commit(Some(&[7])).expect("a step waits");
    assert_eq!(sequence.tokens(12).expect("free"), [12, 1, 7]);
    close(&sequence);
    drop(mine);
    empty(&pool);
}

#[test]
fn what_others_hold_and_pins_keep_stays() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 20);
    let budget = Policy { pin_budget: Units(1), ..Policy::default() };
    let t = tenant(&pool, ROOT, "t", &budget);
    let mine = batch(&pool, 2, 64);
    let one = computed(&pool, &mine, t, 0..14);
    let two = computed(&pool, &mine, t, (0..8).chain(90..96));
    let pin = pool.pin(&two, 3 * PAGE, t, None, "");
    assert!(pin.is_err(), "three pages");
    let fork = two.fork().expect("few references");
    drop(one.fork());
    let pages = |sequence: &Sequence| sequence.pages(G).expect("free").1;
    let before = pages(&two);
    let out = suspend(&pool, &two, Wish::Swap);
    assert_eq!((out.0.shared, out.0.pinned, out.0.moves.len()), (pool.bytes(4), 0, 0), "a fork holds it all");
    commit(&pool, &out);
    assert_eq!(pages(&two), before);
    commit(&pool, &pool.resume(&two, TTL, false).expect("nothing is to be moved"));
    drop(fork);
    let out = suspend(&pool, &two, Wish::Swap);
    assert_eq!((out.0.shared, out.0.rungs.offload), (pool.bytes(2), pool.bytes(2)));
    commit(&pool, &out);
    assert_eq!(pages(&two)[..2], before[..2]);
    // The other one goes; its pages stay with the suspended one.
    drop(one);
    assert_eq!(held(&pool, Tier::Device, t), 2);
    commit(&pool, &pool.resume(&two, TTL, false).expect("there is room"));
    let pin = pool.pin(&two, PAGE, t, None, "").expect("within the budget");
    let out = suspend(&pool, &two, Wish::Swap);
    assert_eq!((out.0.shared, out.0.pinned, out.0.moves.len()), (0, pool.bytes(1), 3));
    commit(&pool, &out);
    pool.unpin(pin).expect("it is listed");
    close(&two);
    empty(&pool);
}

/// Off the device nothing is found; back on it, it is.
#[test]
fn a_miss_while_it_is_away() {
    let pool = host_pool(spec(&[(Full, 1), (Window { tokens: 6 }, 1)]), 20, 20);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let sequence = computed(&pool, &mine, t, 0..13);
    let cached = || open(&pool, t, 0..13).counts().expect("free").cached;
    assert_eq!(cached(), 12);
    let out = suspend(&pool, &sequence, Wish::Swap);
    assert_eq!(cached(), 0, "on its way");
    commit(&pool, &out);
    assert_eq!(cached(), 0);
    let back = pool.resume(&sequence, TTL, false).expect("there is room");
    assert_eq!(cached(), 0, "not yet here");
    commit(&pool, &back);
    assert_eq!(cached(), 12);
    close(&sequence);
    empty(&pool);
}

/// The host tier is full: the device copy stays and the ladder goes on (case 40); a session stays where it is.
#[test]
fn a_full_host_tier() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 4);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let [one, two] = [0, 100].map(|first| computed(&pool, &mine, t, first..first + 9));
    commit(&pool, &pool.offload(&one, TTL, false).expect("three of four pages"));
    let before = look(&pool, &two);
    match pool.offload(&two, TTL, false) {
        Err(Error::Refused(r)) => {
            assert_eq!((r.tier, r.asked, r.room), (Tier::Host, pool.bytes(3), pool.bytes(1)))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(look(&pool, &two), before);
    green(&pool);
    let dry = pool.suspend(&two, Wish::Swap, None, TTL, true).expect("it runs");
    let out = suspend(&pool, &two, Wish::Swap);
    assert_eq!((out.0.victims.clone(), out.0.moves.len()), (dry.0.victims.clone(), 0));
    assert_eq!(out.0.victims[0].fate, Fate::Recomputed);
    assert_eq!(held(&pool, Tier::Device, t), 3);
    commit(&pool, &out);
    close(&one);
    close(&two);
    empty(&pool);
}

/// Tenants with a limit of the host tier of so many pages.
fn host_limit(pages: u32) -> Policy {
    Policy { limit: [None, Some(Units(pages))], ..Policy::default() }
}

/// Of two tenants the one at its limit of the host tier is computed again, and the other is swapped; a session of the former
/// stays where it is, and the refusal names the level.
#[test]
fn a_limit_of_the_host_tier_is_one_tenants_alone() {
    let pool = host_pool(spec(&[(Full, 1)]), 40, 40);
    let org = tenant(&pool, ROOT, "org", &host_limit(5));
    let (a, b) = (tenant(&pool, org, "a", &Policy::default()), plain_tenant(&pool, "b"));
    let mine = batch(&pool, 8, 64);
    let of = |t, first| computed(&pool, &mine, t, first..first + 9);
    let (first, second, other) = (of(a, 0), of(a, 100), of(b, 200));
    commit(&pool, &pool.offload(&first, TTL, false).expect("three of five pages"));
    let before = look(&pool, &second);
    match pool.offload(&second, TTL, false) {
        Err(Error::Refused(r)) => {
            let why = (r.tier, r.why, r.tenant, r.level);
            assert_eq!(why, (Tier::Host, Why::Limit, a, org));
            assert_eq!((r.asked, r.room), (pool.bytes(3), pool.bytes(2)));
        }
        other => panic!("{other:?}"),
    }
    let dry = pool.offload(&second, TTL, true).map(drop);
    assert_eq!(dry, pool.offload(&second, TTL, false).map(drop), "the same numbers");
    assert_eq!(look(&pool, &second), before);
    green(&pool);
    let sessions = [Arc::clone(&second), Arc::clone(&other)];
    let from = From { batches: &[], sessions: &sessions, who: For::Anybody };
    let ask = |dry| pool.preempt(ROOT, pool.bytes(6), from, Wish::Swap, TTL, dry).expect("sound");
    let (dry, built) = (ask(true), ask(false));
    let fates = |built: &Built| -> Vec<_> {
        let mut fates: Vec<_> = built.0.victims.iter().map(|v| (v.tenant, v.fate)).collect();
        fates.sort_unstable_by_key(|&(tenant, _)| tenant);
        fates
    };
    assert_eq!(fates(&built), [(a, Fate::Recomputed), (b, Fate::Swapped)]);
    assert_eq!((fates(&dry), &dry.0.host_full), (fates(&built), &built.0.host_full));
    assert_eq!((&built.0.host_full[..], built.0.shortfall), (&[org][..], 0));
    commit(&pool, &built);
    assert_eq!((held(&pool, Tier::Host, a), held(&pool, Tier::Host, b)), (3, 3));
    [&first, &second, &other].into_iter().for_each(|s| close(s));
    empty(&pool);
}

/// Lowered below use it breaks nobody: what is there comes back or ends, nothing more goes there until use is below.
#[test]
fn a_limit_of_the_host_tier_lowered_below_use() {
    let pool = host_pool(spec(&[(Full, 1)]), 40, 40);
    let t = tenant(&pool, ROOT, "t", &host_limit(6));
    let mine = batch(&pool, 8, 64);
    let [one, two, three] =
        [0, 100, 200].map(|first| computed(&pool, &mine, t, first..first + if first == 0 { 13 } else { 5 }));
    let fate = |sequence| {
        let plan = pool.suspend(sequence, Wish::Swap, None, TTL, true).expect("it runs").0;
        (plan.victims[0].fate, plan.host_full)
    };
    for sequence in [&one, &two] {
        assert_eq!(fate(sequence), (Fate::Swapped, vec![]));
        commit(&pool, &suspend(&pool, sequence, Wish::Swap));
    }
    assert_eq!(fate(&three), (Fate::Recomputed, vec![t]), "six pages are there");
    // A plan that was built before is carried out, and one that is given up changes nothing.
    let back = pool.resume(&two, TTL, false).expect("there is room");
    pool.ledger().set_policy(t, &host_limit(1)).expect("a limit may lie below use");
    green(&pool);
    commit(&pool, &back);
    assert_eq!(held(&pool, Tier::Host, t), 4);
    assert_eq!((fate(&two), fate(&three)), ((Fate::Recomputed, vec![t]), (Fate::Recomputed, vec![t])));
    let back = pool.resume(&one, TTL, false).expect("there is room");
    pool.abort_plan(&back.0).expect("open");
    green(&pool);
    assert_eq!((held(&pool, Tier::Host, t), one.state()), (4, Ok(State::Suspended(Mode::Swap))));
    commit(&pool, &pool.resume(&one, TTL, false).expect("there is room"));
    assert_eq!(held(&pool, Tier::Host, t), 0);
    assert_eq!(fate(&one).0, Fate::Recomputed, "four pages against one");
    pool.ledger().set_policy(t, &Policy::default()).expect("no limit");
    assert_eq!(fate(&one), (Fate::Swapped, vec![]));
    [&one, &two, &three].into_iter().for_each(|s| close(s));
    empty(&pool);
}

/// What a dry run says of several victims is what they get: each counts what those before it would take of the host tier.
#[test]
fn a_dry_run_fills_the_host_tier_as_the_plan_does() {
    for (host, limit) in [(40, Some(2)), (1, None)] {
        let pool = host_pool(spec(&[(Full, 1)]), 40, host);
        let policy = Policy { limit: [None, limit.map(Units)], ..Policy::default() };
        let t = tenant(&pool, ROOT, "t", &policy);
        let mine = batch(&pool, 16, 64);
        let room = limit.unwrap_or_else(|| pool.ledger().capacity(Tier::Host).0) as usize;
        let sequences = crowd(&pool, &mine, &[(t, 8)]);
        let from = From { batches: &[&mine], sessions: &[], who: For::Anybody };
        let ask = |dry| pool.preempt(t, pool.bytes(7), from, Wish::Swap, TTL, dry).expect("sound");
        let (dry, built) = (ask(true), ask(false));
        assert_eq!(built.0.victims[..], dry_rows(&dry.0.victims, &built.0.victims));
        assert_eq!((&dry.0.rungs, &dry.0.host_full), (&built.0.rungs, &built.0.host_full));
        assert_eq!(built.0.victims.iter().filter(|v| v.fate == Fate::Swapped).count(), room);
        assert_eq!(built.0.host_full, [if limit.is_some() { t } else { ROOT }]);
        commit(&pool, &built);
        sequences.iter().flatten().for_each(|s| close(s));
        drop(mine);
        empty(&pool);
    }
}

/// Who can neither be swapped, for the limit, nor computed again keeps its row, and the plan says why it is short.
#[test]
fn whoever_can_not_leave_keeps_its_row() {
    let pool = host_pool(spec(&[(Full, 1)]), 40, 40);
    let t = tenant(&pool, ROOT, "t", &host_limit(0));
    let mine = batch(&pool, 8, 64);
    let sequences = crowd(&pool, &mine, &[(t, 3)]).remove(0);
    // What is sampled now nobody tells.
    for counts in [[0, 0, 1], [0, 0, 1]] {
        mine.step(Some(&counts), None, |_| ()).expect("nobody else uses it");
    }
    (0..2).for_each(|_| mine.commit(None).expect("a step waits"));
    let from = From { batches: &[&mine], sessions: &[], who: For::Anybody };
    let ask = |dry| pool.preempt(t, pool.bytes(9), from, Wish::Swap, TTL, dry).expect("sound");
    let (dry, built) = (ask(true), ask(false));
    // The oldest is spared.
    assert_eq!(numbers(&built.1), [sequences[1].number()]);
    assert_eq!((numbers(&dry.1), dry.0.shortfall), (numbers(&built.1), built.0.shortfall));
    assert_eq!((built.0.shortfall, &built.0.host_full[..]), (pool.bytes(8), &[t][..]));
    assert_eq!(mine.rows(), Ok(2), "one row was taken");
    assert!(mine.sequences().expect("free").iter().any(|s| Arc::ptr_eq(s, &sequences[2])));
    let stays = pool.suspend(&sequences[2], Wish::Swap, Some(&mine), TTL, false).map(drop);
    assert!(matches!(stays, Err(Error::Refused(_))), "{stays:?}");
    assert_eq!((mine.rows(), sequences[2].state()), (Ok(2), Ok(State::Running)));
    commit(&pool, &built);
    sequences.iter().for_each(|s| close(s));
    drop(mine);
    empty(&pool);
}

#[test]
fn no_room_to_come_back() {
    for admit in [false, true] {
        let pool = host_pool(spec(&[(Full, 1)]), 6, 8);
        let t = plain_tenant(&pool, "t");
        let mine = batch(&pool, 2, 64);
        let ask = Open { tokens: (0..9).collect(), max_new_tokens: 7, admit, ..Open::default() };
        let sequence = pool.open(t, ask).expect("there is room");
        mine.add(&sequence).expect("a row");
        run(&mine, 1);
        mine.remove(&sequence).expect("it has a row");
        let promised = pool.ledger().usage(Tier::Device, t).promised;
        commit(&pool, &suspend(&pool, &sequence, Wish::Swap));
        assert_eq!(pool.ledger().usage(Tier::Device, t).promised, Units(0));
        // Room for its pages, and not for what it was admitted for.
        let other = computed(&pool, &mine, t, 100..if admit { 109 } else { 116 });
        let before = look(&pool, &sequence);
        match pool.resume(&sequence, TTL, false) {
            Err(Error::Refused(refusal)) => {
                assert_eq!((refusal.tier, refusal.why), (Tier::Device, Why::Claim))
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(look(&pool, &sequence), before);
        green(&pool);
        drop(other);
        commit(&pool, &pool.resume(&sequence, TTL, false).expect("there is room"));
        assert_eq!(pool.ledger().usage(Tier::Device, t).promised, promised);
        close(&sequence);
        empty(&pool);
    }
}

/// Closed at any point, and the plan then committed, aborted, or never heard of (cases 1-3, 7).
#[test]
fn closed_in_every_state() {
    for (name, spec) in specs() {
        for wish in [Wish::Swap, Wish::Recompute] {
            for at in 0..6 {
                let pool = host_pool(spec.clone(), 12, 12);
                let t = plain_tenant(&pool, "t");
                let mine = batch(&pool, 2, 64);
                let sequence = computed(&pool, &mine, t, 0..14);
                // Another one's page continues one that is away.
                let child = computed(&pool, &mine, t, (0..8).chain(70..75));
                drop(child);
                let mut built = suspend(&pool, &sequence, wish);
                if at >= 3 {
                    commit(&pool, &built);
                    built = pool.resume(&sequence, TTL, false).expect("there is room");
                }
                sequence.close().expect("nobody uses it");
                green(&pool);
                match at % 3 {
                    0 => drop(pool.commit_plan(&built.0).expect("open")),
                    1 => pool.abort_plan(&built.0).expect("open"),
                    _ => drop(pool.advance(TTL).expect("a manual clock")),
                }
                pool.expire_plans();
                green(&pool);
                assert_eq!(pool.audit().balance[1].held, 0, "{name} {wish:?} {at}");
                assert!(pool.abort_plan(&built.0).is_err(), "a late report");
                drop(sequence);
                empty(&pool);
            }
        }
    }
}

/// A copy's end is cached, and the copy itself is off the device: the prefix that is there is hit all the same.
#[test]
fn what_continues_a_copy_that_is_away() {
    let pool = host_pool(spec(&[(Full, 1)]), 12, 12);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let [one, two] = [9, 13].map(|n| open(&pool, t, 0..n));
    [&one, &two].iter().for_each(|s| _ = mine.add(s).expect("a row"));
    run(&mine, 1);
    [&one, &two].iter().for_each(|s| _ = mine.remove(s).expect("it has a row"));
    two.truncate(8).expect("there are more");
    commit(&pool, &pool.offload(&two, TTL, false).expect("there is room"));
    let next = open(&pool, t, 0..13);
    // (The page behind them continues the copy, and is theirs too.)
    assert_eq!(next.counts().expect("free").cached, 12);
    green(&pool);
    [&one, &two, &next].iter().for_each(|s| close(s));
    drop(mine);
    empty(&pool);
}

#[test]
fn closed_off_the_device() {
    for (name, spec) in specs() {
        let pool = host_pool(spec, 12, 12);
        let t = plain_tenant(&pool, "t");
        let mine = batch(&pool, 2, 64);
        let sequence = computed(&pool, &mine, t, 0..14);
        commit(&pool, &suspend(&pool, &sequence, Wish::Swap));
        drop(sequence);
        let balance = pool.audit().balance[1];
        assert_eq!(balance.free, balance.capacity, "{name}: nothing else continues it");
        empty(&pool);
    }
}

/// A page that others continue can't end while it is away; when the host tier is full it does as soon as it can.
#[test]
fn what_is_left_on_the_host_tier_goes_when_room_is_needed() {
    let pool = host_pool(spec(&[(Full, 1)]), 12, 4);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let sequence = computed(&pool, &mine, t, 0..13);
    let child = computed(&pool, &mine, t, (0..8).chain(70..75));
    // All of it was cached once, so the order lists it, and the child continues its second page.
    drop((child, sequence));
    let sequence = open(&pool, t, 0..13);
    assert_eq!(sequence.counts().expect("free").cached, 12);
    commit(&pool, &suspend(&pool, &sequence, Wish::Swap));
    drop(sequence);
    green(&pool);
    assert_eq!(pool.audit().balance[1].cached, pool.bytes(3));
    let next = computed(&pool, &mine, t, 200..209);
    let dry = pool.offload(&next, TTL, true).expect("a dry run says what would be");
    assert_eq!((dry.0.rungs.offload, pool.audit().balance[1].cached), (pool.bytes(3), pool.bytes(3)));
    // The child is cached, and nobody can find it behind a page that is away: it goes, and with it what it continues.
    commit(&pool, &pool.offload(&next, TTL, false).expect("there is room"));
    assert_eq!(pool.audit().balance[1].cached, 0);
    green(&pool);
    close(&next);
    drop(mine);
    empty(&pool);
}

/// What was left off the device continues pages of another tenant that are needed: it goes, and they can be evicted.
#[test]
fn what_is_left_on_the_host_tier_keeps_nothing_on_the_device() {
    let pool = host_pool(spec(&[(Full, 1)]), 4, 4);
    let org = plain_tenant(&pool, "org");
    let publish = Policy { publish: vec![(org, None)], ..Policy::default() };
    let t = tenant(&pool, org, "t", &publish);
    let mine = batch(&pool, 2, 64);
    let share = [(org, 2 * PAGE)];
    let prompt = |tokens: u32| {
        let ask = Open { tokens: (0..tokens).collect(), share: &share, ..Open::default() };
        pool.open(t, ask).expect("nothing is admitted")
    };
    let first = prompt(13);
    mine.add(&first).expect("a row");
    run(&mine, 1);
    drop(mine.remove(&first));
    drop(first);
    let (sequence, sharer) = (prompt(13), prompt(9));
    assert_eq!((sequence.counts().expect("free").cached, sharer.counts().expect("free").cached), (12, 8));
    commit(&pool, &suspend(&pool, &sequence, Wish::Swap));
    close(&sharer);
    close(&sequence);
    green(&pool);
    let [device, host] = pool.audit().balance;
    assert_eq!((device.cached, host.cached), (pool.bytes(2), pool.bytes(1)));
    let other = plain_tenant(&pool, "other");
    let all = computed(&pool, &mine, other, 100..116);
    close(&all);
    drop(mine);
    empty(&pool);
}

#[test]
fn only_a_running_sequence_grows() {
    let pool = host_pool(spec(&[(Full, 1), (Fixed, 1)]), 20, 20);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let sequence = computed(&pool, &mine, t, 0..9);
    let refused = || {
        let text = |e: Error| e.to_string();
        let answers = [
            sequence.extend(&[1]).map_err(text),
            sequence.truncate(2).map_err(text),
            sequence.fork().map(drop).map_err(text),
            sequence.keep_state().map(drop).map_err(text),
            mine.add(&sequence).map(drop).map_err(text),
            pool.pin(&sequence, PAGE, t, None, "").map(drop).map_err(text),
            pool.suspend(&sequence, Wish::Auto, None, TTL, false).map(drop).map_err(text),
        ];
        let first = answers[0].clone().expect_err("refused");
        assert!(answers.iter().all(|answer| answer.as_ref() == Err(&first)), "{answers:?}");
        first
    };
    let out = suspend(&pool, &sequence, Wish::Swap);
    assert!(refused().contains("is being suspended"));
    assert!(pool.resume(&sequence, TTL, false).is_err());
    commit(&pool, &out);
    assert!(refused().contains("is suspended"));
    let back = pool.resume(&sequence, TTL, false).expect("there is room");
    assert!(refused().contains("is being resumed"));
    assert!(pool.resume(&sequence, TTL, false).is_err());
    commit(&pool, &back);
    assert!(pool.resume(&sequence, TTL, false).is_err(), "it runs");
    sequence.extend(&[1]).expect("it runs");
    sequence.close().expect("nobody uses it");
    assert_eq!(pool.resume(&sequence, TTL, false).map(drop), Err(Error::Closed("the sequence")));
    let elsewhere = host_pool(spec(&[(Full, 1)]), 4, 4);
    assert_eq!(elsewhere.resume(&sequence, TTL, false).map(drop), Err(Error::WrongPool("the sequence")));
    empty(&pool);
}

#[test]
fn rows_are_taken_as_remove_takes_them() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 20);
    let t = plain_tenant(&pool, "t");
    let (mine, other) = (batch(&pool, 4, 64), batch(&pool, 4, 64));
    let sequences: Vec<_> = (0..3).map(|n| open(&pool, t, 10 * n..10 * n + 6)).collect();
    for sequence in &sequences {
        mine.add(sequence).expect("a row");
    }
    run(&mine, 1);
    assert!(pool.suspend(&sequences[0], Wish::Swap, None, TTL, false).is_err(), "it stands in a batch");
    assert!(pool.suspend(&sequences[0], Wish::Swap, Some(&other), TTL, false).is_err(), "in another one");
    assert_eq!(mine.rows(), Ok(3));
    // A step under way is forgotten for it.
    mine.step(None, None, |_| ()).expect("nobody else uses it");
    let out = pool.suspend(&sequences[0], Wish::Swap, Some(&mine), TTL, false).expect("it runs");
    assert_eq!(out.0.victims[0].row, Some(TakenRow { row: 0, moved: Some(2) }));
    assert_eq!(out.0.victims[0].sequence, sequences[0].number());
    assert_eq!((mine.rows(), sequences[0].counts().expect("free").written), (Ok(2), 6));
    // Frames that the step may still use come back when it is over.
    commit(&pool, &out);
    assert_eq!(pool.quiescence.drain_quiet(&pool.arenas), 0, "the step is under way");
    mine.commit(Some(&[2, 2, 2])).expect("a step waits");
    assert_eq!(pool.quiescence.drain_quiet(&pool.arenas), 2);
    let out = pool.suspend(&sequences[1], Wish::Swap, Some(&mine), TTL, false).expect("it runs");
    assert_eq!(out.0.victims[0].row, Some(TakenRow { row: 1, moved: None }));
    pool.abort_plan(&out.0).expect("open");
    mine.add(&sequences[1]).expect("it runs");
    run(&mine, 3);
    sequences.iter().for_each(|s| close(s));
    drop((mine, other));
    empty(&pool);
}

/// Some moves of a plan are committed, then it is given up: what has left stays away, and comes back later.
#[test]
fn given_up_in_the_middle() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 20);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let sequence = computed(&pool, &mine, t, 0..13);
    let out = suspend(&pool, &sequence, Wish::Swap);
    assert_eq!(pool.commit_some(&out.0, 1).expect("open").left, 3);
    green(&pool);
    pool.abort_plan(&out.0).expect("open");
    green(&pool);
    assert_eq!(sequence.state(), Ok(State::Suspended(Mode::Swap)));
    assert_eq!((held(&pool, Tier::Device, t), held(&pool, Tier::Host, t)), (3, 1));
    let back = pool.resume(&sequence, TTL, false).expect("there is room");
    assert_eq!(back.0.moves.len(), 1);
    commit(&pool, &back);
    assert_eq!(sequence.state(), Ok(State::Running));
    // And on its way back.
    commit(&pool, &suspend(&pool, &sequence, Wish::Swap));
    let back = pool.resume(&sequence, TTL, false).expect("there is room");
    pool.commit_some(&back.0, 3).expect("open");
    pool.advance(TTL).expect("a manual clock");
    assert_eq!(pool.commit_some(&back.0, 1), Err(Error::Plan(Fault::Ended(back.0.id, PlanState::Expired))));
    green(&pool);
    assert_eq!(sequence.state(), Ok(State::Suspended(Mode::Swap)));
    commit(&pool, &pool.resume(&sequence, TTL, false).expect("there is room"));
    mine.add(&sequence).expect("it runs");
    run(&mine, 9);
    assert_eq!(sequence.tokens(12).expect("free"), [12, 1, 9]);
    close(&sequence);
    drop(mine);
    empty(&pool);
}

#[test]
fn what_restores_sooner() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 20);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let sequence = computed(&pool, &mine, t, 0..13);
    let fate = || pool.suspend(&sequence, Wish::Auto, None, TTL, true).expect("it runs").0.victims[0].fate;
    assert_eq!(fate(), Fate::Swapped);
    // 13 tokens and 4 pages of 256 bytes, both ways: at 2048 bytes a second one second.
    pool.set_bandwidths(0, 2048);
    pool.set_recompute_speed(12);
    assert_eq!(fate(), Fate::Swapped);
    pool.set_recompute_speed(14);
    assert_eq!(fate(), Fate::Recomputed);
    // What others keep is not computed again.
    pool.set_recompute_speed(12);
    let other = open(&pool, t, 0..13);
    let built = pool.suspend(&sequence, Wish::Auto, None, TTL, true).expect("it runs").0;
    assert_eq!((built.victims[0].fate, built.shared), (Fate::Recomputed, pool.bytes(3)).to_owned());
    assert_eq!(built.victims[0].tokens, 1);
    assert_eq!(built.rungs, Rungs { free: pool.bytes(1), ..Rungs::default() });
    assert!(built.is_dry());
    drop((other, sequence));
    empty(&pool);
}

/// Tokens that nobody told the pool can't be computed again.
#[test]
fn unknown_tokens_are_swapped_or_stay() {
    for host in [0, 20] {
        let pool = host_pool(spec(&[(Full, 1)]), 20, host);
        let t = plain_tenant(&pool, "t");
        let mine = batch(&pool, 1, 64);
        let sequence = open(&pool, t, 0..6);
        mine.add(&sequence).expect("a row");
        mine.step(None, None, |_| ()).expect("nobody else uses it");
        mine.step(Some(&[1]), None, |_| ()).expect("nobody else uses it");
        for _ in 0..2 {
            mine.commit(None).expect("a step waits");
        }
        mine.remove(&sequence).expect("it has a row");
        assert_eq!(sequence.counts().expect("free").written, 7);
        let built = pool.suspend(&sequence, Wish::Recompute, None, TTL, false);
        match host {
            0 => assert!(matches!(built, Err(Error::Refused(_)))),
            _ => assert_eq!(built.expect("there is a host tier").0.victims[0].fate, Fate::Swapped),
        }
        drop(sequence);
        pool.advance(TTL).expect("a manual clock");
        pool.expire_plans();
        empty(&pool);
    }
}

/// Whoever can't leave stays in its row.
#[test]
fn nobody_loses_a_row_for_nothing() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 2);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 2, 64);
    let all = [0, 100].map(|first| open(&pool, t, first..first + 13));
    all.iter().for_each(|s| _ = mine.add(s).expect("a row"));
    run(&mine, 1);
    let from = From { batches: &[&mine], sessions: &[], who: For::Anybody };
    for dry in [true, false] {
        match pool.suspend(&all[1], Wish::SwapOnly, Some(&mine), TTL, dry).map(drop) {
            Err(Error::Refused(r)) => {
                assert_eq!((r.tier, r.asked, r.room), (Tier::Host, pool.bytes(4), pool.bytes(3)))
            }
            other => panic!("{other:?}"),
        }
        let plan = pool.preempt(t, 1, from, Wish::SwapOnly, TTL, dry).expect("sound").0;
        assert_eq!((plan.victims.len(), mine.rows()), (0, Ok(2)));
    }
    run(&mine, 2);
    all.iter().for_each(|s| close(s));
    drop(mine);
    pool.advance(TTL).expect("a manual clock");
    empty(&pool);
}

/// A dry run counts what the plan would have put into the host tier by then, for each payer and all above.
#[test]
fn what_does_not_fit_together_is_told() {
    for limit in [None, Some(Units(4))] {
        let pool = host_pool(spec(&[(Full, 1)]), 20, if limit.is_some() { 20 } else { 4 });
        let org = tenant(&pool, ROOT, "org", &Policy { limit: [None, limit], ..Policy::default() });
        let [one, two] = ["one", "two"].map(|name| tenant(&pool, org, name, &Policy::default()));
        let mine = batch(&pool, 2, 64);
        let sessions = [(one, 0), (two, 100), (one, 200)];
        let sessions = sessions.map(|(t, first)| computed(&pool, &mine, t, first..first + 9));
        let from = From { batches: &[], sessions: &sessions, who: For::Anybody };
        let stop = |wish, dry| pool.preempt(org, u64::MAX, from, wish, TTL, dry).expect("sound").0;
        for wish in [Wish::Swap, Wish::SwapOnly] {
            let (dry, plan) = (stop(wish, true), stop(wish, false));
            assert_eq!((&dry.victims, dry.rungs), (&plan.victims, plan.rungs));
            assert_eq!((dry.copied, dry.shortfall), (plan.copied, plan.shortfall));
            assert_eq!(plan.rungs.offload, pool.bytes(3));
            assert_eq!(plan.victims.len(), if wish == Wish::Swap { 3 } else { 1 });
            pool.abort_plan(&plan).expect("open");
        }
        sessions.iter().for_each(|s| close(s));
        drop(mine);
        empty(&pool);
    }
}

/// Two would have to stop, and there is a place for one of them: nobody does.
#[test]
fn a_top_up_that_can_not_be_had_takes_no_rows() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 4);
    let [t, other] = ["t", "other"].map(|name| plain_tenant(&pool, name));
    let mine = batch(&pool, 4, 64);
    let all: Vec<_> = (0..3).map(|n| open(&pool, t, 100 * n..100 * n + 9)).collect();
    all.iter().for_each(|s| _ = mine.add(s).expect("a row"));
    run(&mine, 1);
    let capacity = pool.ledger().capacity(Tier::Device).0;
    let from = From { batches: &[&mine], sessions: &[], who: For::Anybody };
    let more = |pages, dry| {
        let live = crate::reclaim::Live::Preempt(from, Wish::SwapOnly);
        pool.top_up(other, pool.bytes(pages), live, 9, TTL, dry).map(|built| built.0)
    };
    for dry in [true, false] {
        match more(capacity - 4, dry) {
            Err(Error::Plan(Fault::Short { short, .. })) => assert_eq!(short, pool.bytes(2)),
            built => panic!("{:?}", built.map(drop)),
        }
        assert_eq!((mine.rows(), held(&pool, Tier::Host, t)), (Ok(3), 0));
    }
    let plan = more(capacity - 7, false).expect("one of them is enough");
    assert_eq!(plan.victims.len(), 1);
    pool.abort_plan(&plan).expect("open");
    all.iter().for_each(|s| close(s));
    drop(mine);
    empty(&pool);
}

/// Free bytes of the host tier that lie in extents of another page size are no place: the ladder goes on.
#[test]
fn a_host_tier_in_pieces() {
    let pool = host_pool(small_spec(&[(Full, 2)]), 40, 20);
    let policy = Policy { compress: true, ..Policy::default() };
    let t = tenant(&pool, ROOT, "t", &policy);
    let mine = batch(&pool, 2, 64);
    let sequence = computed(&pool, &mine, t, 0..13);
    // Of every other page of the smaller class there.
    let small = pool.spec.small_class_of(G).expect("there is one");
    let size = pool.classes[small.as_usize()].size;
    let mut frames = Vec::new();
    let n = pool.arena(Tier::Host).available(size) as usize;
    pool.take_frames(Lane(0), Tier::Host, t, small, n, &mut frames).expect("all of it");
    frames.sort_unstable();
    let (kept, free): (Vec<_>, Vec<_>) = frames.iter().partition(|frame| frame.0 % 2 == 0);
    let release = |frames: &[FrameId]| {
        pool.arena(Tier::Host).release_many(size, frames).expect("claimed");
        let units = frames.len() as u32 * pool.classes[small.as_usize()].units;
        pool.ledger().discharge(Tier::Host, t, Lane(0), Units(units));
    };
    release(&free);
    assert!(pool.arena(Tier::Host).free_bytes() > 8 * pool.spec.sizes()[1]);
    for dry in [true, false] {
        match pool.offload(&sequence, TTL, dry).map(drop) {
            Err(Error::Refused(r)) => assert_eq!((r.tier, r.why), (Tier::Host, Why::Fragmented)),
            built => panic!("{built:?}"),
        }
        let built = pool.suspend(&sequence, Wish::Swap, None, TTL, dry).expect("it runs");
        assert_eq!(built.0.victims[0].fate, Fate::Recomputed);
        if !dry {
            pool.abort_plan(&built.0).expect("open");
        }
        let sessions = [Arc::clone(&sequence)];
        let from = From { batches: &[], sessions: &sessions, who: For::Anybody };
        let live = crate::reclaim::Live::Preempt(from, Wish::Swap);
        let plan = pool.reclaim(t, 1, live, TTL, dry).expect("sound").0;
        assert_eq!((plan.victims.len(), plan.shortfall), (0, 0));
        assert_eq!(plan.rungs.compress, plan.rungs.sum());
        if !dry {
            pool.abort_plan(&plan).expect("open");
        }
    }
    release(&kept);
    let build = Build::new(&pool, Lane(0), Plan::new(Kind::Reclaim, t, 1), true);
    assert_eq!(sequence.visit(|_, body, _| build.finds_host_full(body)), Ok(None));
    close(&sequence);
    drop(mine);
    empty(&pool);
}

/// Of each tenant of `policies`, so many sequences of one page in a batch, the oldest first.
fn crowd(pool: &Arc<Pool>, batch: &Batch, tenants: &[(TenantId, u32)]) -> Vec<Vec<Arc<Sequence>>> {
    let mut first = 0;
    let sequences = tenants.iter().map(|&(tenant, n)| {
        let one = |_| {
            first += 10;
            let sequence = open(pool, tenant, first..first + 3);
            batch.add(&sequence).expect("a row");
            sequence
        };
        (0..n).map(one).collect()
    });
    let sequences = sequences.collect();
    run(batch, 1);
    sequences
}

fn numbers(sequences: &[Arc<Sequence>]) -> Vec<u64> {
    sequences.iter().map(|s| s.number()).collect()
}

/// The oldest of a tenant stays; sessions go first; then the youngest. A dry run takes nothing.
#[test]
fn victims_of_one_tenant() {
    let pool = host_pool(spec(&[(Full, 1)]), 30, 30);
    let [t, other] = ["t", "other"].map(|name| plain_tenant(&pool, name));
    let mine = batch(&pool, 16, 64);
    let sequences = crowd(&pool, &mine, &[(t, 4), (other, 2)]);
    let idle = computed(&pool, &mine, t, 500..503);
    let from = From {
        batches: &[&mine],
        sessions: &[Arc::clone(&idle), Arc::clone(&sequences[0][1])],
        who: For::Anybody,
    };
    let ask = |pages, dry| pool.preempt(t, pool.bytes(pages), from, Wish::Auto, TTL, dry).expect("sound");
    let n = numbers(&sequences[0]);
    let dry = ask(99, true);
    assert_eq!(numbers(&dry.1), [idle.number(), n[3], n[2], n[1]]);
    assert_eq!((dry.0.shortfall, dry.0.rungs.offload), (pool.bytes(95), pool.bytes(4)));
    assert_eq!((mine.rows(), sequences[0][3].state()), (Ok(6), Ok(State::Running)));
    let built = ask(2, false);
    assert_eq!(numbers(&built.1), [idle.number(), n[3]]);
    assert_eq!(built.0.victims[..], dry_rows(&dry.0.victims[..2], &built.0.victims[..2]));
    commit(&pool, &built);
    assert_eq!(held(&pool, Tier::Device, t), 3);
    let unknown = pool.preempt(TenantId(99), 1, from, Wish::Auto, TTL, false).map(drop);
    assert!(matches!(unknown, Err(Error::UnknownTenant(_))), "{unknown:?}");
    sequences.iter().flatten().chain([&idle]).for_each(|s| close(s));
    drop(mine);
    empty(&pool);
}

/// Where less is wanted than a victim has, what nobody wants stays cached: so recompute restores it sooner.
#[test]
fn little_is_wanted_of_a_large_victim() {
    let pool = host_pool(spec(&[(Full, 1)]), 60, 60);
    let t = plain_tenant(&pool, "t");
    let mine = batch(&pool, 16, 256);
    let large = computed(&pool, &mine, t, 0..120);
    pool.set_bandwidths(1 << 40, pool.bytes(1) * 1_000);
    pool.set_recompute_speed(u64::from(pool.spec.page_tokens()) * 300);
    let from = From { batches: &[], sessions: &[Arc::clone(&large)], who: For::Anybody };
    let fate = |pages| {
        let plan = pool.preempt(ROOT, pool.bytes(pages), from, Wish::Auto, TTL, true).expect("sound").0;
        plan.victims[0].fate
    };
    assert_eq!((fate(1), fate(30)), (Fate::Recomputed, Fate::Swapped));
    close(&large);
    drop(mine);
    empty(&pool);
}

/// What a dry run foretold, with the rows that were taken.
fn dry_rows(dry: &[Victim], built: &[Victim]) -> Vec<Victim> {
    dry.iter().zip(built).map(|(dry, built)| Victim { row: built.row, ..*dry }).collect()
}

/// By priority, then by use over the reserve and weight, across the tenants of an org (case 30).
#[test]
fn victims_across_tenants() {
    let pool = host_pool(spec(&[(Full, 1)]), 30, 30);
    let org = plain_tenant(&pool, "org");
    let policy = |priority, weight| Policy { priority, weight, ..Policy::default() };
    let low = tenant(&pool, org, "low", &policy(10, 1));
    let over = tenant(&pool, org, "over", &policy(50, 1));
    let heavy = tenant(&pool, org, "heavy", &policy(50, 4));
    let mine = batch(&pool, 16, 64);
    let [low, over, heavy]: [Vec<_>; 3] =
        crowd(&pool, &mine, &[(low, 2), (over, 4), (heavy, 9)]).try_into().expect("three");
    let from = From { batches: &[&mine], sessions: &[], who: For::Anybody };
    let built = pool.preempt(org, pool.bytes(5), from, Wish::Auto, TTL, false).expect("sound");
    let (o, h) = (numbers(&over), numbers(&heavy));
    // 4 against 9/4, 3 against 9/4, 2 against 9/4, 2 against 8/4: equal, and the younger goes.
    assert_eq!(numbers(&built.1), [low[1].number(), o[3], o[2], h[8], h[7]]);
    assert_eq!((built.0.shortfall, built.0.rungs.sum()), (0, pool.bytes(5)));
    // The rows went one after the other, as remove takes them.
    assert_eq!(built.0.victims.iter().map(|v| v.row.is_some()).collect::<Vec<_>>(), [true; 5]);
    assert_eq!(mine.rows(), Ok(10));
    commit(&pool, &built);
    // Whoever was the last victim of its tenant is not the next one.
    commit(&pool, &pool.resume(&built.1[4], TTL, false).expect("there is room"));
    mine.add(&built.1[4]).expect("it runs");
    let heavy_id = heavy[0].tenant();
    let next = pool.preempt(heavy_id, pool.bytes(1), from, Wish::Auto, TTL, false).expect("sound");
    assert_eq!(numbers(&next.1), [h[6]]);
    pool.abort_plan(&next.0).expect("open");
    mine.add(&next.1[0]).expect("it runs");
    let next = pool.preempt(heavy_id, pool.bytes(99), from, Wish::Auto, TTL, true).expect("sound");
    assert!(!numbers(&next.1).contains(&h[7]) && !numbers(&next.1).contains(&h[0]));
    [low, over, heavy].iter().flatten().for_each(|s| close(s));
    drop(mine);
    empty(&pool);
}

/// What is lost in the host tier and can't end yet, for a copy uses a page that continues it, is in the way as what is held is:
/// who finds no place beside it keeps its row.
#[test]
fn what_is_lost_and_stays_is_no_room() {
    let pool = host_pool(spec(&[(Full, 1)]), 20, 20);
    let [t, other] = ["t", "other"].map(|name| plain_tenant(&pool, name));
    let mine = batch(&pool, 3, 64);
    let first = computed(&pool, &mine, t, 0..9);
    let child = computed(&pool, &mine, t, 0..13);
    let last = child.pages(G).expect("free").1[2].0;
    close(&child);
    commit(&pool, &pool.offload(&first, TTL, false).expect("there is room"));
    let third = open(&pool, t, 100..109);
    mine.add(&third).expect("a row");
    run(&mine, 1);
    relocate(&pool, last, |_, _| {
        close(&first);
        let lost = pool.ledger().usage(Tier::Host, t);
        assert_eq!((lost.cached, lost.held, pool.drop_lost_pages(Lane(0))), (Units(2), Units(0), 0));
        pool.ledger().set_policy(t, &host_limit(4)).expect("a sound policy");
        match pool.suspend(&third, Wish::SwapOnly, Some(&mine), TTL, false).map(drop) {
            Err(Error::Refused(r)) => assert_eq!(
                (r.tier, r.why, r.level, r.asked, r.room),
                (Tier::Host, Why::Limit, t, pool.bytes(3), pool.bytes(2))
            ),
            built => panic!("{built:?}"),
        }
        assert_eq!((mine.rows(), third.state()), (Ok(1), Ok(State::Running)));
        // Nor does a top-up take anybody's for which two would have to stop, and one of them has a place.
        let more = [200, 300].map(|first| open(&pool, t, first..first + 9));
        more.iter().for_each(|s| _ = mine.add(s).expect("a row"));
        run(&mine, 1);
        pool.ledger().set_policy(t, &host_limit(7)).expect("a sound policy");
        let from = From { batches: &[&mine], sessions: &[], who: For::Anybody };
        let live = crate::reclaim::Live::Preempt(from, Wish::SwapOnly);
        pool.ledger().drain(Tier::Device);
        let claim = pool.ledger().usage(Tier::Device, ROOT).claim;
        let asked = pool.bytes(pool.ledger().capacity(Tier::Device).0 - claim.0 + 4);
        assert!(pool.top_up(other, asked, live, 9, TTL, true).is_ok(), "a dry run does not look closely");
        let short = pool.top_up(other, asked, live, 9, TTL, false).map(drop);
        assert!(matches!(short, Err(Error::Plan(Fault::Short { .. }))), "{short:?}");
        assert_eq!(mine.rows(), Ok(3));
        more.iter().for_each(|s| close(s));
    })
    .expect("a frame is free");
    pool.ledger().set_policy(t, &host_limit(3)).expect("a sound policy");
    commit(&pool, &pool.suspend(&third, Wish::SwapOnly, Some(&mine), TTL, false).expect("it fits now"));
    close(&third);
    drop(mine);
    empty(&pool);
}

"""A tenant's limit of the host tier: no more is charged there for its subtree, and the ladder goes on."""

from __future__ import annotations

import numpy as np
import pytest

import kvalloc
from tinypool import FULL, PAGE, check, check_idle, ids, make_pool, serve, unchanged

SMALL = kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, page_tokens=16, small_dtype="int8")


def two_tiers(pages: int = 40, host: int = 40, spec: kvalloc.KVSpec = FULL) -> kvalloc.Pool:
    """Return a pool with so many usable pages in each tier."""
    return make_pool(pages, spec, host_bytes=max(c.page_bytes for c in spec.classes) * (host + 1))


def test_it_is_set_shown_and_taken_away_like_the_limit():
    pool = two_tiers()
    a = pool.tenant("a", limit=9 * PAGE, host_limit=f"{16 * PAGE // 1024}KiB")
    assert (a.limit, a.host_limit) == (9 * PAGE, 16 * PAGE)
    a.set(host_limit=3 * PAGE - 1)
    assert (a.limit, a.host_limit) == (9 * PAGE, 2 * PAGE), "rounded down to whole units"
    pool.tenant("a", weight=3)
    assert a.host_limit == 2 * PAGE, "what is not given stays"
    usage = a.usage()
    assert (usage.limit, usage.host_limit, usage.host_held, usage.host_charged) == (9 * PAGE, 2 * PAGE, 0, 0)
    assert f"host_limit={2 * PAGE}" in repr(usage)
    a.set(host_limit=0)
    assert (a.host_limit, a.usage(subtree=True).host_limit) == (0, 0)
    a.set(host_limit=None)
    assert (a.limit, a.host_limit, a.usage().host_limit) == (9 * PAGE, None, None)
    assert make_pool(4).tenant("a", host_limit="1GiB").host_limit == 1 << 30, (
        "without a host tier it bounds nothing"
    )


@pytest.mark.parametrize("size", [-1, "-1GiB", 1.5, True, "much", 2**64, [1], float("nan")], ids=repr)
def test_what_is_no_size_is_refused_and_changes_nothing(size):
    pool = two_tiers()
    a = pool.tenant("a", host_limit=5 * PAGE)
    for attempt in (
        lambda: a.set(host_limit=size, weight=7),
        lambda: pool.tenant("a", host_limit=size),
        lambda: pool.tenant("b", host_limit=size),
    ):
        with unchanged(pool), pytest.raises(kvalloc.InvalidArgument):
            attempt()
    assert (a.host_limit, a.weight, len(pool.tenants())) == (5 * PAGE, 1, 1)


@pytest.mark.parametrize("whose", ["a", "org"])
def test_one_tenant_is_computed_again_while_another_is_swapped(whose):
    pool = two_tiers()
    pool.tenant("org", host_limit=4 * PAGE if whose == "org" else None)
    a = pool.tenant("a", parent="org", host_limit=4 * PAGE if whose == "a" else None)
    b = pool.tenant("b")
    first, second, other = (serve(pool, t, ids(40, n)) for n, t in enumerate((a, a, b)))
    pool.offload(first).commit()
    with unchanged(pool), pytest.raises(kvalloc.OutOfPages) as refused:
        pool.offload(second)
    error = refused.value
    assert (error.tier, error.why, error.tenant, error.level) == ("host", "limit", "a", whose)
    assert (error.asked, error.room, second.state) == (3 * PAGE, PAGE, "running")
    assert f"host_limit of {whose}" in str(error)
    assert "host tier" in str(error)
    dry = pool.preempt(None, 6 * PAGE, sessions=[second, other], mode="swap", dry_run=True)
    with pool.preempt(None, 6 * PAGE, sessions=[second, other], mode="swap") as plan:
        assert {v.tenant: v.fate for v in plan.victims} == {"a": "recomputed", "b": "swapped"}
        assert (plan.host_full, plan.shortfall) == ([whose], 0)
        assert (dry.host_full, dry.rungs) == (plan.host_full, plan.rungs)
        assert kvalloc.Plan.from_bytes(plan.to_bytes()).host_full == ["T1" if whose == "org" else "T2"]
    assert (a.host_held, b.host_held) == (3 * PAGE, 3 * PAGE)
    usage = pool.tenant("org").usage(subtree=True)
    assert usage.host_held == 3 * PAGE <= usage.host_charged <= 4 * PAGE
    for seq in (first, second, other):
        seq.close()
    check_idle(pool)


def test_the_tier_itself_is_told_as_none():
    pool = two_tiers(host=4)
    pool.tenant("a", host_limit="1GiB")
    one, two = (serve(pool, "a", ids(40, n)) for n in range(2))
    pool.offload(one).commit()
    with (
        unchanged(pool),
        pytest.raises(kvalloc.OutOfPages, match=r"host tier, which has 4 KiB left") as refused,
    ):
        pool.offload(two)
    assert (refused.value.tier, refused.value.level) == ("host", None)
    assert pool.suspend(two, mode="swap", dry_run=True).host_full == [None]
    assert pool.suspend(two, mode="recompute", dry_run=True).host_full == []


def test_lowered_below_use_it_breaks_nobody():
    pool = two_tiers()
    a = pool.tenant("a", host_limit=8 * PAGE)
    one, two, three = (serve(pool, a, ids(40, n)) for n in range(3))
    for seq in (one, two):
        pool.offload(seq).commit()
    a.set(host_limit=PAGE)
    check(pool)
    assert (a.host_held, a.host_limit) == (6 * PAGE, PAGE)
    assert pool.suspend(three, mode="swap", dry_run=True).victims[0].fate == "recomputed"
    with pytest.raises(kvalloc.OutOfPages) as refused:
        pool.offload(three)
    assert (refused.value.level, refused.value.room) == ("a", 0)
    pool.prefetch(one).commit()
    two.close()
    assert a.host_held == 0
    a.set(host_limit=3 * PAGE)
    pool.offload(three).commit()
    assert (a.host_held, three.mode) == (3 * PAGE, "swap")
    one.close(), three.close()
    check_idle(pool)


@pytest.mark.parametrize("how", [{"compress": True}, {"cut": 16}, {}])
def test_at_the_limit_pages_are_compressed_or_cut_before_anybody_stops(how):
    pool = two_tiers(70, 70, SMALL)
    a = pool.tenant("a", host_limit=0, **how)
    pool.tenant("b", **how)
    batch = pool.batch(4, 200)
    rows = {
        name: [pool.open(name, ids(100, n), 8) for n in seeds]
        for name, seeds in (("a", (0, 1)), ("b", (2, 3)))
    }
    for seq in (*rows["a"], *rows["b"]):
        batch.add(seq)
    batch.step()
    batch.commit(np.full(4, 7, np.int32))
    with pool.reclaim(None, PAGE, live="preempt", batch=batch, mode="swap") as plan:
        rungs = {name for name, size in plan.rungs.items() if size}
        assert plan.shortfall == 0
        if how:
            assert (rungs, plan.host_full) == ({"compress" if "compress" in how else "evict"}, ["a"])
            assert {v.tenant for v in plan.victims} <= {"a"}
    assert a.host_held == 0
    changed = {name: any((s.block_table() <= 0).any() for s in seqs) for name, seqs in rows.items()}
    assert changed["a"] == bool(how)
    assert not changed["b"] or not how
    check(pool)

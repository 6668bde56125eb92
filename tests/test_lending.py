"""A reserve that is lent: others run in it, and it is back with one plan. Issue case I45's other side."""

from __future__ import annotations

import numpy as np
import pytest

import kvalloc
from tinypool import PAGE, TOKENS, cache, check, check_idle, finish, ids, make_pool, serve, unchanged


def lent(pages: int = 32, reserve: int = 24, **options):
    """Return a pool, the lender, a borrower and a batch."""
    pool = make_pool(pages, **options)
    return pool, pool.tenant("l", reserve=reserve * PAGE, lend=True), pool.tenant("b"), pool.batch(8, 1024)


def borrow(pool, tenant, batch, n: int, pages: int) -> list[kvalloc.Sequence]:
    rows = [pool.open(tenant, ids(pages * TOKENS, seed)) for seed in range(n)]
    for seq in rows:
        batch.add(seq)
    finish(batch)
    return rows


def test_others_run_in_it_and_it_is_back_in_the_next_step():
    pool, lender, borrower, batch = lent()
    rows = borrow(pool, borrower, batch, 4, 8)
    assert (borrower.held, lender.lent) == (32 * PAGE, 24 * PAGE)
    prompt = ids(20 * TOKENS, 50)
    with unchanged(pool), pytest.raises(kvalloc.OutOfPages) as no:
        pool.open(lender, prompt, admit=True)
    assert no.value.why == "claim"
    with unchanged(pool):
        assert len(pool.give_back(lender, 20 * PAGE, batch=batch, dry_run=True).victims) == 3
    with pool.give_back(lender, 20 * PAGE, batch=batch, mode="recompute") as plan:
        assert (plan.kind, plan.state, plan.shortfall) == ("give_back", "open", 0)
        assert {victim.tenant for victim in plan.victims} == {"b"}
    with pytest.raises(kvalloc.OutOfPages):
        pool.open(borrower, ids(8 * TOKENS, 60), admit=True)
    seq = pool.open(lender, prompt, admit=True)
    batch.add(seq)
    assert not batch.step().refused
    batch.commit([7] * len(batch))
    assert seq.num_written == 20 * TOKENS
    assert list(rows[3].tokens)[: 8 * TOKENS] == list(ids(8 * TOKENS, 3)), "stopped, and nothing is lost"
    lender.lend_unused()
    check(pool)
    for row in rows:
        if row in batch.rows:
            batch.remove(row)
    batch.remove(seq)
    for one in (*rows, seq):
        one.close()
    check_idle(pool)


def test_an_abort_lends_it_again():
    pool, lender, borrower, batch = lent()
    rows = borrow(pool, borrower, batch, 4, 8)
    with pytest.raises(ZeroDivisionError), pool.give_back(lender, 20 * PAGE, batch=batch) as plan:
        1 / 0  # noqa: B018
    assert (plan.state, lender.lent) == ("aborted", 24 * PAGE)
    assert all(row.state == "running" for row in rows)
    assert borrower.held == 32 * PAGE
    check(pool)


def test_cached_pages_go_before_anybody_stops():
    pool, lender, borrower, batch = lent()
    cache(pool, borrower, ids(30 * TOKENS, 9))
    plan = pool.give_back(lender, 24 * PAGE, batch=batch)
    assert (plan.state, len(plan.victims), lender.lent) == ("committed", 0, 0)
    assert plan.rungs["free"] > 0
    with serve(pool, lender, ids(24 * TOKENS, 10)):
        check(pool)


def test_what_is_missing_is_told_and_nobody_stops():
    pool, lender, borrower, batch = lent()
    rows = borrow(pool, borrower, batch, 4, 8)
    with unchanged(pool), pytest.raises(kvalloc.PlanError) as error:
        pool.give_back(lender, 25 * PAGE, batch=batch)
    assert error.value.shortfall == PAGE, "more than it has reserved"
    with unchanged(pool), pytest.raises(kvalloc.PlanError) as error:
        pool.give_back(lender, 24 * PAGE)
    assert error.value.shortfall == 24 * PAGE, "no batch was given"
    borrower.set(pin_budget=16 * PAGE)
    pins = [pool.pin(row, 8 * TOKENS, owner=borrower) for row in rows[:2]]
    with unchanged(pool), pytest.raises(kvalloc.PlanError) as error:
        pool.give_back(lender, 24 * PAGE, batch=batch)
    assert error.value.shortfall == 8 * PAGE, "pins keep the rest"
    with pool.give_back(lender, 16 * PAGE, batch=batch, mode="recompute"):
        pass
    assert (lender.lent, [row.state for row in rows[:2]]) == (8 * PAGE, ["running"] * 2)
    for pin in pins:
        pin.unpin()
    check(pool)


def test_nobody_inside_his_own_reserve_stops():
    pool, lender, borrower, batch = lent(reserve=16)
    safe = pool.tenant("safe", reserve=8 * PAGE, priority=0)
    inside = borrow(pool, safe, batch, 2, 4)
    rows = [pool.open(borrower, ids(8 * TOKENS, 90 + n)) for n in range(2)]
    for row in rows:
        batch.add(row)
    batch.step([0, 0, 8 * TOKENS, 8 * TOKENS])
    batch.commit([-1, -1, -1, -1])
    with pool.give_back(lender, 16 * PAGE, batch=batch, mode="recompute") as plan:
        assert {victim.tenant for victim in plan.victims} == {"b"}
    assert [row.state for row in inside] == ["running", "running"]
    assert lender.lent == 0
    check(pool)


def test_lending_ends_when_it_is_there():
    pool, lender, borrower, batch = lent()
    borrow(pool, borrower, batch, 4, 8)
    with unchanged(pool), pytest.raises(kvalloc.TenantError):
        lender.set(lend=False)
    assert lender.lend
    with pool.give_back(lender, 24 * PAGE, batch=batch, mode="recompute"):
        pass
    lender.set(weight=2)  # what was given back stays so
    assert lender.lent == 0
    lender.set(lend=False)
    assert pool.admit(lender, 24 * TOKENS).verdict == "now"
    check(pool)


def test_reserves_do_not_add_up_to_more_than_there_is():
    pool, _lender, _, _ = lent()
    with unchanged(pool), pytest.raises(kvalloc.TenantError):
        pool.tenant("second", reserve=9 * PAGE, lend=True)
    second = pool.tenant("second", reserve=8 * PAGE, lend=True)
    assert pool.admit("b", 32 * TOKENS).verdict == "now", "both are lent"
    second.set(lend=False)
    assert pool.admit("b", 32 * TOKENS).verdict == "never"
    with unchanged(pool), pytest.raises(kvalloc.PlanError):
        pool.top_up(second, PAGE)


def test_grow_shrink_grow():
    pool, lender, borrower, batch = lent(host_bytes=64 * PAGE)
    store = kvalloc.NumpyStore(pool)
    rng = np.random.default_rng(5)
    rows = borrow(pool, borrower, batch, 4, 7)
    said = []
    for row in rows:
        said.append(rng.integers(0, 256, (7, PAGE), np.uint8))
        store.write_pages(0, row.block_table(0)[:7], said[-1])
    waiting: list[kvalloc.Sequence] = []
    for turn in range(100):
        pages = int(rng.integers(1, 25))
        lender.set(reserve=pages * PAGE)
        with pool.give_back(lender, pages * PAGE, batch=batch, mode="swap") as plan:
            store.execute(plan)
        waiting += [victim.sequence for victim in plan.victims]
        assert lender.lent == 0
        check(pool)
        lender.lend_unused()
        assert lender.lent == pages * PAGE
        while waiting:
            with pool.resume(waiting[0]) as plan:
                store.execute(plan)
            batch.add(waiting.pop(0))
        if turn % 10 == 0:
            finish(batch)
    for row, content in zip(rows, said, strict=True):
        assert np.array_equal(store.read_pages(0, row.block_table(0)[:7]), content), "no byte is lost"
    assert [list(row.tokens)[: 7 * TOKENS] for row in rows] == [list(ids(7 * TOKENS, n)) for n in range(4)]
    check(pool)


def test_bad_input():
    pool, lender, _, batch = lent()
    for bad in (-1, "much", 1.5, None):
        with unchanged(pool), pytest.raises(kvalloc.InvalidArgument):
            pool.give_back(lender, bad, batch=batch)
    with pytest.raises(kvalloc.UnknownTenant):
        pool.give_back("nobody", PAGE)
    borrow(pool, pool.tenant("b"), batch, 4, 8)
    with unchanged(pool), pytest.raises(kvalloc.WrongPool):
        pool.give_back(lender, PAGE, batch=make_pool(4).batch(1, 16))

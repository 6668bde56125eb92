"""Fault cases B: references and pins. One path to free, nothing twice or under anybody's hands."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import kvalloc
from tinypool import PAGE, SPECS, TOKENS, cache, check, check_idle, hit, ids, make_pool, serve, unchanged


@pytest.fixture
def pool():
    pool = make_pool(12)
    pool.tenant("a", pin_budget=12 * PAGE)
    pool.tenant("b", pin_budget=12 * PAGE)
    return pool


def evict_all(pool, tenant="b"):
    """Take every page there is, and give it back: what was cached is gone."""
    free = pool.capacity // PAGE - (pool.held + pool.pinned) // PAGE
    pages = pool.pages.allocate(tenant, free)
    pool.pages.release(pages)
    return pages


@pytest.mark.parametrize("first", ["unpin", "expiry", "with"])
@pytest.mark.parametrize("second", ["unpin", "expiry", "list"])
def test_b8_a_pin_ends_once(pool, first, second):
    seq = serve(pool, "a", ids(48))
    pin = pool.pin(seq, 48, owner="a", ttl=5)
    seq.close()
    assert (pool.pinned, pool.cached) == (3 * PAGE, 0)
    for how, fails in [(first, False), (second, True)]:
        if how == "unpin":
            if fails:
                with unchanged(pool), pytest.raises(kvalloc.PinError, match="has ended"):
                    pin.unpin()
            else:
                pin.unpin()
        elif how == "expiry":
            pool.advance(6)
        elif how == "with":
            with pin:
                pass
        else:
            assert pool.pins() == []
        # The pages are not freed by either: they are cached.
        assert (pool.pinned, pool.cached) == (0, 3 * PAGE)
        check_idle(pool)
    assert hit(pool, "a", ids(49)) == 48


@pytest.mark.parametrize("pins", [1, 2, 3])
def test_b8_pins_of_one_page_count(pool, pins):
    """Each pin is its own: the pages stay until the last has ended."""
    with serve(pool, "a", ids(32)) as seq:
        made = [pool.pin(seq, 32, owner=owner) for owner in "aba"[:pins]]
    for left in range(pins - 1, -1, -1):
        made.pop().unpin()
        assert pool.pinned == (2 * PAGE if left else 0)
        check(pool)


def test_b9_a_page_stands_in_the_eviction_order_once(pool):
    """Cached, taken back out by pins and hits, cached again: as often as it likes."""
    cache(pool, "a", ids(64))
    for _ in range(5):
        seq = pool.open("a", ids(65))
        assert seq.cached_tokens == 64
        pin = pool.pin(seq, 64, owner="a")
        seq.close()
        assert pool.pinned == 4 * PAGE
        pin.unpin()
        assert (pool.pinned, pool.cached) == (0, 4 * PAGE)
    before = pool.stats().evictions
    evict_all(pool)
    assert pool.stats().evictions - before == 4
    check_idle(pool)
    assert pool.cached == 0


@pytest.mark.parametrize("spec", SPECS)
def test_b10_what_a_running_sequence_holds_is_never_evicted(spec):
    pool = make_pool(40, SPECS[spec])
    pool.tenant("a"), pool.tenant("b")
    cache(pool, "a", ids(100))
    running = serve(pool, "a", ids(100))
    groups = range(len(pool.spec.groups))
    tables = [running.block_table(g) for g in groups]
    frames = {(pool.spec.classes[g].page_bytes, int(f)) for g in groups for f in tables[g] if f}
    taken = []
    for g in groups:
        with contextlib.suppress(kvalloc.OutOfPages):
            while True:
                taken.append((g, pool.pages.allocate("b", 1, group=g)))
    assert pool.cached == 0
    given_out = {(pool.spec.classes[g].page_bytes, int(pool.pages.frames(p)[0])) for g, p in taken}
    assert not frames & given_out
    for g in groups:
        np.testing.assert_array_equal(running.block_table(g), tables[g])
    check(pool)
    running.close()
    for _, pages in taken:
        pool.pages.release(pages)
    check_idle(pool)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("written", [0, 8, 16, 40])
def test_b11_a_failed_prefill_is_freed_by_what_was_allocated(spec, written):
    """Some of the prompt has pages, less of it is written, none of it is sampled."""
    pool = make_pool(40, SPECS[spec])
    pool.tenant("a")
    batch = pool.batch(1, 200)
    seq = pool.open("a", ids(100))
    batch.add(seq)
    if written:
        batch.step([written])
        batch.commit()
    batch.step([50])
    assert pool.held > 0
    seq.close()
    check_idle(pool)
    assert pool.cached <= len(pool.spec.groups) * 2 * PAGE * (written // TOKENS)


@pytest.mark.parametrize("order", ["reference", "pin"])
def test_b12_a_reference_and_a_pin_are_dropped_by_two_paths(pool, order):
    seq = serve(pool, "a", ids(32))
    pin = pool.pin(seq, 32, owner="a")
    drops = [seq.close, pin.unpin]
    for drop in drops if order == "reference" else drops[::-1]:
        drop()
        check(pool)
    assert (pool.held, pool.pinned, pool.cached) == (0, 0, 2 * PAGE)
    released = pool.stats()["released_pages"]
    evict_all(pool)
    assert hit(pool, "a", ids(33)) == 0  # gone from the index
    assert pool.cached == 0
    assert pool.stats()["released_pages"] - released == 12  # those of evict_all itself
    check_idle(pool)


def test_b12_two_threads_drop_at_once(pool):
    for n in range(50):
        seq = serve(pool, "a", ids(33, n))
        pin = pool.pin(seq, 32, owner="a")
        start = threading.Barrier(3)
        threads = [
            threading.Thread(target=lambda drop=drop, start=start: (start.wait(), drop()))
            for drop in (seq.close, pin.unpin, pool.pins)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_idle(pool)
    assert pool.stats()["stale_references"] == 0


def test_b13_batch_eviction_beside_readers():
    """While somebody evicts all the time, those who hit pages keep them, and see their own frames."""
    pool = make_pool(40)
    for name in "abc":
        pool.tenant(name)
    stop = threading.Event()
    failures = []

    def evict() -> None:
        pages = pool.pages
        while not stop.is_set():
            with contextlib.suppress(kvalloc.OutOfPages):
                taken = pages.allocate("c", 12)
                pages.release(taken)

    def read(name: str) -> None:
        try:
            for n in range(150):
                with serve(pool, name, ids(80, n % 3)) as seq:
                    table = seq.block_table()
                    with pool.open(name, ids(80, n % 3)) as again:
                        # Its pages are held by `seq`, so all of them are hit, and they are the same.
                        assert again.cached_tokens == 64
                        np.testing.assert_array_equal(again.block_table(), table[:4])
                    np.testing.assert_array_equal(seq.block_table(), table)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=evict), *(threading.Thread(target=read, args=(n,)) for n in "ab")]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert not failures, failures
    check_idle(pool)


@pytest.mark.parametrize("release", ["twice", "too often in one call", "after its next life began"])
def test_b_a_second_release_is_an_error_and_changes_nothing(pool, release):
    pages = pool.pages.allocate("a", 3)
    other = pool.pages.allocate("b", 1)
    if release == "too often in one call":
        with unchanged(pool), pytest.raises(kvalloc.StaleReference):
            pool.pages.release([*pages, pages[1]])
        pool.pages.release(pages)
    else:
        pool.pages.release(pages)
        if release != "twice":
            again = pool.pages.allocate("b", 11)
            assert pool.free == 0
        with unchanged(pool), pytest.raises(kvalloc.StaleReference) as stale:
            pool.pages.release(pages)
        assert stale.value.first in pages
        with unchanged(pool), pytest.raises(kvalloc.StaleReference):
            pool.pages.frames(pages)
        assert pool.pages.share(pages) == [False] * 3
        if release != "twice":
            pool.pages.release(again)
    pool.pages.release(other)
    check_idle(pool)
    assert pool.stats()["stale_references"] >= 1


def test_b_references_are_shared_up_to_a_bound(pool):
    """A page takes many references; the one too many is refused, and all come back."""
    pages = pool.pages.allocate("a", 1)
    assert pool.pages.share(pages) == [False]  # what nobody can find is its taker's alone
    assert pool.pages.publish("a", pages, [b"k"]) == [True]
    held = 1
    while pool.pages.share(pages) == [True]:
        held += 1
        if held > 300_000:
            break
    check(pool)
    assert held >= 1000
    for _ in range(held):
        pool.pages.release(pages)
    with pytest.raises(kvalloc.StaleReference):
        pool.pages.release(pages)
    check_idle(pool)

"""Fault cases A: abort, failure, time-out. Whatever stops half-way, the books are as before or as after."""

from __future__ import annotations

import contextlib
import gc
import random
import threading

import numpy as np
import pytest

import kvalloc
from tinypool import (
    PAGE,
    SPECS,
    TOKENS,
    cache,
    check,
    check_idle,
    finish,
    hit,
    ids,
    make_pool,
    unchanged,
)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dropped_by", ["close", "del", "with", "exception", "fork"])
def test_a4_a_lookup_that_nobody_reads_is_released(spec, dropped_by):
    pool = make_pool(200, SPECS[spec])
    pool.tenant("a")
    cache(pool, "a", ids(1000))
    check_idle(pool)
    with unchanged(pool):
        seq = pool.open("a", ids(1000))
        assert seq.cached_tokens in (992, 0 if "state" in spec else 992)
        if dropped_by == "close":
            seq.close()
        elif dropped_by == "with":
            with seq:
                pass
        elif dropped_by == "exception":
            with contextlib.suppress(RuntimeError), seq:
                raise RuntimeError
        elif dropped_by == "fork":
            twins = [seq.fork() for _ in range(5)]
            seq.close()
            del twins
        del seq
        gc.collect()
    check_idle(pool)


def test_a4_the_lower_face_releases_a_lookup():
    pool = make_pool(10)
    pool.tenant("a")
    pages = pool.pages.allocate("a", 5)
    assert pool.pages.publish("a", pages, list(range(5))) == [True] * 5
    pool.pages.release(pages[::-1])
    assert pool.held == 0
    found = pool.pages.lookup("a", [0, 1, 2, 9, 3])
    assert list(found) == list(pages[:3])  # a gap ends a hit
    assert pool.held == 3 * PAGE
    pool.pages.release(found[::-1])
    check_idle(pool)


@pytest.mark.parametrize("asked", [3, 4, 11, 2**31])
def test_a5_a_taking_is_all_or_nothing(asked):
    pool = make_pool(10)
    pool.tenant("a"), pool.tenant("b")
    pool.pages.allocate("b", 8)
    with unchanged(pool), pytest.raises(kvalloc.OutOfPages) as refused:
        pool.pages.allocate("a", asked)
    assert (refused.value.asked, refused.value.room) == (asked * PAGE, 2 * PAGE) or asked > 10
    assert refused.value.tenant == "a"
    assert len(pool.pages.allocate("a", 2)) == 2
    check(pool)


@pytest.mark.parametrize("spec", ["full+window", "full+state", "two sizes", "latent+window+state"])
@pytest.mark.parametrize("free", range(5))
def test_a5_groups_grow_together_or_not_at_all(spec, free):
    """A page of the first group is given back if there is none for the second."""
    pool = make_pool(20, SPECS[spec])
    pool.tenant("a")
    other = pool.tenant("b")
    unit = PAGE
    pool.pages.allocate(other, pool.capacity // unit - free)
    with unchanged(pool):
        batch = pool.batch(1, 64)
        seq = pool.open("a", ids(10))
        batch.add(seq)
        out = batch.step()
        need = sum(c.page_bytes for c in pool.spec.classes)
        if need <= free * unit:
            assert out.num_tokens == 10
        else:
            assert out.num_tokens == 0
            assert [r.why for r in out.refused] in (["claim"], ["fragmented"])
            assert out.refused[0].sequence == seq
            assert seq.num_slots == 0
        batch.commit()
        seq.close()


def test_a5_a_prompt_for_two_payers_rolls_both_back():
    pool = make_pool(12)
    pool.tenant("org", limit=6 * PAGE)
    pool.tenant("user", parent="org", publish=["org"], limit=3 * PAGE)
    with unchanged(pool), pytest.raises(kvalloc.AdmissionRefused):
        # 2 pages for org, 4 for the user, whose limit is 3.
        pool.open("user", ids(6 * TOKENS), share=[("org", 2 * TOKENS)], admit=True)
    with pool.open("user", ids(5 * TOKENS), share=[("org", 2 * TOKENS)], admit=True) as seq:
        assert seq.promised == 5 * PAGE
        assert pool.tenant("org").promised == 2 * PAGE
    check_idle(pool)


def test_a5_threads_that_take_too_much_leave_nothing_behind():
    pool = make_pool(10)
    names = [pool.tenant(name).name for name in "abcd"]

    def work(name: str) -> None:
        pages = pool.pages
        rng = random.Random(name)
        for _ in range(400):
            try:
                got = pages.allocate(name, rng.randint(1, 8))
            except kvalloc.OutOfPages as refused:
                assert refused.asked > 0  # noqa: PT017
            else:
                pages.release(got)

    run_threads([lambda name=name: work(name) for name in names])
    check_idle(pool)
    assert pool.free == pool.capacity


def run_threads(jobs) -> None:
    """Run jobs at once; their exceptions are the test's."""
    failures = []

    def run(job) -> None:
        try:
            job()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", range(4))
def test_a6_one_balance_whatever_happens(spec, seed):
    """Random operations in every order; after each of them free + held + cached + pinned is the capacity."""
    rng = random.Random(seed)
    pool = make_pool(24, SPECS[spec])
    names = ["a", "b"]
    pool.tenant("a", reserve=4 * PAGE, pin_budget=4 * PAGE)
    pool.tenant("b", limit=30 * PAGE, pin_budget=4 * PAGE)
    batch = pool.batch(6, 400)
    idle: list[kvalloc.Sequence] = []
    pins: list[kvalloc.Pin] = []
    for _ in range(250):
        act = rng.choice(
            [
                "open",
                "add",
                "step",
                "step",
                "commit",
                "remove",
                "close",
                "fork",
                "truncate",
                "extend",
                "pin",
                "tick",
            ]
        )
        rows = batch.rows
        anyone = [*idle, *rows]
        with contextlib.suppress(kvalloc.OutOfPages, kvalloc.InvalidArgument, kvalloc.PinError):
            if act == "open" and len(idle) < 6:
                new = rng.choice([0, 20])
                prompt = ids(rng.randint(1, 120), rng.randrange(3))
                idle.append(pool.open(rng.choice(names), prompt, new, admit=rng.random() < 0.4))
            elif act == "add" and idle and len(rows) < 6:
                batch.add(idle.pop(rng.randrange(len(idle))))
            elif act == "step":
                batch.step(token_budget=rng.choice([None, 7, 40]))
            elif act == "commit":
                sampled = rng.randrange(-1, 50)
                with contextlib.suppress(kvalloc.InvalidArgument):
                    batch.commit()
                if sampled > 0 and batch.outstanding == 0 and rows:
                    out = batch.step()
                    batch.commit([sampled] * out.num_rows)
            elif act == "remove" and rows:
                seq = rng.choice(rows)
                batch.remove(seq)
                idle.append(seq)
            elif act == "close" and anyone:
                seq = rng.choice(anyone)
                seq.close()
                idle = [s for s in idle if s != seq]
            elif act == "fork" and anyone and len(idle) < 6:
                idle.append(rng.choice(anyone).fork())
            elif act == "truncate" and anyone:
                seq = rng.choice(anyone)
                seq.truncate(rng.randint(1, max(seq.num_tokens, 1)))
            elif act == "extend" and anyone:
                rng.choice(anyone).extend(ids(rng.randint(1, 20), 9))
            elif act == "pin" and anyone:
                pins.append(
                    pool.pin(rng.choice(anyone), 32, owner=rng.choice(names), ttl=rng.choice([None, 2]))
                )
            elif act == "tick":
                pool.advance(1)
                if pins and rng.random() < 0.5:
                    pins.pop().unpin()
        check(pool)
    while batch.outstanding:
        batch.commit()  # sources of copies are held until then
    for seq in [*idle, *batch.rows]:
        seq.close()
    for pin in pins:
        with contextlib.suppress(kvalloc.PinError):
            pin.unpin()
    check_idle(pool)


def test_a6_the_balance_holds_under_load():
    pool = make_pool(40)
    for name in "abc":
        pool.tenant(name)
    done = threading.Event()

    def work(name: str) -> None:
        batch = pool.batch(4, 300)
        for n in range(60):
            with contextlib.suppress(kvalloc.OutOfPages):
                seqs = [pool.open(name, ids(100, n % 5)) for _ in range(3)]
                for seq in seqs:
                    batch.add(seq)
                out = batch.step()
                batch.commit([1] * out.num_rows)
                for seq in seqs:
                    seq.close()

    def audit() -> None:
        while not done.is_set():
            report = pool.audit()
            assert report.ok, report.findings
            assert 0 <= report.device.free <= report.device.capacity

    auditor = threading.Thread(target=audit)
    auditor.start()
    try:
        run_threads([lambda name=name: work(name) for name in "abc"])
    finally:
        done.set()
        auditor.join()
    check_idle(pool)


# An abort at every point of a sequence's life, in every kind of model.

ABORTS = [
    "opened",
    "in batch",
    "between step and commit",
    "twice outstanding",
    "committed",
    "decoding",
    "forked",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("when", ABORTS)
@pytest.mark.parametrize("admit", [False, True])
@pytest.mark.parametrize("how", ["close", "remove", "drop"])
def test_a_abort_in_any_state(spec, when, admit, how):
    pool = make_pool(60, SPECS[spec])
    pool.tenant("a")
    # Neighbours on both sides: the row that leaves and the one that moves have to be told apart.
    batch = pool.batch(4, 400)
    first, last = (pool.open("a", ids(40, seed)) for seed in (1, 2))
    batch.add(first)
    seq = pool.open("a", ids(100), max_new_tokens=20, admit=admit)
    twin = None
    if when != "opened":
        batch.add(seq)
    batch.add(last)
    if when == "between step and commit":
        batch.step()
    elif when == "twice outstanding":
        batch.step(token_budget=100)
        batch.step()
    elif when in ("committed", "decoding", "forked"):
        finish(batch)
    if when == "decoding":
        for other in batch.rows:
            other.extend([1])
        for _ in range(20):
            out = batch.step()
            batch.commit([5] * out.num_rows)
    if when == "forked":
        twin = seq.fork()
    if how == "close" or when == "opened":
        seq.close()
        assert seq.closed
    elif how == "remove":
        assert batch.remove(seq) in (2, None)
    else:
        batch.remove(seq)
        del seq
        gc.collect()
    check(pool)
    assert batch.rows == [first, last] or when == "opened"
    while batch.outstanding:
        batch.commit()
    finish(batch)
    # The rows that stayed are those that were there, and what they show is their own.
    for row, other in enumerate(batch.rows):
        shown = batch.block_table()[row]
        table = other.block_table()
        np.testing.assert_array_equal(shown[: len(table)], table)
        assert not shown[len(table) :].any()
        assert batch.seq_lens[row] == other.num_tokens
    assert not batch.block_table()[len(batch) :].any()
    if twin is not None:
        twin.close()
    if how == "remove" and when != "opened":
        seq.close()
    first.close()
    last.close()
    check_idle(pool)


def test_a_steps_for_a_sequence_that_left_are_forgotten():
    """Its row's entry in an outstanding commit goes to nobody else."""
    pool = make_pool(30)
    pool.tenant("a")
    batch = pool.batch(3, 100)
    seqs = [pool.open("a", ids(16 + n, n)) for n in range(3)]
    for seq in seqs:
        batch.add(seq)
    batch.step()
    batch.step()  # one token each, whose ids are not known yet
    assert batch.remove(seqs[0]) == 2  # the last row moves into row 0
    assert batch.rows == [seqs[2], seqs[1]]
    batch.commit([100, 101, 102])  # in the order of the rows of that step
    assert [seq.tokens[-1] for seq in seqs[1:]] == [101, 102]
    assert (seqs[0].num_tokens, seqs[0].num_written, seqs[0].num_slots) == (16, 0, 0)
    batch.commit([200, 201, 202])
    assert [seq.tokens[-1] for seq in seqs[1:]] == [201, 202]
    assert [seq.num_written for seq in seqs] == [0, 18, 19]
    # What came back may be added again, also while steps are outstanding.
    batch.step()
    assert batch.add(seqs[0]) == 2
    batch.commit([1, 2])
    batch.step()
    batch.commit([3, 4, 5])
    assert seqs[0].num_written == 16
    for seq in seqs:
        seq.close()
    check_idle(pool)


def test_a_a_batch_that_is_dropped_gives_its_sequences_back():
    pool = make_pool(30)
    pool.tenant("a")
    batch = pool.batch(2, 100)
    kept, forgotten = pool.open("a", ids(30)), pool.open("a", ids(30, 1))
    batch.add(kept)
    batch.add(forgotten)
    out = batch.step()
    del forgotten, batch, out
    gc.collect()
    assert (kept.num_slots, kept.num_written) == (0, 0)
    assert pool.held == 0
    other = pool.batch(1, 100)
    other.add(kept)
    finish(other)
    kept.close()
    check_idle(pool)
    assert hit(pool, "a", ids(30)) == 16


def test_a_commits_beyond_the_steps_are_refused():
    pool = make_pool(30)
    pool.tenant("a")
    batch = pool.batch(1, 100)
    with pytest.raises(kvalloc.InvalidArgument, match="step first"):
        batch.commit()
    seq = pool.open("a", ids(10))
    batch.add(seq)
    for _ in range(8):
        batch.step()
    with unchanged(pool), pytest.raises(kvalloc.InvalidArgument, match="commit first"):
        batch.step()
    with (
        unchanged(pool),
        pytest.raises(kvalloc.InvalidArgument, match="2 sampled tokens for a step of 1 rows"),
    ):
        batch.commit([1, 2])
    assert batch.outstanding == 8
    seq.close()
    check_idle(pool)

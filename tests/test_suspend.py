"""Sequences leave the device and come back: by swap, by recompute, aborted, expired, closed on the way.

The cases by number: A1-A3 and A7 (nothing is lost when a transfer is), E28 and E30 (nobody is stopped for
ever, and victims are chosen by over-use), G40 (a full host tier), H44 (frames that an old copy or step may
still use).
"""

from __future__ import annotations

import gc
import itertools
import time

import numpy as np
import pytest

import kvalloc
from tinypool import (
    FULL,
    PAGE,
    SPECS,
    STATELESS,
    TOKENS,
    cache,
    check,
    check_idle,
    decode,
    finish,
    hit,
    ids,
    make_pool,
    serve,
    unchanged,
)

DEVICE, HOST = 0, 1


def two_tiers(pages: int, host: int, spec: kvalloc.KVSpec = FULL, **options) -> kvalloc.Pool:
    """Return a pool with so many usable pages in each tier."""
    return make_pool(pages, spec, host_bytes=max(c.page_bytes for c in spec.classes) * (host + 1), **options)


def host_balance(pool: kvalloc.Pool) -> tuple[int, int, int]:
    """Return held, cached and in-flight bytes of the host tier, which balance."""
    host = check(pool).host
    assert host.free + host.held + host.cached + host.pinned + host.in_flight == host.capacity
    return host.held, host.cached, host.in_flight


def fill(store: kvalloc.NumpyStore, seq: kvalloc.Sequence, seed: int) -> list[np.ndarray]:
    """Write something into every page that a sequence holds; per layer group."""
    rng = np.random.default_rng(seed)
    contents = []
    for group, cls in enumerate(store.spec.classes[: len(store.spec.groups)]):
        frames = held_frames(seq, group)
        contents.append(rng.integers(0, 256, (len(frames), cls.page_bytes), np.uint8))
        store.write_pages(group, frames, contents[-1])
    return contents


def held_frames(seq: kvalloc.Sequence, group: int) -> np.ndarray:
    frames = seq.block_table(group)
    return frames[len(frames) - len(seq.pages(group)) :]


def holds(store: kvalloc.NumpyStore, seq: kvalloc.Sequence, contents: list[np.ndarray]) -> bool:
    """Whether a sequence's pages on the device say this."""
    found = [store.read_pages(group, held_frames(seq, group)) for group in range(len(contents))]
    return all(np.array_equal(a, b) for a, b in zip(found, contents, strict=True))


# ---- by swap, by recompute -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_sequence_goes_on_with_its_tokens(spec, mode):
    pool = two_tiers(40, 40, SPECS[spec])
    tenant = pool.tenant("a")
    seq, twin = (serve(pool, tenant, ids(100, seed), decoded=5) for seed in (0, 1))
    held = tenant.held
    with pool.suspend(seq, mode=mode) as plan:
        assert (seq.state, seq.mode) == ("leaving", mode)
        assert tenant.held == held
        host_balance(pool)
    assert (seq.state, seq.mode, plan.state) == ("suspended", mode, "committed")
    assert plan.bytes == held - tenant.held > 0
    assert tenant.host_held == (plan.bytes if mode == "swap" else 0) == host_balance(pool)[0]
    assert list(seq.tokens) == [*ids(100), *[7] * 6]
    with pool.resume(seq) as plan:
        assert seq.state == "returning"
        check(pool)
    assert (seq.state, seq.mode) == ("running", None)
    assert (tenant.held, tenant.host_held) == (held, 0) or mode == "recompute"
    batch = pool.batch(2, 200)
    batch.add(seq), batch.add(twin)
    if mode == "recompute":
        # The next token follows the last known one, whatever was hit.
        assert seq.num_written == seq.cached_tokens < seq.num_tokens
        finish(batch)
    written = seq.num_written
    decode(batch, 20)
    assert seq.num_written - written == 20
    assert list(seq.tokens)[:106] == [*ids(100), *[7] * 6]
    batch.remove(seq), batch.remove(twin)
    seq.close(), twin.close()
    check_idle(pool)
    assert host_balance(pool) == (0, 0, 0)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_survive_a_swap(spec):
    pool = two_tiers(12, 12, SPECS[spec])
    pool.tenant("a"), pool.tenant("b")
    store = kvalloc.NumpyStore(pool)
    seq = serve(pool, "a", ids(60))
    contents = fill(store, seq, 1)
    with pool.suspend(seq, mode="swap") as plan:
        store.execute(plan)
    assert len(plan.moves) == sum(map(len, contents))
    assert set(plan.moves[:, 0]) == {DEVICE}
    assert set(plan.moves[:, 3]) == {HOST}
    # Frames that lie side by side stay side by side: few runs.
    assert store.runs <= 2 * len(contents) < store.copies + len(contents)
    # Others take all of the device and write to it.
    taken = [
        pool.pages.allocate("b", 1, group=g) for g in range(len(contents)) for _ in range(20) if room(pool, g)
    ]
    for group in range(len(contents)):
        frames = np.arange(1, pool.device_bytes // store.spec.classes[group].page_bytes, dtype=np.int32)
        store.write_pages(
            group, frames, np.full((len(frames), store.spec.classes[group].page_bytes), 0xA5, np.uint8)
        )
    with pytest.raises(kvalloc.OutOfPages), unchanged(pool):
        pool.resume(seq)
    assert seq.state == "suspended"
    for pages in taken:
        pool.pages.release(pages)
    with pool.resume(seq) as plan:
        store.execute(plan)
    assert holds(store, seq, contents)
    seq.close()
    check_idle(pool)


def room(pool: kvalloc.Pool, group: int) -> bool:
    """Whether there is a page of a group to be had."""
    try:
        pool.pages.release(pool.pages.allocate("b", 1, group=group))
    except kvalloc.OutOfPages:
        return False
    return True


def test_recompute_hits_what_is_still_cached_and_counts_it_apart():
    pool = make_pool(20)
    pool.tenant("a")
    seq = serve(pool, "a", ids(100))
    first = pool.stats()
    with pool.suspend(seq) as plan:
        assert plan.victims[0].fate == "recomputed", "there is no host tier"
        assert plan.victims[0].tokens == 100
    assert (pool.held, pool.cached) == (0, 6 * PAGE)
    with pool.resume(seq) as plan:
        assert plan.victims[0].tokens == 100 - 96
    assert (seq.num_written, seq.cached_tokens, seq.num_prompt_tokens) == (96, 96, 100)
    batch = pool.batch(1, 200)
    batch.add(seq)
    finish(batch)
    stats = pool.stats()
    assert stats["query_tokens"] == first["query_tokens"] == 100
    assert (stats["resumed_query_tokens"], stats["resumed_hit_tokens"]) == (100, 96)


def test_auto_takes_what_restores_sooner():
    pool = two_tiers(20, 20)
    pool.tenant("a")
    seq = serve(pool, "a", ids(100))
    fate = lambda: pool.suspend(seq, dry_run=True).victims[0].fate  # noqa: E731
    assert pool.suspend(seq, dry_run=True).copy_seconds is None
    # 7 pages of 4 KiB both ways, against 100 tokens.
    pool.set_speeds(host=7 * PAGE * 2)
    for tokens, expected in [(99, "swapped"), (101, "recomputed"), (100, "swapped")]:
        pool.set_speeds(tokens=tokens)
        assert fate() == expected
    plan = pool.suspend(seq, dry_run=True)
    assert (plan.state, plan.id, plan.copied, plan.copy_seconds) == ("dry", 0, (0, 7 * PAGE), 0.5)
    assert (seq.state, len(plan.moves)) == ("running", 0)
    with pytest.raises(kvalloc.PlanError):
        plan.commit()


def test_what_is_shared_and_what_is_pinned_stays():
    pool = two_tiers(20, 20)
    tenant = pool.tenant("a", pin_budget="1MiB")
    seq = serve(pool, tenant, ids(100))
    other = pool.open(tenant, ids(40))
    assert other.cached_tokens == 32
    pin = pool.pin(seq, 48, owner=tenant)
    before = seq.block_table()
    with pool.suspend(seq, mode="swap") as plan:
        assert (plan.shared, plan.pinned, plan.bytes) == (0, 3 * PAGE, 4 * PAGE), (
            "pinned pages are shared too"
        )
    assert (seq.block_table()[:3] == before[:3]).all()
    assert tenant.held == 3 * PAGE
    other.close()
    assert tenant.held == 3 * PAGE, "they are the suspended one's too"
    pin.unpin()
    with pool.resume(seq) as plan:
        assert len(plan.moves) == 4
    seq.close()
    check_idle(pool)


@pytest.mark.parametrize("spec", STATELESS)
def test_nothing_is_hit_while_it_is_away(spec):
    pool = two_tiers(40, 40, SPECS[spec])
    pool.tenant("a")
    seq = serve(pool, "a", ids(100))
    expected = hit(pool, "a", ids(100))
    assert expected > 0
    plan = pool.suspend(seq, mode="swap")
    assert hit(pool, "a", ids(100)) == 0
    plan.abort()
    assert hit(pool, "a", ids(100)) == expected
    pool.suspend(seq, mode="swap").commit()
    assert hit(pool, "a", ids(100)) == 0
    pool.resume(seq).commit()
    assert hit(pool, "a", ids(100)) == expected


# ---- A: abort, failure, time-out -------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["a", "b"])
def test_g40_sessions_that_end_away_leave_room_in_the_host_tier(other):
    """Their pages go when the room is wanted, with the cached ones on the device that only they led to."""
    pool = two_tiers(64, 8)
    pool.tenant("a"), pool.tenant("b")
    for seed in range(2):
        seq = serve(pool, "a", ids(4 * TOKENS, seed))
        cache(pool, "a", [*ids(4 * TOKENS, seed), *ids(3 * TOKENS, 5 + seed)])  # goes on behind them
        pool.offload(seq).commit()
        seq.close()
    assert host_balance(pool) == (0, 8 * PAGE, 0)
    cache(pool, other, ids(4 * TOKENS, 9))
    seq = serve(pool, other, ids(4 * TOKENS, 10))
    pool.offload(seq).commit()
    assert seq.state == "suspended"
    assert hit(pool, other, [*ids(4 * TOKENS, 9), 1]) == 4 * TOKENS, "what can be found stays"
    seq.close()
    check_idle(pool)


@pytest.mark.parametrize("way", ["out", "back"])
def test_a1_a_plan_whose_handle_was_lost_frees_its_sequence(way):
    """Whoever looks at the sequence finds out that the time is over, on a clock that goes by itself."""
    pool = two_tiers(12, 12, clock="system")
    tenant, batch = pool.tenant("a"), pool.batch(1, 200)
    seq = serve(pool, tenant, ids(40))
    if way == "back":
        pool.suspend(seq, mode="swap").commit()
    build = {"out": pool.suspend, "back": pool.resume}[way]
    build(seq, ttl=0.001)
    time.sleep(0.01)
    assert seq.state == {"out": "running", "back": "suspended"}[way]
    build(seq, ttl=0.001)
    time.sleep(0.01)
    if way == "out":
        batch.add(seq)
    else:
        with pytest.raises(kvalloc.InvalidArgument, match="is suspended"):
            batch.add(seq)
    assert pool.stats().expired_plans == 2
    batch.close()
    seq.close()
    check(pool)
    assert (pool.held, pool.promised, host_balance(pool)) == (0, 0, (0, 0, 0))


@pytest.mark.parametrize("spec", SPECS)
def test_a1_a_transfer_that_nobody_reports_expires_once(spec):
    pool = two_tiers(30, 30, SPECS[spec])
    tenant = pool.tenant("a")
    for turn in range(20):  # more than would fit if any were lost
        seq = serve(pool, tenant, ids(90, turn))
        out = pool.suspend(seq, mode="swap", ttl=5)
        if turn % 2:
            out.commit()
            out = pool.resume(seq, ttl=5)
        seq.close()
        assert host_balance(pool)[0] > 0
        pool.advance(5)
        assert out.state == "expired"
        for report in (out.commit, out.abort, out.commit):
            with pytest.raises(kvalloc.PlanError) as late:
                report()
            assert late.value.state == "expired"
        assert host_balance(pool) == (0, 0, 0)
        check_idle(pool)
        assert tenant.held == 0
    stats = pool.stats()
    assert (stats["expired_plans"], stats["late_reports"]) == (20, 60)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("direction", ["out", "back"])
def test_a2_completion_is_judged_by_the_lease(spec, direction):
    pool = two_tiers(30, 30, SPECS[spec])
    pool.tenant("a")
    seq = serve(pool, "a", ids(90))
    plan = pool.suspend(seq, mode="swap")
    if direction == "back":
        plan.commit()
        plan = pool.resume(seq)
    seq.close()
    check(pool)
    progress = plan.commit()
    assert progress.moved + progress.dropped == len(plan.moves)
    check_idle(pool)
    assert host_balance(pool) == (0, 0, 0)
    # What has been on the device all the time, or came back to it, can be hit.
    if "state" not in spec:
        assert hit(pool, "a", ids(90)) == 80


@pytest.mark.parametrize("spec", SPECS)
def test_a3_a_failed_offload_releases_its_source(spec):
    pool = two_tiers(30, 30, SPECS[spec])
    pool.tenant("a")
    seq = serve(pool, "a", ids(90))
    with unchanged(pool):
        with pytest.raises(OSError, match="the link is down"), pool.offload(seq) as plan:
            raise OSError("the link is down")
        assert (plan.state, seq.state) == ("aborted", "running")
    plan = pool.offload(seq)
    seq.close()
    plan.abort()
    check_idle(pool)
    assert host_balance(pool) == (0, 0, 0)


@pytest.mark.parametrize("spec", SPECS)
def test_a7_the_books_balance_at_every_hand_over(spec):
    pool = two_tiers(40, 40, SPECS[spec])
    tenant = pool.tenant("a")
    seq = serve(pool, tenant, ids(90))
    pages = np.concatenate([seq.pages(g) for g in range(len(SPECS[spec].groups))])
    held = tenant.held
    for end, turn in itertools.product(["commit", "abort"], range(3)):
        plan = pool.suspend(seq, mode="swap")
        assert (tenant.held, tenant.host_held) == (held, held)
        getattr(plan, end)()
        moved = end == "commit"
        assert (tenant.held, tenant.host_held) == ((0, held) if moved else (held, 0))
        assert host_balance(pool) == (held if moved else 0, 0, 0)
        if moved:
            plan = pool.resume(seq)
            assert (tenant.held, tenant.host_held) == (held, held)
            getattr(plan, "abort" if turn == 1 else "commit")()
            if turn == 1:
                assert (tenant.held, tenant.host_held) == (0, held)
                pool.resume(seq).commit()
        assert (tenant.held, tenant.host_held) == (held, 0)
        assert host_balance(pool) == (0, 0, 0)
        # The same references: nobody took one more on the way.
        assert (np.concatenate([seq.pages(g) for g in range(len(SPECS[spec].groups))]) == pages).all()
    seq.close()
    check_idle(pool)


def test_a_plan_in_pieces_that_is_given_up_leaves_a_suspended_sequence():
    pool = two_tiers(20, 20)
    tenant = pool.tenant("a")
    store = kvalloc.NumpyStore(pool)
    seq = serve(pool, tenant, ids(100))
    contents = fill(store, seq, 1)
    plan = pool.suspend(seq, mode="swap")
    store.execute(plan)
    assert repr(plan.commit(3)) == "Progress(moved=3, dropped=0, left=4)"
    assert (seq.state, tenant.host_held) == ("leaving", 7 * PAGE)
    check(pool)
    plan.abort()
    assert (seq.state, tenant.held, tenant.host_held) == ("suspended", 4 * PAGE, 3 * PAGE)
    with pool.resume(seq) as plan:
        store.execute(plan)
    assert len(plan.moves) == 3
    assert holds(store, seq, contents)
    seq.close()
    check_idle(pool)


def test_a_dropped_plan_ends_by_the_clock_and_keeps_no_sequence_open():
    pool = two_tiers(20, 20)
    pool.tenant("a")
    seq = serve(pool, "a", ids(100))
    plan = pool.suspend(seq, mode="swap", ttl=10)
    assert plan.victims[0].sequence == seq
    assert plan.renew(20) == plan.deadline + 10
    del seq
    gc.collect()
    pool.advance(20)
    assert plan.victims[0].sequence is None
    check_idle(pool)
    assert host_balance(pool) == (0, 0, 0)


# ---- E: preemption ---------------------------------------------------------------------------------------


def test_e28_the_whole_need_is_there_before_anything_comes_back():
    """A sequence that was stopped goes on when all it needs is free, and so is not stopped half-way."""
    pool = two_tiers(40, 40)
    pool.tenant("a")
    long = [pool.open("a", ids(128, n), max_new_tokens=16, admit=True) for n in range(4)]
    batch = pool.batch(8, 200)
    for seq in long:
        batch.add(seq)
    finish(batch)
    with pytest.raises(kvalloc.AdmissionRefused):
        pool.open("a", ids(128, 9), max_new_tokens=16, admit=True)
    for mode in ("swap", "recompute"):
        with pool.suspend(long[3], mode=mode, batch=batch) as plan:
            assert (plan.victims[0].row, plan.victims[0].moved_row) == (3, None)
        fifth = serve(pool, "a", ids(128, 9), max_new_tokens=16, admit=True)
        with unchanged(pool), pytest.raises(kvalloc.OutOfPages) as refused:
            pool.resume(long[3])
        assert refused.value.room < refused.value.asked
        assert long[3].state == "suspended"
        fifth.close()
        pool.resume(long[3]).commit()
        assert long[3].promised > 0, "its room to grow is there too"
        batch.add(long[3])
        finish(batch)
    decode(batch, 16)  # nothing is refused
    check(pool)


def test_e30_victims_are_chosen_by_over_use():
    pool = two_tiers(64, 64)
    org = pool.tenant("org")
    tenants = {
        "modest": pool.tenant("modest", parent=org, reserve=8 * PAGE),
        "hungry": pool.tenant("hungry", parent=org),
        "heavy": pool.tenant("heavy", parent=org, weight=8),
    }
    batch = pool.batch(16, 400)
    seqs = {}
    for name, tokens in [("hungry", 320), ("modest", 60), ("modest", 60), ("heavy", 150), ("heavy", 150)]:
        seqs.setdefault(name, []).append(pool.open(tenants[name], ids(tokens, len(batch.rows))))
        batch.add(seqs[name][-1])
    finish(batch)
    # Each tenant's oldest goes on, so the one long, hungry sequence is safe when it is alone; the modest
    # one lies in its reserve; the heavy one is next.
    plan = pool.preempt(org, 10 * PAGE, batch=batch, mode="swap")
    assert [v.sequence for v in plan.victims] == [seqs["heavy"][1]]
    plan.abort()
    batch.add(seqs["heavy"][1])
    # A second hungry one is the first to go, wherever it stands in the queue.
    late = pool.open(tenants["hungry"], ids(33, 50))
    batch.add(late)
    finish(batch)
    plan = pool.preempt(org, 1, batch=batch, mode="swap")
    assert [(v.sequence, v.tenant, v.fate) for v in plan.victims] == [(late, "hungry", "swapped")]
    assert plan.shortfall == 0
    plan.commit()
    # And when it has come back, it is not the next one.
    pool.resume(late).commit()
    batch.add(late)
    plan = pool.preempt(org, 64 * PAGE, batch=batch, mode="swap", dry_run=True)
    assert [v.sequence for v in plan.victims] == [seqs["heavy"][1], seqs["modest"][1]]
    assert plan.shortfall == 64 * PAGE - plan.bytes
    check(pool)


def test_e30_no_victim_twice_in_a_row_and_the_oldest_goes_on():
    pool = two_tiers(40, 40)
    pool.tenant("a")
    batch = pool.batch(8, 200)
    seqs = [pool.open("a", ids(40, n)) for n in range(4)]
    for seq in seqs:
        batch.add(seq)
    finish(batch)
    chosen = []
    for _ in range(12):
        with pool.preempt("a", 1, batch=batch) as plan:
            (victim,) = plan.victims
        chosen.append(victim.sequence)
        pool.resume(victim.sequence).commit()
        batch.add(victim.sequence)
        finish(batch)
    assert all(a != b for a, b in itertools.pairwise(chosen))
    assert seqs[0] not in chosen


def test_rows_leave_as_batch_remove_takes_them():
    pool = two_tiers(40, 40)
    pool.tenant("a", priority=10), pool.tenant("b")
    batch = pool.batch(8, 200)
    seqs = [pool.open(name, ids(20, n)) for n, name in enumerate("aabab")]
    for seq in seqs:
        batch.add(seq)
    finish(batch)
    shown = list(batch.rows)
    with pool.preempt("a", 99 * PAGE, batch=batch) as plan:
        pass
    assert [v.number for v in plan.victims] == [seqs[3].number, seqs[1].number]
    for victim in plan.victims:
        assert shown[victim.row] == victim.sequence
        last = shown.pop()
        if victim.moved_row is not None:
            assert victim.moved_row == len(shown)
            shown[victim.row] = last
    assert shown == list(batch.rows)


# ---- G, H ------------------------------------------------------------------------------------------------


def test_g40_a_full_host_tier_sends_the_ladder_on():
    pool = two_tiers(20, 4)
    pool.tenant("a")
    one, two = (serve(pool, "a", ids(40, n)) for n in range(2))
    pool.offload(one).commit()
    with unchanged(pool), pytest.raises(kvalloc.OutOfPages) as refused:
        pool.offload(two)
    assert (refused.value.asked, refused.value.room) == (3 * PAGE, PAGE)
    assert two.state == "running"
    held = pool.held
    with pool.suspend(two, mode="swap") as plan:
        assert (plan.victims[0].fate, len(plan.moves)) == ("recomputed", 0)
        assert pool.held == held, "the device copy stays until the commit"
    assert (pool.held, two.mode) == (0, "recompute")
    pool.prefetch(one).commit()
    one.close(), two.close()
    check_idle(pool)


def test_h44_frames_wait_for_steps_that_may_still_use_them():
    """A sequence is stopped while a step is under way: its frames are nobody's until that step is over."""
    pool = two_tiers(8, 8)
    pool.tenant("a"), pool.tenant("b")
    store = kvalloc.NumpyStore(pool)
    batch = pool.batch(2, 200)
    seq, other = pool.open("a", ids(50)), pool.open("b", ids(20, 1))
    batch.add(seq), batch.add(other)
    finish(batch)
    contents = fill(store, seq, 1)
    frames = set(seq.block_table().tolist())
    seq.extend([7]), other.extend([7])
    batch.step()
    plan = pool.suspend(seq, mode="swap", batch=batch)
    store.execute(plan)
    # The step that was under way writes what it had in hand into the old frames, after the copy.
    plan.commit()
    store.write_pages(0, np.array(sorted(frames), np.int32), np.full((len(frames), PAGE), 0xA5, np.uint8))
    assert pool.audit().device.in_flight == 4 * PAGE
    with pytest.raises(kvalloc.OutOfPages):
        pool.pages.allocate("b", 3)
    batch.commit([-1, 7])
    taken = pool.pages.allocate("b", 3)
    assert set(pool.pages.frames(taken).tolist()) & frames
    pool.pages.release(taken)
    with pool.resume(seq) as plan:
        store.execute(plan)
    assert holds(store, seq, contents), "no torn copy"
    check(pool)


def test_h44_a_page_in_flight_is_not_given_out():
    pool = two_tiers(8, 8)
    pool.tenant("a"), pool.tenant("b")
    seq = serve(pool, "a", ids(120))
    out = pool.suspend(seq, mode="swap")
    with pytest.raises(kvalloc.OutOfPages):
        pool.pages.allocate("b", 1)
    seq.close()
    with pytest.raises(kvalloc.OutOfPages):  # the copy reads them still
        pool.pages.allocate("b", 1)
    out.commit()
    assert len(pool.pages.allocate("b", 8)) == 8
    check(pool)


# ---- bad input -------------------------------------------------------------------------------------------


def test_only_a_running_sequence_grows():
    pool = two_tiers(20, 20)
    pool.tenant("a", pin_budget="1MiB")
    batch = pool.batch(2, 200)
    seq = serve(pool, "a", ids(40))
    steps = [
        (lambda: pool.suspend(seq, mode="swap"), "is being suspended; commit or abort the plan first"),
        (lambda: None, "is suspended; resume it first"),
        (lambda: pool.resume(seq), "is being resumed; commit the plan first"),
    ]
    for build, text in steps:
        plan = build()
        for use in (
            lambda: seq.extend([1]),
            lambda: seq.truncate(5),
            lambda: seq.fork(),
            lambda: seq.keep_state(),
            lambda: batch.add(seq),
            lambda: pool.pin(seq, 16, owner="a"),
            lambda: pool.suspend(seq),
            lambda: pool.offload(seq),
        ):
            with pytest.raises(kvalloc.InvalidArgument, match=text):
                use()
        assert len(seq.tokens) == 40
        if plan is not None:
            plan.commit()
    with pytest.raises(kvalloc.InvalidArgument, match="not suspended"):
        pool.resume(seq)
    batch.add(seq)
    for call in (pool.suspend, pool.offload):
        with pytest.raises(kvalloc.InvalidArgument, match="has a row in a batch"):
            call(seq)
    batch.remove(seq)
    seq.close()
    for call in (pool.suspend, pool.offload, pool.resume, pool.prefetch):
        with pytest.raises(kvalloc.ClosedError):
            call(seq)
    check(pool)
    assert pool.held == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda pool, seq: pool.suspend(seq, mode="swop"), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.suspend(seq, mode=1), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.suspend(seq, ttl=-1), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.suspend(seq, ttl=float("nan")), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.suspend(seq, dry_run=1), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.suspend(seq, batch=seq), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.suspend(seq, batch=[pool.batch(1, 16)] * 2), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.suspend(None), TypeError),
        (lambda pool, seq: pool.preempt("nobody", 1), kvalloc.UnknownTenant),
        (lambda pool, seq: pool.preempt("a", -1), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.preempt("a", "12 monkeys"), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.preempt("a", 1, sessions=[1]), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.preempt("a", 1, sessions=3), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.preempt("a", 1, batch=[None]), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.set_speeds(host=0), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.set_speeds(tokens=0), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.set_speeds(tokens=0.5), kvalloc.InvalidArgument),
        (lambda pool, seq: make_pool(4).suspend(seq), kvalloc.WrongPool),
        (lambda pool, seq: make_pool(4).resume(seq), kvalloc.WrongPool),
        (lambda pool, seq: pool.preempt("a", 1, batch=make_pool(4).batch(1, 16)), kvalloc.WrongPool),
        (lambda pool, seq: pool.suspend(seq).commit(-1), kvalloc.InvalidArgument),
        (lambda pool, seq: pool.suspend(seq).renew("long"), kvalloc.InvalidArgument),
        (lambda pool, seq: kvalloc.Plan.from_bytes(b"no plan"), kvalloc.PlanError),
        (lambda pool, seq: kvalloc.Plan.from_bytes("no bytes"), TypeError),
        (lambda pool, seq: kvalloc.Plan(), TypeError),
    ],
)
def test_bad_input(call, error):
    pool = two_tiers(20, 20)
    pool.tenant("a")
    seq = serve(pool, "a", ids(40))
    with pytest.raises(error):
        call(pool, seq)
    pool.advance(60)
    with unchanged(pool):
        assert seq.state == "running"
    seq.close()
    check_idle(pool)


def test_a_plan_travels_and_is_committed_at_home():
    pool = two_tiers(20, 20)
    pool.tenant("a")
    seq = serve(pool, "a", ids(40))
    plan = pool.suspend(seq, mode="swap")
    data = plan.to_bytes()
    there = kvalloc.Plan.from_bytes(data)
    assert (there.moves == plan.moves).all()
    assert (there.id, there.kind, there.deadline, there.bytes) == (plan.id, "suspend", 30.0, 3 * PAGE)
    assert [(v.number, v.fate, v.sequence) for v in there.victims] == [(seq.number, "swapped", None)]
    for end in (there.commit, there.abort):
        with pytest.raises(kvalloc.PlanError, match="committed where its pool is"):
            end()
    with there:
        pass
    assert plan.state == "open"
    for at in range(0, len(data), 7):
        altered = bytearray(data)
        altered[at] ^= 1
        with pytest.raises(kvalloc.PlanError):
            kvalloc.Plan.from_bytes(bytes(altered))
    plan.commit()
    check(pool)


def test_two_plans_do_not_hold_one_sequence():
    pool = two_tiers(20, 20)
    pool.tenant("a")
    seq = serve(pool, "a", ids(40))
    first = pool.suspend(seq)
    with pytest.raises(kvalloc.InvalidArgument):
        pool.suspend(seq)
    assert not pool.preempt("a", 1, sessions=[seq]).victims
    first.abort()
    with pool.suspend(seq, mode="swap"):
        pass
    with pytest.raises(kvalloc.TenantError, match="held or promised"):
        pool.remove_tenant("a")


def test_a_session_goes_out_and_comes_back_before_its_turn():
    """A chat: out while the user thinks, back before the answer, and nothing is computed twice."""
    pool = two_tiers(10, 40)
    pool.tenant("a")
    batch = pool.batch(1, 400)
    chats = []
    for n in range(4):  # 4 chats of 6 pages on a device of 10
        chat = pool.open("a", ids(80, n))
        batch.add(chat)
        finish(batch)
        batch.remove(chat)
        pool.offload(chat).commit()
        chats.append(chat)
    for turn in range(3):
        for chat in chats:
            pool.prefetch(chat).commit()
            chat.extend([turn, turn])
            batch.add(chat)
            assert batch.step().num_tokens == 2
            batch.commit()
            batch.remove(chat)
            pool.offload(chat).commit()
    assert [len(chat) for chat in chats] == [86] * 4
    assert pool.stats()["resumed_query_tokens"] == 0
    for chat in chats:
        chat.close()
    del batch
    assert pool.pages.allocate("a", 10).size == 10, "all of it is to be had"
    check(pool)


# ---- what is told ----------------------------------------------------------------------------------------


def mirror(pool: kvalloc.Pool, known: set) -> list[str]:
    """Follow the events since the last call; return their types."""
    told = []
    for event in pool.events():
        told.append(event["type"])
        assert event["tier"] == "device"
        place = (event["scope"], event["group"], event["key"])
        (known.add if event["type"] == "stored" else known.discard)(place)
    return told


@pytest.mark.parametrize("spec", ["full", "full+window"])
def test_events_tell_when_pages_leave_the_device_and_when_they_are_back(spec):
    pool = two_tiers(40, 40, SPECS[spec], events=1000)
    tenant, known = pool.tenant("a"), set()
    seq = serve(pool, tenant, ids(64), decoded=3)
    mirror(pool, known)
    cached = pool.cached // PAGE  # left its window, and stays on the device
    pages = len(known) - cached
    assert pages > 0
    every = set(known)
    pool.suspend(seq, mode="swap").abort()
    assert mirror(pool, known) == []
    with pool.suspend(seq, mode="swap"):
        assert mirror(pool, known) == []  # it may be aborted
    assert mirror(pool, known) == ["removed"] * pages
    assert len(known) == cached
    assert hit(pool, "a", ids(65)) == 0
    pool.resume(seq).abort()
    assert mirror(pool, known) == []
    plan = pool.resume(seq)
    plan.commit(moves=1)
    assert mirror(pool, known) == ["stored"]
    plan.commit()
    assert mirror(pool, known) == ["stored"] * (pages - 1)
    assert known == every
    assert hit(pool, "a", ids(65)) == 64
    # By recompute it leaves its pages to the cache, where they are found.
    pool.suspend(seq, mode="recompute").commit()
    assert mirror(pool, known) == []
    pool.resume(seq).commit()
    with pool.suspend(seq, mode="swap"):
        pass
    assert set(mirror(pool, known)) == {"removed"}
    seq.close()
    assert "stored" not in mirror(pool, known)  # that they went was told when they left
    assert len(known) == pool.cached // PAGE == len(known & every)
    check_idle(pool)


def test_events_are_told_for_the_last_copy_that_can_be_found():
    pool = two_tiers(40, 40, events=1000)
    tenant, known, batch = pool.tenant("a"), set(), pool.batch(2, 200)
    first, twin = (pool.open(tenant, ids(64)) for _ in range(2))
    batch.add(first), batch.add(twin)
    finish(batch)
    assert mirror(pool, known) == ["stored"] * 4
    with pool.suspend(first, mode="swap", batch=batch):
        pass
    assert mirror(pool, known) == []
    assert hit(pool, "a", ids(65)) == 64
    with pool.suspend(twin, mode="swap", batch=batch):
        pass
    assert mirror(pool, known) == ["removed"] * 4
    with pool.resume(first):
        pass
    assert mirror(pool, known) == ["stored"] * 4
    with pool.resume(twin):
        pass
    first.close()
    twin.close()
    assert mirror(pool, known) == []
    assert hit(pool, "a", ids(65)) == 64
    pool.reset_prefix_cache()
    assert [event["type"] for event in pool.events()] == ["removed"] * 4 + ["cleared"]


def test_a_page_that_everybody_lets_go_of_on_its_way_out_stays_and_nothing_is_told():
    pool = two_tiers(40, 40, events=1000)
    tenant, known = pool.tenant("a"), set()
    seq = serve(pool, tenant, ids(64))
    assert mirror(pool, known) == ["stored"] * 4
    plan = pool.suspend(seq, mode="swap")
    seq.close()
    plan.commit()
    assert mirror(pool, known) == []
    assert hit(pool, "a", ids(65)) == 64


def test_a_compressed_page_is_told_to_be_removed_once():
    spec = kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, page_tokens=TOKENS, small_dtype="int8")
    pool = two_tiers(40, 40, spec, events=1000)
    tenant, known = pool.tenant("a", compress=True), set()
    seq = serve(pool, tenant, ids(64), decoded=3)
    assert mirror(pool, known) == ["stored"] * 4
    with pool.compress(tenant, pool.capacity, sessions=[seq]) as plan:
        assert len(plan.moves) == 4
    assert mirror(pool, known) == ["removed"] * 4
    for way in (pool.suspend, pool.resume):  # compressed it goes to the host, and comes back
        with way(seq):
            pass
    assert mirror(pool, known) == []
    seq.close()
    assert mirror(pool, known) == []
    check_idle(pool)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_told_is_what_can_be_found(seed):
    """Sequences come and go, swap, recompute, compress, are evicted: a mirror knows nothing that is gone."""
    rng = np.random.default_rng(seed)
    spec = kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, page_tokens=TOKENS, small_dtype="int8")
    pool = two_tiers(36, 20, spec, events=1000)
    tenant, known = pool.tenant("a", compress=True), set()
    keys: dict[int, list[int]] = {}  # of each prompt, page by page
    for prompt in range(4):
        serve(pool, tenant, ids(65, prompt)).close()
        keys[prompt] = [event["key"] for event in pool.events()]
        known.update(("a", 0, key) for key in keys[prompt])
    live: list[kvalloc.Sequence] = []
    told, by_mirror, by_pool = set(), 0, 0
    for _ in range(150):
        op = rng.integers(6)
        running = [seq for seq in live if seq.state == "running"]
        away = [seq for seq in live if seq.state == "suspended"]
        try:
            if op == 0 and len(live) < 6:
                live.append(serve(pool, tenant, ids(65, int(rng.integers(4)))))
            elif op == 1 and running:
                mode = str(rng.choice(["swap", "recompute"]))
                plan = pool.suspend(running[rng.integers(len(running))], mode=mode)
                plan.commit() if rng.random() < 0.7 else plan.abort()
            elif op == 2 and away:
                plan = pool.resume(away[rng.integers(len(away))])
                plan.commit() if rng.random() < 0.7 else plan.abort()
            elif op == 3 and running:
                pool.compress(tenant, 2 * PAGE, sessions=running).commit()
            elif op == 4 and live:
                live.pop(rng.integers(len(live))).close()
            elif op == 5:
                pool.pages.release(pool.pages.allocate(tenant, int(rng.integers(1, 6))))
        except kvalloc.OutOfPages:
            pass
        told.update(mirror(pool, known))
        there = {key for _, _, key in known}
        for prompt, chain in keys.items():
            found = next((n for n, key in enumerate(chain) if key not in there), len(chain))
            there_are = hit(pool, "a", ids(65, prompt))
            # Never what is not there. Less, where copies that did not know of each other were told apart.
            assert found * TOKENS <= there_are
            by_mirror, by_pool = by_mirror + found * TOKENS, by_pool + there_are
    assert told == {"stored", "removed"}
    assert by_mirror > 0.9 * by_pool > 0
    for seq in live:
        seq.close()
    check_idle(pool)

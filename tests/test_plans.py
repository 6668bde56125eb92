"""Bytes are taken back and handed on: reclaim, freeze, watermarks, top-up, rebalance, and how plans end.

The cases by number: A1 and A2 (a hold has a deadline, and late reports are counted), E30 (over-use decides,
not the place in a queue), F33-F36 under rebalance (any free byte serves any class, and sequences go on), I48
(a quiet tenant's pages stay).
"""

from __future__ import annotations

import numpy as np
import pytest

import kvalloc
from tinypool import (
    FULL,
    PAGE,
    SPECS,
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


def two_sizes(pages: int = 256, **options) -> kvalloc.Pool:
    """Return a pool of many small extents: pages of 4 KiB, and of 8 KiB in the window's group."""
    return make_pool(pages, SPECS["two sizes"], **options)


class Bytes:
    """The device as an array of bytes, and what copies in it."""

    def __init__(self, pool: kvalloc.Pool) -> None:
        self.memory = np.zeros(pool.device_bytes, np.uint8)
        self.page_bytes = [c.page_bytes for c in pool.spec.classes]

    def page(self, cls: int, frame: int) -> np.ndarray:
        """Return a view of one page."""
        size = self.page_bytes[cls]
        return self.memory[frame * size : (frame + 1) * size]

    def execute(self, plan: kvalloc.Plan) -> None:
        """Carry a plan out."""
        for _, cls, frame, _, to_class, to_frame in plan.moves.tolist():
            self.page(to_class, to_frame)[:] = self.page(cls, frame)

    def step(self, batch: kvalloc.Batch, sample: int = 7) -> None:
        """Decode one token in every row: each writes its number where the step says."""
        out = batch.step()
        assert not out.refused, out.refused
        for group, source, target in out.copies.tolist():
            self.page(group, target)[:] = self.page(group, source)
        for group, size in enumerate(self.page_bytes):
            slots = batch.slot_mapping(group)[: out.num_tokens]
            token_bytes = size // TOKENS
            for slot, position in zip(
                slots.tolist(), batch.positions[: out.num_tokens].tolist(), strict=True
            ):
                self.memory[slot * token_bytes : (slot + 1) * token_bytes] = position % 251
        batch.commit(np.full(out.num_rows, sample, np.int32))

    def check(self, seq: kvalloc.Sequence) -> None:
        """Every page that the sequence holds says what was written there."""
        for group, size in enumerate(self.page_bytes):
            table = seq.block_table(group)
            for place in np.flatnonzero(table):
                content = self.page(group, int(table[place])).reshape(TOKENS, -1)
                positions = np.arange(place * TOKENS, (place + 1) * TOKENS)
                known = positions < seq.num_written
                assert (content[known] == (positions[known] % 251)[:, None]).all(), (group, place, size)


# ---- the free rung ---------------------------------------------------------------------------------------


def test_a_plan_says_what_comes_back_and_what_stays():
    pool = make_pool(32)
    acme = pool.tenant("acme", pin_budget="1MiB")
    cache(pool, acme, ids(5 * TOKENS))
    held = serve(pool, acme, ids(3 * TOKENS, 1))
    pinned = serve(pool, acme, ids(2 * TOKENS, 2))
    pin = pool.pin(pinned, 2 * TOKENS, owner=acme)
    pinned.close()
    with unchanged(pool):
        dry = pool.reclaim(acme, 9 * PAGE, dry_run=True)
        assert (dry.state, dry.id, dry.kind, dry.tenant) == ("dry", 0, "reclaim", "acme")
        assert dry.rungs == {"free": 5 * PAGE, "offload": 0, "compress": 0, "evict": 0}
        assert (dry.shortfall, dry.pinned, dry.bytes) == (4 * PAGE, 2 * PAGE, 5 * PAGE)
        assert "reclaim" in repr(dry)
    with pool.reclaim(acme, 2 * PAGE) as plan:
        assert plan.state == "open"
        assert pool.plans()[0].id == plan.id
        assert acme.cached == 5 * PAGE, "nothing happens before the commit"
    assert (plan.state, acme.cached) == ("committed", 3 * PAGE)
    assert hit(pool, acme, ids(5 * TOKENS)) == 3 * TOKENS, "the ends of prompts go first"
    pin.unpin()
    held.close()
    check_idle(pool)


def test_an_exception_aborts():
    pool = make_pool(8)
    acme = pool.tenant("acme")
    cache(pool, acme, ids(5 * TOKENS))
    with unchanged(pool), pytest.raises(RuntimeError, match="copy"), pool.reclaim(acme, "1MiB") as plan:
        raise RuntimeError("a copy failed")
    assert plan.state == "aborted"
    assert pool.stats().aborted_plans == 1


def test_of_the_whole_pool():
    pool = make_pool(16)
    for name in ("a", "b"):
        cache(pool, pool.tenant(name), ids(6 * TOKENS))
    with pool.reclaim(None, 7 * PAGE) as plan:
        assert plan.tenant is None
    assert (plan.rungs["free"], pool.cached) == (7 * PAGE, 5 * PAGE)


def test_case_i48_a_quiet_tenants_pages_stay():
    pool = make_pool(32)
    quiet, noisy, beta = pool.tenant("quiet", reserve=8 * PAGE), pool.tenant("noisy"), pool.tenant("beta")
    cache(pool, quiet, ids(8 * TOKENS))
    for seed in range(1, 4):
        cache(pool, noisy, ids(8 * TOKENS, seed))
    assert pool.free == 0
    pool.top_up(beta, 16 * PAGE)
    assert (quiet.cached, noisy.cached, pool.free) == (8 * PAGE, 8 * PAGE, 16 * PAGE)
    assert hit(pool, quiet, [*ids(8 * TOKENS), 1]) == 8 * TOKENS


# ---- bad input -------------------------------------------------------------------------------------------


def test_bad_input():
    pool = make_pool(8)
    acme = pool.tenant("acme")
    with unchanged(pool):
        assert pool.reclaim(acme, "1TiB").shortfall == 1 << 40, "larger than the tenant"
        for call in (pool.reclaim, pool.top_up):
            with pytest.raises(kvalloc.UnknownTenant):
                call("nobody", PAGE)
            for wrong in (-1, "12GB?", 1.5, float("nan"), None):
                with pytest.raises(kvalloc.InvalidArgument):
                    call(acme, wrong)
            for keywords in (
                {"live": "kill"},
                {"ttl": -1},
                {"dry_run": 1},
                {"mode": "swap"},
                {"sessions": [1]},
            ):
                with pytest.raises(kvalloc.InvalidArgument):
                    call(acme, PAGE, **keywords)
        with pytest.raises(kvalloc.InvalidArgument):
            pool.top_up(acme, PAGE, live="freeze")
        for keywords in ({"page_class": 9}, {"page_class": -1}, {"max_moves": -1}, {"page_class": "full"}):
            with pytest.raises(kvalloc.InvalidArgument):
                pool.rebalance(PAGE, **keywords)
        for low, high in ((2 * PAGE, PAGE), (PAGE, None), (0, 0)):
            with pytest.raises(kvalloc.InvalidArgument):
                pool.set_watermarks(low, high)
        with pytest.raises(kvalloc.PlanError, match="missing") as error:
            pool.top_up(acme, "1GiB")
        assert (error.value.asked, error.value.shortfall) == (1 << 30, (1 << 30) - pool.capacity)
    pool.close()
    for call in (lambda: pool.reclaim(acme, 1), lambda: pool.rebalance(1), pool.reclaim_some, pool.plans):
        with pytest.raises(kvalloc.ClosedError):
            call()


def test_a_plan_ends_once():
    pool, other = make_pool(8), make_pool(8)
    acme = pool.tenant("acme")
    for end in ("commit", "abort"):
        plan = pool.reclaim(acme, PAGE)
        getattr(plan, end)()
        for late in (plan.commit, plan.abort):
            with pytest.raises(kvalloc.PlanError, match="before") as error:
                late()
            assert (error.value.plan, error.value.state) == (
                plan.id,
                f"{end}ed".replace("commited", "committed"),
            )
    assert pool.stats().late_reports == 4
    with pytest.raises(kvalloc.PlanError, match="dry"):
        pool.reclaim(acme, PAGE, dry_run=True).commit()
    with pytest.raises(kvalloc.PlanError, match="where its pool is"):
        kvalloc.Plan.from_bytes(pool.reclaim(acme, PAGE).to_bytes()).commit()
    assert not other.plans()


def test_case_a1_a_plan_that_nobody_ends_expires():
    pool = two_sizes()
    acme = pool.tenant("acme")
    kept = scatter(pool, acme)
    for _ in range(20):
        plan = pool.rebalance(pool.free, page_class=0, ttl=5)
        assert len(plan.moves)
        pool.advance(5)
        assert plan.state == "expired"
    assert pool.stats().expired_plans == 20
    assert check(pool).device.in_flight == 0
    assert all(len(seq) for seq in kept)


def test_case_a2_a_report_that_comes_late_changes_nothing():
    pool = two_sizes()
    acme = pool.tenant("acme")
    kept = scatter(pool, acme)
    plan = pool.rebalance(pool.free, page_class=0, ttl=5)
    # The sequences are aborted while their pages are copied; then the completion arrives.
    for seq in kept:
        seq.close()
    check(pool)
    pool.advance(6)
    with unchanged(pool), pytest.raises(kvalloc.PlanError) as error:
        plan.commit()
    assert error.value.state == "expired"
    check_idle(pool)


def test_altered_in_transit():
    pool = two_sizes()
    kept = scatter(pool, pool.tenant("acme"))
    plan = pool.rebalance(pool.free, page_class=0)
    assert len(plan.moves) <= len(kept)
    data = plan.to_bytes()
    there = kvalloc.Plan.from_bytes(data)
    assert (there.id, there.kind, there.emptied) == (plan.id, "rebalance", plan.emptied)
    assert there.spec_digest == plan.spec_digest == pool.spec.digest
    np.testing.assert_array_equal(there.moves, plan.moves)
    for at in range(0, len(data), 7):
        altered = bytearray(data)
        altered[at] ^= 1
        with pytest.raises(kvalloc.PlanError, match="no plan"):
            kvalloc.Plan.from_bytes(bytes(altered))
    for cut in (b"", data[:8], data[:-1], data[:-8], data + b"\0" * 8, b"x" * len(data)):
        with pytest.raises(kvalloc.PlanError, match="no plan"):
            kvalloc.Plan.from_bytes(cut)
    with pytest.raises(kvalloc.PlanError, match="another version"):
        kvalloc.Plan.from_bytes(data[:7] + b"\1" + data[8:])  # without a digest


def test_a_dry_run_is_not_carried_out_elsewhere_either():
    pool = two_sizes()
    kept = scatter(pool, pool.tenant("acme"))
    dry = pool.rebalance(pool.free, page_class=0, dry_run=True)
    assert 0 < len(dry.moves) <= len(kept)
    for plan in (dry, kvalloc.Plan.from_bytes(dry.to_bytes())):
        with pytest.raises(kvalloc.PlanError, match="dry run has no leases"):
            plan.to_copy(pool)


# ---- freeze, watermarks ----------------------------------------------------------------------------------


def test_frozen():
    pool = make_pool(16)
    org = pool.tenant("org")
    acme = pool.tenant("acme", parent=org)
    batch = pool.batch(2, 256)
    seq = pool.open(acme, ids(TOKENS), max_new_tokens=TOKENS + 4, admit=True)
    batch.add(seq)
    finish(batch)
    with pool.reclaim(org, 0, live="freeze"):
        assert acme.frozen
    with pytest.raises(kvalloc.OutOfPages) as error:
        pool.open(acme, [1])
    assert error.value.why == "frozen"
    with pytest.raises(kvalloc.AdmissionRefused) as error:
        pool.open(acme, [1], admit=True)
    assert (error.value.verdict, error.value.why) == ("wait", "frozen")
    answer = pool.admit(acme, 1)
    assert (answer.verdict, answer.why) == ("wait", "frozen")
    seq.extend([7])
    decode(batch, 2 * TOKENS)  # what it was admitted for, and what is left of its last page
    (refusal,) = batch.step().refused
    assert refusal.why == "frozen"
    org.thaw()
    assert not acme.frozen
    assert not batch.step().refused
    acme.freeze()
    assert (acme.frozen, org.frozen) == (True, False)
    beta = pool.tenant("beta")
    with pool.reclaim(None, 0, live="freeze"):
        assert beta.frozen
    assert (acme.frozen, beta.frozen) == (True, False)


def test_whoever_freezes_undoes_it():
    pool = make_pool(16)
    acme = pool.tenant("acme")
    plan = pool.reclaim(acme, 0, live="freeze")
    acme.thaw()
    acme.freeze()
    plan.abort()
    assert acme.frozen
    acme.thaw()
    assert not acme.frozen


def test_a_plan_is_nothing_to_who_gets_its_tenants_place():
    pool = make_pool(16, max_tenants=2)
    beta, acme = pool.tenant("beta"), pool.tenant("acme")
    seq = pool.open(beta, ids(12 * TOKENS))
    batch = pool.batch(1, 256)
    batch.add(seq)
    finish(batch)
    batch.remove(seq)
    plan = pool.top_up(acme, 8 * PAGE, live="preempt", sessions=[seq])
    pool.remove_tenant(acme)
    other = pool.tenant("other", reserve=2 * PAGE)
    plan.commit()
    assert (other.reserve, seq.state) == (2 * PAGE, "suspended")


def test_watermarks():
    pool = make_pool(32)
    acme = pool.tenant("acme")
    assert pool.watermarks is None
    acme.set_watermarks(4 * PAGE, 8 * PAGE)
    assert acme.watermarks == (4 * PAGE, 8 * PAGE)
    cache(pool, acme, ids(12 * TOKENS))
    freed = [pool.reclaim_some(max_pages=3) for _ in range(20)]
    assert max(freed) <= 3 * PAGE
    assert freed[-1] == 0
    assert acme.cached <= 4 * PAGE
    acme.set_watermarks()
    assert acme.watermarks is None
    pool.set_watermarks(high=2 * PAGE)
    assert pool.watermarks == (2 * PAGE, 2 * PAGE)
    while pool.reclaim_some():
        pass
    assert pool.cached <= 2 * PAGE


# ---- reserve and borrow ----------------------------------------------------------------------------------


def test_grow_shrink_grow():
    pool = make_pool(32)
    acme, beta = pool.tenant("acme"), pool.tenant("beta")
    for turn in range(10):
        cache(pool, acme, ids(30 * TOKENS, turn))
        pool.top_up(beta, 20 * PAGE)
        assert beta.reserve == 20 * PAGE
        assert pool.free >= 20 * PAGE
        with serve(pool, beta, ids(20 * TOKENS, 99)):
            assert check(pool).ok
        beta.set(reserve=4 * PAGE)
        pool.top_up(beta, 3 * PAGE)
        assert beta.reserve == 7 * PAGE
        beta.set(reserve=0)
    check_idle(pool)


def test_a_top_up_above_the_limit():
    pool = make_pool(32)
    beta = pool.tenant("beta", limit=4 * PAGE)
    with unchanged(pool), pytest.raises(kvalloc.TenantError):
        pool.top_up(beta, 5 * PAGE)
    assert pool.top_up(beta, 4 * PAGE).state == "committed"


def test_case_e30_those_over_their_share_are_stopped():
    pool = make_pool(16)
    batch = pool.batch(4, 256)
    small, large, beta = pool.tenant("small"), pool.tenant("large"), pool.tenant("beta")
    rows = [pool.open(large, ids(4 * TOKENS, n)) for n in range(3)] + [pool.open(small, ids(2 * TOKENS, 9))]
    for seq in rows:
        batch.add(seq)
    finish(batch)
    with unchanged(pool), pytest.raises(kvalloc.PlanError) as error:
        pool.top_up(beta, 6 * PAGE)
    missing = error.value.shortfall
    assert 0 < missing <= 6 * PAGE
    with pool.top_up(beta, 6 * PAGE, live="preempt", batch=batch, mode="recompute") as plan:
        assert {victim.tenant for victim in plan.victims} == {"large"}
        assert beta.reserve == 0, "not before they have left"
    assert beta.reserve == 6 * PAGE
    assert rows[0].state == "running", "the oldest goes on"
    assert serve(pool, beta, ids(6 * TOKENS, 50)).num_written == 6 * TOKENS
    check(pool)


# ---- rebalance -------------------------------------------------------------------------------------------


def scatter(pool: kvalloc.Pool, tenant: kvalloc.Tenant, spread: int = 7) -> list[kvalloc.Sequence]:
    """Fill the pool with sequences of one small page each, and close all but some, all over the arena."""
    seqs = []
    while True:
        seq = pool.open(tenant, ids(2, len(seqs)))
        batch = pool.batch(1, 4 * TOKENS)
        batch.add(seq)
        out = batch.step()
        if out.refused:
            seq.close()
            break
        batch.commit([7])
        batch.remove(seq)
        seqs.append(seq)
    kept = seqs[::spread]
    for n, seq in enumerate(seqs):
        if n % spread:
            seq.close()
    check(pool)
    return kept


def test_case_f33_f34_any_free_byte_serves_any_class():
    pool = two_sizes()
    acme = pool.tenant("acme")
    kept = scatter(pool, acme)
    fragmented, held = pool.fragmented, pool.held
    assert fragmented > 0
    memory = Bytes(pool)
    with pool.rebalance(pool.free) as plan:
        assert plan.kind == "rebalance"
        assert plan.copied == (sum(memory.page_bytes[c] for c in plan.moves[:, 1]), 0)
        assert (plan.moves[:, 1] == plan.moves[:, 4]).all()
        memory.execute(plan)
    assert pool.held == held
    assert pool.fragmented < fragmented / 4
    for cls in (0, 1):
        # Every byte that is free, but for what extents that are in use can't take.
        pages = pool.pages.allocate(acme, (pool.free - pool.fragmented) // memory.page_bytes[cls], group=cls)
        assert pool.fragmented <= pool.capacity // 8
        check(pool)
        pool.pages.release(pages)
    for seq in kept:
        seq.close()
    check_idle(pool)
    for cls in (0, 1, 0):  # an empty pool serves any class
        pages = pool.pages.allocate(
            acme, (pool.capacity - 2 * max(memory.page_bytes)) // memory.page_bytes[cls], group=cls
        )
        pool.pages.release(pages)


def test_case_f35_a_top_up_across_sizes():
    pool = two_sizes()
    acme, beta = pool.tenant("acme"), pool.tenant("beta")
    kept = scatter(pool, acme)
    room = (pool.free - pool.fragmented // 4) // PAGE * PAGE
    with unchanged(pool), pytest.raises(kvalloc.PlanError) as error:
        pool.top_up(beta, room, max_moves=1)
    assert error.value.shortfall > 0
    dry = pool.top_up(beta, room, dry_run=True)
    assert (dry.state, beta.reserve) == ("dry", 0)
    with pool.top_up(beta, room) as plan:
        assert beta.reserve == room
    assert (plan.state, beta.reserve) == ("committed", room)
    for cls, size in enumerate(c.page_bytes for c in pool.spec.classes):
        pages = pool.pages.allocate(beta, room // size, group=cls)
        assert len(pages) == room // size
        pool.pages.release(pages)
    # Given up: the reserve goes back.
    beta.set(reserve=0)
    for seq in kept:
        seq.close()
    check_idle(pool)


def test_case_f36_sequences_decode_while_their_pages_move():
    pool = two_sizes(400)
    acme = pool.tenant("acme")
    memory = Bytes(pool)
    batch = pool.batch(8, 512)
    kept = scatter(pool, acme)
    rows = []
    for n in range(8):
        seq = pool.open(acme, ids(20 + n, 500 + n))
        batch.add(seq)
        rows.append(seq)
        memory.step(batch)
    for seq in kept:
        seq.close()
    moved = 0
    for turn in range(60):
        plan = pool.rebalance(pool.capacity, page_class=turn % 2, max_moves=8)
        memory.execute(plan)
        if turn % 3 == 0:
            memory.step(batch)  # between the copy and the commit
        if turn % 7 == 3:
            plan.abort()
        else:
            left = 1
            while left:
                progress = plan.commit(moves=3)
                left, moved = progress.left, moved + progress.moved
                memory.step(batch)
        for seq in rows:
            memory.check(seq)
        check(pool)
    assert moved > 0
    assert all(seq.num_written > 60 for seq in rows)
    for seq in rows:
        batch.remove(seq)
        seq.close()
    check_idle(pool)


def test_pages_held_by_another_plan():
    pool = two_sizes()
    kept = scatter(pool, pool.tenant("acme"))
    first, second = (pool.rebalance(pool.free, page_class=0, max_moves=9) for _ in range(2))
    places = [{tuple(move) for move in plan.moves[:, :3].tolist()} for plan in (first, second)]
    assert places[0]
    assert not places[0] & places[1]
    second.commit()
    first.abort()
    check(pool)
    for seq in kept:
        seq.close()
    check_idle(pool)


def test_frames_that_were_told_stay():
    pool = two_sizes()
    acme = pool.tenant("acme")
    pages = pool.pages.allocate(acme, 100, group=0)
    some = pages[::9]
    pool.pages.release([page for page in pages if page not in some])
    frames = pool.pages.frames(some)
    with pool.rebalance(pool.capacity, page_class=1) as plan:
        assert len(plan.moves) == 0
        assert plan.shortfall > 0
    np.testing.assert_array_equal(pool.pages.frames(some), frames)
    pool.pages.release(some)
    check_idle(pool)


def test_one_size_has_nothing_to_rebalance():
    pool = make_pool(8, FULL)
    cache(pool, pool.tenant("acme"), ids(3 * TOKENS))
    with pool.rebalance("1GiB") as plan:
        assert len(plan.moves) == 0
        assert plan.shortfall == (1 << 30) - plan.emptied - pool.free or plan.shortfall > 0

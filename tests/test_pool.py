"""What a pool does, in the order in which one meets it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvalloc
from tinypool import PAGE, SPECS, TOKENS, cache, check, check_idle, decode, finish, hit, ids, make_pool, serve


@pytest.fixture
def pool():
    return make_pool(40, events=1000)


def test_one_request_from_start_to_end(pool):
    tenant = pool.tenant("acme")
    seq = pool.open(tenant, ids(20), max_new_tokens=4)
    assert (seq.num_tokens, seq.num_slots, seq.num_written, seq.cached_tokens) == (20, 0, 0, 0)
    batch = pool.batch(max_sequences=4, max_tokens=64)
    assert batch.add(seq) == 0
    out = batch.step()
    assert (out.num_tokens, out.num_rows, list(out.counts)) == (20, 1, [20])
    assert tenant.held == pool.held == 2 * PAGE
    table = seq.block_table()
    np.testing.assert_array_equal(batch.block_table()[0, :3], [*table, 0])
    np.testing.assert_array_equal(batch.positions[:20], range(20))
    np.testing.assert_array_equal(batch.query_start_loc[:2], [0, 20])
    np.testing.assert_array_equal(batch.seq_lens, [20, 0, 0, 0])
    slots = [table[n // TOKENS] * TOKENS + n % TOKENS for n in range(20)]
    np.testing.assert_array_equal(batch.slot_mapping()[:21], [*slots, -1])
    batch.commit([7])
    assert (seq.num_tokens, seq.num_slots, seq.num_written) == (21, 20, 20)
    assert batch.step().num_tokens == 1
    assert (batch.positions[0], batch.seq_lens[0]) == (20, 21)
    batch.commit(np.array([8], np.int32))
    assert list(seq.tokens[20:]) == [7, 8]
    assert batch.remove(seq) is None
    seq.close()
    # The full page stays for others, the rest is free.
    assert (tenant.held, tenant.cached) == (0, PAGE)
    assert hit(pool, tenant, ids(20)) == 16
    check_idle(pool)


def test_prompts_go_in_by_budget_after_rows_that_decode(pool):
    pool.tenant("a")
    batch = pool.batch(4, 200)
    running = serve(pool, "a", ids(20))
    running.extend([1])
    long, short = pool.open("a", ids(100, 1)), pool.open("a", ids(30, 2))
    for seq in (long, running, short):
        batch.add(seq)
    assert list(batch.step(token_budget=64).counts) == [63, 1, 0]
    batch.commit([-1, 5, -1])
    assert list(batch.step(token_budget=64).counts) == [37, 1, 26]
    batch.commit([9, 5, -1])
    assert list(batch.step([0, 1, 4]).counts) == [0, 1, 4]
    batch.commit([-1, 5, 6])
    assert [seq.num_tokens for seq in (long, running, short)] == [101, 24, 31]
    batch.close()
    assert len(batch) == 0
    assert not long.closed
    for seq in (long, running, short):
        seq.close()
    check_idle(pool)


def test_rows_move_into_the_hole(pool):
    pool.tenant("a")
    batch = pool.batch(4, 64)
    seqs = [pool.open("a", ids(10 + n, n)) for n in range(4)]
    assert [batch.add(seq) for seq in seqs] == [0, 1, 2, 3]
    finish(batch)
    assert batch.remove(seqs[1]) == 3  # row 3 is row 1 now
    assert batch.rows == [seqs[0], seqs[3], seqs[2]]
    assert batch.remove(seqs[2]) is None
    for seq in seqs:
        seq.extend([1])
    batch.step()
    np.testing.assert_array_equal(batch.seq_lens, [11, 14, 0, 0])
    np.testing.assert_array_equal(batch.block_table()[1, :1], seqs[3].block_table())
    batch.commit()
    for seq in seqs:
        seq.close()
    check_idle(pool)


def test_the_same_calls_give_the_same_pages():
    def run():
        pool = make_pool(30)
        pool.tenant("a"), pool.tenant("b")
        batch = pool.batch(8, 200)
        shown = []
        for n in range(40):
            if len(batch) < 6:
                batch.add(pool.open("ab"[n % 2], ids(20 + 13 * (n % 4), n % 5)))
            out = batch.step(token_budget=50)
            shown.append(batch.block_table().copy())
            shown.append(batch.slot_mapping()[: out.num_tokens].copy())
            batch.commit([n] * out.num_rows)
            for refusal in out.refused:
                refusal.sequence.close()
            for seq in batch.rows:
                if seq.num_written > 80:
                    seq.close()
        return shown

    for one, two in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_csr_arrays():
    pool = make_pool(60, SPECS["full+window"])
    pool.tenant("a")
    batch = pool.batch(3, 200)
    seqs = [pool.open("a", ids(n, n)) for n in (5, 100, 32)]
    for seq in seqs:
        batch.add(seq)
    for _ in range(2):
        batch.step()
        batch.commit([1, 1, 1])
    for group in range(2):
        indptr, indices, last = batch.csr(group)
        assert {array.dtype for array in (indptr, indices, last)} == {np.dtype(np.int32)}
        assert list(last) == [6, 5, 1]
        for row, seq in enumerate(seqs):
            table = seq.block_table(group)
            np.testing.assert_array_equal(indices[indptr[row] : indptr[row + 1]], table[table > 0])
    assert list(batch.csr(0)[0]) == [0, 1, 8, 11]
    assert list(batch.csr(1)[0]) == [0, 1, 5, 8]


class Tensor:
    """As much of a tensor as exchange by DLPack needs."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("wrap", [lambda a: a, memoryview, Tensor], ids=["numpy", "memoryview", "dlpack"])
def test_arrays_of_ones_own(pool, wrap):
    pool.tenant("a")
    batch = pool.batch(2, 64, max_step_tokens=128)
    seq = pool.open("a", ids(20))
    batch.add(seq)
    batch.step()
    batch.commit()
    mine = {
        "block_table": np.full((2, 4), 77, np.int32),
        "slot_mapping": np.full(128, 77, np.int64),
        "seq_lens": np.full(2, 77, np.int32),
        "query_start_loc": np.full(3, 77, np.int32),
        "positions": np.full(128, 77, np.int32),
    }
    batch.bind(**{name: wrap(array) for name, array in mine.items()})
    np.testing.assert_array_equal(mine["block_table"][0], [*seq.block_table(), 0, 0])
    seq.extend([5])
    batch.step()
    assert (mine["seq_lens"][0], mine["positions"][0], mine["query_start_loc"][1]) == (21, 20, 1)
    assert mine["slot_mapping"][0] == seq.block_table()[1] * TOKENS + 4
    assert (mine["slot_mapping"][1:] == -1).all()
    np.testing.assert_array_equal(np.asarray(batch.seq_lens), mine["seq_lens"])
    batch.commit()
    seq.close()
    check_idle(pool)


def test_arrays_are_written_in_place(pool):
    pool.tenant("a")
    batch = pool.batch(2, 64)
    arrays = [
        batch.block_table(),
        batch.slot_mapping(),
        batch.seq_lens,
        batch.query_start_loc,
        batch.positions,
    ]
    assert [a.dtype.name for a in arrays] == ["int32", "int64", "int32", "int32", "int32"]
    batch.add(pool.open("a", ids(20)))
    batch.step()
    assert arrays[2][0] == 20
    assert batch.seq_lens is arrays[2]
    assert batch.block_table() is arrays[0]
    assert np.from_dlpack(arrays[1])[0] == arrays[1][0]


# Sharing.


def test_parts_of_a_prompt_are_shared_under_different_nodes(pool):
    """A system prompt for the organisation, the rest for oneself."""
    org = pool.tenant("org")
    one, two = (pool.tenant(name, parent=org, publish=[org]) for name in ("one", "two"))
    system, mine, yours = ids(64), ids(40, 1), ids(40, 2)
    first = serve(pool, one, np.concatenate([system, mine]), share=[(org, 64)])
    assert (org.held, one.held) == (4 * PAGE, 3 * PAGE)  # the scope pays
    second = pool.open(two, np.concatenate([system, yours]), share=[(org, 64)])
    assert second.cached_tokens == 64
    assert (org.held, two.held) == (4 * PAGE, 0)
    # The private rest is found by its owner alone, behind the same shared part.
    assert hit(pool, one, np.concatenate([system, mine]), share=[(org, 64)]) == 96
    assert hit(pool, two, np.concatenate([system, mine]), share=[(org, 64)]) == 64
    first.close()
    second.close()
    assert (org.cached, one.cached, two.cached) == (4 * PAGE, 2 * PAGE, 0)
    check_idle(pool)


def test_publishing_upward_is_a_right(pool):
    org = pool.tenant("org")
    reader = pool.tenant("reader", parent=org)
    writer = pool.tenant("writer", parent=org, publish=[org])
    seq = serve(pool, reader, ids(64), share=[("org", 64)])
    assert seq.fallbacks == [("org", 64)]
    assert (org.held, reader.held) == (0, 4 * PAGE)
    assert hit(pool, writer, ids(64), share=[("org", 64)]) == 0
    # What others may publish is there for all below: the reader hits it, and pays only for what comes behind.
    cache(pool, writer, ids(48, 1), share=[("org", 48)])
    with serve(pool, reader, ids(96, 1), share=[("org", 96)]) as half:
        assert half.cached_tokens == 48
        assert half.fallbacks == [("org", 48)]
        assert org.held == 3 * PAGE
    seq.close()
    check_idle(pool)


def test_the_right_to_publish_has_a_size(pool):
    org = pool.tenant("org")
    writer = pool.tenant("writer", parent=org, publish={"org": 4 * PAGE})
    assert writer.publish == {"org": 4 * PAGE}
    with serve(pool, writer, ids(64), share=[("org", 64)]) as seq:
        assert seq.fallbacks == []
        assert org.held == 4 * PAGE
    with serve(pool, writer, ids(64, 1), share=[("org", 64)]) as seq:
        assert seq.fallbacks == [("org", 64)]
        assert org.held == 0
        assert writer.held == 4 * PAGE
    check_idle(pool)


def test_admission_asks_each_payer_for_its_part(pool):
    """A long shared prompt does not count against the limit of the one who uses it."""
    org = pool.tenant("org")
    user = pool.tenant("user", parent=org, publish=["org"], limit=3 * PAGE)
    seq = pool.open(user, ids(160), 16, share=[("org", 128)], admit=True)
    assert (org.promised, user.promised) == (8 * PAGE, 3 * PAGE)
    seq.close()
    with pytest.raises(kvalloc.AdmissionRefused) as refused:
        pool.open(user, ids(160), 17, share=[("org", 128)], admit=True)
    assert (refused.value.verdict, refused.value.level) == ("never", "user")
    cache(pool, user, ids(128), share=[("org", 128)])
    pool.open(user, ids(160), 16, share=[("org", 128)], admit=True).close()
    check_idle(pool)


def test_a_reset_forgets_all(pool):
    pool.tenant("a"), pool.tenant("b")
    cache(pool, "a", ids(64))
    cache(pool, "b", ids(64, 1))
    assert pool.reset_prefix_cache() == 8
    assert pool.free == pool.capacity
    assert hit(pool, "a", ids(65)) == hit(pool, "b", ids(65, 1)) == 0
    check_idle(pool)


# Room.


def test_a_reserve_is_there_at_once(pool):
    """Others may fill it with what can be taken back without asking, and with nothing else."""
    owner = pool.tenant("owner", reserve=10 * PAGE)
    pool.tenant("other")
    for seed in range(2):
        cache(pool, "other", ids(320, seed))
    assert pool.cached == 40 * PAGE
    with pytest.raises(kvalloc.OutOfPages) as refused:
        pool.pages.allocate("other", 31)
    assert (refused.value.why, refused.value.room) == ("claim", 30 * PAGE)
    running = pool.pages.allocate("other", 30)
    mine = pool.pages.allocate(owner, 10)
    assert (owner.held, pool.cached, pool.free) == (10 * PAGE, 0, 0)
    check(pool)
    pool.pages.release(mine)
    pool.pages.release(running)
    check_idle(pool)


def test_a_hit_may_be_refused_too(pool):
    """Cached pages in another's reserve can't be held again: the hit ends there."""
    pool.tenant("a")
    cache(pool, "a", ids(320))
    pool.tenant("b", reserve=30 * PAGE)
    with pool.open("a", ids(321)) as seq:
        assert seq.cached_tokens == 160
        assert pool.held == 10 * PAGE
    assert pool.stats()["stopped_lookups"] == 1
    check_idle(pool)


def test_at_a_limit_ones_own_cached_pages_go_first(pool):
    pool.tenant("a", limit=6 * PAGE)
    pool.tenant("b")
    cache(pool, "a", ids(64))
    cache(pool, "b", ids(64))
    pages = pool.pages.allocate("a", 5)
    assert (pool.tenant("a").cached, pool.tenant("b").cached) == (PAGE, 4 * PAGE)
    with pytest.raises(kvalloc.OutOfPages) as refused:
        pool.pages.allocate("a", 2)
    assert (refused.value.why, refused.value.level) == ("limit", "a")
    pool.pages.release(pages)
    check_idle(pool)


def test_limits_hold_for_the_whole_subtree(pool):
    pool.tenant("org", limit=10 * PAGE)
    for name in ("x", "y"):
        pool.tenant(name, parent="org")
    pool.pages.allocate("x", 6)
    with pytest.raises(kvalloc.OutOfPages) as refused:
        pool.pages.allocate("y", 5)
    assert (refused.value.level, refused.value.room, refused.value.tenant) == ("org", 4 * PAGE, "y")
    pool.pages.allocate("y", 4)
    assert pool.tenant("org").held == 0
    assert pool.tenant("org").usage(subtree=True).held == 10 * PAGE
    check(pool)


@pytest.mark.parametrize(("weights", "left"), [((1, 1), (10, 10)), ((3, 1), (15, 5)), ((1, 4), (4, 16))])
def test_weights_decide_who_gives_back(weights, left):
    pool = make_pool(240)
    for name, weight in zip("ab", weights, strict=True):
        pool.tenant(name, weight=weight)
        cache(pool, name, ids(120 * TOKENS))
    pool.tenant("c")
    pool.pages.allocate("c", 160)
    parts = [pool.tenant(name).cached // PAGE for name in "ab"]
    assert sum(parts) == 80
    # A choice holds for some evictions.
    assert abs(parts[0] - 4 * left[0]) <= 32
    check(pool)


def test_among_equals_the_lower_priority_gives_back_first():
    pool = make_pool(80)
    pool.tenant("low", priority=10), pool.tenant("high", priority=90)
    for name in ("high", "low"):
        cache(pool, name, ids(40 * TOKENS))
    pool.tenant("c")
    pool.pages.allocate("c", 8)
    assert (pool.tenant("low").cached, pool.tenant("high").cached) == (32 * PAGE, 40 * PAGE)


def test_admission_promises_and_gives_back(pool):
    tenant = pool.tenant("a")
    answer = pool.admit(tenant, ids(100), 60)
    assert (answer.verdict, answer.bytes, bool(answer)) == ("now", 10 * PAGE, True)
    seq = pool.open(tenant, ids(100), 60, admit=True)
    assert (seq.promised, tenant.promised, tenant.held) == (10 * PAGE, 10 * PAGE, 0)
    batch = pool.batch(1, 200)
    batch.add(seq)
    finish(batch)
    assert (seq.promised, tenant.promised, tenant.held) == (3 * PAGE, 3 * PAGE, 7 * PAGE)
    assert pool.admit(tenant, 30 * TOKENS + 1).verdict == "wait"
    assert pool.admit(tenant, 30 * TOKENS).verdict == "now"
    assert pool.admit(tenant, 40 * TOKENS + 1).verdict == "never"
    seq.close()
    assert tenant.promised == 0
    # What others hold of the same prompt is not needed twice.
    with serve(pool, tenant, ids(100)):
        assert pool.admit(tenant, ids(100), 60).bytes == 4 * PAGE
    check_idle(pool)


# Pins.


def test_pins_keep_pages_and_are_listed(pool):
    pool.tenant("a"), pool.tenant("keeper", pin_budget=4 * PAGE)
    seq = serve(pool, "a", ids(70))
    pin = pool.pin(seq, 70, owner="keeper", ttl=30, label="system prompt")
    assert (pin.pages, pin.bytes, pin.owner, pin.label, pin.expires) == (
        4,
        4 * PAGE,
        "keeper",
        "system prompt",
        30,
    )
    assert pool.pinned == 0  # held until the sequence goes
    seq.close()
    assert (pool.pinned, pool.tenant("a").pinned, pool.cached) == (4 * PAGE, 4 * PAGE, 0)
    taken = pool.pages.allocate("a", 36)
    with pytest.raises(kvalloc.OutOfPages):
        pool.pages.allocate("a", 1)
    pool.pages.release(taken)
    assert hit(pool, "a", ids(70)) == 64  # never evicted
    assert [p.label for p in pool.pins("keeper")] == ["system prompt"]
    pool.advance(30)
    assert pool.pins() == []
    assert (pool.pinned, pool.cached) == (0, 4 * PAGE)
    with pytest.raises(kvalloc.PinError):
        pin.unpin()
    check_idle(pool)


def test_a_window_pins_what_it_still_has():
    pool = make_pool(40, SPECS["full+window"])
    pool.tenant("a", pin_budget="1MiB")
    batch = pool.batch(1, 200)
    seq = pool.open("a", ids(100))
    batch.add(seq)
    while seq.num_written < 100:
        batch.step(token_budget=16)
        batch.commit()
    pin = pool.pin(seq, 96, owner="a")
    assert 6 < pin.pages <= 9
    seq.close()
    assert pool.pinned == pin.bytes
    pin.unpin()
    check_idle(pool)


# Telling.


def test_events_tell_what_was_stored_and_what_went():
    pool = make_pool(4, events=64)
    pool.tenant("a")
    cache(pool, "a", ids(64))
    events = pool.events()
    stored = [e for e in events if e["type"] == "stored"]
    assert len(stored) == len(events) == 4
    assert events.lost == 0
    assert [e["parent"] for e in stored] == [None, *(e["key"] for e in stored[:-1])]
    assert {(e["scope"], e["tokens"], e["group"], e["tier"]) for e in stored} == {("a", 16, 0, "device")}
    assert [e["sequence"] for e in stored] == list(range(stored[0]["sequence"], stored[0]["sequence"] + 4))
    taken = pool.pages.allocate("a", 2)
    assert [e["key"] for e in pool.events()] == [
        stored[3]["key"],
        stored[2]["key"],
    ]  # the last of the chain first
    pool.pages.release(taken)
    assert len(pool.events()) == 0
    pool.reset_prefix_cache()
    kinds = [e["type"] for e in pool.events()]
    assert kinds == ["removed", "removed", "cleared"]


def test_events_are_bounded_and_count_what_was_lost():
    pool = make_pool(40, events=16)
    pool.tenant("a")
    for n in range(10):
        cache(pool, "a", ids(64, n))
    events = pool.events()
    assert len(events) + events.lost == 40
    assert 0 < len(events) <= 16
    assert pool.stats()["written_events"] == 40
    assert pool.stats()["dropped_events"] == events.lost
    cache(pool, "a", ids(16, 99))
    assert pool.events().lost == 0
    silent = make_pool(40)
    silent.tenant("a")
    cache(silent, "a", ids(64))
    assert len(silent.events()) == 0


def test_stats_count_what_happened(pool):
    pool.tenant("a")
    cache(pool, "a", ids(64))
    serve(pool, "a", ids(70), 10).close()
    stats = pool.stats()
    assert (stats["query_tokens"], stats["hit_tokens"]) == (134, 64)
    assert stats.hit_rate == pytest.approx(64 / 134)
    assert stats["written_tokens"] == 64 + 6 + 10
    assert set(stats.keys()) == set(stats.as_dict()) == set(stats.describe())
    assert "hit_tokens" in stats
    assert len(stats) == len(list(stats))
    assert stats["published_pages"] == 5
    assert stats["allocated_pages"] == 5
    assert pool.stats()["double_frees"] == 0


def test_reprs_say_what_they_are(pool):
    tenant = pool.tenant("acme", reserve=PAGE)
    seq = serve(pool, tenant, ids(20))
    batch = pool.batch(2, 64)
    for thing, words in [
        (pool, ["Pool", "free"]),
        (tenant, ["acme"]),
        (seq, ["acme", "20 tokens"]),
        (batch, ["0 of 2 rows"]),
        (pool.audit(), ["0 finding"]),
        (pool.stats(), ["Stats"]),
        (pool.admit("acme", 5), ["now"]),
        (pool.pages, ["Pages"]),
    ]:
        for word in words:
            assert word in repr(thing), repr(thing)
    batch.add(seq)
    seq.extend([1])
    assert "1 tokens in 1 rows" in repr(batch.step())


# The lower face.


def test_the_lower_face(pool):
    """For engines with tables of their own: allocate, publish, look up, share, release."""
    pool.tenant("a"), pool.tenant("b")
    pages = pool.pages.allocate("a", 4)
    assert pages.dtype == np.uint64
    frames = pool.pages.frames(pages)
    assert frames.dtype == np.int32
    assert len(set(frames)) == 4
    assert frames.min() >= 1
    keys = [b"one", b"two", 3, -4]
    assert pool.pages.publish("a", pages, keys) == [True] * 4
    found = pool.pages.find("a", [b"two", b"nothing", 3])
    assert list(found) == [pages[1], pool.pages.MISS, pages[2]]
    assert pool.pages.share(found) == [True, False, True]
    assert list(pool.pages.lookup("a", keys)) == list(pages)
    assert len(pool.pages.lookup("b", keys)) == 0
    for references in (pages[::-1], found[[2, 0]], pages[::-1]):
        pool.pages.release(references)
    assert (pool.held, pool.cached) == (0, 4 * PAGE)
    again = pool.pages.lookup("a", np.array([3, -4]))
    assert list(again) == list(pages[2:])
    pool.pages.release(again[::-1])
    taken = pool.pages.allocate("b", 40)
    assert list(pool.pages.find("a", keys)) == [pool.pages.MISS] * 4
    assert pool.pages.share(pages) == [False] * 4
    pool.pages.release(taken)
    check_idle(pool)


def test_both_faces_share_one_pool(pool):
    pool.tenant("a")
    seq = serve(pool, "a", ids(40))
    references = seq.pages()
    np.testing.assert_array_equal(pool.pages.frames(references), seq.block_table())
    assert pool.pages.share(references) == [True, True, False]  # the partial page is the sequence's alone
    seq.close()
    assert pool.held == 2 * PAGE
    pool.pages.release(references[:2][::-1])
    check_idle(pool)


# Growing back and forth.


def test_drafts_grow_and_are_cut(pool):
    pool.tenant("a")
    seq = serve(pool, "a", ids(30))
    batch = pool.batch(1, 100)
    batch.add(seq)
    seq.extend([1, 2, 3, 4, 5])
    assert batch.step().num_tokens == 5
    assert pool.held == 3 * PAGE
    seq.truncate(31)  # four were rejected
    batch.commit([9])
    assert (list(seq.tokens[30:]), seq.num_written, pool.held) == ([1, 9], 31, 2 * PAGE)
    decode(batch, 3)
    assert seq.num_written == 34
    seq.close()
    check_idle(pool)


def test_the_next_turn_of_a_chat(pool):
    pool.tenant("a")
    seq = serve(pool, "a", ids(40), 20)
    assert seq.num_tokens == 61
    assert seq.num_written == 60
    seq.extend(ids(50, 1))
    batch = pool.batch(1, 200)
    batch.add(seq)
    assert batch.step().num_tokens == 51
    batch.commit([1])
    tokens = seq.tokens
    seq.close()
    assert hit(pool, "a", tokens) == 96
    check_idle(pool)


def test_bind_lets_the_old_arrays_go_without_a_lock(pool):
    batch, seen = pool.batch(4, 64), []

    class Watched(np.ndarray):
        def __del__(self):
            seen.append((batch.seq_lens.tolist(), len(batch)))

    batch.bind(seq_lens=np.zeros(4, np.int32).view(Watched))
    batch.bind(seq_lens=np.ones(4, np.int32))
    gc.collect()
    assert seen == [([1, 1, 1, 1], 0)]


def test_a_closed_batch_keeps_nothing(pool):
    tenant = pool.tenant("a")
    first = serve(pool, tenant, ids(20))
    second = first.fork()
    batch = pool.batch(4, 64)
    for seq in (first, second):
        batch.add(seq)
        seq.extend([1])
    out = batch.step()
    assert len(out.copies) > 0
    first.close()
    second.close()
    batch.close()
    assert batch.outstanding == 0
    assert pool.held == 0
    assert not pool.audit().findings
    pool.reset_prefix_cache()
    pool.remove_tenant(tenant)
    del out


def test_a_batch_of_long_rows_is_small(pool):
    assert pool.batch(1, 2**28).max_step_tokens == 2**20 + 1
    assert pool.batch(1, 2**30).slot_mapping().shape == (2**20 + 1,)
    assert pool.batch(2, 100).max_step_tokens == 202
    assert pool.batch(1, 100, max_step_tokens=500).max_step_tokens == 500


def test_a_handle_outlives_its_tenant_and_names_nobody_else():
    pool = make_pool(20, max_tenants=1)
    old = pool.tenant("acme")
    pool.remove_tenant(old)
    new = pool.tenant("beta")
    serve(pool, new, ids(40)).close()
    assert old != new
    assert repr(old) == '<kvalloc.Tenant "acme", removed>'
    assert old.name == "acme"
    for use in (
        lambda: pool.open(old, ids(40)),
        lambda: pool.admit(old, 5),
        lambda: pool.pages.allocate(old, 1),
        lambda: pool.remove_tenant(old),
        lambda: pool.tenant("c", parent=old),
        lambda: old.set(weight=2),
        lambda: old.held,
        lambda: old.limit,
        lambda: old.parent,
        lambda: old.publish,
        lambda: old.pin_used,
        old.usage,
        old.stats,
    ):
        with pytest.raises(kvalloc.UnknownTenant, match='"acme" was removed'):
            use()
    assert new.weight == 1
    pool.remove_tenant(new)
    again = pool.tenant("acme")
    assert again.held == 0


def test_a_tenant_with_open_sequences_stays(pool):
    tenant = pool.tenant("gone")
    seq = pool.open(tenant, ids(20))  # no page yet
    fork = seq.fork()
    with pytest.raises(kvalloc.TenantError, match="2 open sequences"):
        pool.remove_tenant(tenant)
    seq.close()
    seq.close()
    batch = pool.batch(1, 64)
    batch.add(fork)
    with pytest.raises(kvalloc.TenantError, match="1 open sequence;"):
        pool.remove_tenant(tenant)
    with pytest.raises(kvalloc.AdmissionRefused):
        pool.open(tenant, ids(20), 10**6, admit=True)
    fork.close()
    pool.remove_tenant(tenant)


def test_the_default_tenant_stays():
    pool = make_pool(20, default_tenant="guest")
    with pytest.raises(kvalloc.TenantError, match="default_tenant"):
        pool.remove_tenant("guest")
    assert pool.open("nobody", [1]).tenant.name == "guest"


def test_a_tenant_whose_pages_others_pin_stays_as_it_is(pool):
    tenant, other = pool.tenant("a", pin_budget=9 * PAGE), pool.tenant("b", pin_budget=9 * PAGE)
    seq = serve(pool, tenant, ids(40))
    pool.pin(seq, 16, owner=tenant)
    pin = pool.pin(seq, 16, owner=other)
    seq.close()
    before = (tenant.cached, tenant.pinned, len(pool.pins()))
    with pytest.raises(kvalloc.TenantError, match='pin of "b"'):
        pool.remove_tenant(tenant)
    assert (tenant.cached, tenant.pinned, len(pool.pins())) == before
    pin.unpin()
    pool.remove_tenant(tenant)

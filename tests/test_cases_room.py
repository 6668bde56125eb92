"""Fault cases E and F: admission, progress, geometry."""

from __future__ import annotations

import contextlib

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
    group,
    hit,
    ids,
    make_pool,
    serve,
    unchanged,
)


@pytest.mark.parametrize(
    ("tokens", "new", "pages"),
    [(1002, 0, 49), (100_000, 0, 4789), (785, 0, 49), (700, 85, 49), (1, 2**30 - 1, 49), (2**30, 0, 49)],
)
@pytest.mark.parametrize("by_length", [True, False])
def test_e26_what_can_never_fit_is_refused_at_once(tokens, new, pages, by_length):
    pool = make_pool(pages)
    pool.tenant("a")
    with unchanged(pool):
        prompt = tokens if by_length else ids(min(tokens, 100_000))
        if by_length or tokens <= 100_000:
            answer = pool.admit("a", prompt, new)
            assert (answer.verdict, answer.room) == ("never", pool.capacity)
            assert not answer
            assert kvalloc.format_bytes(pool.capacity) in answer.reason
            assert kvalloc.format_bytes(-(-(tokens + new) // TOKENS) * PAGE) in answer.reason
    if tokens <= 100_000:
        with unchanged(pool), pytest.raises(kvalloc.AdmissionRefused) as refused:
            pool.open("a", ids(tokens), new, admit=True)
        assert refused.value.verdict == "never"
        assert refused.value.room == pool.capacity
        assert refused.value.asked == -(-(tokens + new) // TOKENS) * PAGE
    # The queue behind moves on.
    assert pool.admit("a", 784).verdict == "now"
    with pool.open("a", ids(784), admit=True):
        assert pool.promised == 49 * PAGE
    check_idle(pool)


@pytest.mark.parametrize("bound", ["limit", "parent's limit", "others' reserves"])
def test_e26_never_names_what_is_in_the_way(bound):
    pool = make_pool(20)
    pool.tenant("org", limit=8 * PAGE if "parent" in bound else None)
    pool.tenant("a", parent="org", limit=8 * PAGE if bound == "limit" else None)
    if "reserve" in bound:
        pool.tenant("b", reserve=12 * PAGE)
    assert pool.admit("a", 8 * TOKENS).verdict == "now"
    never = pool.admit("a", 8 * TOKENS + 1)
    assert (never.verdict, never.room) == ("never", 8 * PAGE)
    assert never.behind == {"limit": "a", "parent's limit": "org", "others' reserves": None}[bound]


@pytest.mark.parametrize("admit", [True, False])
def test_e27_a_prompt_that_fits_and_its_output_that_does_not(admit):
    """Refused at once, or told in the step that finds no room; never preempted and retried for ever."""
    pool = make_pool(63)  # 1,008 tokens
    pool.tenant("a")
    assert pool.admit("a", 1000, 24).verdict == "never"
    if admit:
        with unchanged(pool), pytest.raises(kvalloc.AdmissionRefused):
            pool.open("a", ids(1000), 24, admit=True)
        return
    seq = pool.open("a", ids(1000), 24)
    batch = pool.batch(1, 2000)
    batch.add(seq)
    finish(batch)
    seq.extend([1])
    decode(batch, 8)
    assert seq.num_written == 1008
    with unchanged(pool):
        out = batch.step()
        [refusal] = out.refused
        assert (out.num_tokens, refusal.row, refusal.sequence) == (0, 0, seq)
        assert (refusal.needed_bytes, refusal.room) == (PAGE, 0)
        assert "asked for 4 KiB" in refusal.reason
        batch.commit([-1])
    seq.close()
    check_idle(pool)


def test_e28_the_whole_need_is_reserved_before_a_load_starts():
    """Four large ones fill nine tenths; the fifth waits and takes nothing; all four reach their end."""
    pool = make_pool(100)
    tenant = pool.tenant("a")
    four = [pool.open(tenant, ids(300, n), 50, admit=True) for n in range(4)]
    assert pool.promised == 4 * 22 * PAGE
    with unchanged(pool):
        answer = pool.admit(tenant, 300, 50)
        assert (answer.verdict, answer.bytes, answer.room) == ("wait", 22 * PAGE, 12 * PAGE)
        with pytest.raises(kvalloc.AdmissionRefused) as refused:
            pool.open(tenant, ids(300, 9), 50, admit=True)
        assert refused.value.verdict == "wait"
        # Nor does anybody else get at what was promised.
        with pytest.raises(kvalloc.OutOfPages):
            pool.pages.allocate(tenant, 13)
    batch = pool.batch(4, 400)
    for seq in four:
        batch.add(seq)
    finish(batch)
    for seq in four:
        seq.extend([1])
    decode(batch, 50)
    assert pool.promised == 0
    four[0].close()
    assert pool.admit(tenant, 300, 50).verdict == "now"
    check(pool)
    for seq in four:
        seq.close()
    check_idle(pool)


@pytest.mark.parametrize("spec", SPECS)
def test_e28_an_admitted_sequence_reaches_its_end_whatever_others_do(spec):
    pool = make_pool(60, SPECS[spec])
    pool.tenant("a"), pool.tenant("b")
    seq = pool.open("a", ids(90), 60, admit=True)
    batch = pool.batch(1, 200, max_step_tokens=200)
    batch.add(seq)

    def take_everything():
        for g in range(len(pool.spec.groups)):
            with contextlib.suppress(kvalloc.OutOfPages):
                while True:
                    pool.pages.allocate("b", 1, group=g)

    for budget in range(0, 90, 15):
        take_everything()
        out = batch.step(token_budget=15)
        assert not out.refused, (budget, out.refused)
        assert out.num_tokens == 15
        batch.commit([7 if budget == 75 else -1])
    for _ in range(59):
        take_everything()
        out = batch.step()
        assert not out.refused
        batch.commit([7])
        check(pool)
    assert seq.num_tokens == 150
    seq.close()
    check(pool)
    assert pool.promised == 0


@pytest.mark.parametrize("spec", SPECS)
def test_e29_the_only_sequence_without_room_fails_alone(spec):
    """Its numbers are told, what it has stays, and serving goes on."""
    pool = make_pool(12, SPECS[spec])
    pool.tenant("a"), pool.tenant("b")
    batch = pool.batch(2, 1000)
    seq = pool.open("a", ids(8))
    batch.add(seq)
    finish(batch)
    seq.extend([1])
    taken = []
    for g in range(len(pool.spec.groups)):
        with contextlib.suppress(kvalloc.OutOfPages):
            while True:
                taken.append(pool.pages.allocate("b", 1, group=g))
    refused = []
    for _ in range(20):
        out = batch.step()
        refused = out.refused
        batch.commit([7] if out.num_tokens else [-1])
        check(pool)
        if refused:
            break
    [refusal] = refused
    assert refusal.sequence == seq
    assert refusal.needed_bytes >= PAGE
    assert refusal.room < refusal.needed_bytes
    assert seq.num_written == TOKENS
    assert list(seq.tokens) == [*ids(8), 1, *[7] * 8]
    # Others go on: a second sequence of one page less, the same one once there is room.
    for pages in taken:
        pool.pages.release(pages)
    out = batch.step()
    assert not out.refused
    batch.commit([7])
    seq.close()
    check_idle(pool)


def test_e29_rows_that_can_grow_do():
    """One row is refused, its neighbours in the same step are not."""
    pool = make_pool(6)
    pool.tenant("a")
    pool.tenant("poor", limit=2 * PAGE)
    batch = pool.batch(3, 100)
    seqs = [pool.open(name, ids(n, n)) for name, n in (("a", 20), ("poor", 32), ("a", 16))]
    for seq in seqs:
        batch.add(seq)
    finish(batch)
    for seq in seqs:
        seq.extend([1])
    out = batch.step()
    assert [(r.row, r.sequence, r.why) for r in out.refused] == [(1, seqs[1], "limit")]
    assert list(out.counts) == [1, 0, 1]
    assert out.num_tokens == 2
    assert list(batch.query_start_loc[:4]) == [0, 1, 1, 2]
    assert list(batch.seq_lens) == [21, 32, 17]
    assert list(batch.positions[:2]) == [20, 16]
    assert batch.slot_mapping()[2] == -1
    refused = out.refused
    batch.remove(seqs[0])  # the rows move; a refusal still names its sequence
    assert [r.sequence for r in out.refused] == [r.sequence for r in refused] == [seqs[1]]
    batch.commit([5, 6, 7])
    assert [seq.num_tokens for seq in seqs] == [21, 33, 18]
    for seq in seqs:
        seq.close()
    check_idle(pool)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("admit", [True, False])
def test_e31_more_sequences_than_pages_all_finish(spec, admit):
    """16 pages for each group, 20 sequences: whoever finds no room waits, and in the end all are through."""
    groups = len(SPECS[spec].groups)
    pool = make_pool(16 * groups, SPECS[spec])
    pool.tenant("a")
    waiting = [(ids(20, n), 20) for n in range(20)]
    running: list[kvalloc.Sequence] = []
    done = 0
    batch = pool.batch(20, 64)
    crowded = False
    for _ in range(3000):
        while waiting and not (crowded and running):
            prompt, new = waiting[0]
            try:
                seq = pool.open("a", prompt, new, admit=admit)
            except kvalloc.AdmissionRefused:
                break
            waiting.pop(0)
            batch.add(seq)
            running.append(seq)
        out = batch.step()
        stuck = [r.sequence for r in out.refused]
        batch.commit([7 if s.num_tokens == s.num_slots else -1 for s in batch.rows])
        for seq in running[:]:
            if seq.num_written >= 40:
                seq.close()
                running.remove(seq)
                crowded = False
                done += 1
        if stuck and not any(out.counts):
            # Everybody waits for everybody: the youngest starts anew. With admission this can't happen.
            assert not admit
            victim = stuck[-1]
            waiting.append((ids(20, int(victim.tokens[0]) // 1_000_000 - 1), 20))
            running.remove(victim)
            victim.close()
            crowded = True
        check(pool)
        if done == 20:
            break
    assert done == 20
    check_idle(pool)


def test_e32_somebody_can_start_when_nothing_runs():
    """Whatever was cached or refused before: in an idle pool a request that can ever fit fits now."""
    pool = make_pool(20)
    pool.tenant("a", limit=12 * PAGE)
    pool.tenant("b", reserve=6 * PAGE)
    for n in range(30):
        name = "ab"[n % 2]
        cache(pool, name, ids(16 * (n % 12 + 1), n))
        check_idle(pool)
        for tenant, most in (("a", 12), ("b", 20)):
            assert pool.admit(tenant, most * TOKENS).verdict == "now"
            assert pool.admit(tenant, most * TOKENS + 1).verdict == "never"


# F: geometry.


@pytest.mark.parametrize("step", [2, 3, 5])
def test_f33_no_contiguity_is_ever_needed(step):
    pool = make_pool(128)
    pool.tenant("a")
    pages = pool.pages.allocate("a", 128)
    pool.pages.release(pages[::step])  # every second, third, fifth page
    free = len(pages[::step])
    batch = pool.batch(1, 2048)
    seq = pool.open("a", ids(free * TOKENS))
    batch.add(seq)
    out = batch.step()
    assert out.num_tokens == free * TOKENS
    assert not out.refused
    slots = batch.slot_mapping()[: out.num_tokens]
    table = seq.block_table().astype(np.int64)
    positions = np.arange(out.num_tokens)
    np.testing.assert_array_equal(slots, table[positions // TOKENS] * TOKENS + positions % TOKENS)
    assert len(set(slots)) == out.num_tokens
    assert min(slots) >= TOKENS
    batch.commit()
    seq.close()
    check_idle_but(pool, 128 - free)


def check_idle_but(pool, pages):
    check(pool)
    assert pool.held == pages * PAGE


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("left", ["nothing", "cached pages"])
def test_f34_an_empty_pool_serves_any_class(first, left):
    """All of it for one class, then all of it for the other."""
    pool = make_pool(32, SPECS["two sizes"])
    pool.tenant("a")
    sizes = [c.page_bytes for c in pool.spec.classes]
    for g in (first, 1 - first, first):
        n = pool.capacity // sizes[g]
        pages = pool.pages.allocate("a", n, group=g)
        assert pool.free < sizes[g]
        assert len(set(pool.pages.frames(pages))) == n
        assert 0 not in pool.pages.frames(pages)
        check(pool)
        if left != "nothing":
            pool.pages.publish("a", pages, list(range(n)), group=g)
        pool.pages.release(pages[::-1])
        check_idle(pool)


@pytest.mark.parametrize(
    "spec",
    [
        *SPECS.values(),
        kvalloc.KVSpec.uniform(
            layers=3, kv_heads=1, head_dim=24, page_tokens=3
        ),  # 864 bytes, padded to 1,024
        kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=1, dtype="int8", page_tokens=1),
        kvalloc.KVSpec.uniform(
            layers=1, kv_heads=3, head_dim=80, dtype="int8", page_tokens=7, small_dtype=None
        ),
    ],
)
def test_f35_page_bytes_are_one_number(spec):
    """Capacity, charges, limits, answers and frames all count in the padded bytes of the spec."""
    pool = make_pool(12, spec)
    pool.tenant("a")
    for g in range(len(spec.groups)):
        size = spec.classes[g].page_bytes
        assert size == spec.page_bytes(g)
        assert size % 256 == 0
        before = pool.free
        pages = pool.pages.allocate("a", 3, group=g)
        assert before - pool.free == pool.tenant("a").held == pool.audit().device.held == 3 * size
        pool.pages.release(pages)
    seq = pool.open("a", ids(1), admit=True)
    assert (
        seq.promised
        == pool.admit("a", 1).bytes
        == sum(spec.classes[g].page_bytes for g in range(len(spec.groups)))
    )
    seq.close()
    check_idle(pool)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("chunk", [1, 5, 16, 33, 200])
def test_f36_charged_is_what_is_really_held(spec, chunk):
    """A window group releases pages as they leave the window, and the books follow page by page."""
    pool = make_pool(60, SPECS[spec])
    tenant = pool.tenant("a")
    batch = pool.batch(1, 400)
    seq = pool.open("a", ids(200))
    batch.add(seq)
    spec = pool.spec

    def really_held():
        return sum(len(seq.pages(g)) * spec.classes[g].page_bytes for g in range(len(spec.groups)))

    while seq.num_written < 200:
        batch.step(token_budget=chunk)
        batch.commit([7 if seq.num_slots == 200 else -1])
        assert really_held() == tenant.held == pool.held
        check(pool)
    decode(batch, 60)
    for g, kind in enumerate(spec.groups):
        pages = len(seq.pages(g))
        shown = batch.block_table(g)[0]
        first = {
            "full": 0,
            "latent": 0,
            "window": (seq.num_slots - (kind.window or 0)) // TOKENS,
            "chunked": (seq.num_slots - 1) // (kind.window or 1) * (kind.window or 1) // TOKENS,
            "state": 0,
        }[kind.kind]
        if kind.kind == "state":
            assert pages == 1
            continue
        last = -(-seq.num_slots // TOKENS)
        assert last - first <= pages <= last - first + 1  # the step trims before it grows
        assert not shown[: last - pages].any()
        np.testing.assert_array_equal(shown[last - pages : last], seq.block_table(g)[last - pages :])
        assert shown[last - pages : last].all()
        assert not shown[last:].any()
    assert really_held() == tenant.held
    seq.close()
    check_idle(pool)


@pytest.mark.parametrize("spec", SPECS)
def test_f36_a_hit_takes_what_decoding_from_there_needs(spec):
    """Of a window only its last pages, of a full group all; and with less in one group, less in all."""
    pool = make_pool(100, SPECS[spec])
    pool.tenant("a")
    prompt = ids(161)
    batch = pool.batch(1, 400)
    writer = pool.open("a", prompt)
    batch.add(writer)
    while writer.num_written < 161:
        batch.step(token_budget=16)
        batch.commit()
        writer.keep_state()
    kept = [writer.block_table(g) for g in range(len(pool.spec.groups))]
    reader = pool.open("a", prompt)
    assert reader.cached_tokens == 160
    for g, kind in enumerate(pool.spec.groups):
        table = reader.block_table(g)
        if kind.kind == "state":
            assert len(table) == 1
            assert table[0] != kept[g][0]
            continue
        needed = np.flatnonzero(table)
        assert len(table) == 10
        first = {
            "window": (160 - (kind.window or 0) + 1) // TOKENS,
            "chunked": 160 // (kind.window or 1) * (kind.window or 1) // TOKENS,
        }
        assert list(needed) == list(range(first.get(kind.kind, 0), 10))
        for page in needed:
            if kept[g][page]:
                assert table[page] == kept[g][page]
    reader.close()
    writer.close()
    check_idle(pool)


@pytest.mark.parametrize("kept", [[32], [64, 96], [48], []])
def test_f36_a_fixed_state_is_hit_where_a_snapshot_was_kept(kept):
    pool = make_pool(60, SPECS["full+state"])
    pool.tenant("a")
    batch = pool.batch(1, 200)
    writer = pool.open("a", ids(120))
    batch.add(writer)
    while writer.num_written < 120:
        batch.step(token_budget=8)
        batch.commit()
        if writer.num_written in kept:
            assert writer.keep_state()
        elif writer.num_written % TOKENS:
            assert not writer.keep_state()
        check(pool)
    for length in (120, 97, 96, 65, 64, 33, 32):
        with pool.open("a", ids(length)) as reader:
            assert reader.cached_tokens == max((n for n in kept if n < length), default=0)
            if reader.cached_tokens:
                # The snapshot is copied before the state is written on.
                other = pool.batch(1, 200)
                other.add(reader)
                copies = other.step().copies
                assert [next(iter(c)) for c in copies] == [1]
                other.commit()
                check(pool)
    writer.close()
    check_idle(pool)


def test_f36_a_fork_during_a_step_that_writes_the_state_is_refused():
    pool = make_pool(20, SPECS["full+state"])
    pool.tenant("a")
    batch = pool.batch(1, 100)
    seq = pool.open("a", ids(20))
    batch.add(seq)
    batch.step()
    with unchanged(pool), pytest.raises(kvalloc.InvalidArgument, match="commit"):
        seq.fork()
    batch.commit()
    seq.fork().close()
    seq.close()
    check_idle(pool)


def test_f36_a_chunk_border_alone_is_no_hit():
    """Behind a border no page of the chunk before is needed; what nobody wrote is no hit all the same."""
    pool = make_pool(20, SPECS["chunked"])
    pool.tenant("a")
    for n in (49, 97, 145):
        assert hit(pool, "a", ids(n)) == 0
    cache(pool, "a", ids(97))
    assert hit(pool, "a", ids(97)) == 96


def test_f37_more_than_2_31_elements_and_4_gib_a_layer():
    """Offsets are 64 bits wide: frames, slots and addresses at the end of a large pool."""
    spec = kvalloc.KVSpec.uniform(layers=2, kv_heads=32, head_dim=128, page_tokens=16)
    n = 70_000
    pool = kvalloc.Pool(spec, spec.page_bytes() * (n + 1))
    elements = n * 16 * 32 * 128
    assert elements > 2**31
    assert elements * 2 > 4 << 30
    pool.tenant("a")
    assert pool.capacity == n * spec.page_bytes() == pool.free
    pages = pool.pages.allocate("a", n)
    frames = pool.pages.frames(pages)
    assert frames.dtype == np.int32
    assert frames.max() == n
    assert len(np.unique(frames)) == n
    check(pool)
    assert pool.audit().device.held == pool.capacity
    pool.pages.release(pages)
    check_idle(pool)


def test_f37_slots_beyond_2_31():
    spec = kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=1, page_tokens=65_536)
    pool = kvalloc.Pool(spec, spec.page_bytes() * 40_001)
    pool.tenant("a")
    low = pool.pages.allocate("a", 39_000)
    batch = pool.batch(1, 200_000, max_step_tokens=4)
    seq = pool.open("a", [1, 2, 3])
    batch.add(seq)
    batch.step()
    [frame] = seq.block_table()
    slots = batch.slot_mapping()
    assert slots.dtype == np.int64
    assert list(slots[:3]) == [int(frame) * 65_536 + n for n in range(3)]
    assert slots[0] > 2**31
    batch.commit([4])
    batch.step()
    assert batch.slot_mapping()[0] == int(frame) * 65_536 + 3
    seq.close()
    pool.pages.release(low)
    check_idle(pool)


@pytest.mark.parametrize("page_bytes", [17_989_632, 917_504, 4_096])
@pytest.mark.parametrize("size", ["5GiB", "1GiB", 5 * 10**9 + 1])
def test_f38_memory_that_is_no_multiple_is_rounded_down_and_told(page_bytes, size):
    layers = page_bytes // 4096
    spec = kvalloc.KVSpec.uniform(layers=layers, kv_heads=1, head_dim=64, page_tokens=16)
    assert spec.page_bytes() == page_bytes
    asked = kvalloc.parse_bytes(size)
    layout = spec.arena(size)
    assert layout.bytes + layout.rounded_off == asked
    assert layout.bytes % page_bytes == 0
    assert layout.rounded_off < page_bytes
    pool = kvalloc.Pool(spec, size, host_bytes=size)
    assert pool.capacity == layout.bytes - page_bytes  # frame 0
    report = pool.audit()
    assert report.ok
    assert report.host.capacity == report.host.free == pool.capacity


@pytest.mark.parametrize("short", [1, 4096, 8191])
def test_f38_memory_for_no_page_is_refused(short):
    with pytest.raises(kvalloc.KvallocError, match=r"8192|4096"):
        kvalloc.Pool(FULL, 2 * PAGE - short)
    assert kvalloc.Pool(FULL, 2 * PAGE).capacity == PAGE


def test_f_a_group_with_a_window_of_one_token():
    pool = make_pool(20, kvalloc.KVSpec.from_groups([group("full"), group("window", window=1)], TOKENS))
    pool.tenant("a")
    seq = serve(pool, "a", ids(100))
    batch = pool.batch(1, 200)
    batch.add(seq)
    seq.extend([1])
    decode(batch, 40)
    assert len(seq.pages(1)) <= 2
    seq.close()
    check_idle(pool)
    assert hit(pool, "a", ids(100)) in (96,)

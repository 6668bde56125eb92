"""Bad input: what was asked, what there was, what to do; and the books as before."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import math
import signal

import numpy as np
import pytest

import kvalloc
from tinypool import (
    FULL,
    PAGE,
    SPECS,
    cache,
    check,
    check_idle,
    ids,
    make_pool,
    serve,
    unchanged,
)

ABSURD = [-1, 2**63, 2**64, -(2**70), 10**400, math.nan, math.inf, -math.inf, 1.5, True, False]
ABSURD += ["", "x", "12GX", "-1GiB", None, [], {}, object(), b"1", "\ud800"]


def refused(*errors):
    """What a call with such an argument may raise: never a panic, nothing of Python's insides."""
    return pytest.raises(errors or (kvalloc.KvallocError, TypeError))


@pytest.fixture
def pool():
    pool = make_pool(20)
    pool.tenant("a", pin_budget=20 * PAGE)
    return pool


# Sizes and counts.


@pytest.mark.parametrize("size", [s for s in ABSURD if s is not None], ids=lambda s: repr(s)[:20])
@pytest.mark.parametrize("which", ["device_bytes", "host_bytes"])
def test_pool_sizes(size, which):
    with pytest.raises(kvalloc.InvalidArgument) as error:
        kvalloc.Pool(FULL, **{"device_bytes": "1MiB", "host_bytes": 0, which: size})
    assert 10 < len(str(error.value)) < 400


def test_pool_sizes_at_the_edges():
    with pytest.raises(kvalloc.InvalidArgument, match="8192"):
        kvalloc.Pool(FULL, 0)
    with pytest.raises(kvalloc.InvalidArgument):
        kvalloc.Pool(FULL, None)
    with pytest.raises(kvalloc.InvalidArgument):
        kvalloc.Pool(FULL, 2**62)
    assert kvalloc.Pool(FULL, "1MiB", None).capacity == (1 << 20) - PAGE
    assert kvalloc.Pool(FULL, np.int64(1 << 20)).capacity == (1 << 20) - PAGE
    assert kvalloc.Pool(FULL, "1MB").capacity == 10**6 // PAGE * PAGE - PAGE


@pytest.mark.parametrize(
    ("keyword", "values"),
    [
        ("max_tenants", [0, -1, 2**40, 2**70, "x", 1.5, True, None]),
        ("events", [-1, 2**40, "x", None, True]),
        ("clock", ["", "sundial", 3, None]),
        ("secret", [b"", b"short", "text" * 4, b"x" * 17, 5]),
        ("default_tenant", ["", "a/b", "x" * 500, " a", "a\n", 7, "\u202e", "\ud800"]),
        ("compare_tokens", [1, "yes", None]),
        ("force_collisions", [0, "no", None]),
        ("nonsense", [1]),
    ],
)
def test_pool_options(keyword, values):
    for value in values:
        with refused():
            kvalloc.Pool(FULL, "1MiB", **{keyword: value})


@pytest.mark.parametrize("spec", [None, 5, "full", object(), {}, kvalloc.KVSpec])
def test_pool_of_no_spec(spec):
    with pytest.raises(kvalloc.InvalidArgument, match="KVSpec"):
        kvalloc.Pool(spec, "1MiB")


def test_no_memory_is_taken_for_an_absurd_request(pool):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with unchanged(pool):
        for new in (2**29, 2**30, 2**32 - 1):
            with contextlib.suppress(kvalloc.KvallocError):
                pool.open("a", [1], new)
            with pytest.raises(kvalloc.KvallocError):
                pool.open("a", [1], new, admit=True)
        with pytest.raises(kvalloc.OutOfPages):
            pool.pages.allocate("a", 2**32 - 1)
        with pytest.raises(kvalloc.InvalidArgument):
            pool.batch(1 << 20, 1 << 30)
        gc.collect()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("rows", [0, *ABSURD], ids=lambda s: repr(s)[:20])
def test_batch_sizes(pool, rows):
    with pytest.raises(kvalloc.InvalidArgument, match="max_sequences"):
        pool.batch(rows, 100)
    with pytest.raises(kvalloc.InvalidArgument, match="max_tokens"):
        pool.batch(1, rows)
    if rows is not None:
        with pytest.raises(kvalloc.InvalidArgument, match="max_step_tokens"):
            pool.batch(1, 100, max_step_tokens=rows)


# Tenants.

HOSTILE = [
    "",
    " ",
    "a ",
    " a",
    "\n",
    "a\nb",
    "a\0b",
    "a/b",
    "..",
    ".",
    "x" * 129,
    "é" * 65,
    "a\u202eb",
    "\u200b",
]
HOSTILE += ["\x7f", "\x1b[31m", "\ud800", "\ufeffa"]


@pytest.mark.parametrize("name", [*HOSTILE, None, 5, b"a", ["a"], True], ids=lambda n: ascii(n)[:20])
def test_tenant_names(pool, name):
    with unchanged(pool), refused() as error:
        pool.tenant(name)
    if isinstance(name, str):
        # The message can be printed and logged as it is.
        str(error.value).encode()
        assert "\n" not in str(error.value)
        assert "\x1b" not in str(error.value)
        assert "\u202e" not in str(error.value)
    assert len(pool.tenants()) == 1


@pytest.mark.parametrize("name", ["a b", "ünï", "租户", "O'Neil", '"', "-", "%s{0}", "a" * 128, "null", "0"])
def test_tenant_names_that_only_look_odd(pool, name):
    tenant = pool.tenant(name)
    assert tenant.name == name
    assert pool.tenant(name) == tenant
    assert tenant in pool.tenants()
    pool.open(name, [1, 2]).close()
    repr(tenant), repr(pool)
    check_idle(pool)


@pytest.mark.parametrize(
    "policy",
    [
        {"weight": 0},
        {"weight": -1},
        {"weight": 2**40},
        {"weight": 1.5},
        {"weight": "2"},
        {"weight": None},
        {"priority": -1},
        {"priority": 101},
        {"priority": math.nan},
        {"priority": True},
        {"lend": 1},
        {"lend": "yes"},
        {"publish": "a"},
        {"publish": ["nobody"]},
        {"publish": [5]},
        {"publish": 5},
        {"publish": {"a": -1}},
        {"publish": None},
        {"parent": "nobody"},
        {"parent": 5},
        {"parnet": "a"},
        {"name": "x"},
        {"reserve": 2**62},
        {"publish": ["cousin"]},
        {"publish": {"cousin": 5}},
    ],
    ids=repr,
)
def test_policies(pool, policy):
    pool.tenant("cousin")
    tenants = len(pool.tenants())
    with unchanged(pool), refused():
        pool.tenant("new", **policy)
    with unchanged(pool), refused():
        pool.tenant("a", **policy)
    with unchanged(pool), refused():
        pool.tenant("a").set(**policy)
    # Nothing by half: a bad part spoils the good ones.
    with unchanged(pool), refused():
        pool.tenant("a").set(**{"reserve": PAGE, "limit": 9 * PAGE, "host_limit": PAGE, **policy})
    assert len(pool.tenants()) == tenants
    assert (pool.tenant("a").reserve, pool.tenant("a").host_limit) == (0, None)


def test_tenants_cannot_move(pool):
    pool.tenant("org")
    pool.tenant("b", parent="org")
    with pytest.raises(kvalloc.TenantError, match="org"):
        pool.tenant("b", parent="a")
    with pytest.raises(kvalloc.TenantError):
        pool.tenant("b").set(parent="a")
    assert pool.tenant("b", parent="org").parent.name == "org"
    assert pool.tenant("org").parent is None


def test_the_tree_has_a_depth_and_the_pool_a_number_of_tenants():
    pool = make_pool(4, max_tenants=40)
    parent = None
    with pytest.raises(kvalloc.TenantError, match=r"deep|level") as deep:  # noqa: PT012
        for n in range(40):
            parent = pool.tenant(f"t{n}", **({"parent": parent} if parent else {}))
    assert str(deep.value)
    with pytest.raises(kvalloc.TenantError, match="40"):  # noqa: PT012
        for n in range(41):
            pool.tenant(f"u{n}")
    assert len(pool.tenants()) == 40
    check_idle(pool)


# Prompts.

NO_PROMPTS = [
    [],
    (),
    np.array([], np.int32),
    "text",
    b"bytes",
    None,
    5,
    1.5,
    {1, 2},
    {1: 2},
    object(),
    [None],
    ["1"],
    [1.5],
    [True],
    [[1, 2]],
    np.zeros((2, 2), np.int32),
    np.zeros(3),
    np.array([1.0, 2.0], np.float32),
    np.array(5),
    np.array([True]),
    np.array(["a"]),
    np.array([1, None]),
    [-1],
    [2**31],
    [2**63],
    [10**400],
    np.array([-1]),
    np.array([2**31]),
    np.array([2**63], np.uint64),
    np.array([-5], np.int32),
    np.array([1 + 2j]),
    np.array([2**40, 1], ">i8"),
    (x for x in [1]),
    [1, 2, math.nan],
    range(0),
]


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=lambda p: repr(p)[:30].replace("\n", ""))
def test_prompts(pool, prompt):
    with unchanged(pool):
        with pytest.raises(kvalloc.InvalidArgument) as error:
            pool.open("a", prompt)
        assert len(str(error.value)) < 400
        if not isinstance(prompt, int):
            with pytest.raises(kvalloc.InvalidArgument):
                pool.admit("a", prompt)
    with pool.open("a", [1, 2, 3]) as seq, unchanged(pool):
        if len(prompt) if hasattr(prompt, "__len__") and np.ndim(prompt) else True:
            with pytest.raises(kvalloc.InvalidArgument):
                seq.extend(prompt)
        else:
            with contextlib.suppress(kvalloc.InvalidArgument):
                seq.extend(prompt)
        assert list(seq.tokens) == [1, 2, 3]


def test_prompts_say_which_id_is_wrong(pool):
    for bad in ([1, 2, -7, 4], np.array([1, 2, -7, 4]), np.array([1, 2, -7, 4], np.int32), (1, 2, -7)):
        with pytest.raises(kvalloc.InvalidArgument, match=r"-7 at position 2"):
            pool.open("a", bad)


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 0, 2**31 - 1],
        (5, 0, 2**31 - 1),
        range(3),
        [np.int32(1), np.uint8(2)],
        np.array([5, 6], np.int8),
        np.array([5, 6], np.uint64),
        np.array([5, 6], ">i4"),
        np.arange(20)[::2],
        np.arange(20, dtype=np.int32)[::-3],
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1],
        memoryview(np.array([1, 2], np.int32)),
        memoryview(b"ab"),
    ],
    ids=lambda p: repr(p)[:30],
)
def test_prompts_of_many_kinds(pool, prompt):
    with pool.open("a", prompt) as seq:
        assert list(seq.tokens) == [int(x) for x in prompt]
        assert len(seq) == len(prompt)


def test_prompts_may_be_read_only(pool):
    frozen = ids(20)
    frozen.flags.writeable = False
    with pool.open("a", frozen) as seq:
        assert list(seq.tokens) == list(frozen)
        frozen = None
    # The sequence has a copy of its own.
    mine = ids(20)
    with pool.open("a", mine) as seq:
        mine[:] = 0
        assert list(seq.tokens) == list(ids(20))


@pytest.mark.parametrize(
    ("keyword", "values"),
    [
        ("max_new_tokens", [-1, 2**32, 2**70, 1.5, "x", None, True]),
        ("priority", [-1, 101, 256, 1.5, "x", None, True]),
        ("ttl", [-1, math.nan, math.inf, 1e300, 10**400, "x", True]),
        ("adapter", [5, 1.5, ["x"], "\ud800"]),
        ("extra_key", [5, 1.5, ["x"], "\ud800"]),
        ("adapter_generation", [-1, 2**64, "x", 1.5, None]),
        (
            "share",
            [5, "org", [5], ["ab"], [("a",)], [("a", -1)], [("a", "x")], [("nobody", 5)], [(5, 5)], {"a": 5}],
        ),
        ("admit", [1, "yes", None]),
    ],
)
def test_open_options(pool, keyword, values):
    for value in values:
        with unchanged(pool), refused():
            pool.open("a", ids(20), **{keyword: value})


@pytest.mark.parametrize(
    "share", [[("a", 2**32 - 1)], [("a", 0)], [("a", 5), ("a", 2**32 - 1)], [], [("a", 1)] * 50]
)
def test_shared_parts_longer_than_the_prompt_end_with_it(pool, share):
    with pool.open("a", ids(40), share=share) as seq:
        assert seq.fallbacks == []
    check_idle(pool)


def test_a_prompt_beyond_the_pool(pool):
    """Without admission it is opened, and grows as far as it can."""
    batch = pool.batch(1, 1000)
    seq = pool.open("a", ids(500))
    batch.add(seq)
    for _ in range(10):
        out = batch.step()
        batch.commit([-1])
    assert seq.num_written <= 320
    assert len(out.refused) == 1
    assert out.refused[0].room < out.refused[0].needed_bytes
    seq.close()
    check_idle(pool)


def test_a_sequence_longer_than_a_row(pool):
    batch = pool.batch(1, 50)
    with (
        pool.open("a", ids(51)) as long,
        unchanged(pool),
        pytest.raises(kvalloc.InvalidArgument, match="at most 50"),
    ):
        batch.add(long)
    seq = pool.open("a", ids(40))
    batch.add(seq)
    seq.extend(ids(40))
    for _ in range(4):
        out = batch.step()
        batch.commit([-1])
    assert [r.why for r in out.refused] == ["row"]
    assert batch.seq_lens[0] <= 64  # its pages
    seq.close()
    check_idle(pool)


@pytest.mark.parametrize("n", [0, 21, -1, 2**40, 1.5, "x", None, True])
def test_truncate(pool, n):
    with serve(pool, "a", ids(20)) as seq, unchanged(pool):
        with pytest.raises(kvalloc.InvalidArgument):
            seq.truncate(n)
        assert seq.num_tokens == 20


def test_truncate_before_what_a_window_kept():
    pool = make_pool(30, SPECS["full+window"])
    pool.tenant("a")
    batch = pool.batch(1, 200)
    seq = pool.open("a", ids(150))
    batch.add(seq)
    while seq.num_written < 150:
        batch.step(token_budget=16)
        batch.commit()
    with unchanged(pool), pytest.raises(kvalloc.InvalidArgument, match="window"):
        seq.truncate(50)
    seq.truncate(149)
    seq.close()
    check_idle(pool)


# Steps.


@pytest.mark.parametrize(
    "counts",
    [
        [],
        [1],
        [1, 1, 1],
        [1, -1],
        [2**31, 1],
        [1.5, 1],
        ["x", 1],
        [None, 1],
        5,
        "ab",
        np.zeros((2, 1), np.int32),
        np.array([1.0, 1.0]),
        np.array([2**40, 1]),
        [10**6, 10**6],
        {1: 2},
        [True, -5],
    ],
    ids=repr,
)
def test_counts(pool, counts):
    batch = pool.batch(2, 100)
    for n in range(2):
        batch.add(pool.open("a", ids(20, n)))
    with unchanged(pool), pytest.raises(kvalloc.InvalidArgument):
        batch.step(counts)
    assert batch.outstanding == 0
    for seq in batch.rows:
        seq.close()
    check_idle(pool)


@pytest.mark.parametrize(
    "sampled",
    [
        *([], [1], [1, 1, 1], [2**31, 1], [1.5, 1], ["x", 1], [None, 1], [True, 1], 5, "ab", {1: 2}),
        *(np.zeros((2, 1), np.int32), np.array([1.0, 1.0]), np.array([2**40, 1])),
    ],
    ids=repr,
)
def test_sampled(pool, sampled):
    batch = pool.batch(2, 100)
    for n in range(2):
        batch.add(pool.open("a", ids(20, n)))
    batch.step([20, 3])
    with unchanged(pool), pytest.raises(kvalloc.InvalidArgument):
        batch.commit(sampled)
    assert batch.outstanding == 1
    batch.commit([5, 6])  # a token sampled in the middle of a prompt is none
    assert [(seq.num_written, seq.num_tokens) for seq in batch.rows] == [(20, 21), (3, 20)]
    for seq in batch.rows:
        seq.close()
    check_idle(pool)


@pytest.mark.parametrize("budget", [-1, 2**32, 1.5, "x", True, math.nan])
def test_token_budget(pool, budget):
    batch = pool.batch(1, 100)
    with unchanged(pool), pytest.raises(kvalloc.InvalidArgument, match="token_budget"):
        batch.step(token_budget=budget)


def test_steps_of_nothing(pool):
    batch = pool.batch(2, 100)
    out = batch.step()
    assert (out.num_tokens, out.num_rows, list(out.counts), out.refused, len(out.copies)) == (0, 0, [], [], 0)
    batch.commit([])
    seq = pool.open("a", ids(20))
    batch.add(seq)
    assert batch.step(token_budget=0).num_tokens == 0
    batch.commit([7])
    assert (seq.num_tokens, seq.num_written) == (20, 0)  # a token sampled for nothing is none
    seq.close()
    check_idle(pool)


def test_batches_take_what_is_theirs(pool):
    batch, other = pool.batch(1, 100), pool.batch(1, 100)
    seq, second = pool.open("a", ids(20)), pool.open("a", ids(20, 1))
    with unchanged(pool):
        with pytest.raises(kvalloc.InvalidArgument, match="no row"):
            batch.remove(seq)
        batch.add(seq)
        for target in (batch, other):
            with pytest.raises(kvalloc.InvalidArgument, match="already"):
                target.add(seq)
        with pytest.raises(kvalloc.InvalidArgument, match="rows"):
            batch.add(second)
        with pytest.raises(kvalloc.InvalidArgument, match="no row"):
            other.remove(seq)
        for bad in (None, 5, "seq", batch):
            with pytest.raises(TypeError):
                batch.add(bad)
        batch.remove(seq)
        other.add(seq)
    seq.close()
    second.close()
    for gone in (seq, second):
        with unchanged(pool), pytest.raises(kvalloc.ClosedError):
            batch.add(gone)
    check_idle(pool)


# Arrays of one's own.


def arrays(batch, rows=2, pages=7, step=None):
    step = step or batch.max_step_tokens
    return {
        "block_table": np.zeros((rows, pages), np.int32),
        "slot_mapping": np.zeros(step, np.int64),
        "seq_lens": np.zeros(rows, np.int32),
        "query_start_loc": np.zeros(rows + 1, np.int32),
        "positions": np.zeros(step, np.int32),
    }


@pytest.mark.parametrize("name", ["block_table", "slot_mapping", "seq_lens", "query_start_loc", "positions"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.astype(np.int16),
        lambda a: a.astype(np.uint32),
        lambda a: a.astype(np.float32),
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        lambda a: a[:-1].copy(),
        lambda a: np.append(a, a),
        lambda a: a.reshape(1, *a.shape),
        lambda a: np.asfortranarray(np.repeat(a, 2, axis=-1))[..., ::2],
        lambda a: a.tolist(),
        lambda a: 5,
        lambda a: "text",
        lambda a: b"bytes",
        lambda a: [a, a],
        lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
    ],
)
def test_bind(pool, name, spoil):
    batch = pool.batch(2, 100)
    seq = pool.open("a", ids(20))
    batch.add(seq)
    mine = arrays(batch)
    before = batch.block_table(), batch.seq_lens
    with unchanged(pool), refused() as error:
        batch.bind(**{**mine, name: spoil(mine[name])})
    assert str(error.value)
    # Nothing by half: the arrays are those of before.
    assert batch.block_table() is before[0]
    assert batch.seq_lens is before[1]
    batch.step()
    assert batch.seq_lens[0] == 20
    assert not mine["seq_lens"].any()
    assert not mine["block_table"].any()
    batch.commit()
    with pytest.raises(TypeError, match="nonsense"):
        batch.bind(nonsense=mine[name])
    batch.bind()
    batch.bind(**mine)
    assert batch.seq_lens is mine["seq_lens"]
    assert mine["block_table"][0, 0] == seq.block_table()[0]
    seq.close()
    check_idle(pool)


def test_bound_arrays_cannot_be_taken_away(pool):
    """What the core writes into stays where it is."""
    batch = pool.batch(2, 100)
    mine = arrays(batch)
    batch.bind(**mine)
    for array in mine.values():
        with pytest.raises(ValueError, match=r"resize|reference"):
            array.resize(1, refcheck=True)
    data = bytearray(2 * 4)
    batch.bind(seq_lens=np.frombuffer(data, np.int32))
    with pytest.raises(BufferError):
        data.extend(b"x")
    seq = pool.open("a", ids(5))
    batch.add(seq)
    batch.step()
    assert data[0] == 5
    seq.close()


def test_groups_of_arrays():
    pool = make_pool(20, SPECS["full+window"])
    pool.tenant("a")
    batch = pool.batch(2, 100)
    table = np.zeros((2, 7), np.int32)
    for bad in (table, [table], [table] * 3, [], 5):
        with refused():
            batch.bind(block_table=bad)
    batch.bind(block_table=[table, table.copy()])
    for g in (-1, 2, 256, 2**40, "0", None, 1.5, True):
        for call in (batch.block_table, batch.slot_mapping, batch.csr):
            with refused():
                call(g)
        with pool.open("a", [1]) as seq:
            for call in (seq.pages, seq.block_table):
                with refused():
                    call(g)
        with unchanged(pool), refused():
            pool.pages.allocate("a", 1, group=g)


# Handles: closed, stale, of another pool.


def test_closed_sequences(pool):
    seq = serve(pool, "a", ids(40))
    seq.close()
    seq.close()
    assert seq.closed
    assert "closed" in repr(seq)
    calls = [
        lambda: seq.num_tokens,
        lambda: seq.num_slots,
        lambda: seq.num_written,
        lambda: seq.cached_tokens,
        lambda: seq.tokens,
        lambda: len(seq),
        lambda: seq.pages(),
        lambda: seq.block_table(),
        lambda: seq.extend([1]),
        lambda: seq.truncate(1),
        seq.fork,
        seq.keep_state,
        lambda: seq.promised,
        lambda: seq.fallbacks,
        lambda: pool.batch(1, 100).add(seq),
        lambda: pool.pin(seq, 16, owner="a"),
    ]
    for call in calls:
        with unchanged(pool), pytest.raises(kvalloc.ClosedError, match="closed"):
            call()
    with pytest.raises(kvalloc.ClosedError), seq:
        seq.extend([1])
    check_idle(pool)


def test_closed_pools():
    pool = make_pool(10, default_tenant="d")
    tenant = pool.tenant("a", pin_budget=PAGE)
    batch = pool.batch(1, 100)
    pages = pool.pages
    taken = pages.allocate("a", 1)
    seq = serve(pool, "a", ids(40))
    pin = pool.pin(seq, 16, owner="a")
    batch.add(seq)
    pool.close()
    pool.close()
    assert pool.closed
    assert "closed" in repr(pool)
    for call in (
        lambda: pool.open("a", [1]),
        lambda: pool.admit("a", 1),
        lambda: pool.tenant("b"),
        lambda: pool.tenant("a", weight=2),
        lambda: pages.allocate("a", 1),
        lambda: pages.lookup("a", [b"x"]),
        lambda: pages.share([1]),
        batch.step,
        lambda: pool.batch(1, 1),
        lambda: pool.pages.find("a", [b"x"]),
        seq.fork,
        pool.reset_prefix_cache,
        lambda: pool.pin(seq, 16, owner="a"),
    ):
        with pytest.raises(kvalloc.ClosedError, match="closed"):
            call()
    # What was taken can still be given back.
    batch.remove(seq)
    seq.close()
    pin.unpin()
    pages.release(taken)
    check_idle(pool)
    assert tenant.held == 0


def test_handles_of_another_pool(pool):
    other = make_pool(20)
    alien = other.tenant("a", pin_budget=20 * PAGE)
    seq = serve(other, "a", ids(40))
    for call in (
        lambda: pool.open(alien, [1]),
        lambda: pool.admit(alien, 1),
        lambda: pool.pages.allocate(alien, 1),
        lambda: pool.tenant("b", parent=alien),
        lambda: pool.tenant("a", publish=[alien]),
        lambda: pool.batch(1, 100).add(seq),
        lambda: pool.pin(seq, 16, owner="a"),
        lambda: pool.open("a", [1], share=[(alien, 1)]),
        lambda: pool.pins(alien),
    ):
        with unchanged(pool), unchanged(other), pytest.raises(kvalloc.WrongPool, match="another pool"):
            call()
    assert alien != pool.tenant("a")
    assert seq != pool.open("a", [1])
    with pytest.raises(kvalloc.InvalidArgument):
        pool.batch(1, 100).remove(seq)


@pytest.mark.parametrize("tenant", [None, 5, 1.5, b"a", ["a"], object(), kvalloc.Tenant])
def test_no_tenants(pool, tenant):
    for call in (
        lambda: pool.open(tenant, [1]),
        lambda: pool.admit(tenant, 1),
        lambda: pool.pages.allocate(tenant, 1),
        lambda: pool.open("a", [1], share=[(tenant, 1)]),
    ):
        with unchanged(pool), pytest.raises(kvalloc.InvalidArgument, match="Tenant or its name"):
            call()


@pytest.mark.parametrize(
    "pages",
    [
        [2**64 - 2],
        [2**64],
        [-1],
        [2**63],
        [10**30],
        [5_000_000],
        [1.5],
        ["x"],
        [None],
        5,
        "x",
        None,
        b"x",
        [[1]],
        np.array([1.5]),
        np.array([-1]),
        np.array([[1]], np.uint64),
        [True],
    ],
    ids=repr,
)
def test_page_references(pool, pages):
    taken = pool.pages.allocate("a", 2)
    for call in (
        lambda: pool.pages.release(pages),
        lambda: pool.pages.frames(pages),
        lambda: pool.pages.publish("a", pages, [b"k"]),
        lambda: pool.pages.share(pages),
    ):
        with unchanged(pool), contextlib.suppress(kvalloc.KvallocError, TypeError):
            answer = call()
            assert not np.any(answer) or answer is None
    check(pool)
    assert pool.held == 2 * PAGE
    pool.pages.release(taken)


@pytest.mark.parametrize(
    "keys",
    [
        b"abc",
        "abc",
        5,
        None,
        [""],
        ["x"],
        [1.5],
        [b""],
        [b"x" * 5000],
        [2**127],
        [None],
        [[b"x"]],
        [b"a", b"b"],
    ],
    ids=lambda k: repr(k)[:20],
)
def test_page_keys(pool, keys):
    page = pool.pages.allocate("a", 1)
    with unchanged(pool), refused():
        pool.pages.publish("a", page, keys)
    if keys != [b"a", b"b"]:
        for call in (pool.pages.lookup, pool.pages.find):
            with unchanged(pool), refused():
                call("a", keys)
    pool.pages.release(page)


@pytest.mark.parametrize("n", [-1, 2**32, 2**70, 1.5, "x", None, True])
def test_page_counts(pool, n):
    with unchanged(pool), pytest.raises(kvalloc.InvalidArgument):
        pool.pages.allocate("a", n)
    assert len(pool.pages.allocate("a", 0)) == 0


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (-1, {}),
        (2**40, {}),
        ("x", {}),
        (None, {}),
        (15, {}),
        (0, {}),
        (16, {"ttl": -1}),
        (16, {"ttl": math.nan}),
        (16, {"ttl": "x"}),
        (16, {"owner": "nobody"}),
        (16, {"owner": None}),
        (16, {"label": 5}),
        (16, {"label": "\ud800"}),
    ],
    ids=repr,
)
def test_pins(pool, tokens, options):
    with serve(pool, "a", ids(40)) as seq:
        with unchanged(pool), refused():
            pool.pin(seq, tokens, **{"owner": "a", **options})
        assert pool.pins() == []
        for bad in (None, 5, "seq"):
            with refused():
                pool.pin(bad, 16, owner="a")
    check_idle(pool)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, 1e300, 10**400, "x", None, True])
def test_clocks(pool, seconds):
    with pytest.raises(kvalloc.InvalidArgument):
        pool.advance(seconds)
    assert pool.advance(0) == 0
    assert pool.advance(1.5) == 1.5
    with pytest.raises(kvalloc.InvalidArgument, match="clock"):
        make_pool(4, clock="system").advance(1)


def test_reports_and_lists_are_read_only_and_bounded():
    pool = make_pool(20, events=8)
    pool.tenant("a")
    cache(pool, "a", ids(160))
    events = pool.events()
    assert len(events) + events.lost == 10
    assert events.lost > 0
    assert events[-1] == events[len(events) - 1]
    for bad in (len(events), -len(events) - 1, 2**70, -(2**70)):
        with pytest.raises(IndexError):
            events[bad]
    for bad in ("x", None, 1.5):
        with pytest.raises(TypeError):
            events[bad]
    for bad in (-1, 2**70, "x", None, 1.5, True):
        with refused():
            pool.events(bad)
    with pytest.raises(KeyError, match="hit_tokens"):
        pool.stats()["nonsense"]
    for thing in (
        pool,
        pool.audit(),
        pool.stats(),
        pool.tenant("a"),
        pool.tenant("a").usage(),
        pool.audit().device,
    ):
        with pytest.raises((AttributeError, TypeError)):
            thing.held = 5
        with pytest.raises((AttributeError, TypeError)):
            thing.nonsense = 5


# Every method of every class, with garbage.

GARBAGE = [
    None,
    -1,
    0,
    2**31,
    2**63,
    2**64,
    -(2**70),
    1.5,
    math.nan,
    math.inf,
    "",
    "x",
    "\ud800",
    b"",
    b"x",
    True,
    [],
    [None],
]
GARBAGE += [
    (),
    {},
    object(),
    [-1],
    ["a"],
    np.zeros(3),
    np.zeros((2, 2), np.int32),
    np.array(5),
    lambda: 5,
    int,
    range(3),
]


def targets():
    pool = make_pool(20, events=16, default_tenant="d")
    tenant = pool.tenant("a", pin_budget=20 * PAGE)
    seq = serve(pool, tenant, ids(40))
    batch = pool.batch(4, 100)
    batch.add(pool.open("a", ids(30, 1)))
    step = batch.step()
    pin = pool.pin(seq, 32, owner="a")
    return [
        pool,
        tenant,
        seq,
        batch,
        step,
        pin,
        pool.pages,
        pool.stats(),
        pool.audit(),
        pool.audit().device,
        pool.events(),
        tenant.usage(),
        pool.admit("a", 5),
    ]


NAMES = [type(target).__name__ for target in targets()]


@pytest.mark.parametrize("at", range(len(NAMES)), ids=NAMES)
def test_every_method_with_garbage(at):
    """A KvallocError, a TypeError, or an answer; never a panic or an error of Python's insides."""
    everything = targets()
    target, pool = everything[at], everything[0]
    skip = {
        "__class__",
        "__new__",
        "__init__",
        "__init_subclass__",
        "__subclasshook__",
        "__getattribute__",
        "__reduce_ex__",
    }
    skip |= {
        "__reduce__",
        "__setattr__",
        "__delattr__",
        "__dir__",
        "__format__",
        "__sizeof__",
        "__getstate__",
    }
    allowed = (kvalloc.KvallocError, TypeError, KeyError, IndexError)
    called = 0
    for name in sorted(set(dir(type(target))) - skip):
        method = getattr(type(target), name)
        if not callable(method):
            with contextlib.suppress(kvalloc.ClosedError):  # `__exit__` is among the methods
                getattr(target, name)
            continue
        bound = getattr(target, name)
        try:
            keywords = [
                p.name for p in inspect.signature(bound).parameters.values() if p.kind == p.KEYWORD_ONLY
            ]
        except (TypeError, ValueError):
            keywords = []
        good = {
            "open": ("a", [1, 2]),
            "admit": ("a", 5),
            "batch": (2, 50),
            "pin": (everything[2], 16),
            "allocate": ("a", 1),
        }
        for junk in GARBAGE:
            attempts = [((), {}), ((junk,), {}), ((junk, junk), {}), ((junk,) * 3, {})]
            attempts += [(("a", junk), {}), (("a", [1], junk), {}), (("a", junk, [b"k"]), {})]
            attempts += [(good.get(name, ()), {keyword: junk}) for keyword in keywords]
            for arguments, options in attempts:
                if name == "close" and not arguments:
                    continue
                with contextlib.suppress(allowed):
                    bound(*arguments, **options)
                called += 1
    assert called > 0
    report = pool.audit()
    assert report.ok, report.findings


@pytest.mark.parametrize("name", sorted(set(kvalloc.__all__) & set(dir(kvalloc._core))))
def test_classes_are_made_by_their_makers(name):
    """Only a pool and a spec are made from outside, and nothing can be derived from what the core makes."""
    cls = getattr(kvalloc, name)
    if (
        not inspect.isclass(cls)
        or issubclass(cls, Exception)
        or name not in dir(kvalloc._core)
        or name == "Pool"
    ):
        return
    with pytest.raises(TypeError):
        cls()
    with pytest.raises(TypeError):
        type("Mine", (cls,), {})


# Errors, texts, secrets.


def test_every_error_is_in_the_tree():
    errors = [e for e in vars(kvalloc).values() if inspect.isclass(e) and issubclass(e, Exception)]
    assert len(errors) >= 12
    for error in errors:
        assert issubclass(error, kvalloc.KvallocError)
    assert issubclass(kvalloc.OutOfPages, MemoryError)
    assert issubclass(kvalloc.InvalidArgument, ValueError)


def test_a_refusal_carries_its_numbers(pool):
    pool.tenant("org", limit=5 * PAGE)
    pool.tenant("user", parent="org")
    with pytest.raises(kvalloc.OutOfPages) as error:
        pool.pages.allocate("user", 6)
    e = error.value
    assert (e.asked, e.room, e.why, e.tenant, e.level) == (6 * PAGE, 5 * PAGE, "limit", "user", "org")
    assert kvalloc.format_bytes(6 * PAGE) in str(e)
    assert kvalloc.format_bytes(5 * PAGE) in str(e)
    assert "raise the limit" in str(e)


def test_the_secret_is_never_shown():
    secret = b"\x00SeCrEt\xff\x9c16byte!"
    assert len(secret) == 16
    pool = make_pool(10, secret=secret, events=16)
    pool.tenant("a")
    seq = serve(pool, "a", ids(20))
    shown = [
        repr(x)
        for x in (
            pool,
            seq,
            pool.stats(),
            pool.stats().as_dict(),
            pool.audit(),
            pool.events(),
            pool.tenant("a"),
        )
    ]
    shown += [str(pool.spec), repr(pool.pages), repr(pool.batch(1, 10)), str(vars(type(pool)))]
    for wrong in (secret + b"x", secret[:-1], secret.decode("latin-1"), bytearray(secret), [secret]):
        with pytest.raises(kvalloc.InvalidArgument, match="16 bytes") as error:
            make_pool(10, secret=wrong)
        shown.append(str(error.value) + repr(error.value) + repr(error.value.args) + repr(vars(error.value)))
    for text in shown:
        assert "SeCrEt" not in text
        assert secret.hex() not in text
        assert str(list(secret))[1:-1] not in text
    assert not any("secret" in name for name in dir(pool))


@pytest.mark.parametrize("call", ["counts", "sampled", "bind", "share", "publish"])
def test_an_endless_iterable_ends_in_an_error(pool, call):
    batch = pool.batch(2, 100)
    seq = pool.open("a", ids(20))
    batch.add(seq)
    if call == "sampled":
        batch.step()
    with unchanged(pool), refused(kvalloc.InvalidArgument) as error:
        if call == "counts":
            batch.step(itertools.repeat(1))
        elif call == "bind":
            batch.bind(block_table=itertools.repeat(np.zeros(2, np.int32)))
        elif call == "share":
            pool.open("a", ids(20), share=itertools.repeat(("a", 1)))
        elif call == "publish":
            pool.tenant("a", publish=itertools.repeat("a"))
        else:
            batch.commit(itertools.repeat(1))
    assert len(str(error.value)) < 200


def test_ctrl_c_ends_the_reading_of_references(pool):
    def endless():
        yield 1
        signal.raise_signal(signal.SIGINT)
        while True:
            yield 1

    for call in (pool.pages.release, lambda keys: pool.pages.find("a", keys)):
        with pytest.raises(KeyboardInterrupt):
            call(endless())


def test_what_is_nearly_right_is_refused_with_a_sentence(pool):
    tenant = pool.tenant("a")
    pages = pool.pages.allocate(tenant, 1)
    calls = {
        "True or False": lambda: tenant.set(lend=1),
        "a list of scopes": lambda: tenant.set(publish=5),
        "neither bytes": lambda: pool.pages.find("a", ["s"]),
        "128-bit": lambda: pool.pages.publish("a", pages, [1.5]),
        "no valid text": lambda: make_pool(4, clock="\ud800"),
        "no tenant": lambda: pool.open("\ud800", [1]),
        "text or bytes": lambda: pool.open("a", bytearray(b"abc")),
        "at most": lambda: pool.open("a", range(10**12)),
    }
    for words, call in calls.items():
        with pytest.raises((kvalloc.InvalidArgument, kvalloc.UnknownTenant), match=words):
            call()
    pool.pages.release(pages)


def test_bound_arrays_share_no_memory(pool):
    batch = pool.batch(4, 64)
    memory = np.zeros(64, np.int32)
    with pytest.raises(kvalloc.InvalidArgument, match="seq_lens and query_start_loc share memory"):
        batch.bind(seq_lens=memory[2:6], query_start_loc=memory[3:8])
    batch.bind(seq_lens=memory[:4], query_start_loc=memory[4:9])
    with pytest.raises(kvalloc.InvalidArgument, match="share memory"):
        batch.bind(seq_lens=batch.query_start_loc[1:])


@pytest.mark.parametrize("name", ["\u061c", "\u180e", "a\ufe0f", "\u3164", "\u2800", "\u115f", "\U000e0041"])
def test_names_can_be_seen(pool, name):
    with pytest.raises(kvalloc.TenantError, match="does not show"):
        pool.tenant(name)


def test_a_long_name_is_not_echoed(pool):
    for make in (lambda: pool.tenant("x" * 10**6), lambda: make_pool(4, default_tenant="x" * 10**6)):
        with pytest.raises(kvalloc.TenantError, match="longer than 128 bytes") as error:
            make()
        assert len(str(error.value)) < 150

"""What every store must do, whatever its arrays: `tests/test_store_numpy.py` and `tests/torch` run it.

The truth is attention in float64 over what each sequence was given, kept apart from pages, tables and frames.
"""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest

import kvalloc
from tinypool import check, check_idle

HEADS, KV_HEADS, DIM = 6, 2, 32
# Storage, and how far an answer may be from that of exact K and V of order 1.
DTYPES = {
    "float32": 2e-6,
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 0.2,
    "int8": 3e-2,
}
KINDS = ("full", "window", "chunked", "latent")
V_DIM = 24  # of the latent


def spec_of(
    *kinds: str, dtype: str = "float32", page_tokens: int = 16, window: int = 37, layers: int = 2, **options
) -> kvalloc.KVSpec:
    """Return a spec with one group of each kind."""
    groups = []
    for kind in kinds:
        shape = {"k_dim": DIM} if kind == "latent" else {"kv_heads": KV_HEADS, "k_dim": DIM}
        if kind in ("window", "chunked"):
            shape["window"] = window
        groups.append(kvalloc.LayerGroup(kind, kind, layers=layers, dtype=dtype, **shape))
    return kvalloc.KVSpec.from_groups(groups, page_tokens, **options)


def pool_of(spec: kvalloc.KVSpec, size: str = "2MiB", **options) -> kvalloc.Pool:
    pool = kvalloc.Pool(spec, size, clock="manual", **options)
    pool.tenant("a")
    return pool


def first_seen(group: kvalloc.LayerGroup, position: int) -> int:
    """Return the first position that a token looks at, as the spec's words have it."""
    if group.kind == "window":
        return max(0, position - group.window + 1)
    if group.kind == "chunked":
        return position - position % group.window
    return 0


def plain(q, k, v, group, positions, *, scale=None, soft_cap=None, sinks=None, gone=()):
    """Attention of tokens at `positions` over k and v ``[tokens, kv_heads, dim]``, in float64.

    `gone` are positions that nobody sees.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    per_head = q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for i, position in enumerate(positions):
        seen = np.setdiff1d(np.arange(first_seen(group, position), position + 1), gone)
        for head in range(q.shape[1]):
            scores = k[seen, head // per_head] @ q[i, head] * (scale or q.shape[-1] ** -0.5)
            if soft_cap:
                scores = np.tanh(scores / soft_cap) * soft_cap
            top = max(scores.max(initial=-np.inf), -np.inf if sinks is None else sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[i, head] = weights @ v[seen, head // per_head] / total
    return out


class Moves:
    """Stands in for a plan."""

    def __init__(self, *moves: tuple[int, int, int, int, int, int]) -> None:
        self.moves = np.array(moves, np.int64).reshape(-1, 6)


def copying(batch, *copies) -> kvalloc.StepData:
    """Return the batch's step, asking for other copies: group, source, destination."""
    return dataclasses.replace(kvalloc.StepData.of(batch), copies=np.array(copies))


class Model:
    """Random K, V and queries for every layer, and what attention over them should give."""

    def __init__(self, test: StoreContract, store, batch, seed: int = 0) -> None:
        self.test, self.store, self.batch = test, store, batch
        self.spec = store.spec
        self.random = np.random.default_rng(seed)
        self.history: dict[object, dict[tuple[int, str], np.ndarray]] = {}
        self.gone: dict[tuple[object, int], np.ndarray] = {}

    def step(self, tolerance: float = 2e-6, dtype=np.float32, sampled: int = 7, **how) -> kvalloc.Step:
        """Run one step through all layers; every answer is compared."""
        step = self.batch.step(**{name: how.pop(name) for name in ("counts", "token_budget") if name in how})
        self.store.copy(self.batch)
        for layer in range(len(self.spec.layer_map)):
            self.layer(layer, step, tolerance, dtype, **how)
        self.batch.commit(np.full(step.num_rows, sampled, np.int32))
        return step

    def layer(self, layer, step, tolerance=2e-6, dtype=np.float32, **how):
        number = self.spec.layer_map[layer][0]
        group = self.spec.groups[number]
        latent = group.kind == "latent"
        n = step.num_tokens
        q = self.random.standard_normal((n, HEADS, group.k_dim)).astype(dtype)
        k = self.random.standard_normal((n, group.kv_heads, group.k_dim)).astype(dtype)
        v = None if latent else self.random.standard_normal((n, group.kv_heads, group.v_dim)).astype(dtype)
        got = self.test.attend(self.store, layer, q, k, v, self.batch, v_dim=V_DIM if latent else None, **how)
        assert got.dtype == dtype
        starts = self.batch.query_start_loc
        for row, seq in enumerate(self.batch.rows[: step.num_rows]):
            at = slice(int(starts[row]), int(starts[row + 1]))
            if at.start == at.stop:
                continue
            length = int(self.batch.seq_lens[row])
            before = length - (at.stop - at.start)
            keys = self.remember(seq, layer, "k", before, k[at])
            values = keys[..., :V_DIM] if latent else self.remember(seq, layer, "v", before, v[at])
            gone = self.gone.get((seq, number), ())
            want = plain(q[at], keys, values, group, range(before, length), gone=gone, **how)
            np.testing.assert_allclose(
                got[at], want, atol=tolerance, rtol=tolerance, err_msg=f"layer {layer} row {row}"
            )

    def remember(self, seq, layer, name, before, new):
        """Extend what a sequence was given; a sequence that hit a prefix starts from `history` of another."""
        kept = self.history.setdefault(seq, {})
        old = kept.get((layer, name), new[:0])[:before]
        assert len(old) == before, "the test did not say what these tokens hold"
        kept[layer, name] = np.concatenate([old, new])
        return kept[layer, name]

    def give_up(self, row, *pages, group=0):
        """Show 0 for pages of a row, as if they had been given up; what lies in their frames becomes NaN."""
        table, tokens = self.batch.block_table(group), self.spec.page_tokens
        for page in pages:
            entry = int(table[row, page])
            cls = group if entry > 0 else self.spec.classes.index(self.spec.small_class(group))
            nan = np.full((1, self.store.classes[cls].page_bytes), 0xFF, np.uint8)
            self.store.write_pages(cls, np.array([entry if entry > 0 else ~entry]), nan)
            table[row, page] = 0
            here = (self.batch.rows[row], group)
            positions = np.arange(page * tokens, (page + 1) * tokens)
            self.gone[here] = np.concatenate([self.gone.get(here, positions[:0]), positions])

    def inherit(self, seq, other):
        """Say that a sequence's first tokens hold what another's do."""
        self.history[seq] = {key: value.copy() for key, value in self.history[other].items()}


class StoreContract:
    """Subclasses say how to make a store and how to turn its arrays into numpy's."""

    def make(self, pool, **options):
        raise NotImplementedError

    def array(self, values):
        """Return the library's array."""
        raise NotImplementedError

    def numbers(self, array):
        """Return a numpy array."""
        raise NotImplementedError

    def poison(self, store):
        """Fill all memory with bits that mean NaN in every floating-point dtype."""
        for cls in range(len(store.classes)):
            for part in store.page_parts(cls):
                part[:] = 0xFF

    def attend(self, store, layer, q, k, v, batch, **how):
        sinks = how.pop("sinks", None)
        arrays = (None if x is None else self.array(x) for x in (q, k, v))
        if sinks is not None:
            how["sinks"] = self.array(sinks)
        return self.numbers(store.attend(layer, *arrays, batch, **how))

    # -- attention -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["page_major", "layer_major"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_prefill_chunks_and_decode(self, kind, dtype, layout):
        """Rows of several lengths, prompts in chunks beside decoding rows, over pages full of NaN."""
        spec = spec_of(kind, dtype=dtype, layout=layout)
        pool = pool_of(spec)
        with self.make(pool) as store, pool.batch(4, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (1, 16, 40, 100):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            for _ in range(6):
                model.step(DTYPES[dtype], token_budget=48)
            check(pool)

    @pytest.mark.parametrize("kinds", [("full", "window"), ("full", "chunked"), ("latent", "window")])
    def test_hybrids(self, kinds):
        """Two groups, each with its own pages; windows really let go, and what they let go is poisoned."""
        pool = pool_of(spec_of(*kinds, window=24))
        with self.make(pool) as store, pool.batch(2, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (30, 90):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            for _ in range(40):
                model.step()
            assert (batch.block_table(1)[1, :2] == 0).all()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("how", ["soft cap", "sinks", "both", "scale"])
    def test_caps_and_sinks(self, kind, how):
        pool = pool_of(spec_of(kind))
        options = {}
        if how in ("soft cap", "both"):
            options["soft_cap"] = 1.5
        if how in ("sinks", "both"):
            options["sinks"] = np.linspace(-2, 3, HEADS).astype(np.float32)
        if how == "scale":
            options["scale"] = 0.3
        with self.make(pool) as store, pool.batch(2, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (20, 70):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            for _ in range(4):
                model.step(5e-6, token_budget=50, **options)

    @pytest.mark.parametrize("page_tokens", [1, 5, 16, 64])
    def test_page_sizes(self, page_tokens):
        pool = pool_of(spec_of("full", "window", page_tokens=page_tokens, window=11))
        with self.make(pool) as store, pool.batch(3, 256) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (1, 33, 64):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            for _ in range(5):
                model.step(token_budget=40)

    def test_a_step_without_tokens(self):
        pool = pool_of(spec_of("full", "window"))
        with self.make(pool) as store, pool.batch(2, 64) as batch:
            batch.add(pool.open("a", range(5)))
            batch.step(counts=[0])
            q, k = np.zeros((0, HEADS, DIM), np.float32), np.zeros((0, KV_HEADS, DIM), np.float32)
            for layer in (0, 3):
                assert self.attend(store, layer, q, k, k, batch).shape == (0, HEADS, DIM)
            with pytest.raises(kvalloc.InvalidArgument, match="q has shape"):
                self.attend(store, 0, np.zeros((1, HEADS, DIM), np.float32), k, k, batch)

    # -- prefixes and forks ----------------------------------------------------------------------------------

    def test_a_hit_reads_what_another_sequence_wrote(self):
        pool = pool_of(spec_of("full"))
        with self.make(pool) as store, pool.batch(2, 256) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            first = pool.open("a", np.arange(50))
            batch.add(first)
            model.step()
            second = pool.open("a", np.arange(60))
            assert second.cached_tokens == 48
            model.inherit(second, first)
            batch.add(second)
            for _ in range(3):
                model.step()

    def test_c18_forks_copy_before_they_write(self):
        """Case C18: a partial tail page is shared by a fork; both write; both answers are right."""
        pool = pool_of(spec_of("full", "window"))
        with self.make(pool) as store, pool.batch(4, 256) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            parent = pool.open("a", np.arange(41))
            batch.add(parent)
            model.step()
            copied = 0
            children = [parent.fork(), parent.fork()]
            for child in children:
                model.inherit(child, parent)
                batch.add(child)
            for _ in range(20):
                copied += len(model.step().copies)
            assert copied >= 2
            for seq in (parent, *children):
                batch.remove(seq)
                seq.close()
            check_idle(pool)

    def test_b13_eviction_leaves_a_reader_its_bytes(self):
        """Case B13: a batch of pages is evicted beside a reader that holds one of them."""
        pool = pool_of(spec_of("full"), "128KiB")
        with self.make(pool) as store, pool.batch(4, 256) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            writer = pool.open("a", np.arange(100))
            batch.add(writer)
            model.step()
            reader = pool.open("a", np.arange(17))
            assert reader.cached_tokens == 16
            model.inherit(reader, writer)
            batch.remove(writer)
            writer.close()
            # Everything but the reader's page goes to somebody else, and is written over.
            with pool.open("a", np.arange(90) + 5000) as other:
                batch.add(other)
                batch.add(reader)
                for _ in range(3):
                    model.step()
                assert pool.stats().evictions > 0
                batch.remove(other)

    # -- plans -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["page_major", "layer_major"])
    def test_pages_go_to_the_host_and_come_back_elsewhere(self, layout):
        """Runs of adjacent frames are one copy; every byte arrives, in other frames too."""
        pool = pool_of(spec_of("full", "window", layout=layout), host_bytes="1MiB")
        with self.make(pool) as store:
            random = np.random.default_rng(0)
            pages = store.classes[1]
            frames = np.array([3, 4, 5, 9, 11, 12])
            content = random.integers(0, 256, (len(frames), pages.page_bytes), np.uint8)
            store.write_pages(1, frames, content)
            out = Moves(*((0, 1, f, 1, 1, h) for f, h in zip(frames, [7, 8, 9, 4, 20, 22], strict=True)))
            store.execute(out)
            assert (store.copies, store.runs) == (6, 4)  # 3-5, 9, 11, 12
            store.write_pages(1, frames, np.zeros_like(content))
            back = Moves(
                *((1, 1, h, 0, 1, f) for h, f in zip([7, 8, 9, 4, 20, 22], range(30, 36), strict=True))
            )
            store.execute(back)
            assert (self.numbers(store.page_parts(1)[0])[frames] == 0).all()
            np.testing.assert_array_equal(store.read_pages(1, np.arange(30, 36)), content)
            # Frame to frame within a tier, and the other group untouched.
            store.execute(Moves((0, 1, 30, 0, 1, 50), (0, 1, 31, 0, 1, 51), (1, 1, 7, 1, 1, 2)))
            np.testing.assert_array_equal(store.read_pages(1, np.array([50, 51])), content[:2])
            assert store.copies == 15

    @pytest.mark.parametrize("layout", ["page_major", "layer_major"])
    @pytest.mark.parametrize("small", ["int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_compressed_pages_are_attended(self, kind, small, layout):
        """Pages of a running sequence in a smaller class, by negative entries of the block table."""
        pool = pool_of(spec_of(kind, small_dtype=small, layout=layout, window=64), "4MiB", host_bytes="1MiB")
        with self.make(pool) as store, pool.batch(3, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (70, 100, 30):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            model.step()
            table = batch.block_table(0)
            # The last frames of the arena: nothing lies there yet.
            free = iter(range(store.classes[1].frames - 8, store.classes[1].frames))
            # Full pages that every later token sees: of a chunk only those since its start.
            for row, page in ((1, 4), (1, 5)) if kind == "chunked" else ((0, 3), (1, 3), (1, 4)):
                frame = next(free)
                store.execute(Moves((0, 0, int(table[row, page]), 0, 1, frame)))
                table[row, page] = ~frame
            loose = {"int8": 3e-2, "float8_e4m3fn": 0.2}[small]
            for _ in range(4):
                model.step(loose)

    # -- pages that were given up ----------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["page_major", "layer_major"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", ["full", "latent"])
    def test_pages_given_up_are_not_attended(self, kind, dtype, layout):
        """Entries of 0, in rows that decode and amid a prompt, beside rows that have all pages."""
        pool = pool_of(spec_of(kind, dtype=dtype, layout=layout))
        with self.make(pool) as store, pool.batch(4, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (100, 30, 7, 200):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            model.step(DTYPES[dtype], counts=[100, 30, 7, 90])
            model.give_up(0, 0, 2, 3)
            model.give_up(1, 0)
            model.give_up(3, 1, 2, 4)
            for _ in range(4):
                model.step(DTYPES[dtype], token_budget=60)
            model.give_up(0, 5)
            model.give_up(3, *range(5, 12))
            for _ in range(3):
                model.step(DTYPES[dtype])

    @pytest.mark.parametrize(
        "how", [{}, {"soft_cap": 1.5}, {"sinks": np.linspace(-2, 3, HEADS)}, {"scale": 2}]
    )
    def test_all_but_the_page_that_is_written_may_be_given_up(self, how):
        """The last tokens of a page, the first of the next one, alone and in a row of several."""
        pool = pool_of(spec_of("full", "latent"))
        how = {name: np.float32(value) for name, value in how.items()}
        with self.make(pool) as store, pool.batch(2, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (46, 64):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            model.step(5e-6, counts=[46, 32], **how)
            for group in (0, 1):
                model.give_up(0, 0, 1, group=group)
                model.give_up(1, 0, 1, group=group)
            for _ in range(4):
                model.step(5e-6, counts=[1, 7], **how)
            for group in (0, 1):
                model.give_up(0, 2, group=group)
            model.step(5e-6, **how)

    def test_windows_beside_pages_given_up(self):
        """Each group has its own table: a page that one has given up is another's to read."""
        pool = pool_of(spec_of("full", "window", "chunked", page_tokens=5))
        with self.make(pool) as store, pool.batch(2, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (60, 41):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            model.step()
            model.give_up(0, 1, 8, 10)
            for _ in range(12):
                model.step()

    @pytest.mark.parametrize("small", ["int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("kind", ["full", "latent"])
    def test_pages_given_up_between_compressed_ones(self, kind, small):
        pool = pool_of(spec_of(kind, small_dtype=small), "4MiB")
        with self.make(pool) as store, pool.batch(3, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            for n in (100, 60):
                batch.add(pool.open("a", np.arange(n) + 1000 * n))
            model.step()
            table = batch.block_table(0)
            frame = store.classes[1].frames - 1
            for row, page in ((0, 1), (0, 4), (0, 5), (1, 0)):
                store.execute(Moves((0, 0, int(table[row, page]), 0, 1, frame)))
                table[row, page] = ~frame
                frame -= 1
            model.give_up(0, 2, 4)
            model.give_up(1, 1, 0)
            loose = {"int8": 3e-2, "float8_e4m3fn": 0.2}[small]
            for _ in range(4):
                model.step(loose)

    def test_the_null_frame_is_no_page(self, monkeypatch):
        """If entries of 0 were taken for pages, the tests above would say so: frame 0 holds NaN."""
        pool = pool_of(spec_of("full"))
        with self.make(pool) as store, pool.batch(1, 512) as batch:
            self.poison(store)
            model = Model(self, store, batch)
            batch.add(pool.open("a", np.arange(50)))
            model.step()
            model.give_up(0, 1)
            model.step()
            monkeypatch.setattr("kvalloc.store.steps._given_up", lambda *_: None)
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                model.step()

    def test_where_no_page_may_be_given_up(self):
        """Where the step writes, and in windows."""
        pool = pool_of(spec_of("full", "window", window=37))
        with self.make(pool) as store, pool.batch(1, 512) as batch:
            model = Model(self, store, batch)
            batch.add(pool.open("a", np.arange(60)))
            model.step()
            q, k = np.zeros((1, HEADS, DIM), np.float32), np.zeros((1, KV_HEADS, DIM), np.float32)
            for group, page, told in ((0, 3, "page 3: 0 is no frame"), (1, 2, "page 2: 0 is no frame")):
                table = batch.block_table(group)
                frame = int(table[0, page])
                table[0, page] = 0
                batch.step()
                with pytest.raises(kvalloc.InvalidArgument, match=told):
                    self.attend(store, 2 * group, q, k, k, batch)
                table[0, page] = frame
                batch.commit([7])

    @pytest.mark.parametrize("small", ["int8", "float8_e4m3fn"])
    def test_conversion_goes_both_ways_and_between_tiers(self, small):
        pool = pool_of(spec_of("full", small_dtype=small, dtype="float16"), host_bytes="1MiB")
        with self.make(pool) as store:
            random = np.random.default_rng(1)
            view = store.views(1)
            wanted = random.standard_normal((16, KV_HEADS, DIM)).astype(np.float16)
            view.k[3], view.v[3] = self.array(wanted), self.array(-wanted)
            store.execute(Moves((0, 0, 3, 1, 1, 5)))
            store.execute(Moves((1, 1, 5, 1, 0, 9)))
            store.execute(Moves((1, 0, 9, 0, 0, 7)))
            tolerance = {"int8": 0.02, "float8_e4m3fn": 0.13}[small]
            for side, sign in ((view.k, 1), (view.v, -1)):
                got = self.numbers(side)[7].astype(np.float32)
                assert np.abs(got - sign * wanted.astype(np.float32)).max() < tolerance
            assert store.copies == 3

    def test_plans_that_are_refused(self):
        pool = pool_of(spec_of("full", "window", small_dtype="int8"), host_bytes="1MiB")
        with self.make(pool) as store:
            store.write_pages(0, np.array([1, 2]), np.ones((2, store.classes[0].page_bytes), np.uint8))
            for wrong in (
                [(2, 0, 1, 0, 0, 2)],
                [(0, 4, 1, 0, 0, 2)],
                [(0, 0, 0, 1, 0, 2)],
                [(0, 0, 1, 1, 0, 10**6)],
                [(0, 0, 1, 0, 1, 2)],
                [(0, 0, 1, 1, 0, 3), (0, 0, 2, 1, 0, 3)],
                [(0, 0, 1, 0, 0, 3), (0, 0, 3, 1, 0, 4)],
            ):
                with pytest.raises(kvalloc.InvalidArgument, match="move"):
                    store.execute(Moves((0, 0, 1, 0, 0, 6), *wrong))
            assert store.copies == 0
            store.execute(Moves())
            missing = Moves()
            missing.moves = np.zeros((1, 5))
            with pytest.raises(kvalloc.InvalidArgument, match=r"int64 \[n, 6\]"):
                store.execute(missing)
        pool = pool_of(spec_of("full"))
        with self.make(pool) as store:
            with pytest.raises(kvalloc.InvalidArgument, match=r"the store has 0 \(device\)"):
                store.execute(Moves((0, 0, 1, 1, 0, 1)))
            with pytest.raises(kvalloc.InvalidArgument, match="no host tier"):
                store.page_parts(0, host=True)
            assert store.host_bytes == 0
        with pytest.raises(kvalloc.ClosedError):
            store.execute(Moves())

    def test_a_plan_whose_places_are_not_its_own_is_not_carried_out(self):
        """After its end, in another pool, of a dry run: its frames may hold what others wrote since."""
        pool, other = (pool_of(spec_of("full"), host_bytes="1MiB") for _ in range(2))
        with self.make(pool) as store, self.make(other) as foreign, pool.batch(1, 512) as batch:
            seq = pool.open("a", np.arange(6 * pool.spec.page_tokens))
            batch.add(seq)
            batch.step()
            batch.commit([7])
            batch.remove(seq)

            def suspend():
                return pool.suspend(seq, mode="swap")

            plan = suspend()
            plan.abort()
            with pytest.raises(kvalloc.PlanError, match="aborted"):
                store.execute(plan)
            plan = suspend()
            with pytest.raises(kvalloc.WrongPool):
                foreign.execute(plan)
            pool.advance(60)
            with pytest.raises(kvalloc.PlanError, match="expired"):
                store.execute(plan)
            with pytest.raises(kvalloc.InvalidArgument, match="plan must be"):
                store.execute(None)
            assert store.copies == foreign.copies == 0
            plan = suspend()
            store.execute(plan)
            # What was committed has left its frame, which is somebody else's now.
            plan.commit(2)
            store.execute(plan)
            assert (len(plan.moves), len(plan.to_copy(pool)), store.copies) == (6, 4, 10)
            plan.commit()
            with pytest.raises(kvalloc.PlanError, match="committed"):
                store.execute(plan)
            assert store.copies == 10
            store.execute(pool.reclaim("a", 0, dry_run=True))  # nothing to copy
            seq.close()

    @pytest.mark.parametrize(
        "other",
        [{"page_tokens": 32}, {"dtype": "float16"}, {"layout": "layer_major"}, {"small_dtype": "int8"}],
    )
    def test_a_plan_of_another_spec_is_refused(self, other):
        """Its frames are there, and are other bytes: pages are larger, or their layers lie elsewhere."""
        pool, mate = (pool_of(spec_of("full"), host_bytes="1MiB") for _ in range(2))
        stranger = pool_of(spec_of("full", **other), host_bytes="1MiB")
        seq = pool.open("a", np.arange(2 * pool.spec.page_tokens))
        with pool.batch(1, 512) as batch:
            batch.add(seq)
            batch.step()
            batch.commit([7])
            batch.remove(seq)
        plan = pool.suspend(seq, mode="swap")
        data = plan.to_bytes()
        there = kvalloc.Plan.from_bytes(data)
        assert there.spec_digest == plan.spec_digest == pool.spec.digest != stranger.spec.digest
        assert there.to_bytes() == data
        with self.make(stranger) as store:
            with pytest.raises(kvalloc.InvalidArgument, match=r"plan is of another spec than .*<KVSpec"):
                store.execute(there)
            assert store.copies == 0
        with self.make(mate) as store:
            store.execute(there)
            assert store.copies == len(plan.moves) > 0
        plan.commit()
        seq.close()

    # -- ranks -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["page_major", "layer_major"])
    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    def test_two_ranks_are_one(self, dtype, layout):
        """Each rank holds its heads; the same frames; side by side their answers are that of one store."""
        whole, shared = (pool_of(spec_of("full", "window", dtype=dtype, layout=layout)) for _ in range(2))
        random = np.random.default_rng(0)
        with (
            self.make(whole) as one,
            self.make(shared, rank=0, ranks=2) as left,
            self.make(shared, rank=1, ranks=2) as right,
            whole.batch(2, 256) as batch,
            shared.batch(2, 256) as other,
        ):
            assert left.device_bytes == right.device_bytes == one.device_bytes // 2
            assert tuple(left.views(0).k.shape) == (left.classes[0].frames, 16, KV_HEADS // 2, DIM)
            for store in (one, left, right):
                self.poison(store)
            for b, pool in ((batch, whole), (other, shared)):
                for n in (20, 70):
                    b.add(pool.open("a", np.arange(n) + 1000 * n))
            for _ in range(4):
                tokens = batch.step().num_tokens
                assert other.step().num_tokens == tokens
                assert (batch.block_table(1) == other.block_table(1)).all()
                for layer in range(4):
                    q, k, v = (
                        random.standard_normal((tokens, heads, DIM)).astype(np.float32)
                        for heads in (HEADS, KV_HEADS, KV_HEADS)
                    )
                    want = self.attend(one, layer, q, k, v, batch)
                    got = [
                        self.attend(store, layer, *(np.split(x, 2, 1)[rank] for x in (q, k, v)), other)
                        for rank, store in enumerate((left, right))
                    ]
                    np.testing.assert_allclose(np.concatenate(got, 1), want, atol=1e-6)
                for b in (batch, other):
                    b.commit([7, 7])

    def test_heads_that_do_not_fit_the_ranks(self):
        for kind, ranks, match in (
            ("full", 3, "2 KV heads can't be divided by 3 ranks"),
            ("latent", 2, "a latent has no heads to divide"),
        ):
            pool = pool_of(spec_of(kind))
            with pytest.raises(kvalloc.InvalidArgument, match=f"{match}.*tp="):
                self.make(pool, rank=0, ranks=ranks)
        for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
            with pytest.raises(kvalloc.InvalidArgument, match="ranks count from 0"):
                self.make(pool, rank=rank, ranks=ranks)
        pool = pool_of(spec_of("full", page_tokens=1, dtype="int8"))
        with pytest.raises(kvalloc.InvalidArgument, match="multiple of 16"):
            self.make(pool, rank=0, ranks=2)

    # -- views -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["page_major", "layer_major"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_views_and_bytes(self, dtype, layout):
        """A layer's tensors lie where the geometry says, share memory with the bytes, touch no other."""
        spec = spec_of("full", "window", dtype=dtype, layout=layout)
        with self.make(pool_of(spec)) as store:
            for cls in range(len(store.classes)):
                for part in store.page_parts(cls):
                    part[:] = 0
            group, at = spec.layer_map[3]
            page = spec.classes[group]
            view = store.views(3)
            frames = store.pool.device_bytes // page.page_bytes
            assert tuple(view.k.shape) == (frames, 16, KV_HEADS, DIM) == tuple(view.v.shape)
            assert (view.k_scale is None) == (dtype != "int8") == (view.v_scale is None)
            marked = [x for x in view if x is not None]
            for array in marked:
                array[5] = 1
            size, scale = kvalloc.layers.DTYPES[dtype]
            want = 16 * KV_HEADS * (2 * DIM * size + 2 * scale)
            parts = [self.numbers(part) for part in store.page_parts(group)]
            layer = parts[at][5] if layout == "layer_major" else parts[0][5][at * page.layer_bytes :]
            assert layer[:want].reshape(-1)[:1].size == 1
            touched = sum(int((part != 0).any(1).sum()) for part in parts)
            assert touched == 1  # one frame, one layer
            if layout == "page_major":
                whole = self.numbers(store.page_bytes_view(group))[5]
                outside = np.r_[whole[: at * page.layer_bytes], whole[at * page.layer_bytes + want :]]
                assert not outside.any()
                assert whole[at * page.layer_bytes : at * page.layer_bytes + want].any()

    def test_layers_that_share(self):
        spec = kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=32, dtype="float32")
        with self.make(pool_of(spec)) as store:
            assert store.views(1) is store.views(1)
            store.views(0).k[3] = 7
            assert float(self.numbers(store.views(0).k)[3].min()) == 7

    # -- refusals --------------------------------------------------------------------------------------------

    def test_one_store_a_pool(self):
        pool = pool_of(spec_of("full"))
        store = self.make(pool)
        with pytest.raises(kvalloc.InUse, match="has a store already"):
            self.make(pool)
        store.close()
        self.make(pool).close()
        forgotten = self.make(pool)
        del forgotten
        gc.collect()
        self.make(pool).close()

    def test_closed(self):
        pool = pool_of(spec_of("full"))
        batch = pool.batch(2, 64)
        batch.add(pool.open("a", range(4)))
        batch.step()
        q, k = np.zeros((4, HEADS, DIM), np.float32), np.zeros((4, KV_HEADS, DIM), np.float32)
        with self.make(pool) as store:
            assert not store.closed
        assert store.closed
        assert "closed" in repr(store)
        calls = (
            lambda: store.views(0),
            lambda: store.page_bytes_view(0),
            lambda: store.copy(batch),
            lambda: self.attend(store, 0, q, k, k, batch),
        )
        for call in calls:
            with pytest.raises(kvalloc.ClosedError, match="store is closed"):
                call()
        store.close()
        store = self.make(pool)
        pool.close()
        for call in calls:
            with pytest.raises(kvalloc.ClosedError, match="pool is closed"):
                call()
        with pytest.raises(kvalloc.ClosedError, match="pool is closed"):
            self.make(pool)

    def test_wrong_arguments(self):
        pool = pool_of(spec_of("full", "latent"))
        other = pool_of(spec_of("full", "latent"))
        batch, foreign = pool.batch(2, 64), other.batch(2, 64)
        for b, p in ((batch, pool), (foreign, other)):
            b.add(p.open("a", range(5)))
        q, k = np.zeros((5, HEADS, DIM), np.float32), np.zeros((5, KV_HEADS, DIM), np.float32)
        with self.make(pool) as store:

            def refused(error, match, layer=0, q=q, k=k, v=k, batch=batch, **how):
                with pytest.raises(error, match=match):
                    self.attend(store, layer, q, k, v, batch, **how)

            wrong = kvalloc.InvalidArgument
            refused(wrong, "no step yet")
            with pytest.raises(wrong, match="no step yet"):
                store.copy(batch)
            batch.step()
            foreign.step()
            refused(kvalloc.WrongPool, "another pool", batch=foreign)
            with pytest.raises(kvalloc.WrongPool, match="another pool"):
                store.copy(foreign)
            refused(wrong, "kvalloc.Batch", batch=None)
            for no_batch in (None, batch.last, batch.last.copies):
                with pytest.raises(wrong, match=r"kvalloc\.Batch"):
                    store.copy(no_batch)
            refused(wrong, "layers 0 to 3", layer=4)
            refused(wrong, "layers 0 to 3", layer=-1)
            refused(wrong, "it must be \\(5, heads, 32\\)", q=q[:4])
            refused(wrong, "heads of this rank", q=q[:, :5])
            refused(wrong, "values of a head", q=q[..., :31])
            refused(wrong, "k has shape \\(4, 2, 32\\)", k=k[:4])
            refused(wrong, "KV heads of this rank", k=k[:, :1])
            refused(wrong, "v has shape", v=k[..., :8])
            refused(wrong, "v must be", v=None)
            refused(wrong, "k has dtype", k=k.astype(np.int32))
            refused(wrong, "q has dtype", q=q.astype(np.int32))
            refused(wrong, "scale is nan", scale=float("nan"))
            refused(wrong, "soft_cap is 0", soft_cap=0)
            refused(wrong, "one per head", sinks=np.zeros(5, np.float32))
            refused(wrong, "v_dim is 16", v_dim=16)
            refused(wrong, "is a latent", layer=2, k=k[:, :1], v=None)
            refused(wrong, "v_dim is 33", layer=2, k=k[:, :1], v=None, v_dim=33)
            refused(wrong, "no V of its own", layer=2, k=k[:, :1], v=k[:, :1], v_dim=16)
            with pytest.raises(wrong, match="must be"):
                store.attend(0, q.tolist(), None, None, batch)
            for copies in ([[0, 1]], [[9, 1, 2]], [[0, 0, 2]], [[0, 1, 10**6]], [[0.5, 1, 2]]):
                with pytest.raises(wrong, match="copies"):
                    store.copy(copying(batch, *copies))
            frame = int(batch.block_table(0)[0, 0])
            for entry, told in ((10**6, "1000000 is no frame"), (0, "0 is no frame"), (-5, "-5 is no frame")):
                batch.block_table(0)[0, 0] = entry
                batch.step()
                refused(wrong, told, q=q[:1], k=k[:1], v=k[:1])
            batch.block_table(0)[0, 0] = frame
            batch.step()
            batch.slot_mapping(0)[0] = 16 * 10**6
            refused(wrong, "names frame 1000000", q=q[:1], k=k[:1], v=k[:1])
        foreign.close()

    def test_nothing_is_written_when_refused(self):
        pool = pool_of(spec_of("full"))
        with self.make(pool) as store, pool.batch(2, 64) as batch:
            batch.add(pool.open("a", range(5)))
            batch.step()
            view = store.views(0)
            view.k[:], view.v[:] = 3, 3
            q, k = np.zeros((5, HEADS, DIM), np.float32), np.zeros((5, KV_HEADS, DIM), np.float32)
            for how in ({"soft_cap": -1.0}, {"v_dim": 3}):
                with pytest.raises(kvalloc.InvalidArgument):
                    self.attend(store, 0, q, k, k, batch, **how)
            with pytest.raises(kvalloc.InvalidArgument):
                self.attend(store, 0, q, k, k[..., :3], batch)
            assert (self.numbers(view.k) == 3).all()

    def test_no_memory(self, monkeypatch):
        pool = pool_of(spec_of("full"), "1GiB")
        monkeypatch.setattr(f"{type(self).MODULE}.available_bytes", lambda: 1 << 20)
        with pytest.raises(
            kvalloc.OutOfMemory, match=r"1 GiB, and cpu has 1 MiB available.*smaller"
        ) as caught:
            self.make(pool)
        assert isinstance(caught.value, MemoryError)
        assert (caught.value.asked, caught.value.room) == (pool.device_bytes, 1 << 20)
        monkeypatch.undo()
        self.make(pool).close()

"""Contexts that lose old pages: block tables show 0 there, and attention is over what is left."""

from __future__ import annotations

import numpy as np
import pytest

import kvalloc
from kvalloc.connector import Archive, FileConnector

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
TOKENS = 16
KEEP = 24
SPEC = kvalloc.KVSpec.uniform(
    layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32", page_tokens=TOKENS
)
PAGE = SPEC.classes[0].page_bytes


class Side:
    """One sequence in one row."""

    def __init__(self, length: int = 8 * TOKENS + 1, cut: int | None = KEEP, **options) -> None:
        self.pool = kvalloc.Pool(SPEC, "4MiB", **options)
        self.tenant = self.pool.tenant("a", cut=cut)
        self.store = kvalloc.NumpyStore(self.pool)
        self.batch = self.pool.batch(max_sequences=2, max_tokens=512)
        self.seq = self.pool.open(self.tenant, range(length))
        self.batch.add(self.seq)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            assert not self.batch.step().refused
            self.batch.commit([1] * len(self.batch))

    def cut(self, size: int | str = "1GiB", **options) -> kvalloc.Plan:
        return self.pool.cut(self.tenant, size, batch=self.batch, **options)

    def shown(self) -> list[int]:
        """The entries of the row that its sequence has pages for."""
        return np.asarray(self.batch.block_table())[0, : len(self.seq.block_table())].tolist()


def side(**options) -> Side:
    here = Side(**options)
    here.step()
    return here


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of one token over those that are there: q [heads, dim], k and v [tokens, kv heads, dim]."""
    each = HEADS // KV_HEADS
    k, v = (np.repeat(x, each, axis=1).astype(np.float64) for x in (k, v))
    scores = np.einsum("hd,thd->ht", q, k) * DIM**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def test_the_tenant_has_to_allow_it():
    here = side()
    assert here.tenant.cut == KEEP
    here.tenant.set(weight=2)
    assert here.tenant.cut == KEEP
    here.tenant.set(cut=None)
    assert here.tenant.cut is None
    with pytest.raises(kvalloc.InvalidArgument, match=r"'a'|\"a\".*cut=tokens"):
        here.cut()
    assert here.pool.tenant("b").cut is None
    for wrong in (0, -1, True, "12", 1.5, 2**32):
        with pytest.raises(kvalloc.InvalidArgument, match="from 1 to 4294967295"):
            here.tenant.set(cut=wrong)
        with pytest.raises(kvalloc.InvalidArgument, match="from 1 to 4294967295"):
            here.pool.tenant("c", cut=wrong)
    assert here.tenant.cut is None
    assert [tenant.name for tenant in here.pool.tenants()] == ["a", "b"]


def test_what_means_nothing_is_refused():
    here, other = side(), side()
    for name, wrong in (
        *(("bytes", wrong) for wrong in (-1, "some")),
        *(("ttl", -1), ("dry_run", 1), ("sessions", [1]), ("batch", 7)),
    ):
        with pytest.raises(kvalloc.InvalidArgument):
            here.pool.cut(**{"tenant": here.tenant, "bytes": 1, name: wrong})
    with pytest.raises(kvalloc.UnknownTenant):
        here.pool.cut("nobody", 1)
    with pytest.raises(kvalloc.WrongPool):
        here.pool.cut(here.tenant, 1, batch=other.batch)


def test_the_first_page_and_the_last_tokens_stay():
    here = side()
    held, table = here.tenant.held, here.seq.block_table().tolist()
    with here.cut() as plan:
        here.store.execute(plan)
        assert (here.tenant.held, here.seq.block_table().tolist()) == (held, table), "not before the commit"
    # 129 tokens, the last 24 of which begin in page 6.
    assert (plan.kind, plan.rungs["evict"], plan.bytes) == ("cut", 5 * PAGE, 5 * PAGE)
    assert (plan.moves.shape, plan.copied) == ((0, 6), (0, 0))
    (victim,) = plan.victims
    assert (victim.fate, victim.tokens, victim.row, victim.sequence.number) == (
        "trimmed",
        5 * TOKENS,
        None,
        here.seq.number,
    )
    assert here.tenant.held == held - 5 * PAGE
    assert here.seq.block_table().tolist() == [table[0], 0, 0, 0, 0, 0, *table[6:]]
    assert len(here.seq.pages()) == len(here.pool.pages.frames(here.seq.pages())) == len(table) - 5
    here.step()
    assert here.shown() == here.seq.block_table().tolist()
    assert here.seq.num_written == 8 * TOKENS + 2
    assert here.pool.audit().ok
    assert here.pool.stats().cut_pages == 5
    with pytest.raises(kvalloc.InvalidArgument, match="cut"):
        here.batch.csr()


def test_a_dry_run_and_an_abort_change_nothing():
    here = side()
    held, table = here.tenant.held, here.seq.block_table().tolist()
    dry = here.cut(2 * PAGE, dry_run=True)
    assert (dry.state, dry.rungs["evict"], dry.shortfall) == ("dry", 2 * PAGE, 0)
    plan = here.cut(2 * PAGE)
    assert (plan.rungs, plan.shortfall) == (dry.rungs, dry.shortfall)
    there = kvalloc.Plan.from_bytes(plan.to_bytes())
    assert (there.kind, there.rungs, len(there.moves), there.victims[0].fate) == (
        "cut",
        plan.rungs,
        0,
        "trimmed",
    )
    plan.abort()
    assert (here.tenant.held, here.seq.block_table().tolist()) == (held, table)
    assert here.pool.audit().ok
    with here.pool.open(here.tenant, range(200)) as twin:
        assert twin.cached_tokens == 8 * TOKENS, "found as before"


def test_a_cut_that_expires_is_an_aborted_one():
    here = side(clock="manual")
    held, table = here.tenant.held, here.seq.block_table().tolist()
    plan = here.cut(2 * PAGE, ttl=5)
    here.pool.advance(6.0)
    with pytest.raises(kvalloc.PlanError) as late:
        plan.commit()
    assert late.value.state == plan.state == "expired"
    assert (here.tenant.held, here.seq.block_table().tolist()) == (held, table)
    assert here.pool.stats().cut_pages == 0
    assert here.pool.audit().ok


def test_a_sequence_that_closes_while_its_cut_is_open_gives_all_back_once():
    here = side()
    plan = here.cut()
    here.batch.remove(here.seq)
    here.seq.close()
    plan.commit()
    assert here.tenant.held == 0
    assert here.pool.audit().ok
    here.pool.close()
    with pytest.raises(kvalloc.ClosedError):
        here.cut()


def test_what_is_cut_is_not_found_and_not_written_on():
    here = side()
    with here.cut(2 * PAGE):
        pass
    here.step(3 * TOKENS)
    with here.pool.open(here.tenant, here.seq.tokens) as twin:
        assert twin.cached_tokens == TOKENS, "nothing behind it either"
    with pytest.raises(kvalloc.InvalidArgument, match="truncate to 16 tokens"):
        here.seq.truncate(TOKENS + 3)
    # A fork has not more than it.
    with here.seq.fork() as fork:
        assert (fork.block_table() > 0).tolist() == (here.seq.block_table() > 0).tolist()
    here.seq.truncate(TOKENS)
    here.seq.extend(range(TOKENS, 5 * TOKENS))
    here.step()
    assert (here.seq.block_table() > 0).all()
    with here.pool.open(here.tenant, here.seq.tokens) as twin:
        assert twin.cached_tokens == 5 * TOKENS, "exact again"
    assert here.pool.audit().ok


def test_what_nobody_finds_any_more_is_told_once():
    here = Side(events=1000)
    here.step()
    with here.cut(2 * PAGE):
        pass
    here.step(2 * TOKENS)
    here.seq.close()
    here.pool.reset_prefix_cache()
    told = list(here.pool.events())
    stored, removed = ([e["key"] for e in told if e["type"] == what] for what in ("stored", "removed"))
    assert len(stored) == len(set(stored)) == 8, "nothing that was computed after the cut"
    assert sorted(removed) == sorted(stored)


def test_what_is_gone_stays_gone_on_the_host_and_comes_back_when_it_is_computed_again():
    here = side(host_bytes="4MiB")
    with here.cut():
        pass
    here.step()
    gone = (here.seq.block_table() == 0).tolist()
    for mode, after in (("swap", gone), ("recompute", [False] * len(gone))):
        with here.pool.suspend(here.seq, mode=mode, batch=here.batch) as plan:
            here.store.execute(plan)
        assert here.tenant.held == 0
        assert here.tenant.host_held == (4 * PAGE if mode == "swap" else 0)
        with here.pool.resume(here.seq) as plan:
            here.store.execute(plan)
        here.batch.add(here.seq)
        here.step()
        assert (here.seq.block_table() == 0).tolist() == after
        assert here.pool.audit().ok


def test_reclaim_cuts_before_it_stops_anybody_where_the_host_tier_is_full():
    here = side()
    with here.pool.reclaim(here.tenant, 2 * PAGE, live="preempt", batch=here.batch) as plan:
        here.store.execute(plan)
    assert plan.rungs == {"free": 0, "offload": 0, "compress": 0, "evict": 2 * PAGE}
    assert ([victim.fate for victim in plan.victims], plan.shortfall, len(here.batch)) == (["trimmed"], 0, 1)
    there = side(host_bytes="4MiB")
    plan = there.pool.reclaim(there.tenant, 2 * PAGE, live="preempt", batch=there.batch, dry_run=True)
    assert plan.rungs["evict"] == 0


def test_a_context_without_end_lives_in_what_it_keeps():
    here = side(length=5)
    frames = set()
    for _ in range(40):
        here.step(TOKENS // 2)
        with here.cut():
            pass
        frames.update(here.seq.block_table().tolist())
    assert here.seq.num_written > 20 * TOKENS
    assert here.tenant.held <= 4 * PAGE
    assert here.pool.audit().ok


def test_what_a_cut_sequence_computes_is_not_archived(tmp_path):
    here = side()
    with here.cut(PAGE):
        pass
    here.step(2 * TOKENS)
    with FileConnector(tmp_path) as files:
        assert Archive(here.store, files, weights="tiny@1").save(here.seq) == 1


def test_attention_is_over_what_is_left():
    here = Side(length=6 * TOKENS + 5)
    rng = np.random.default_rng(3)
    keys: list[np.ndarray] = [np.empty((0, KV_HEADS, DIM), np.float32) for _ in range(LAYERS)]
    values = list(keys)
    for at in range(2 * TOKENS):
        count = here.seq.num_tokens - here.seq.num_written
        q, k, v = rng.standard_normal((3, LAYERS, count, HEADS, DIM), np.float32)
        k, v = k[:, :, :KV_HEADS], v[:, :, :KV_HEADS]
        here.batch.step()
        there = np.repeat(here.seq.block_table() != 0, TOKENS)
        assert there.all() == (at <= 3), "cut after the fourth step"
        for layer in range(LAYERS):
            keys[layer] = np.concatenate([keys[layer], k[layer]])
            values[layer] = np.concatenate([values[layer], v[layer]])
            out = here.store.attend(layer, q[layer], k[layer], v[layer], here.batch)
            kept = there[: len(keys[layer])]
            want = expected(q[layer, -1], keys[layer][kept], values[layer][kept])
            np.testing.assert_allclose(out[-1], want, rtol=1e-4, atol=1e-5)
        here.batch.commit([1])
        if at == 3:
            with here.cut(3 * PAGE) as plan:
                here.store.execute(plan)
    assert not there[TOKENS : 4 * TOKENS].any()

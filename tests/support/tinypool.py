"""Pools of a few pages, and the shortest way to run sequences through them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np

import kvalloc

TOKENS = 16  # of a page
PAGE = 4096  # bytes of a page of most specs below


def group(kind: str, name: str | None = None, **options) -> kvalloc.LayerGroup:
    """Return a layer group whose pages have 4 KiB."""
    if kind == "state":
        shape = {"state_bytes": PAGE}
    elif kind == "latent":
        shape = {"k_dim": 128}
    else:
        shape = {"kv_heads": 1, "k_dim": 64}
    return kvalloc.LayerGroup(name or kind, kind, layers=1, **{**shape, **options})


FULL = kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, page_tokens=TOKENS)
SPECS = {
    "full": FULL,
    "latent": kvalloc.KVSpec.from_groups([group("latent")], TOKENS),
    "window": kvalloc.KVSpec.from_groups([group("window", window=40)], TOKENS),
    "chunked": kvalloc.KVSpec.from_groups([group("chunked", window=48)], TOKENS),
    "full+window": kvalloc.KVSpec.from_groups([group("full"), group("window", window=40)], TOKENS),
    "full+chunked": kvalloc.KVSpec.from_groups([group("full"), group("chunked", window=32)], TOKENS),
    "full+state": kvalloc.KVSpec.from_groups([group("full"), group("state")], TOKENS),
    "latent+window+state": kvalloc.KVSpec.from_groups(
        [group("latent"), group("window", window=33), group("state")], TOKENS
    ),
    "two windows": kvalloc.KVSpec.from_groups(
        [group("window", "near", window=20), group("window", "far", window=70)], TOKENS
    ),
    "two sizes": kvalloc.KVSpec.from_groups([group("full"), group("window", window=40, kv_heads=2)], TOKENS),
}
STATELESS = [name for name in SPECS if "state" not in name]


def make_pool(pages: int, spec: kvalloc.KVSpec = FULL, **options) -> kvalloc.Pool:
    """Return a pool with so many usable pages (of the largest size): frame 0 is never given out."""
    options = {"clock": "manual", **options}
    return kvalloc.Pool(spec, max(c.page_bytes for c in spec.classes) * (pages + 1), **options)


def ids(tokens: int, seed: int = 0) -> np.ndarray:
    """Return a prompt; other seeds share no token with it."""
    return np.arange(tokens, dtype=np.int32) + 1_000_000 * (seed + 1)


def finish(batch: kvalloc.Batch, sample: int = 7) -> None:
    """Step until every prompt in the batch is written; nothing may be refused."""
    while any(seq.num_written < seq.num_tokens for seq in batch.rows):
        out = batch.step()
        assert not out.refused, out.refused
        batch.commit(np.full(out.num_rows, -1, np.int32))


def decode(batch: kvalloc.Batch, steps: int, sample: int = 7) -> None:
    """Decode some tokens in every row; nothing may be refused."""
    for _ in range(steps):
        out = batch.step()
        assert not out.refused, out.refused
        batch.commit(np.full(out.num_rows, sample, np.int32))


def serve(
    pool: kvalloc.Pool, tenant: kvalloc.Tenant | str, prompt: Iterable[int], decoded: int = 0, **options
) -> kvalloc.Sequence:
    """Open a sequence, write its prompt and some more tokens: it is idle then, and open."""
    seq = pool.open(tenant, prompt, **options)
    batch = pool.batch(1, len(seq) + decoded + TOKENS)
    batch.add(seq)
    finish(batch)
    if decoded:
        seq.extend([7])
        decode(batch, decoded)
    batch.remove(seq)
    return seq


def cache(pool: kvalloc.Pool, tenant: kvalloc.Tenant | str, prompt: Iterable[int], **options) -> None:
    """Leave a prompt's pages in the cache."""
    serve(pool, tenant, prompt, **options).close()


def hit(pool: kvalloc.Pool, tenant: kvalloc.Tenant | str, prompt: Iterable[int], **options) -> int:
    """How many tokens of a prompt are in the cache."""
    with pool.open(tenant, prompt, **options) as seq:
        return seq.cached_tokens


def check(pool: kvalloc.Pool) -> kvalloc.AuditReport:
    """Audit a pool that nobody works on: the books balance to the byte."""
    report = pool.audit()
    assert report.ok, report.findings
    assert report.exact
    parts = pool.free + pool.held + pool.cached + pool.pinned
    assert parts + report.device.in_flight == pool.capacity, report.device
    assert min(pool.free, pool.held, pool.cached, pool.pinned, pool.promised) >= 0
    assert pool.stats()["double_frees"] == 0
    return report


def check_idle(pool: kvalloc.Pool) -> None:
    """Audit a pool in which nothing is open or pinned."""
    check(pool)
    assert (pool.held, pool.pinned, pool.promised) == (0, 0, 0)
    assert pool.free + pool.cached == pool.capacity


@contextlib.contextmanager
def unchanged(pool: kvalloc.Pool) -> Iterator[None]:
    """What happens inside leaves the books as they were."""

    def figures():
        # Not `charged` and `claim`: what lies in stock between the ledger and its users comes and goes.
        parts = ("held", "cached", "pinned", "promised", "reserve", "limit", "host_held", "host_limit")
        usage = [(t.name, *(getattr(t.usage(), part) for part in parts)) for t in pool.tenants()]
        return pool.free, pool.held, pool.cached, pool.pinned, pool.promised, usage

    before = figures()
    yield
    check(pool)
    assert figures() == before

"""One GiB of cold pages, reclaimed and granted to another tenant: ``python bench/reclaim.py [--json FILE]``.

57,344 bytes a token, pages of 16 tokens: 1,170 pages are a GiB. A tenant's cached prompts fill the pool; then
one call, ``pool.top_up(other, "1GiB")``, evicts them and gives the other tenant its reserve. No copies.
Beside it the same in two calls: `Pool.reclaim` with its commit, and ``tenant.set(reserve=...)``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvalloc
from clock import Result, machine, median_of, timed

GIB = 1 << 30
BAR_US = 100
PROMPT = 90  # pages of a prompt


def full_of_cold_pages(spec: kvalloc.KVSpec, pages: int) -> tuple[kvalloc.Pool, kvalloc.Tenant]:
    """Return a pool whose pages are all cached, and their tenant."""
    pool = kvalloc.Pool(spec, spec.classes[0].page_bytes * (pages + 1))
    cold = pool.tenant("cold")
    tokens = spec.page_tokens
    batch = pool.batch(max_sequences=1, max_tokens=PROMPT * tokens + 1)
    nothing = np.full(1, -1, np.int32)
    for first in range(0, pages, PROMPT):
        n = min(PROMPT, pages - first) * tokens
        seq = pool.open(cold, np.arange(n, dtype=np.int32) + first * tokens)
        batch.add(seq)
        batch.step()
        batch.commit(nothing)
        seq.close()
    assert pool.cached == pool.capacity
    return pool, cold


def jobs(repeats: int) -> list[Result]:
    """Time the jobs; each call finds a full pool."""
    spec = kvalloc.KVSpec.uniform(layers=28, kv_heads=4, head_dim=128, dtype="float16", page_tokens=16)
    page = spec.classes[0].page_bytes
    pages = GIB // page

    def job(name: str, call: Callable[[kvalloc.Pool, kvalloc.Tenant, kvalloc.Tenant], object]) -> Result:
        def once() -> float:
            pool, cold = full_of_cold_pages(spec, pages)
            beta = pool.tenant("beta")
            took = timed(lambda: call(pool, cold, beta))
            assert beta.reserve == pages * page, "it is granted"
            assert pool.free >= pages * page - page, "it is free"
            assert pool.audit()
            return took

        return median_of(name, "kvalloc", once, repeats, unit="us", note=f"{pages} pages of {page:,} bytes")

    def two_calls(pool: kvalloc.Pool, cold: kvalloc.Tenant, beta: kvalloc.Tenant) -> None:
        with pool.reclaim(cold, pages * page):
            pass
        beta.set(reserve=pages * page)

    return [
        job("top_up of 1 GiB", lambda pool, cold, beta: pool.top_up(beta, pages * page)),
        job("reclaim, commit, set(reserve)", two_calls),
    ]


def main() -> int:
    """Print a table; exit code 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = jobs(given.repeats)
    for result in results:
        low, high = min(result.repeats), max(result.repeats)
        print(f"{result.job:<32} {result.value:8.1f} us   ({low:.1f} to {high:.1f}; {result.note})")
    if given.json:
        record = {"machine": machine(), "results": [result.json() for result in results]}
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    print(f"bar: {BAR_US} us")
    return int(results[0].value > BAR_US)


if __name__ == "__main__":
    sys.exit(main())

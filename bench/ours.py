"""kvalloc doing the jobs of this folder through its Python face, the way a scheduler would call it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from time import perf_counter_ns

import numpy as np

import kvalloc
from clock import Result, median_of, resident_bytes, timed

SIDE = "kvalloc"
PAGE = 16
# Steps between two looks at the clock, which costs up to 0.2 us on a virtual machine: an asynchronous
# scheduler may run as many ahead of their commits.
AHEAD = 8
VOCABULARY = 128_000
GEOMETRY = {"layers": 28, "kv_heads": 4, "head_dim": 128, "dtype": "float16", "page_tokens": PAGE}
PAGE_BYTES = 28 * 4 * 128 * 2 * 2 * PAGE


def pool_with(pages: int, **options: object) -> kvalloc.Pool:
    """Build a pool with that many usable pages (frame 0 is never given out)."""
    return kvalloc.Pool(kvalloc.KVSpec.uniform(**GEOMETRY), device_bytes=(pages + 1) * PAGE_BYTES, **options)


def in_service(pool: kvalloc.Pool, tenant: kvalloc.Tenant) -> None:
    """Use every page once: a pool in service has touched its memory, as the other side's has."""
    pages = pool.pages.allocate(tenant, pool.free // PAGE_BYTES)
    pool.pages.release(pages)


def tenant_of(pool: kvalloc.Pool) -> kvalloc.Tenant:
    """Make a tenant three levels down with a reserve and a limit, so that a charge has a tree to walk."""
    pool.tenant("org", limit=pool.capacity)
    pool.tenant("team", parent="org")
    return pool.tenant("user", parent="team", reserve=pool.capacity // 4, limit=pool.capacity)


def prompts(tokens: int, seed: int) -> Iterator[np.ndarray]:
    """Endless random prompts as int32 arrays, no two alike."""
    chance = np.random.default_rng(seed)
    while True:
        yield chance.integers(0, VOCABULARY, tokens, dtype=np.int32)


def decode(rows: int, steps: int, repeats: int) -> list[Result]:
    """One token for each of `rows` running sequences: the step alone, and with commit."""
    lengths = [512 + row % PAGE for row in range(rows)]
    longest = 528 + (repeats + 1) * steps + PAGE
    # At least 65,536 pages, the size of a real pool: 56 GiB of Qwen2.5-7B.
    need = sum(length + (repeats + 1) * steps for length in lengths) // PAGE + 2 * rows
    pool = pool_with(max(need, 65_536))
    tenant = tenant_of(pool)
    in_service(pool, tenant)
    batch = pool.batch(max_sequences=rows, max_tokens=longest, max_step_tokens=sum(lengths))
    held = []
    for length, ids in zip(lengths, prompts(528, rows), strict=False):
        held.append(pool.open(tenant, ids[:length], max_new_tokens=(repeats + 1) * steps + 1))
        batch.add(held[-1])
    sampled = np.full(rows, 7, dtype=np.int32)
    if batch.step().refused:
        raise RuntimeError("the pool is too small for the job")
    batch.commit(sampled)
    after: list[float] = []

    def once() -> float:
        growing = committing = 0
        for _ in range(steps // AHEAD):
            start = perf_counter_ns()
            for _ in range(AHEAD):
                out = batch.step()
            grown = perf_counter_ns()
            for _ in range(AHEAD):
                batch.commit(sampled)
            done = perf_counter_ns()
            growing += grown - start
            committing += done - grown
            if out.refused or out.num_tokens != rows:
                raise RuntimeError("a row did not grow")
        after.append((growing + committing) / steps / 1e3)
        return growing / steps

    note = f"mean of {steps} steps, crossings, charges and array writes included"
    step = median_of(f"decode {rows}", SIDE, once, repeats, unit="us", note=note)
    both = Result(f"decode {rows} + commit", SIDE, statistics.median(after[1:]), "us", after[1:], note)
    for sequence in held:
        batch.remove(sequence)
        sequence.close()
    return [step, both]


def prompt(tokens: int, repeats: int) -> list[Result]:
    """A long prompt, nothing cached and everything cached: open, add, step; commit apart."""
    pool = pool_with(tokens // PAGE + 64)
    tenant = tenant_of(pool)
    in_service(pool, tenant)
    batch = pool.batch(max_sequences=1, max_tokens=tokens + PAGE)
    fresh = prompts(tokens, 1)
    sampled = np.full(1, 7, dtype=np.int32)
    committed: list[float] = []

    def one(ids: object, *, forget: bool) -> float:
        start = perf_counter_ns()
        sequence = pool.open(tenant, ids)
        batch.add(sequence)
        out = batch.step()
        placed = perf_counter_ns()
        batch.commit(sampled)
        committed.append((perf_counter_ns() - start) / 1e3)
        if out.refused:
            raise RuntimeError("the pool is too small for the job")
        batch.remove(sequence)
        sequence.close()
        if forget:
            pool.reset_prefix_cache()
        return placed - start

    results = []

    def measure(job: str, once: object) -> None:
        committed.clear()
        results.append(median_of(job, SIDE, once, repeats, unit="us", note="open + add + step"))
        kept = committed[1:]
        results.append(Result(f"{job} + commit", SIDE, statistics.median(kept), "us", kept))

    measure(f"prompt {tokens} cold", lambda: one(next(fresh), forget=True))
    again = next(fresh)
    one(again, forget=False)
    measure(f"prompt {tokens} all hit", lambda: one(again, forget=False))
    pool.reset_prefix_cache()
    measure(f"prompt {tokens} cold, list", lambda: one(next(fresh).tolist(), forget=True))
    return results


def churn(tokens: int, pages: int, repeats: int) -> list[Result]:
    """A prompt into a pool that is full of cached pages: open, step, commit, close, with hashing."""
    pool = pool_with(pages)
    tenant = tenant_of(pool)
    batch = pool.batch(max_sequences=1, max_tokens=tokens + PAGE)
    fresh = prompts(tokens, 2)
    sampled = np.full(1, -1, dtype=np.int32)

    def one(ids: np.ndarray) -> None:
        sequence = pool.open(tenant, ids)
        batch.add(sequence)
        if batch.step().refused:
            raise RuntimeError("nothing could be evicted")
        batch.commit(sampled)
        batch.remove(sequence)
        sequence.close()

    for _ in range(pages * PAGE // tokens + 1):
        one(next(fresh))
    evicted = pool.stats().evictions

    def once() -> float:
        ids = next(fresh)
        return timed(lambda: one(ids))

    result = median_of(f"churn {tokens}", SIDE, once, repeats, unit="us", note="with hashing")
    per_prompt = (pool.stats().evictions - evicted) / (repeats + 1)
    result.note += f"; {per_prompt:.0f} evictions a prompt"
    return [result]


def build(pages: int) -> list[Result]:
    """Build a pool, then fill it with cached pages: time to build, memory per page. Wants its own process."""
    tokens = 32_768
    pool_with(1000).close()
    before = resident_bytes()
    start = perf_counter_ns()
    pool = pool_with(pages, compare_tokens=False)
    spent = perf_counter_ns() - start
    built = resident_bytes() - before
    tenant = tenant_of(pool)
    batch = pool.batch(max_sequences=1, max_tokens=tokens + PAGE)
    sampled = np.full(1, -1, dtype=np.int32)
    fresh = prompts(tokens, 3)
    for _ in range(pages * PAGE // tokens):
        sequence = pool.open(tenant, next(fresh))
        batch.add(sequence)
        batch.step()
        batch.commit(sampled)
        batch.remove(sequence)
        sequence.close()
    full = resident_bytes() - before
    return [
        Result(f"build {pages}", SIDE, spent / 1e6, "ms"),
        Result("bytes per page, empty", SIDE, built / pages, "B", note="tables are zero pages until used"),
        Result(
            "bytes per page, all cached",
            SIDE,
            full / pages,
            "B",
            note="with index and ghosts, no tokens",
        ),
    ]

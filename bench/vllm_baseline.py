"""vLLM's own block manager doing the jobs of this folder, without a model: the baseline for every ratio.

`KVCacheManager` is driven as vLLM's scheduler drives it: requests carry the default block hasher (SHA-256),
prefix caching is on, blocks hold 16 tokens. Only the calls named by a job are on the clock; what a scheduler
does around them is not.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections.abc import Iterator
from time import perf_counter_ns

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from clock import Result, median_of, resident_bytes, timed

SIDE = "vllm"
BLOCK = 16
VOCABULARY = 128_000

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)
PARAMS = SamplingParams(max_tokens=100_000)
NUMBERS = itertools.count()


def manager_with(blocks: int) -> KVCacheManager:
    """Build a manager whose pool has that many usable blocks (block 0 is its null block)."""
    geometry = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=128, dtype=torch.float16)
    config = KVCacheConfig(
        num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], geometry)]
    )
    return KVCacheManager(
        config, max_model_len=1 << 20, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )


def prompts(tokens: int, seed: int) -> Iterator[list[int]]:
    """Endless random prompts, no two alike."""
    chance = random.Random(seed)
    while True:
        yield chance.choices(range(VOCABULARY), k=tokens)


def request(tokens: list[int]) -> Request:
    """Make a request; this hashes its full blocks."""
    return Request(f"r{next(NUMBERS)}", tokens, PARAMS, None, block_hasher=HASHER)


def admit(manager: KVCacheManager, made: Request) -> int:
    """Look up, then take room for the rest of the prompt; return how many tokens hit."""
    blocks, hits, _ = manager.get_computed_blocks(made)
    taken = manager.allocate_slots(made, made.num_tokens - hits, hits, blocks)
    if taken is None:
        raise RuntimeError("the pool is too small for the job")
    made.num_computed_tokens = made.num_tokens
    return hits


def decode(rows: int, steps: int, repeats: int) -> list[Result]:
    """One token for each of `rows` running requests: the step alone, and with the part after the model."""
    lengths = [512 + row % BLOCK for row in range(rows)]
    room = sum(length + (repeats + 1) * steps for length in lengths) // BLOCK + 2 * rows
    manager = manager_with(room)
    running = []
    for length, tokens in zip(lengths, prompts(528, rows), strict=False):
        running.append(request(tokens[:length]))
        admit(manager, running[-1])
        running[-1].append_output_token_ids(7)
    after: list[float] = []

    def once() -> float:
        growing = committing = 0
        for _ in range(steps):
            start = perf_counter_ns()
            for each in running:
                manager.allocate_slots(each, 1)
            grown = perf_counter_ns()
            for each in running:
                each.num_computed_tokens += 1
                each.append_output_token_ids(7)
            done = perf_counter_ns()
            growing += grown - start
            committing += done - grown
        after.append((growing + committing) / steps / 1e3)
        return growing / steps

    note = f"mean of {steps} steps, crossings included"
    step = median_of(f"decode {rows}", SIDE, once, repeats, unit="us", note=note)
    both = Result(f"decode {rows} + commit", SIDE, statistics.median(after[1:]), "us", after[1:], note)
    return [step, both]


def prompt(tokens: int, repeats: int) -> list[Result]:
    """A long prompt, nothing cached and everything cached: hash, look up, allocate."""
    manager = manager_with(tokens // BLOCK + 64)
    fresh = prompts(tokens, 1)

    def cold() -> float:
        ids = next(fresh)
        start = perf_counter_ns()
        made = request(ids)
        hits = admit(manager, made)
        spent = perf_counter_ns() - start
        if hits:
            raise RuntimeError(f"{hits} tokens of a cold prompt hit")
        manager.free(made)
        if not manager.reset_prefix_cache():
            raise RuntimeError("blocks are still in use")
        return spent

    again = next(fresh)
    results = [median_of(f"prompt {tokens} cold", SIDE, cold, repeats, unit="us")]
    first = request(again)
    admit(manager, first)
    manager.free(first)

    def hit() -> float:
        start = perf_counter_ns()
        made = request(again)
        hits = admit(manager, made)
        spent = perf_counter_ns() - start
        if hits != tokens - BLOCK:  # the last token is always computed again
            raise RuntimeError(f"{hits} tokens hit instead of {tokens - BLOCK}")
        manager.free(made)
        return spent

    results.append(median_of(f"prompt {tokens} all hit", SIDE, hit, repeats, unit="us"))
    return results


def churn(tokens: int, pool: int, repeats: int) -> list[Result]:
    """A prompt into a pool full of cached blocks: each block taken evicts one. Hashing is off the clock."""
    manager = manager_with(pool)
    fresh = prompts(tokens, 2)
    for _ in range(pool * BLOCK // tokens + 1):
        made = request(next(fresh))
        admit(manager, made)
        manager.free(made)

    cached = manager.block_pool.cached_block_hash_to_block
    if len(cached) < pool - tokens // BLOCK:
        raise RuntimeError("the pool is not full")

    def once() -> float:
        made = request(next(fresh))

        def all_of_it() -> None:
            admit(manager, made)
            manager.free(made)

        return timed(all_of_it)

    note = "without hashing"
    return [median_of(f"churn {tokens}", SIDE, once, repeats, unit="us", note=note)]


def build(blocks: int) -> list[Result]:
    """Build a pool, then fill it with cached blocks: time to build, heap per block. Wants its own process."""
    manager_with(1000)
    before = resident_bytes()
    start = perf_counter_ns()
    manager = manager_with(blocks)
    spent = perf_counter_ns() - start
    built = resident_bytes() - before
    fresh = prompts(32_768, 3)
    for _ in range(blocks * BLOCK // 32_768):
        made = request(next(fresh))
        admit(manager, made)
        manager.free(made)
    del made
    full = resident_bytes() - before
    return [
        Result(f"build {blocks}", SIDE, spent / 1e6, "ms"),
        Result("bytes per page, empty", SIDE, built / blocks, "B"),
        Result("bytes per page, all cached", SIDE, full / blocks, "B"),
    ]

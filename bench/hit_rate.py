"""Prefix hit rate on the Mooncake conversation trace by pool size, one request at a time.

``python bench/hit_rate.py mooncake_conversation_trace.jsonl [--json FILE] [--limit N]``

Each of the trace's hash ids stands for 512 tokens and becomes one page. A reference hits when its page and
all pages before it in the request are there. Plain LRU over the same references, tail of a request released
first, is computed beside it: what an engine with a fixed policy would see, and a check of this program.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from pathlib import Path
from time import perf_counter

import numpy as np

from clock import machine

PAGE = 512
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
BARS = (7.5, 9.5, 14.0, 21.5, 28.5, 34.3)


def lru(requests: list[list[int]], capacity: int) -> float:
    """Percent of references that hit under LRU."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = references = 0
    for ids in requests:
        references += len(ids)
        hit = next((i for i, each in enumerate(ids) if each not in cache), len(ids))
        hits += hit
        for each in ids[:hit]:
            del cache[each]
        free = capacity - len(ids)
        while len(cache) > free:
            cache.popitem(last=False)
        for each in ids[hit:]:
            cache.pop(each, None)
        for each in reversed(ids):
            cache[each] = None
    return 100 * hits / references


def ours(requests: list[list[int]], capacity: int) -> tuple[float, float]:
    """Percent of references that hit in a pool of that many pages, and seconds."""
    import kvalloc

    spec = kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=128, dtype="float16", page_tokens=PAGE)
    page_bytes = 2 * 128 * 2 * PAGE
    # One page more for the token behind the prompt's pages (a prompt's last token never hits), one frame 0.
    pool = kvalloc.Pool(spec, device_bytes=(capacity + 2) * page_bytes)
    tenant = pool.tenant("trace")
    longest = max(map(len, requests)) * PAGE + 2
    batch = pool.batch(max_sequences=1, max_tokens=longest)
    nothing = np.full(1, -1, dtype=np.int32)
    within = np.arange(PAGE, dtype=np.int32)
    hits = references = 0
    start = perf_counter()
    for ids in requests:
        tokens = np.empty(len(ids) * PAGE + 1, dtype=np.int32)
        # The id in the first half, the position in the second: pages differ as the ids do.
        pages = tokens[:-1].reshape(len(ids), PAGE)
        pages[:] = within
        pages[:, : PAGE // 2] = np.asarray(ids, dtype=np.int32)[:, None]
        tokens[-1] = 0
        sequence = pool.open(tenant, tokens)
        batch.add(sequence)
        hits += sequence.cached_tokens // PAGE
        references += len(ids)
        if refused := batch.step().refused:
            raise RuntimeError(f"{len(ids)} pages were refused in a pool of {capacity}: {refused[0]}")
        batch.commit(nothing)
        batch.remove(sequence)
        sequence.close()
    return 100 * hits / references, perf_counter() - start


def main() -> int:
    """Run all sizes and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, help="only the first N requests")
    parser.add_argument("--lru-only", action="store_true", help="check the program without kvalloc")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with args.trace.open() as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines][: args.limit]
    print(f"{len(requests):,} requests, {sum(map(len, requests)):,} references")
    print(f"{'pages':>8} {'kvalloc %':>10} {'LRU %':>8} {'bar %':>8} {'s':>7}")
    rows = []
    for capacity, bar in zip(SIZES, BARS, strict=True):
        baseline = lru(requests, capacity)
        rate, seconds = (float("nan"), 0.0) if args.lru_only else ours(requests, capacity)
        rows.append({"pages": capacity, "kvalloc": rate, "lru": baseline, "bar": bar, "seconds": seconds})
        print(f"{capacity:8,} {rate:10.2f} {baseline:8.2f} {bar:8.1f} {seconds:7.1f}", flush=True)
    if args.json:
        report = {"command": "python bench/hit_rate.py ...", "machine": machine(), "results": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the processes of a tensor-parallel group do in tests.

Here, and not in a test, since a process that is spawned imports it by name: pytest imports tests by path.
"""

import dataclasses

import numpy as np
import pytest
import torch

import kvalloc
from store_contract import HEADS, KV_HEADS, pool_of, spec_of

STEPS = 4


def inputs():
    """Return what the whole model would give its layers, the same in each process."""
    random = np.random.default_rng(0)
    while True:
        yield lambda n: tuple(
            torch.from_numpy(random.standard_normal((n, heads, 32)).astype(np.float32))
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )


def serve(pool, answer):
    """Run steps of two sequences; `answer` makes each layer's output."""
    outputs, tables, given = [], [], inputs()
    with pool.batch(2, 256) as batch:
        for n in (20, 70):
            batch.add(pool.open("a", np.arange(n) + 1000 * n))
        for _ in range(STEPS):
            tokens = batch.step(token_budget=48).num_tokens
            tables.append(batch.block_table(1).copy())
            outputs += [answer(layer, *next(given)(tokens), batch) for layer in range(4)]
            batch.commit([7, 7])
    return outputs, tables


def in_processes(worker, folder, *args, ranks=2):
    """Run ``worker(rank, ranks, *args)`` in a process each: what they return. One that fails, fails here."""
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    torch.multiprocessing.spawn(_join, (worker, folder, ranks, args), nprocs=ranks)
    return [torch.load(folder / f"rank {rank}", weights_only=False) for rank in range(ranks)]


def _join(rank, worker, folder, ranks, args):
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    try:
        torch.save(worker(rank, ranks, *args), folder / f"rank {rank}")
    finally:
        torch.distributed.destroy_process_group()


def attend_in_part(rank, ranks, whole):
    """Serve with the heads of one rank: the outputs of all, side by side; whether all had the same pages."""
    # A spec of all ranks that the store divides; or, as engines have it, that of one rank.
    spec = spec_of("full", "window")
    if not whole:
        groups = [dataclasses.replace(g, kv_heads=g.kv_heads // ranks) for g in spec.groups]
        spec = kvalloc.KVSpec.from_groups(groups)
    pool = pool_of(spec)
    place = {"rank": rank, "ranks": ranks} if whole else {}
    with kvalloc.TorchStore(pool, **place) as store:

        def answer(layer, q, k, v, batch):
            mine = store.attend(layer, *(x.chunk(ranks, 1)[rank] for x in (q, k, v)), batch)
            parts = [torch.empty_like(mine) for _ in range(ranks)]
            torch.distributed.all_gather(parts, mine.contiguous())
            return torch.cat(parts, 1)

        outputs, tables = serve(pool, answer)
    table = torch.from_numpy(np.stack(tables))
    others = [torch.empty_like(table) for _ in range(ranks)]
    torch.distributed.all_gather(others, table)
    return outputs, all(bool((t == table).all()) for t in others)

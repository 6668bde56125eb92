"""Two processes over gloo, each with the heads of its rank: side by side their answers are that of one."""

import dataclasses
import socket

import numpy as np
import pytest

import kvalloc
from store_contract import HEADS, KV_HEADS, pool_of, spec_of

torch = pytest.importorskip("torch")

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


def one_rank(rank, ranks, port, queue, whole):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    try:
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
        queue.put((rank, [out.numpy() for out in outputs], all(bool((t == table).all()) for t in others)))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("whole", [True, False], ids=["spec of all ranks", "spec of one rank"])
def test_two_processes_over_gloo(whole):
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=one_rank, args=(rank, 2, port, queue, whole)) for rank in range(2)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=200) for _ in processes]  # before joining: the pipe holds little
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    pool = pool_of(spec_of("full", "window"))
    with kvalloc.TorchStore(pool) as store:
        want, _ = serve(pool, store.attend)
    for _, got, same_frames in answers:
        assert same_frames
        for mine, whole_answer in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, whole_answer.numpy(), atol=1e-6)

"""What the processes of a tensor-parallel group do in tests.

Here, and not in a test, since a process that is spawned imports it by name: pytest imports tests by path.
"""

import dataclasses

import numpy as np
import pytest
import torch

import kvalloc
from store_contract import HEADS, KV_HEADS, Moves, pool_of, spec_of

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


# -- a group in which one rank keeps the books ---------------------------------------------------------------

VOCABULARY = 97
LAYERS = 4


def group_spec():
    """Pages of a full and a window group, and int8 ones that full pages are compressed to."""
    return spec_of("full", "window", small_dtype="int8")


class Link:
    """What goes from the first rank to all of them, and back; a rank alone talks to nobody."""

    def __init__(self, rank=0, ranks=1):
        self.rank, self.ranks = rank, ranks

    def send(self, *message):
        if self.ranks > 1:
            torch.distributed.broadcast_object_list([message], src=0)

    def receive(self):
        box = [None]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def all_said(self, done):
        """Whether all ranks have done it."""
        said = [done] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(said, done)
        return all(said)

    def side_by_side(self, mine):
        """The heads of all ranks."""
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        if self.ranks == 1:
            return mine
        torch.distributed.all_gather(parts, mine.contiguous())
        return torch.cat(parts, 1)


class Shard:
    """A little model that makes up its next token by attention, with the KV heads of one rank."""

    def __init__(self, pool, link, fails_at=None):
        place = {"rank": link.rank, "ranks": link.ranks} if link.ranks > 1 else {}
        self.store = kvalloc.TorchStore(pool, **place)
        self.link, self.fails_at, self.plans = link, fails_at, 0
        random = torch.Generator().manual_seed(1)
        width = HEADS * 32

        def weights(*shape):
            return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

        self.embedding = torch.randn(VOCABULARY, width, generator=random)
        self.out = weights(VOCABULARY, width)
        sizes = [n * 32 for n in (HEADS, KV_HEADS, KV_HEADS)]
        self.layers = [[weights(size, width) for size in sizes] for _ in range(LAYERS)]

    def forward(self, step, ids):
        """Return the next token of each row, int32, and its last hidden state."""
        self.store.copy(step)
        hidden = self.embedding[torch.from_numpy(ids.astype(np.int64))]
        for layer, weights in enumerate(self.layers):
            whole = [(hidden @ w.T).unflatten(1, (-1, 32)) for w in weights]
            q, k, v = (x.chunk(self.link.ranks, 1)[self.link.rank] for x in whole)
            out = self.link.side_by_side(self.store.attend(layer, q, k, v, step))
            hidden = torch.nn.functional.layer_norm(hidden + out.flatten(1), hidden.shape[1:])
        last = hidden[torch.from_numpy(step.query_start_loc[1 : step.num_rows + 1].astype(np.int64)) - 1]
        return (last @ self.out.T).argmax(1).numpy().astype(np.int32), last

    def execute(self, plan):
        """Copy this rank's shard; return whether all ranks have copied theirs."""
        self.plans += 1
        try:
            if self.plans == self.fails_at:
                self.store.execute(Moves(*plan.moves[: len(plan.moves) // 2].tolist()))
                raise OSError("the link of this rank is down")
            self.store.execute(plan)
        except OSError:
            return self.link.all_said(False)
        return self.link.all_said(True)


class Books:
    """The rank that has pool, batch and plans."""

    def __init__(self, link, fails_at=None):
        self.pool = pool_of(group_spec(), "2MiB", host_bytes="1MiB")
        self.link, self.shard = link, Shard(self.pool, link, fails_at)
        self.pool.tenant("b", compress=True)
        self.batch = self.pool.batch(32, 256)
        self.tokens, self.hidden, self.ended = {}, [], []

    def open(self, number, length):
        seq = self.pool.open("b", np.arange(length) % VOCABULARY + number)
        self.batch.add(seq)
        self.tokens[seq] = []
        return seq

    def step(self, times=1):
        for _ in range(times):
            out = self.batch.step()
            assert not out.refused
            rows = self.batch.rows[: out.num_rows]
            counts = np.diff(self.batch.query_start_loc[: len(rows) + 1])
            known = [
                seq.tokens[seq.num_slots - count : seq.num_slots]
                for seq, count in zip(rows, counts, strict=True)
            ]
            ids, step = np.concatenate(known), kvalloc.StepData.of(self.batch)
            self.link.send("step", step.to_bytes(), ids)
            sampled, last = self.shard.forward(step, ids)
            self.batch.commit(sampled)
            self.hidden.append(last)
            for seq, token in zip(rows, sampled.tolist(), strict=True):
                self.tokens[seq].append(token)

    def carry_out(self, plan):
        self.link.send("plan", plan.to_bytes())
        if self.shard.execute(plan):
            plan.commit()
        else:
            plan.abort()
        assert self.pool.audit()
        self.ended.append((plan.kind, len(plan.moves), plan.state))

    def serve(self):
        """Decode while pages move to other frames, to the host and back, and into another class."""
        brief = [self.open(n, 5) for n in range(24)]
        first, second = self.open(10, 70), self.open(40, 40)
        self.step(2)
        for seq in brief[1:-1]:  # not a page is full: nothing of them stays cached
            self.batch.remove(seq)
            seq.close()
        self.step(2)
        self.carry_out(self.pool.rebalance(self.pool.free, page_class=2))
        self.step(3)
        plan = self.pool.suspend(second, mode="swap", batch=self.batch)
        self.carry_out(plan)
        self.step(3)
        while second.state == "suspended":
            self.carry_out(self.pool.resume(second))
        self.batch.add(second)
        self.step(2)
        self.carry_out(self.pool.compress("b", "1MiB", batch=self.batch))
        self.step(8)
        self.link.send("end")
        return [self.tokens[seq] for seq in (first, second, brief[-1])], self.hidden, self.ended


def keep_books_or_follow(rank, ranks, failing_rank, fails_at):
    """Rank 0 has the books; the others do as they are told, each with its own heads."""
    link = Link(rank, ranks)
    fails_at = fails_at if rank == failing_rank else None
    if rank == 0:
        return Books(link, fails_at).serve()
    pool = pool_of(group_spec(), "2MiB", host_bytes="1MiB")  # for its sizes
    shard = Shard(pool, link, fails_at)
    states = []
    while (message := link.receive())[0] != "end":
        if message[0] == "step":
            states.append(shard.forward(kvalloc.StepData.from_bytes(message[1]), message[2])[1])
        else:
            shard.execute(kvalloc.Plan.from_bytes(message[1]))
    assert pool.held == 0
    return states, shard.store.copies

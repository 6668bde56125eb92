"""How soon a reserve that is lent is its owner's again: ``python bench/lending.py [--json FILE]``.

Half of a pool is a lender's reserve. Borrowers without a reserve keep the whole pool in use: between any two
steps there is one waiting for whom there is no room. The lender's requests come at random, each as large as
its reserve has left or smaller. One that is refused asks for its bytes (`Pool.give_back`); the borrowers that
stop go on later. Counted in steps, from the request to the end of the plan (its bytes can be charged) and to
its first token. A step takes whole prompts, so that room alone is measured.

Every frame has bytes of its own; those of a sequence that was swapped out are compared when it is back.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter_ns

import numpy as np

import kvalloc
from clock import machine

PAGES = 512
ROWS = 128
TURNS = 1000
SPEC = kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype="float16", page_tokens=16)
PAGE = SPEC.classes[0].page_bytes


@dataclass
class Run:
    """A request that runs, is stopped, or waits."""

    seq: kvalloc.Sequence
    left: int
    asked: int = -1  # the step before which a lender's request came
    known: list[int] = field(default_factory=list)
    bytes: np.ndarray | None = None


class Serving:
    """A loop of steps over one batch, borrowers first come first served, the lender at once."""

    def __init__(self, mode: str, seed: int) -> None:
        host = PAGE * (2 * PAGES + 1) if mode == "swap" else None
        self.pool = kvalloc.Pool(SPEC, PAGE * (PAGES + 1), host)
        self.mode = mode
        self.lender = self.pool.tenant("lender", reserve=PAGE * PAGES // 2, lend=True)
        self.borrowers = [self.pool.tenant(f"borrower {i}") for i in range(4)]
        self.store = kvalloc.NumpyStore(self.pool)
        self.rng = np.random.default_rng(seed)
        frames = np.arange(1, PAGES + 1, dtype=np.int32)
        self.store.write_pages(0, frames, self.rng.integers(0, 256, (PAGES, PAGE), np.uint8))
        most = PAGES * SPEC.page_tokens
        self.batch = self.pool.batch(ROWS, most, max_step_tokens=2 * most)
        self.runs: list[Run] = []
        self.stopped: deque[Run] = deque()
        self.texts = count(1)
        self.step_no = 0
        self.usable: list[int] = []
        self.first: list[int] = []
        self.calls: list[float] = []
        self.victims = self.compared = self.recalled = 0

    def tokens(self, n: int) -> np.ndarray:
        """Return a prompt that nobody had before."""
        return np.arange(n, dtype=np.int32) + next(self.texts) * 100_003

    def pages(self, seq: kvalloc.Sequence) -> np.ndarray:
        """Return what the pages of a sequence say."""
        return self.store.read_pages(0, seq.block_table(0)[: len(seq.pages(0))])

    def want(self) -> tuple[int, int]:
        """Return a prompt's and a reply's length that stay inside the lender's reserve, or (0, 0)."""
        lender = self.lender
        room = (lender.reserve - lender.held - lender.pinned - lender.promised) // PAGE
        if room < 2:
            return 0, 0
        pages = int(self.rng.integers(2, room + 1))
        reply = int(self.rng.integers(1, min(32, 16 * (pages - 1)) + 1))
        return 16 * pages - reply, reply

    def serve_lender(self, prompt: int, reply: int, asked: int) -> bool:
        """Open a request of the lender, whatever runs in its reserve; False if it has to be tried again."""
        pool, tokens = self.pool, self.tokens(prompt)
        try:
            seq = pool.open(self.lender, tokens, reply, admit=True)
        except kvalloc.OutOfPages as no:
            self.recalled += 1
            start = perf_counter_ns()
            try:
                plan = pool.give_back(self.lender, no.asked, batch=self.batch, mode=self.mode)
            except kvalloc.PlanError:
                return False
            self.calls.append((perf_counter_ns() - start) / 1e3)
            gone = self.take(plan)
            with plan:
                self.store.execute(plan)
            self.victims += len(gone)
            self.stopped.extend(gone)
            try:
                seq = pool.open(self.lender, tokens, reply, admit=True)
            except kvalloc.OutOfPages:
                return False
        self.usable.append(self.step_no - asked + 1)
        self.lender.lend_unused()
        self.add(Run(seq, reply, asked))
        return True

    def take(self, plan: kvalloc.Plan) -> list[Run]:
        """Follow the plan's victims out of the rows."""
        gone = []
        for victim in plan.victims:
            run = self.runs[victim.row]
            self.runs[victim.row] = self.runs[-1]
            self.runs.pop()
            run.known = list(run.seq.tokens)
            run.bytes = self.pages(run.seq) if victim.fate == "swapped" else None
            gone.append(run)
        return gone

    def add(self, run: Run) -> None:
        """Give a request a row."""
        assert self.batch.add(run.seq) == len(self.runs)
        self.runs.append(run)

    def fill(self) -> None:
        """Let borrowers go on, or begin, until there is no room for one."""
        while len(self.runs) < ROWS:
            if self.stopped:
                run = self.stopped[0]
                try:
                    plan = self.pool.resume(run.seq)
                except kvalloc.OutOfPages:
                    return
                with plan:
                    self.store.execute(plan)
                assert list(run.seq.tokens) == run.known, "no token is lost"
                if run.bytes is not None:
                    assert np.array_equal(self.pages(run.seq), run.bytes), "no byte is lost"
                    self.compared += run.bytes.nbytes
                self.add(self.stopped.popleft())
                continue
            tenant = self.borrowers[int(self.rng.integers(4))]
            prompt, reply = (int(n) for n in self.rng.integers((32, 16), (400, 200)))
            try:
                seq = self.pool.open(tenant, self.tokens(prompt), reply, admit=True)
            except kvalloc.OutOfPages:
                return
            self.add(Run(seq, reply))

    def step(self) -> None:
        """One step of the whole batch."""
        out = self.batch.step()
        assert not out.refused
        self.batch.commit(np.full(len(self.runs), 7, np.int32))
        for row in reversed(range(len(self.runs))):
            run = self.runs[row]
            if run.asked >= 0:
                self.first.append(self.step_no - run.asked + 1)
                run.asked = -1
            run.left -= 1
            if run.left <= 0:
                self.batch.remove(run.seq)
                run.seq.close()
                self.runs[row] = self.runs[-1]
                self.runs.pop()
        self.step_no += 1

    def requests(self, n: int) -> None:
        """Serve so many of the lender's requests that find others in its reserve."""
        waiting: tuple[int, int, int] | None = None
        while self.recalled < n or waiting:
            self.fill()
            prompt, reply = self.want()
            if waiting is None and prompt and self.rng.random() < 0.3:
                waiting = prompt, reply, self.step_no
            if waiting and self.serve_lender(*waiting):
                waiting = None
            self.step()
        assert self.pool.audit()

    def close(self) -> None:
        """Close what is left: every byte is free or cached again."""
        for run in (*self.runs, *self.stopped):
            if run.seq in self.batch.rows:
                self.batch.remove(run.seq)
            run.seq.close()
        self.batch.close()
        assert self.pool.held == self.pool.promised == 0
        while self.pool.reclaim_some():  # frames that the last steps have left
            pass
        assert self.pool.free + self.pool.cached == self.pool.capacity
        assert self.pool.audit()


def grow_shrink_grow(seed: int) -> dict[str, float]:
    """Move a reserve up and down while others run in it; the books balance every turn, no byte is lost."""
    serving = Serving("swap", seed)
    pool, lender, rng = serving.pool, serving.lender, serving.rng
    took = []
    for turn in range(TURNS):
        serving.fill()
        reserve = PAGE * int(rng.integers(1, PAGES // 2 + 1))
        start = perf_counter_ns()
        lender.set(reserve=reserve)
        plan = pool.give_back(lender, reserve, batch=serving.batch, mode="swap")
        serving.stopped.extend(serving.take(plan))
        with plan:
            serving.store.execute(plan)
        took.append((perf_counter_ns() - start) / 1e3)
        assert lender.lent == 0
        lender.set(lend=False)  # all of it is there
        assert pool.admit(lender, 16 * (reserve // PAGE)).verdict == "now"
        # A limit below use comes down by plan.
        over = serving.borrowers[turn % 4]
        limit = PAGE * int(rng.integers(1, PAGES // 8))
        over.set(limit=limit)
        if over.held + over.promised > limit:
            excess = over.held + over.promised - limit
            plan = pool.preempt(over, excess, batch=serving.batch, mode="swap")
            serving.stopped.extend(serving.take(plan))
            with plan:
                serving.store.execute(plan)
            assert over.held + over.promised <= limit + plan.shortfall
        over.set(limit=None)
        lender.set(lend=True)
        assert lender.lent == reserve
        assert pool.audit(), turn
        serving.step()
    serving.close()
    return {
        "turns": TURNS,
        "compared_bytes": serving.compared,
        "p50_us": float(np.percentile(took, 50)),
        "p99_us": float(np.percentile(took, 99)),
    }


def main() -> int:
    """Print the figures; exit code 1 if a request waited for more than one step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    late = False
    for mode in ("recompute", "swap"):
        serving = Serving(mode, seed=1)
        serving.requests(given.requests)
        serving.step()
        found: dict[str, float] = {
            "requests": serving.recalled,
            "stopped": serving.victims,
            "compared_bytes": serving.compared,
        }
        for name, values in (("usable_steps", serving.usable), ("first_token_steps", serving.first)):
            found |= {f"{name}_p50": float(np.percentile(values, 50))}
            found |= {f"{name}_p99": float(np.percentile(values, 99)), f"{name}_max": max(values)}
            late |= max(values) > 1
        for q in (50, 99):
            found[f"give_back_p{q}_us"] = float(np.percentile(serving.calls, q))
        serving.close()
        results[mode] = found
    results["grow, shrink, grow"] = grow_shrink_grow(seed=2)
    for name, found in results.items():
        print(name, *(f"  {key:<24} {value:>14,.1f}" for key, value in found.items()), sep="\n")
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())

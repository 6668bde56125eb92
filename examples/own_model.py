"""A model of one's own under the reference scheduler: what `Engine` needs is one method.

The "model" here counts down: the token that follows is the last one minus one. A real one runs its forward
pass on ``batch.block_table()``, ``batch.slot_mapping()``, ``batch.query_start_loc`` and ``batch.seq_lens``,
and samples; nothing else changes.

Run it with ``python examples/own_model.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import kvalloc
from kvalloc.engine import Engine, Literal, Request, Rows, WallClock

STOP = 0


class CountDown:
    """Says the last token minus one, down to `STOP`."""

    def step(self, batch: kvalloc.Batch, step: kvalloc.Step, rows: Rows) -> NDArray[np.int32]:
        """Return what each row sampled, int32 ``[rows]``."""
        last = [int(run.sequence.tokens[-1]) for run in rows.running]
        return np.array(last, dtype=np.int32) - 1


def main() -> None:
    """Serve a few prompts of two tenants."""
    spec = kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype="float16")
    pool = kvalloc.Pool(spec, "4MiB")
    tenants = {
        "gold": pool.tenant("gold", reserve="1MiB", weight=3),
        "free": pool.tenant("free", limit="2MiB"),
    }

    def listener(event: str, request: Request) -> None:
        if event in ("finished", "refused"):
            waited = (request.admitted - request.arrival) * 1e3
            print(f"{request.tenant}: {request.produced} tokens, waited {waited:.1f} ms {request.refused}")

    engine = Engine(
        pool, CountDown(), tenants, clock=WallClock(), max_rows=8, token_budget=64, max_tokens=512,
        stop=STOP, listener=listener,
    )  # fmt: skip
    prompts = [np.arange(100, 100 + n, dtype=np.int32) % 23 + 1 for n in (5, 40, 17, 60, 33)]
    for _ in engine.run(
        Request(0.0, "gold" if i % 2 else "free", Literal(ids), max_new=30) for i, ids in enumerate(prompts)
    ):
        pass
    assert pool.audit().ok
    print(f"{engine.steps} steps; cached for later: {kvalloc.format_bytes(pool.cached)}")


if __name__ == "__main__":
    main()

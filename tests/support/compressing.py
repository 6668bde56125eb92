"""Decoding that goes on while pages are compressed under it, on any store: what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import kvalloc

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
TOKENS = 16
# The largest relative distance of a stored value from what was stored: 3 mantissa bits and half a step of
# 127 of the row's largest, which for normal values is about 3.5 of their deviations.
BOUND = {"float8_e4m3fn": 1 / 16, "int8": 3.5 / 254}


def spec_of(small: str) -> kvalloc.KVSpec:
    return kvalloc.KVSpec.uniform(
        layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32", small_dtype=small
    )


class Side:
    """One sequence in one row, over one store."""

    def __init__(self, make_store: Callable, small: str, length: int) -> None:
        spec = spec_of(small)
        self.pool = kvalloc.Pool(spec, "8MiB")
        self.tenant = self.pool.tenant("a", compress=True)
        self.store = make_store(self.pool)
        self.batch = self.pool.batch(max_sequences=1, max_tokens=512)
        self.seq = self.pool.open(self.tenant, range(length))
        self.batch.add(self.seq)

    def step(self, inputs: np.ndarray, to_array: Callable, to_numpy: Callable) -> np.ndarray:
        """Attend with inputs [layers, 3, tokens, heads, dim]; return float32 [layers, tokens, heads, dim]."""
        self.batch.step()
        outs = []
        for layer, (q, k, v) in enumerate(inputs):
            k, v = k[:, :KV_HEADS], v[:, :KV_HEADS]
            out = self.store.attend(layer, to_array(q), to_array(k), to_array(v), self.batch)
            outs.append(to_numpy(out))
        self.batch.commit([1])
        return np.stack(outs)


def errors(make_store: Callable, small: str, to_array: Callable, to_numpy: Callable) -> tuple[float, float]:
    """Decode beside an uncompressed twin.

    Returns
    -------
    before, after : float
        Largest relative error of a step's output, by its norm, before pages were compressed, and after.
    """
    rng = np.random.default_rng(5)
    length = 6 * TOKENS + 3
    full, half = (Side(make_store, small, length) for _ in range(2))
    found = []
    for at in range(12):
        count = length if at == 0 else 1
        inputs = rng.standard_normal((LAYERS, 3, count, HEADS, DIM), np.float32)
        want, got = (side.step(inputs, to_array, to_numpy) for side in (full, half))
        found.append(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
        if at == 3:
            with half.pool.compress(half.tenant, "1MiB", batch=half.batch) as plan:
                half.store.execute(plan)
                assert len(plan.moves) == 6  # all but the newest
            assert half.tenant.held == full.tenant.held - plan.rungs["compress"]
        if at > 4:
            assert (np.asarray(half.batch.block_table())[0, :7] < 0).tolist() == [True] * 6 + [False]
    assert half.pool.audit().ok
    for side in (full, half):
        side.store.close()
    return max(found[:4]), max(found[4:])

"""The store's way through the Triton kernels, interpreted: short and long rows in one batch."""

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import kvalloc  # noqa: E402
from store_contract import DTYPES, KINDS, Model, Moves, pool_of, spec_of  # noqa: E402
from torch_arrays import TorchArrays  # noqa: E402
from triton_cases import interpreted, quiet  # noqa: E402

pytestmark = [interpreted, *quiet]


def run(pool, prompts, steps, tolerance, **how):
    arrays = TorchArrays()
    with kvalloc.TorchStore(pool, kernels="triton") as store, pool.batch(4, 128) as batch:
        arrays.poison(store)
        model = Model(arrays, store, batch)
        for n in prompts:
            batch.add(pool.open("a", np.arange(n) + 1000 * n))
        for _ in range(steps):
            model.step(tolerance, token_budget=20, **how)
        yield store, batch
        model.step(tolerance, **how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "int8"])
def test_steps(kind, dtype):
    pool = pool_of(spec_of(kind, dtype=dtype, window=7, layers=1))
    for _ in run(pool, (1, 20, 18), 3, DTYPES[dtype]):
        pass


def test_caps_and_sinks():
    pool = pool_of(spec_of("full", layers=1))
    sinks = np.linspace(-2, 3, 6).astype(np.float32)
    for _ in run(pool, (3, 18), 2, 5e-6, soft_cap=1.5, sinks=sinks):
        pass


def test_compressed_pages():
    pool = pool_of(spec_of("full", layers=1, small_dtype="int8"))
    for store, batch in run(pool, (40, 20), 4, 3e-2):
        table, frame = batch.block_table(), store.classes[1].frames - 1
        store.execute(Moves((0, 0, int(table[0, 1]), 0, 1, frame)))
        table[0, 1] = ~frame


def test_pages_given_up():
    pool = pool_of(spec_of("full", layers=1))
    with kvalloc.TorchStore(pool, kernels="triton") as store, pool.batch(2, 128) as batch:
        arrays = TorchArrays()
        arrays.poison(store)
        model = Model(arrays, store, batch)
        for n in (60, 34):
            batch.add(pool.open("a", np.arange(n) + 1000 * n))
        model.step(counts=[40, 34])
        model.give_up(0, 0)
        model.give_up(1, 1)
        model.step(counts=[5, 1])
        model.step(counts=[1, 1])


@pytest.mark.parametrize("kernels", ["cutlass", 1])
def test_kernels_that_are_not_there(kernels):
    with pytest.raises(kvalloc.InvalidArgument, match="'torch' or 'triton'"):
        kvalloc.TorchStore(pool_of(spec_of("full")), kernels=kernels)

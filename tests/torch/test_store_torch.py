"""The store over torch, on the CPU, and what of CUDA can be shown without a card."""

import gc

import numpy as np
import pytest

import kvalloc
from store_contract import Model, pool_of, spec_of

torch = pytest.importorskip("torch")

from kvalloc.store.locked import lock, unlock  # noqa: E402
from torch_arrays import TorchArrays  # noqa: E402


class TestTorchStore(TorchArrays):
    pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_queries(dtype):
    """16-bit models over pages of 16 bits: the answer is that of float32 within their rounding."""
    pool = pool_of(spec_of("full", dtype=str(dtype).removeprefix("torch.")))
    with kvalloc.TorchStore(pool) as store, pool.batch(2, 128) as batch:
        for n in (20, 50):
            batch.add(pool.open("a", np.arange(n) + 1000 * n))
        for _ in range(3):
            tokens = batch.step(token_budget=40).num_tokens
            wide = [torch.randn(tokens, heads, 32) for heads in (6, 2, 2)]
            q, k, v = (x.to(dtype) for x in wide)
            got = store.attend(0, q, k, v, batch)
            assert got.dtype == dtype
            want = store.attend(0, q.float(), k, v, batch)
            assert want.dtype == torch.float32
            assert (got.float() - want).abs().max() < (4e-3 if dtype == torch.float16 else 3e-2)
            batch.commit(np.full(2, 7, np.int32))


def test_strided_and_requiring_grad():
    """Queries as a model makes them: views of something larger, with a graph behind them."""
    pool = pool_of(spec_of("full"))
    with kvalloc.TorchStore(pool) as store, pool.batch(2, 128) as batch:
        batch.add(pool.open("a", range(9)))
        batch.step()
        packed = torch.randn(9, 10, 64, requires_grad=True)
        q, k, v = (x[..., ::2] for x in packed.split([6, 2, 2], 1))
        out = store.attend(0, q, k, v, batch)
        assert not out.requires_grad
        want = store.attend(0, *(x.detach().contiguous() for x in (q, k, v)), batch)
        torch.testing.assert_close(out, want)


def test_inference_mode_leaves_nothing_behind():
    """The first call inside inference mode, the next one outside of it."""
    pool = pool_of(spec_of("full"))
    with torch.inference_mode():
        store = kvalloc.TorchStore(pool)
    with store, pool.batch(2, 128) as batch:
        arrays = TorchArrays()
        model = Model(arrays, store, batch)
        batch.add(pool.open("a", range(20)))
        with torch.inference_mode():
            model.step()
        model.step()
        with torch.no_grad():
            model.step()


def test_devices():
    pool = pool_of(spec_of("full"))
    for device, match in (
        ("tpu", "device 'tpu'"),
        ("meta", "must be 'cpu' or a CUDA"),
        (None, "device None"),
    ):
        with pytest.raises(kvalloc.InvalidArgument, match=match):
            kvalloc.TorchStore(pool, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(kvalloc.InvalidArgument, match="sees no CUDA device"):
            kvalloc.TorchStore(pool, device="cuda")
    with kvalloc.TorchStore(pool) as store, pool.batch(2, 128) as batch:
        batch.add(pool.open("a", range(2)))
        batch.step()
        far = [torch.zeros(2, heads, 32, device="meta") for heads in (6, 2, 2)]
        with pytest.raises(kvalloc.InvalidArgument, match="lies on meta, the store on cpu"):
            store.attend(0, *far, batch)


class Cudart:
    """Counts what is locked, as the driver would."""

    def __init__(self, most):
        self.most, self.locked = most, {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        if sum(self.locked.values()) + size > self.most:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]
        return 0


def test_host_memory_is_locked_in_pieces_or_not_at_all():
    """Case G42 in small: what is locked is what was asked for, no power of two."""
    cudart = Cudart(1000)
    pieces = lock(cudart.cudaHostRegister, cudart.cudaHostUnregister, 4096, 700, chunk=300)
    assert pieces == [(4096, 300), (4396, 300), (4696, 100)]
    assert sum(cudart.locked.values()) == 700
    with pytest.raises(MemoryError, match="error 2 after 300 of 700"):
        lock(cudart.cudaHostRegister, cudart.cudaHostUnregister, 1 << 20, 700, chunk=300)
    assert sum(cudart.locked.values()) == 700
    unlock(cudart.cudaHostUnregister, pieces)
    assert cudart.locked == {}


def test_memory_goes_back(monkeypatch):
    """An arena is mapped once, and unmapped when the store is closed and its views are gone."""

    def mapped():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * 4096

    pool = pool_of(spec_of("full"), "512MiB", host_bytes="256MiB")
    before = mapped()
    store = kvalloc.TorchStore(pool)
    assert mapped() - before >= 768 << 20
    assert store.host_bytes == pool.host_bytes
    view = store.views(0)
    store.close()
    del view
    gc.collect()
    assert mapped() - before < 64 << 20

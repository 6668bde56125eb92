"""The CUDA C kernels on a card, by cupy, against dense numpy; the cases that also run on the CPU."""

import numpy as np
import pytest

from kv_formats import Pages
from kvalloc.errors import InvalidArgument
from kvalloc.kernels import cuda
from paged_cases import MIXED, Case

cupy = pytest.importorskip("cupy", exc_type=ImportError)
try:
    cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError as error:
    pytest.skip(f"needs a CUDA device: {error}", allow_module_level=True)

KINDS = ["float32", "float16", "bfloat16", "int8", "float8"]


@pytest.mark.parametrize("q_kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_formats(q_kind, kind):
    Case(*MIXED, q_kind=q_kind, kind=kind).check(None)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 8, "group": 4, "k_dim": 128, "page_tokens": 16},
        {"heads": 3, "group": 3, "k_dim": 20, "page_tokens": 5},
        {"heads": 1, "group": 12, "k_dim": 80, "page_tokens": 1},
        {"heads": 2, "group": 2, "k_dim": 192, "v_dim": 128},
        {"heads": 1, "group": 16, "k_dim": 576, "v_dim": 512, "shared": True},
    ],
    ids=str,
)
def test_attention_shapes(shape):
    Case([4000, 1, 0, 130, 60, 700], [1, 1, 1, 77, 60, 1], **shape).check(None)


@pytest.mark.parametrize(
    "options",
    [{"window": 5}, {"chunk": 6}, {"soft_cap": 0.7}, {"sinks": np.array([-1, 0.5, 3, 30], np.float32)}],
    ids=str,
)
def test_attention_options(options):
    Case(*MIXED, width=300).check(None, **options)


@pytest.mark.parametrize("small", ["int8", "float8"])
def test_compressed_pages_in_the_same_table(small):
    Case([333, 9, 14], [1, 4, 14], kind="float16", q_kind="float16", small=small).check(None)


@pytest.mark.parametrize("kind", KINDS)
def test_write(kind):
    rng = np.random.default_rng(0)
    pages, wanted = (Pages.make(kind, 6, 4, 3, 64, 64) for _ in range(2))
    k, v, k_scale, v_scale = pages.on_device()
    new = rng.standard_normal((2, 5, 3, 64)).astype(np.float32)
    slots = np.array([5, -1, 22, 4, -1])
    cuda.write_kv(*map(cupy.asarray, new), k, v, cupy.asarray(slots), k_scale, v_scale)
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted.put(slot // 4, slot % 4, new[0, token], new[1, token])
    for given, right in ((k, wanted.k), (v, wanted.v)):
        difference = given.get().view(f"i{right.itemsize}").astype(int) - right.view(f"i{right.itemsize}")
        assert np.abs(difference).max() <= (1 if kind == "int8" else 0)
    if kind == "int8":
        np.testing.assert_array_equal(k_scale.get(), wanted.k_scale)


@pytest.mark.parametrize("small", ["int8", "float8"])
def test_quantise_and_back(small):
    rng = np.random.default_rng(1)
    pages = Pages.make("float16", 5, 4, 2, 64, 64)
    for offset in range(4):
        pages.put(2, offset, *rng.standard_normal((2, 2, 64)))
    k, v, *_ = pages.on_device()
    keys = Pages.make(small, 5, 4, 2, 64, 64).on_device()
    cuda.quantise_pages(k, v, cupy.asarray([2]), keys, cupy.asarray([3]))
    cuda.dequantise_pages(keys, cupy.asarray([3]), k, v, cupy.asarray([4]))
    for rows in (k.get(), v.get()):
        right, back = (rows[frame].astype(np.float64) for frame in (2, 4))
        bound = np.abs(right).max(-1, keepdims=True) / 127 * 0.51 if small == "int8" else np.abs(right) / 15
        assert (np.abs(back - right) <= bound + 1e-3).all()


@pytest.mark.parametrize("page_bytes", [256, 5_000, 1 << 20])
def test_copy_gather_scatter(page_bytes):
    rng = np.random.default_rng(2)
    wanted = rng.integers(0, 256, (9, page_bytes), np.uint8)
    pages = cupy.asarray(wanted)
    copies = cupy.asarray([[0, 3, 5], [0, 1, 8], [1, -1, 2]], dtype=np.int32)
    cuda.copy_pages(pages, copies[:, 1], copies[:, 2])
    wanted[5], wanted[8] = wanted[3], wanted[1]
    np.testing.assert_array_equal(pages.get(), wanted)
    staging = cupy.zeros((3, page_bytes), np.uint8)
    cuda.gather_pages(pages, cupy.asarray([7, -1, 0]), staging)
    np.testing.assert_array_equal(staging.get(), np.stack([wanted[7], 0 * wanted[0], wanted[0]]))
    cuda.scatter_pages(staging, cupy.asarray([1, 2, -1]), pages)
    wanted[1], wanted[2] = wanted[7], 0
    np.testing.assert_array_equal(pages.get(), wanted)


def test_launches_go_to_the_current_stream():
    pages = cupy.zeros((64, 1 << 22), np.uint8)
    source, target = cupy.arange(0, 32), cupy.arange(32, 64)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        for value in range(1, 20):
            pages[:32] = value
            cuda.copy_pages(pages, source, target)
        assert int(pages[32:].min()) == int(pages[32:].max()) == 19


def test_pools_beyond_2_31_elements():
    frames, page_bytes = 4200, 1 << 20
    if cupy.cuda.runtime.memGetInfo()[0] < frames * page_bytes + (1 << 30):
        pytest.skip("needs 5.2 GiB of free device memory")
    arena = cupy.empty((frames, page_bytes), np.uint8)
    k, v = (
        cupy.ndarray((frames, 4, 2, 16), np.float16, arena.data + offset, (page_bytes, 64, 32, 2))
        for offset in (4096, 8192)
    )
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((2, 4, 2, 16)).astype(np.float16)
    slots = cupy.asarray([(frames - 1) * 4 + i for i in range(4)])
    cuda.write_kv(*map(cupy.asarray, rows), k, v, slots)
    cuda.copy_pages(arena, cupy.asarray([frames - 1]), cupy.asarray([1]))
    q, length = (
        cupy.asarray(rng.standard_normal((1, 4, 16)).astype(np.float32)),
        cupy.asarray([4], dtype=np.int32),
    )
    starts = cupy.asarray([0, 1], dtype=np.int32)
    near, far = (
        cuda.paged_attention(q, k, v, cupy.asarray([[frame]], dtype=np.int32), length, starts).get()
        for frame in (1, frames - 1)
    )
    np.testing.assert_array_equal(near, far)
    np.testing.assert_array_equal(k[1].get(), rows[0])


def test_arrays_of_the_host_are_refused():
    with pytest.raises(InvalidArgument, match="cupy arrays; got a ndarray"):
        cuda.copy_pages(np.zeros((2, 256), np.uint8), np.zeros(1, np.int32), np.ones(1, np.int32))

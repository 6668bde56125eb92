"""The store over cupy, with numpy in cupy's place and its kernels compiled as C++."""

import numpy as np
import pytest

import kvalloc
from cuda_on_cpu import COMPILER, CpuBackend
from kvalloc.store.cupy_store import CupyStore
from kvalloc.store.memory import available_bytes
from kvalloc.store.streams import Inline, Order
from store_contract import DTYPES, KINDS, Model, StoreContract, copying, pool_of, spec_of

if COMPILER is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="session")
def built(request, tmp_path_factory):
    """Where compiled kernels lie: by their content, so a later run, or another Python's, finds them."""
    cache = getattr(request.config, "cache", None)
    return cache.mkdir("cuda-as-cpp") if cache else tmp_path_factory.mktemp("cuda-as-cpp")


class OnCpu(CupyStore):
    """A store whose device is this host: only what talks to the driver is other."""

    built = None

    def _library(self):
        return np, CpuBackend(self.built)

    def _streams(self):
        return Order(Inline(), Inline())

    @property
    def device(self):
        return "a host that stands in"

    def _allocate(self, size):
        return np.zeros(size, np.uint8)

    def _allocate_host(self, size):
        return np.zeros(size, np.uint8)

    def _available(self):
        return available_bytes()

    def _copy_run(self, source, target):
        target[:] = source


class Arrays(StoreContract):
    def make(self, pool, **options):
        return OnCpu(pool, **options)

    def array(self, values):
        return np.ascontiguousarray(values)

    def numbers(self, array):
        return np.asarray(array)


@pytest.fixture
def arrays(built, monkeypatch):
    monkeypatch.setattr(OnCpu, "built", built)
    return Arrays()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_steps(arrays, kind, dtype):
    pool = pool_of(spec_of(kind, dtype=dtype, window=7, layers=1))
    with arrays.make(pool) as store, pool.batch(4, 128) as batch:
        arrays.poison(store)
        model = Model(arrays, store, batch)
        for n in (1, 20, 18):
            batch.add(pool.open("a", np.arange(n) + 1000 * n))
        for _ in range(4):
            model.step(max(DTYPES[dtype], 1e-5), token_budget=20)


def test_plans_and_ranks(arrays):
    arrays.test_pages_go_to_the_host_and_come_back_elsewhere("page_major")
    arrays.test_plans_that_are_refused()
    arrays.test_one_store_a_pool()
    arrays.test_two_ranks_are_one("float32", "page_major")


@pytest.mark.parametrize("small", ["int8", "float8_e4m3fn"])
def test_conversion(arrays, small):
    arrays.test_conversion_goes_both_ways_and_between_tiers(small)


def test_compressed_pages(arrays):
    arrays.test_compressed_pages_are_attended("full", "int8", "page_major")


@pytest.mark.parametrize("kind", ["full", "latent"])
def test_pages_given_up(arrays, kind):
    arrays.test_pages_given_up_between_compressed_ones(kind, "int8")


def test_refusals(arrays):
    pool = pool_of(spec_of("full"))
    with arrays.make(pool) as store, pool.batch(2, 64) as batch:
        batch.add(pool.open("a", range(5)))
        batch.step()
        q, k = np.zeros((5, 6, 32), np.float32), np.zeros((5, 2, 32), np.float32)
        for wrong in (
            (q[:4], k, k),
            (q, k[:, :1], k),
            (q, k, None),
            (q.astype(np.float64), k, k),
            ([], k, k),
        ):
            with pytest.raises(kvalloc.InvalidArgument):
                store.attend(0, *wrong, batch)
        store.copy(copying(batch, [0, 1, 9]))

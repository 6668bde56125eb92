"""The store over numpy."""

import numpy as np
import pytest

import kvalloc
from store_contract import DIM, HEADS, KV_HEADS, StoreContract, plain, pool_of, spec_of


class TestNumpyStore(StoreContract):
    MODULE = "kvalloc.store.numpy_store"

    def make(self, pool, **options):
        return kvalloc.NumpyStore(pool, **options)

    def array(self, values):
        return np.asarray(values)

    def numbers(self, array):
        return np.asarray(array)


def test_queries_in_float64_are_attended_in_float64():
    """As the torch store does; K and V have the precision that they are stored in."""
    pool = pool_of(spec_of("full"))
    with kvalloc.NumpyStore(pool) as store, pool.batch(1, 64) as batch:
        batch.add(pool.open("a", range(21)))
        batch.step()
        random = np.random.default_rng(0)
        q, k, v = (random.standard_normal((21, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS))
        k, v = (x.astype(np.float32).astype(np.float64) for x in (k, v))
        sinks = np.linspace(-1, 1, HEADS)
        for how in ({}, {"sinks": sinks, "soft_cap": 2.0, "scale": 0.3}):
            got = store.attend(0, q, k, v, batch, **how)
            assert got.dtype == np.float64
            want = plain(q, k, v, store.spec.groups[0], range(21), **how)
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
        with pytest.raises(kvalloc.InvalidArgument, match="it must be float32, float16 or float64"):
            store.attend(0, q.astype(np.longdouble), k, v, batch)

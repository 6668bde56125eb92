"""The store over numpy."""

import numpy as np

import kvalloc
from store_contract import StoreContract


class TestNumpyStore(StoreContract):
    MODULE = "kvalloc.store.numpy_store"

    def make(self, pool, **options):
        return kvalloc.NumpyStore(pool, **options)

    def array(self, values):
        return np.asarray(values)

    def numbers(self, array):
        return np.asarray(array)

"""The store over torch, on the CPU."""

import numpy as np
import pytest

import kvalloc
from store_contract import StoreContract

torch = pytest.importorskip("torch")


class TestTorchStore(StoreContract):
    MODULE = "kvalloc.store.torch_store"

    def make(self, pool, **options):
        return kvalloc.TorchStore(pool, **options)

    def array(self, values):
        return torch.from_numpy(np.asarray(values))

    def numbers(self, array):
        return array.numpy()

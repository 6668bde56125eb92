"""What the tests of stores need to speak torch."""

import numpy as np
import torch

import kvalloc
from store_contract import StoreContract


class TorchArrays(StoreContract):
    MODULE = "kvalloc.store.torch_store"

    def make(self, pool, **options):
        return kvalloc.TorchStore(pool, **options)

    def array(self, values):
        return torch.from_numpy(np.asarray(values))

    def numbers(self, array):
        return array.numpy()

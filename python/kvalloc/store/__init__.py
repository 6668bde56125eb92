"""Tensors for a pool: numpy, torch, cupy. ``docs/stores.md`` explains them."""

from kvalloc.store.base import BaseStore
from kvalloc.store.protocol import KVView, Store
from kvalloc.store.step_data import StepData

__all__ = ["BaseStore", "KVView", "StepData", "Store"]

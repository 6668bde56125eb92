"""Multi-tenant memory manager for the KV cache of LLM serving engines.

The books: which page holds which tokens, who shares it, which tenant pays for it, where it lies, what can be
taken back.

>>> import kvalloc
>>> spec = kvalloc.KVSpec.uniform(layers=28, kv_heads=4, head_dim=128, dtype="float16", page_tokens=16)
>>> pool = kvalloc.Pool(spec, device_bytes="1GiB")
>>> acme = pool.tenant("acme", reserve="256MiB", limit="768MiB", weight=2)
>>> seq = pool.open(acme, list(range(100)), max_new_tokens=8)
>>> batch = pool.batch(max_sequences=8, max_tokens=4096)
>>> row = batch.add(seq)
>>> batch.step().num_tokens
100
>>> batch.commit([7])
>>> seq.num_tokens, seq.num_written
(101, 100)
>>> batch.remove(seq); seq.close()
>>> bool(pool.audit())
True
"""

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from kvalloc import models
from kvalloc._core import (
    Admission,
    AuditReport,
    Balance,
    Batch,
    Events,
    Pages,
    Pin,
    Plan,
    Pool,
    Progress,
    Refusal,
    Sequence,
    Stats,
    Step,
    Tenant,
    Usage,
    Victim,
    __version__,
    _forked,
)
from kvalloc.errors import (
    AdmissionRefused,
    ClosedError,
    InUse,
    InvalidArgument,
    KvallocError,
    OutOfMemory,
    OutOfPages,
    PinError,
    PlanError,
    SequenceBusy,
    SpecError,
    StaleReference,
    TenantError,
    UnknownTenant,
    WrongPool,
)
from kvalloc.layers import ArenaLayout, LayerGroup, PageClass
from kvalloc.sizes import format_bytes, parse_bytes
from kvalloc.spec import KVSpec

if _TYPE_CHECKING:
    from kvalloc.store.cupy_store import CupyStore
    from kvalloc.store.numpy_store import NumpyStore
    from kvalloc.store.step_data import StepData
    from kvalloc.store.torch_store import TorchStore

__all__ = [
    "Admission",
    "AdmissionRefused",
    "ArenaLayout",
    "AuditReport",
    "Balance",
    "Batch",
    "ClosedError",
    "CupyStore",
    "Events",
    "InUse",
    "InvalidArgument",
    "KVSpec",
    "KvallocError",
    "LayerGroup",
    "NumpyStore",
    "OutOfMemory",
    "OutOfPages",
    "PageClass",
    "Pages",
    "Pin",
    "PinError",
    "Plan",
    "PlanError",
    "Pool",
    "Progress",
    "Refusal",
    "Sequence",
    "SequenceBusy",
    "SpecError",
    "StaleReference",
    "Stats",
    "Step",
    "StepData",
    "Tenant",
    "TenantError",
    "TorchStore",
    "UnknownTenant",
    "Usage",
    "Victim",
    "WrongPool",
    "__version__",
    "format_bytes",
    "models",
    "parse_bytes",
]

# The books of a pool belong to the process that made it; a child refuses to use its copy of them.
_os.register_at_fork(after_in_child=_forked)

# Imported when they are asked for: not everybody needs tensors, and two of them need optional libraries.
_ON_USE = {
    "CupyStore": "kvalloc.store.cupy_store",
    "NumpyStore": "kvalloc.store.numpy_store",
    "StepData": "kvalloc.store.step_data",
    "TorchStore": "kvalloc.store.torch_store",
}


def __getattr__(name: str) -> object:
    if name in _ON_USE:
        return getattr(_import_module(_ON_USE[name]), name)
    raise AttributeError(f"module 'kvalloc' has no attribute {name!r}")

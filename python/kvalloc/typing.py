"""What the arguments and answers of kvalloc are called in annotations. Nothing here is needed to run it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from kvalloc._core import Tenant

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "AdmissionVerdict",
    "ClearedEvent",
    "Event",
    "Fate",
    "Int32s",
    "Keys",
    "OwnArray",
    "PageRefs",
    "PlanKind",
    "PlanState",
    "Publish",
    "RefusalReason",
    "RemovedEvent",
    "Scope",
    "SequenceState",
    "Size",
    "StoredEvent",
    "SupportsArray",
    "SupportsDLPack",
    "SuspendMode",
    "TokenIds",
]


class SupportsArray(Protocol):
    """Something numpy can look into, such as a tensor in host memory."""

    def __array__(self) -> NDArray[Any]: ...


class SupportsDLPack(Protocol):
    """Something that shows its memory by DLPack, such as a tensor in host memory."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


TokenIds: TypeAlias = "NDArray[np.integer[Any]] | Sequence[SupportsIndex] | Buffer | SupportsArray"
"""Token ids, 0 to 2**31 - 1, in one dimension. An int32 array is read fastest."""

Int32s: TypeAlias = "NDArray[np.integer[Any]] | Sequence[SupportsIndex] | Buffer"
"""int32 numbers, one per row."""

PageRefs: TypeAlias = "NDArray[np.uint64] | Sequence[SupportsIndex] | Buffer"
"""References to pages: id and generation, 64 bits each."""

Keys: TypeAlias = "Sequence[bytes | SupportsIndex] | NDArray[np.integer[Any]]"
"""Keys that the caller computed, one per page: 1 to 64 bytes, or 128-bit ints."""

Size: TypeAlias = str | SupportsIndex
"""Bytes: an int, or text such as ``"12GiB"``."""

Scope: TypeAlias = Tenant | str
"""A tenant: its handle or its name."""

Publish: TypeAlias = "Sequence[Scope] | Mapping[Scope, Size | None]"
"""Scopes a tenant may publish into, and the most bytes charged there (None: no bound)."""

OwnArray: TypeAlias = "NDArray[Any] | Buffer | SupportsDLPack"
"""A writable array that a batch fills."""

AdmissionVerdict: TypeAlias = Literal["now", "wait", "never"]
RefusalReason: TypeAlias = Literal["limit", "claim", "frames", "fragmented", "frozen", "row", "budget"]

PlanKind: TypeAlias = Literal[
    "reclaim",
    "rebalance",
    "top_up",
    "suspend",
    "resume",
    "offload",
    "prefetch",
    "compress",
    "give_back",
    "cut",
]
PlanState: TypeAlias = Literal["open", "committed", "aborted", "expired", "ended", "dry"]
Fate: TypeAlias = Literal["frozen", "swapped", "recomputed", "trimmed", "resumed"]
SuspendMode: TypeAlias = Literal["auto", "swap", "recompute"]
SequenceState: TypeAlias = Literal["running", "leaving", "suspended", "returning"]


class StoredEvent(TypedDict):
    """A page can now be found."""

    sequence: int
    type: Literal["stored"]
    key: int
    parent: int | None
    page: int
    group: int
    scope: str
    tokens: int
    tier: Literal["device", "host"]


class RemovedEvent(TypedDict):
    """The last page with this content can't be found any more: it went, or left the device or its class."""

    sequence: int
    type: Literal["removed"]
    key: int
    group: int
    scope: str
    tier: Literal["device", "host"]


class ClearedEvent(TypedDict):
    """Nothing is cached any more."""

    sequence: int
    type: Literal["cleared"]


Event: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent

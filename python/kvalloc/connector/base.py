"""What a connector keeps, and under which key."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Connector", "PageKey", "root_key"]

DIGEST = 32


@dataclass(frozen=True, slots=True)
class PageKey:
    """The exact identity of one page's content.

    Parameters
    ----------
    group : int
        Layer group.
    parent : bytes
        Digest of the page before it, or of the root: geometry, weights, scope, adapter, extra key.
    tokens : bytes
        The page's token ids, int32, little-endian.
    """

    group: int
    parent: bytes
    tokens: bytes

    @property
    def chain(self) -> bytes:
        """Digest of all tokens up to the end of this page: the `parent` of the next one, in every group."""
        return blake2b(self.parent + self.tokens, digest_size=DIGEST, person=b"kvalloc page").digest()

    @property
    def name(self) -> str:
        """64 hex digits and the group: pages with different keys have different names."""
        return f"{self.chain.hex()}-{self.group}"

    def header(self) -> bytes:
        """All of the key as bytes, to be kept beside the content and compared on the way in."""
        return struct.pack("<HH", self.group, len(self.parent)) + self.parent + self.tokens


def root_key(*fields: str | bytes | int | None) -> bytes:
    """Digest of the fields that every key of a prompt begins with; each one tagged, absent ones too.

    Examples
    --------
    >>> from kvalloc.connector.base import root_key
    >>> root_key("a", None) == root_key(None, "a")
    False
    """
    state = blake2b(digest_size=DIGEST, person=b"kvalloc root")
    for field in fields:
        if field is None:
            state.update(b"\0")
            continue
        kind = b"i" if isinstance(field, int) else b"s" if isinstance(field, str) else b"b"
        data = str(field).encode() if isinstance(field, int | str) else field
        state.update(kind + struct.pack("<Q", len(data)) + data)
    return state.digest()


@runtime_checkable
class Connector(Protocol):
    """Bytes under keys, somewhere else: on disk, on another machine.

    A connector may lose what it was given (a miss is always allowed) and may be full; it never gives back
    anything but what was put under the very key. Calls may come from several threads.
    """

    def put(self, key: PageKey, content: NDArray[np.uint8]) -> bool:
        """Keep `content`, uint8 ``[bytes]``; False if there is no room for it or it could not be written."""
        ...

    def get(self, key: PageKey, out: NDArray[np.uint8]) -> bool:
        """Fill `out`, uint8 ``[bytes]``; False, with `out` undefined, if the page is not there whole."""
        ...

    def __contains__(self, key: PageKey) -> bool:
        """Whether `get` would probably succeed."""
        ...

    def close(self) -> None:
        """Let go of what the connector holds open; what was put stays."""
        ...

"""Pages as files of one directory: atomic, checksummed, bounded.

A file is one page:

==========  ===================================================================
bytes       content
==========  ===================================================================
8           ``KVPAGE01``
4, 8        length of the key, length of the content, little-endian
32          BLAKE2b of key and content
            the key (`PageKey.header`), the content
==========  ===================================================================

It is written under another name, flushed, and renamed: a reader sees all of it or nothing, after a crash too.
The name is the key's digest, so one name means one key; on the way in the key in the file is compared with
the one that is asked for, and the checksum with the bytes. Files of other names are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.errors import ClosedError, InvalidArgument
from kvalloc.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from io import FileIO
    from typing import Self, SupportsIndex

    from numpy.typing import NDArray

    from .base import PageKey

__all__ = ["FileConnector", "FileCounts"]

_MAGIC = b"KVPAGE01"
_HEAD = struct.Struct("<8sIQ32s")
_NAME = re.compile(r"[0-9a-f]{64}-\d{1,3}\.kv")
_UNFINISHED = re.compile(r"[0-9a-z_]{8}\.kv-part")
_ABANDONED = 3600.0  # seconds after which nobody writes to an unfinished file any more


@dataclass(slots=True)
class FileCounts:
    """What happened so far, in pages."""

    put: int = 0
    got: int = 0
    missed: int = 0
    evicted: int = 0
    refused: int = 0  # larger than the limit, or the disk is full
    damaged: int = 0  # truncated, altered, or of another key: removed and counted as missed
    failed: int = 0  # the system could not read or write


class FileConnector:
    """Pages as files of one directory, which is made if it isn't there; readable by its owner alone.

    Several processes may use one directory. Each then bounds what it knows of: at its start, and what it put.

    Parameters
    ----------
    directory : path
        Where.
    limit : int or str
        Most bytes of all files together. The ones used least recently go first.
    sync : bool
        Flush each file to the disk before it counts, so that a power failure leaves whole files only. Without
        it such a file is found out by its checksum.

    Raises
    ------
    InvalidArgument
        A limit that can't be read, or a path that is no directory.
    OSError
        The directory can't be made or read.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from kvalloc.connector import FileConnector, PageKey
    >>> with tempfile.TemporaryDirectory() as where, FileConnector(where, limit="1MiB") as files:
    ...     key = PageKey(0, b"root", bytes(64))
    ...     out = np.zeros(100, dtype=np.uint8)
    ...     files.put(key, np.arange(100, dtype=np.uint8)), files.get(key, out), int(out[99])
    (True, True, 99)
    """

    def __init__(
        self, directory: str | os.PathLike[str], limit: str | SupportsIndex = "10GiB", *, sync: bool = False
    ) -> None:
        self.directory, self.limit, self.sync = Path(directory), parse_bytes(limit), sync
        self.counts = FileCounts()
        if self.directory.exists() and not self.directory.is_dir():
            raise InvalidArgument(f"{self.directory} is not a directory; give one for the pages")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._closed = False
        self._used = 0
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes by name, least recently used first
        known = []
        for entry in os.scandir(self.directory):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                status = entry.stat()
                if _NAME.fullmatch(entry.name):
                    known.append((status.st_mtime_ns, entry.name, status.st_size))
                elif _UNFINISHED.fullmatch(entry.name) and time.time() - status.st_mtime > _ABANDONED:
                    os.unlink(entry.path)  # its writer was killed
        for _, name, size in sorted(known):
            self._files[name] = size
            self._used += size
        with self._lock:
            self._make_room(0)

    @property
    def used(self) -> int:
        """Bytes of the files that it knows of."""
        return self._used

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def __len__(self) -> int:
        """Return the number of pages that it knows of."""
        return len(self._files)

    def __contains__(self, key: PageKey) -> bool:
        """Whether there is a file for this page; whether it is whole shows when it is read."""
        return self._path(key).exists()

    def put(self, key: PageKey, content: NDArray[np.uint8]) -> bool:
        """Keep a page; False if it is larger than the limit, the disk is full, or it can't be written.

        A page that is there already is kept as it is.
        """
        path, header = self._path(key), key.header()
        data = np.ascontiguousarray(content).view(np.uint8).reshape(-1).data
        size = _HEAD.size + len(header) + len(data)
        with self._lock:
            if path.name in self._files and path.exists():
                self._files.move_to_end(path.name)
                return True
            if size > self.limit:
                self.counts.refused += 1
                return False
            self._make_room(size)
            self._used += size  # held while it is being written
        head = _HEAD.pack(_MAGIC, len(header), len(data), _checksum(header, data))
        try:
            self._write(path, head + header, data)
        except OSError as error:
            with self._lock:
                self._used -= size
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                self.counts.refused += full
                self.counts.failed += not full
            return False
        with self._lock:
            self._used -= self._files.pop(path.name, 0)  # another thread wrote the same page
            self._files[path.name] = size
            self.counts.put += 1
        return True

    def get(self, key: PageKey, out: NDArray[np.uint8]) -> bool:
        """Fill `out`, uint8 ``[bytes]``; False if the page is not there whole, with this very key."""
        if out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
            raise InvalidArgument(
                f"out must be contiguous uint8 to write into, not {out.dtype} {out.strides}"
            )
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                whole = _read(file, key.header(), out)
        except FileNotFoundError:
            self._forget(path.name, "missed")
            return False
        except OSError:
            self._forget(path.name, "failed")
            return False
        if not whole:
            with contextlib.suppress(OSError):
                path.unlink()
            self._forget(path.name, "damaged")
            return False
        with self._lock:
            self.counts.got += 1
            if path.name in self._files:
                self._files.move_to_end(path.name)
        with contextlib.suppress(OSError):
            os.utime(path)  # the order survives a restart
        return True

    def close(self) -> None:
        """End; the files stay."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{format_bytes(self._used)} of {format_bytes(self.limit)}"
        return f"<FileConnector {str(self.directory)!r}, {len(self._files):,} pages, {state}>"

    def _path(self, key: PageKey) -> Path:
        if self._closed:
            raise ClosedError(f"the connector of {self.directory} was closed")
        return self.directory / f"{key.name}.kv"

    def _write(self, path: Path, head: bytes, data: memoryview) -> None:
        handle, part = tempfile.mkstemp(suffix=".kv-part", prefix="", dir=self.directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head)
                file.write(data)
                if self.sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    def _make_room(self, size: int) -> None:
        while self._files and self._used + size > self.limit:
            name, gone = self._files.popitem(last=False)
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).unlink()
            self._used -= gone
            self.counts.evicted += 1

    def _forget(self, name: str, why: str) -> None:
        with self._lock:
            self._used -= self._files.pop(name, 0)
            setattr(self.counts, why, getattr(self.counts, why) + 1)
            if why == "damaged":
                self.counts.missed += 1


def _checksum(header: bytes, data: memoryview) -> bytes:
    state = blake2b(header, digest_size=32)
    state.update(data)
    return state.digest()


def _read(file: FileIO, header: bytes, out: NDArray[np.uint8]) -> bool:
    """Fill `out` from a file; whether it is the page with this key, whole."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return False
    magic, key_bytes, content_bytes, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or key_bytes != len(header) or content_bytes != out.nbytes:
        return False
    if file.read(key_bytes) != header:
        return False
    data = out.reshape(-1).data
    return file.readinto(data) == len(data) and not file.read(1) and _checksum(header, data) == checksum

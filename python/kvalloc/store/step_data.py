"""A step of a batch as plain data: how a rank that keeps no books knows which pages to write and read.

In a tensor-parallel group one rank has the pool, its batches and its plans. The others have the tensor of
their heads. Each step the first one sends them this, and they attend as if the batch were theirs.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvalloc._core import Batch
from kvalloc.errors import InvalidArgument

__all__ = ["Shown", "StepData", "fit_together"]

_MAGIC: Final = b"KVSTEP01"
# What follows is checksummed: digest of the spec; rows, tokens, copies, layer groups, columns of a block
# table; then the arrays.
_HEAD: Final = struct.Struct("<8sI")
_COUNTS: Final = struct.Struct("<16s5I")
_MOST_GROUPS: Final = 32


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class StepData:
    """What a batch's newest step asks of a store. Made by `of` or `from_bytes`; a store takes it for a batch.

    Attributes
    ----------
    spec_digest : bytes [16]
        `KVSpec.digest` of the batch's pool. A store of another spec refuses the step.
    num_rows, num_tokens : int
        Of the step.
    query_start_loc : int32 [num_rows + 1]
    seq_lens : int32 [num_rows]
    positions : int32 [num_tokens]
        As `Batch` has them.
    copies : int32 [n, 3]
        `Step.copies`: pages to copy first.
    block_tables : tuple of int32 [num_rows, pages]
    slot_mappings : tuple of int64 [num_tokens]
        One a layer group; tables are as wide as the longest sequence needs.

    Examples
    --------
    >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=64), "4MiB")
    >>> batch = pool.batch(max_sequences=4, max_tokens=256)
    >>> row, step = batch.add(pool.open(pool.tenant("acme"), range(20))), batch.step()
    >>> sent = kvalloc.StepData.of(batch).to_bytes()  # here; and on every other rank:
    >>> there = kvalloc.StepData.from_bytes(sent)
    >>> there.num_tokens, bool((there.block_table() == batch.block_table()[:1, :2]).all())
    (20, True)
    """

    spec_digest: bytes
    num_rows: int
    num_tokens: int
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    positions: NDArray[np.int32]
    copies: NDArray[np.int32]
    block_tables: tuple[NDArray[np.int32], ...]
    slot_mappings: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Copy what a batch shows of its newest step.

        Parameters
        ----------
        batch : Batch
            After its step, and before the next change of its rows.

        Raises
        ------
        InvalidArgument
            It is no batch, or has taken no step yet.
        """
        if not isinstance(batch, Batch):
            raise InvalidArgument(f"batch must be a kvalloc.Batch, not {batch!r}")
        if not batch.step_id:
            raise InvalidArgument("the batch has taken no step yet; call batch.step() first")
        step, spec = batch.last, batch.pool.spec
        rows, tokens = step.num_rows, step.num_tokens
        lens = batch.seq_lens[:rows].copy()
        width = -(-int(lens.max(initial=0)) // spec.page_tokens)
        groups = range(len(spec.groups))
        return cls(
            spec.digest,
            rows,
            tokens,
            batch.query_start_loc[: rows + 1].copy(),
            lens,
            batch.positions[:tokens].copy(),
            step.copies.copy(),
            tuple(batch.block_table(group)[:rows, :width].copy() for group in groups),
            tuple(batch.slot_mapping(group)[:tokens].copy() for group in groups),
        )

    def __repr__(self) -> str:
        return f"<kvalloc.StepData {self.num_tokens} tokens of {self.num_rows} rows>"

    @property
    def last(self) -> Self:
        """The step: itself."""
        return self

    def block_table(self, group: int = 0) -> NDArray[np.int32]:
        """Frames of each row's pages in a layer group, int32 [num_rows, pages]."""
        return self.block_tables[group]

    def slot_mapping(self, group: int = 0) -> NDArray[np.int64]:
        """Where each token's KV goes in a layer group, int64 [num_tokens]; -1: nowhere."""
        return self.slot_mappings[group]

    def to_bytes(self) -> bytes:
        """As bytes, with a checksum, for other ranks. Who may send them is not decided here."""
        groups = len(self.block_tables)
        width = self.block_tables[0].shape[1]
        counts = (self.num_rows, self.num_tokens, len(self.copies), groups, width)
        body = _COUNTS.pack(self.spec_digest, *counts)
        body += b"".join(array.tobytes() for array in self._arrays())
        return _HEAD.pack(_MAGIC, zlib.crc32(body)) + body

    def _arrays(self) -> Iterator[NDArray[np.int32] | NDArray[np.int64]]:
        """In the order in which they travel."""
        yield from self.slot_mappings
        yield from (self.query_start_loc, self.seq_lens, self.positions, self.copies)
        yield from self.block_tables

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What `to_bytes` wrote.

        Parameters
        ----------
        data : bytes

        Raises
        ------
        InvalidArgument
            These are no bytes or no step, were altered on the way, or have numbers that no step has. Pages
            are checked by the store that is to read them.
        """
        if not isinstance(data, bytes):
            raise InvalidArgument(f"a step is read from bytes, not {type(data).__name__}; use bytes(...)")
        start = _HEAD.size + _COUNTS.size
        if len(data) < start or data[: len(_MAGIC)] != _MAGIC:
            raise InvalidArgument(f"these {len(data):,} bytes are no step; send those of StepData.to_bytes")
        digest, rows, tokens, copies, groups, width = _COUNTS.unpack_from(data, _HEAD.size)
        sizes = [2 * groups * tokens, rows + 1, rows, tokens, 3 * copies, groups * rows * width]
        whole = len(data) == start + 4 * sum(sizes)
        if not whole or _HEAD.unpack_from(data)[1] != zlib.crc32(data[_HEAD.size :]):
            raise InvalidArgument(
                "this step was cut or altered on the way: its checksum differs; send it again"
            )
        if not 1 <= groups <= _MOST_GROUPS:
            raise InvalidArgument(
                f"this step is of {groups:,} layer groups; 1 to {_MOST_GROUPS} are possible: "
                "send what to_bytes wrote"
            )
        words = np.frombuffer(data, np.int32, offset=start)
        slots, starts, lens, positions, pages, tables = np.split(words, np.cumsum(sizes[:-1]))
        if not fit_together(starts, lens, tokens):
            raise InvalidArgument(
                f"no step of {tokens:,} tokens in {rows:,} rows has this query_start_loc and these seq_lens: "
                "send what to_bytes wrote"
            )
        return cls(
            digest,
            rows,
            tokens,
            starts,
            lens,
            positions,
            pages.reshape(-1, 3),
            tuple(tables.reshape(groups, rows, width)),
            tuple(slots.view(np.int64).reshape(groups, tokens)),
        )


def fit_together(starts: NDArray[np.int32], lens: NDArray[np.int32], num_tokens: int) -> bool:
    """Whether a step of so many tokens can have these arrays.

    Parameters
    ----------
    starts : int32 [rows + 1]
        As `Batch.query_start_loc`.
    lens : int32 [rows]
        As `Batch.seq_lens`.
    num_tokens : int
        Of the step.
    """
    wide = starts.astype(np.int64)  # differences of int32 may not be
    counts = np.diff(wide)
    return bool(wide[0] == 0 and wide[-1] == num_tokens and (counts >= 0).all() and (lens >= counts).all())


Shown: TypeAlias = Batch | StepData
"""What a store attends by: a batch after its step, or what another rank told of one."""

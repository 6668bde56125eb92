"""What a forward of a model brings: token ids, padding, positions; and what a row of it is to the pool."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvalloc._core import Sequence, Tenant
from kvalloc.errors import InvalidArgument

__all__ = ["Identity", "Inputs", "Int32s", "Row", "in_order", "padding_of"]

Int32s = NDArray[np.int32]

_NO_IDS: Final = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a row's pages may be shared under, as `Pool.open` takes it.

    Attributes
    ----------
    tenant : Tenant or str
        Who pays.
    extra_key : str or bytes
        What KV depends on besides the tokens: above all, which model it is of.
    adapter : str or None
        The adapters that are switched on.
    share : sequence of (Tenant or str, int)
        Parts of the prompt that are shared under a tenant above.
    """

    tenant: Tenant | str
    extra_key: str | bytes
    adapter: str | None = None
    share: Many[tuple[Tenant | str, int]] = ()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a forward is given, in host memory.

    Attributes
    ----------
    rows, columns : int
        Its shape.
    ids : int32 [rows, columns] or None
        Token ids; None where the KV depends on more than those.
    mask : bool [rows, columns so far + columns] or None
        False for padding. None: there is none.
    positions : int64 [rows or 1, columns] or None
        Positions that the model will use. None: it counts columns.
    keep : int
        How many of the last columns have outputs that somebody wants.
    """

    rows: int
    columns: int
    ids: Int32s | None
    mask: NDArray[np.bool_] | None = None
    positions: NDArray[np.int64] | None = None
    keep: int = 0


@dataclass(slots=True)
class Row:
    """A row of the model's batch.

    Attributes
    ----------
    padding : int
        Columns before its first token.
    sequence : Sequence or None
        Its tokens and pages; None while all its columns are padding.
    length : int
        Tokens whose KV is in pages.
    known : int
        Tokens whose ids the sequence knows.
    prompt : int32 array
        What it was opened with by `Rows.begin`; a forward must not be given anything else.
    private : bool
        Its ids don't tell its KV, so nothing more of it is published.
    """

    padding: int
    sequence: Sequence | None = None
    length: int = 0
    known: int = 0
    prompt: Int32s = field(default_factory=lambda: _NO_IDS)
    private: bool = False

    @property
    def end(self) -> int:
        """The first column whose KV is not in pages."""
        return self.padding + self.length

    def fork(self) -> "Row":
        """The same tokens in the same pages."""
        return replace(self, sequence=None if self.sequence is None else self.sequence.fork())

    def close(self) -> None:
        """Give its pages back."""
        if self.sequence is not None:
            self.sequence.close()


def padding_of(mask: NDArray[np.bool_] | None, rows: int, columns: int) -> NDArray[np.int64]:
    """Count the columns of padding in front of each row.

    Parameters
    ----------
    mask : bool [rows, columns] or None
        False for padding.
    rows, columns : int
        Its shape, also where there is none.

    Returns
    -------
    int64 [rows]

    Raises
    ------
    InvalidArgument
        There is padding behind a row's first token.
    """
    if mask is None:
        return np.zeros(rows, dtype=np.int64)
    padding = np.where(mask.any(axis=1), mask.argmax(axis=1), columns)
    holes = mask.sum(axis=1) != columns - padding
    if holes.any():
        row = int(np.argmax(holes))
        raise InvalidArgument(
            f"row {row}: attention_mask has zeros behind its first one; only padding on the left can be kept "
            "out of pages"
        )
    return padding


def in_order(inputs: Inputs, row: int, first: int, token: int) -> bool:
    """Whether a row's tokens have the positions that they have in its sequence.

    Parameters
    ----------
    inputs : Inputs
    row : int
    first : int
        The column of the forward that holds the row's first token.
    token : int
        Its number in the sequence.

    Returns
    -------
    bool
    """
    count = inputs.columns - first
    if inputs.positions is None:
        # Then the model counts columns, padding too.
        return inputs.mask is None or bool(inputs.mask[row].all())
    at = inputs.positions[row if len(inputs.positions) > 1 else 0, first:]
    return bool((at == np.arange(token, token + count)).all())

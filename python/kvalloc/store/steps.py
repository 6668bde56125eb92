"""What a step of a batch asks of a layer group: which tokens go where, and which pages each row reads.

Worked out once a step and kept by the store for its layers: a model has tens of them, and they all read the
same arrays. numpy only.

A page of a row's context that was given up shows 0 in the block table. It is taken out of the row here, so no
store gathers or masks it. That changes no answer: a group that lets pages go in the middle looks at all that
came before, whatever its position, and the pages that a step writes to are there.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvalloc.errors import InvalidArgument
from kvalloc.store.geometry import ClassGeometry
from kvalloc.store.step_data import Shown, fit_together

__all__ = ["Rows", "Together", "group_rows", "read_step"]

Int64s = NDArray[np.int64]

# Rows are worked on together if the shortest has at least this share of the longest one's pages.
_ALIKE: Final = 0.75


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step that have tokens, as one layer group sees them.

    Attributes
    ----------
    rows : int64 [rows]
        Their numbers in the batch.
    first_token, counts : int64 [rows]
        Where the tokens of each row begin in the step, and how many there are.
    seq_lens : int64 [rows]
        Tokens of each sequence, those of the step included, those of pages that were given up not.
    first_page, end_page : int64 [rows]
        The pages that its tokens read.
    table : int32 [rows of the batch, max_pages]
        The block table without pages that were given up. An entry below 0 is ``~frame`` of the small class.
    tokens : int64 [written]
        Tokens of the step that are written,
    frames, offsets : int64 [written]
        and where to.
    num_tokens : int
        Tokens of the step.
    """

    rows: Int64s
    first_token: Int64s
    counts: Int64s
    seq_lens: Int64s
    first_page: Int64s
    end_page: Int64s
    table: NDArray[np.int32]
    tokens: Int64s
    frames: Int64s
    offsets: Int64s
    num_tokens: int

    def pages(self, row: int) -> Int64s:
        """The block table's entries that a row reads."""
        return self.table[self.rows[row], self.first_page[row] : self.end_page[row]].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Together:
    """Rows of like length and the same number of tokens, worked on in one go.

    Attributes
    ----------
    tokens : int64 [rows, count]
        Their tokens in the step.
    positions : int64 [rows, count]
        Positions of those in their sequences.
    pages : int64 [rows, pages]
        Entries of the block table; 0 behind a row's last page.
    start : int64 [rows]
        Position of the first token of each row's first page.
    seq_lens : int64 [rows]
        Tokens of each sequence.
    """

    tokens: Int64s
    positions: Int64s
    pages: Int64s
    start: Int64s
    seq_lens: Int64s


def first_positions(kind: str, window: int | None, positions: Int64s) -> Int64s:
    """The first position to which tokens at these positions attend.

    Parameters
    ----------
    kind : str
        Of the layer group.
    window : int or None
        Its window or chunk.
    positions : int64 [...]

    Returns
    -------
    int64 [...]
    """
    if kind == "window" and window is not None:
        return np.maximum(positions - window + 1, 0)
    if kind == "chunked" and window is not None:
        return positions // window * window
    return np.zeros_like(positions)


def read_step(
    batch: Shown, group: int, page: ClassGeometry, small: ClassGeometry | None, page_tokens: int
) -> Rows:
    """Read the arrays of a batch for a layer group, and check them.

    Parameters
    ----------
    batch : Batch or StepData
        After its step.
    group : int
        The layer group.
    page, small : ClassGeometry
        Its classes.
    page_tokens : int
        Tokens of a page.

    Returns
    -------
    Rows

    Raises
    ------
    InvalidArgument
        If an array names a frame that is not there: it was overwritten, or the batch has moved on. 0, a page
        that was given up, is refused where the step writes, and in a group that has a window or chunks.
    """
    step = batch.last
    num_rows, num_tokens = step.num_rows, step.num_tokens
    shown = batch.query_start_loc[: num_rows + 1], batch.seq_lens[:num_rows]
    if not fit_together(*shown, num_tokens):
        raise InvalidArgument(
            f"the batch's arrays don't show its step of {num_tokens} tokens: "
            "attend before rows are added or removed, and don't write into them"
        )
    starts, lens = (array.astype(np.int64) for array in shown)
    counts = np.diff(starts)
    rows = np.flatnonzero(counts)
    counts, lens = counts[rows], lens[rows]
    kind, window = page.group.kind, page.group.window
    first = first_positions(kind, window, lens - counts) // page_tokens
    end = -(-lens // page_tokens)
    table = batch.block_table(group)
    if (width := int(end.max(initial=0))) > table.shape[1]:
        raise InvalidArgument(
            f"block_table of group {page.group.name!r} has {table.shape[1]} pages a row, and a sequence of "
            f"the step has {width} of {page_tokens} tokens: no batch has shown this"
        )
    gone = _given_up(table, rows, first, (lens - counts) // page_tokens, end, page, small)
    if gone is not None:
        table = _without(table, rows, gone)
        lost = gone.sum(axis=1)
        lens, end = lens - lost * page_tokens, end - lost
    slots = batch.slot_mapping(group)[:num_tokens]
    tokens = np.flatnonzero(slots >= 0)
    frames, offsets = np.divmod(slots[tokens], page_tokens)
    if len(frames) and (frames.min() < 1 or frames.max() >= page.frames):
        bad = int(frames.max() if frames.max() >= page.frames else frames.min())
        raise InvalidArgument(
            f"slot_mapping of group {group} names frame {bad}; there are frames 1 to {page.frames - 1}"
        )
    return Rows(rows, starts[:-1][rows], counts, lens, first, end, table, tokens, frames, offsets, num_tokens)


def _given_up(
    table: NDArray[np.int32],
    rows: Int64s,
    first: Int64s,
    written: Int64s,
    end: Int64s,
    page: ClassGeometry,
    small: ClassGeometry | None,
) -> NDArray[np.bool_] | None:
    """Which entries of the rows are pages that were given up; None if none is.

    Refuses a table in which a page that will be read is not there otherwise; `written` is the first page of
    each row that the step writes to.
    """
    if not len(rows):
        return None
    columns = np.arange(int(end.max()))
    shown = table[rows, : len(columns)]
    read = (columns >= first[:, None]) & (columns < end[:, None])
    other = read & ((shown <= 0) | (shown >= page.frames))
    if not other.any():
        return None
    gone = other & (shown == 0)
    lowest = -small.frames if small else 0
    wrong = other & ((shown == -1) | (shown >= page.frames) | (shown < lowest))
    wrong |= gone & (columns >= written[:, None]) if page.group.grows else gone
    if wrong.any():
        row, column = (int(at[0]) for at in np.nonzero(wrong))
        raise InvalidArgument(
            f"block_table of group {page.group.name!r}, row {int(rows[row])}, page {column}: "
            f"{int(shown[row, column])} is no frame that can be read (1 to {page.frames - 1}"
            f"{f', ~1 to ~{small.frames - 1} compressed' if small else ''})"
        )
    return gone if gone.any() else None


def _without(table: NDArray[np.int32], rows: Int64s, gone: NDArray[np.bool_]) -> NDArray[np.int32]:
    """A copy of the table in which the pages of each row that are there stand side by side."""
    width = gone.shape[1]
    packed = table[: int(rows.max()) + 1, :width].copy()
    cut = np.flatnonzero(gone.any(axis=1))
    order = np.argsort(gone[cut], axis=1, kind="stable")
    packed[rows[cut]] = np.take_along_axis(table[rows[cut], :width], order, axis=1)
    return packed


def group_rows(rows: Rows, page_tokens: int, most_tokens: int) -> list[Together]:
    """Put rows of like length together.

    Parameters
    ----------
    rows : Rows
        All rows of a step.
    page_tokens : int
        Tokens of a page.
    most_tokens : int
        The most tokens of KV in one group, except where a single row has more.

    Returns
    -------
    list of Together
        Every row is in one of them; longest first.
    """
    lengths = rows.end_page - rows.first_page
    order = np.lexsort((-lengths, rows.counts))
    groups: list[Together] = []
    at = 0
    while at < len(order):
        head = order[at]
        pages = int(lengths[head])
        end = at + 1
        most = max(1, most_tokens // (pages * page_tokens))
        while (
            end < len(order)
            and end - at < most
            and rows.counts[order[end]] == rows.counts[head]
            and lengths[order[end]] >= _ALIKE * pages
        ):
            end += 1
        groups.append(_together(rows, np.sort(order[at:end]), pages, page_tokens))
        at = end
    return groups


def _together(rows: Rows, members: Int64s, pages: int, page_tokens: int) -> Together:
    count = int(rows.counts[members[0]])
    offsets = np.arange(count)
    columns = rows.first_page[members][:, None] + np.arange(pages)
    inside = columns < rows.end_page[members][:, None]
    shown = rows.table[rows.rows[members][:, None], np.where(inside, columns, 0)]
    return Together(
        tokens=rows.first_token[members][:, None] + offsets,
        positions=(rows.seq_lens - rows.counts)[members][:, None] + offsets,
        pages=np.where(inside, shown, 0).astype(np.int64),
        start=rows.first_page[members] * page_tokens,
        seq_lens=rows.seq_lens[members],
    )

"""The rows of a model's batch as sequences of a pool: opening, stepping, committing, taking back.

A model calls its input a batch of ``[rows, columns]``. A row's first columns may be padding; column c is
token ``c - padding`` of the row's sequence, so padding is never stored, and what a page holds doesn't depend
on whom a prompt was batched with.

One forward is one step: `Rows.prepare` opens what is new, leaves out columns that are in the cache already
and takes the step; the layers write; `Rows.commit` counts the columns. `Rows.roll_back` undoes a step that
failed.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvalloc._core import Batch
from kvalloc.errors import ClosedError, InvalidArgument, OutOfPages
from kvalloc.integrations.transformers.inputs import Identity, Inputs, Int32s, Row, in_order, padding_of
from kvalloc.store.protocol import Store
from kvalloc.store.steps import first_positions

__all__ = ["Flight", "Rows"]

_MOST_STEPS: Final = 8  # that wait for their commit
_ANEW: Final = "Call cache.reset() before a prompt that begins anew (cache.generate does)"


@dataclass(slots=True)
class Flight:
    """A step that is not committed.

    Attributes
    ----------
    before : int
        Columns before the forward.
    columns : int
        Columns that the layers see: those of the forward without those left out.
    counts : int64 [rows]
        Tokens of each row that are stored: its last columns.
    known : list of int
        What the sequences knew before.
    fresh : bool
        The rows were opened in this forward.
    written : set of int
        Layers that have written.
    """

    before: int
    columns: int
    counts: NDArray[np.int64]
    known: list[int]
    fresh: bool
    written: set[int] = field(default_factory=set)

    @property
    def stored(self) -> NDArray[np.bool_]:
        """Bool [rows, columns]: which of the columns are stored."""
        stored: NDArray[np.bool_] = np.arange(self.columns) >= self.columns - self.counts[:, None]
        return stored

    @property
    def whole(self) -> bool:
        """Whether all columns are stored."""
        return bool((self.counts == self.columns).all())


class Rows:
    """The rows of one cache.

    Parameters
    ----------
    store : Store
        Where the pages lie; its pool is where they come from.
    """

    def __init__(self, store: Store) -> None:
        self.pool = store.pool
        self._store = store
        self.rows: list[Row] = []
        self.columns = 0
        self.flight: Flight | None = None
        self.hits = 0
        self._batch: Batch | None = None
        self._moved = True
        self._closed = False

    @property
    def batch(self) -> Batch:
        """The batch whose arrays show the step."""
        if self._batch is None:
            raise InvalidArgument("no step was taken")
        return self._batch

    @property
    def closed(self) -> bool:
        """Whether it was closed, or the pool was."""
        return self._closed or self.pool.closed

    def __len__(self) -> int:
        return len(self.rows)

    def live(self) -> None:
        """Raise if it was closed."""
        if self.closed:
            raise ClosedError("the cache is closed; make another with KvallocCache.for_model")

    # -- opening ---------------------------------------------------------------------------------------------

    def begin(
        self, ids: Int32s, mask: NDArray[np.bool_] | None, identity: Identity, *, max_new_tokens: int = 0
    ) -> int:
        """Open a sequence for each row, with what the cache has of its prompt.

        Parameters
        ----------
        ids : int32 [rows, columns]
            The prompts.
        mask : bool [rows, columns] or None
            False for padding on the left.
        identity : Identity
            What they may be shared under.
        max_new_tokens : int, optional
            If above 0, reserve room for the prompt and so many more, or refuse.

        Returns
        -------
        int
            Tokens that were found.

        Raises
        ------
        AdmissionRefused, InvalidArgument, TenantError, ClosedError
            Nothing is open then.
        """
        self.live()
        self.reset()
        columns = ids.shape[1]
        padding = padding_of(mask, len(ids), columns)
        try:
            for row_ids, pad in zip(ids, padding, strict=True):
                row = Row(int(pad))
                self.rows.append(row)
                if pad < columns:
                    row.prompt = np.ascontiguousarray(row_ids[pad:])
                    self._open(row, row.prompt, identity, max_new_tokens)
        except BaseException:
            self.reset()
            raise
        return sum(row.length for row in self.rows)

    def _open(self, row: Row, ids: Int32s, identity: Identity, max_new_tokens: int = 0) -> None:
        row.sequence = self.pool.open(
            identity.tenant,
            ids,
            max_new_tokens=max_new_tokens,
            share=list(identity.share) or None,
            adapter=identity.adapter,
            extra_key=identity.extra_key,
            admit=max_new_tokens > 0,
        )
        row.length = row.sequence.cached_tokens
        row.known = len(ids)
        self.hits += row.length
        self._moved = True

    def _open_private(self, row: Row, identity: Identity) -> None:
        """Open a row whose KV nobody can find: token ids are needed for the first token only."""
        hidden = replace(identity, extra_key=os.urandom(16), share=())
        self._open(row, np.zeros(1, dtype=np.int32), hidden)
        row.private = True

    # -- a forward -------------------------------------------------------------------------------------------

    def prepare(self, inputs: Inputs, identity: Identity) -> int:
        """Make room for a forward: take its step.

        Parameters
        ----------
        inputs : Inputs
            What the model is given.
        identity : Identity
            What rows that are opened now may be shared under.

        Returns
        -------
        int
            How many columns to leave out at the front, because every row has them in pages and nobody wants
            their outputs.

        Raises
        ------
        InvalidArgument
            Inputs that don't continue what the cache holds.
        OutOfPages
            There is no room. The cache is as before.
        """
        self.live()
        self.roll_back()
        fresh = not self.rows
        known = [row.known for row in self.rows]
        try:
            if fresh:
                self.rows = [Row(0) for _ in range(inputs.rows)]
            elif inputs.rows != len(self.rows):
                self._expand(inputs.rows)
                known = [row.known for row in self.rows]
            end = self.columns + inputs.columns
            known += [0] * (len(self.rows) - len(known))
            self._place(inputs, end, identity)
            self._check_goes_on(inputs)
            self._give_up_hits(inputs, end, identity)
            self._tell(inputs, end)
            left_out = self._left_out(inputs)
            counts = np.array([max(0, end - row.end) for row in self.rows], dtype=np.int64)
            self.flight = Flight(self.columns, inputs.columns - left_out, counts, known, fresh)
            self.columns += left_out
            self._step(counts)
        except BaseException:
            self._undo(fresh, known)
            raise
        return left_out

    def _expand(self, rows: int) -> None:
        """Beams, or several answers to each prompt: every row becomes several."""
        if self.columns or rows % len(self.rows):
            raise InvalidArgument(
                f"the forward has {rows} rows, the cache {len(self.rows)}; reset() it, or use "
                "batch_repeat_interleave or batch_select_indices"
            )
        self.select(np.repeat(np.arange(len(self.rows)), rows // len(self.rows)))

    def _check_goes_on(self, inputs: Inputs) -> None:
        """Refuse a prompt no longer than what is here: `generate` has cut off as much of it, or all."""
        behind = not inputs.columns
        if inputs.positions is not None and not behind and self.columns:
            held = np.array([self.columns - row.padding for row in self.rows])
            behind = bool((inputs.positions[:, -1] < held).any())
        if behind:
            raise InvalidArgument(
                f"this forward lies behind the {self.columns} columns that the cache holds: like any cache "
                f"it goes on from there: give the whole text so far and more. {_ANEW}"
            )

    def _place(self, inputs: Inputs, end: int, identity: Identity) -> None:
        """Find each row's padding, and open what begins here."""
        if inputs.mask is not None and inputs.mask.shape != (inputs.rows, end):
            raise InvalidArgument(
                f"attention_mask has shape {inputs.mask.shape}; with {self.columns} columns in the cache it "
                f"must be {(inputs.rows, end)}. {_ANEW}"
            )
        for n, (row, pad) in enumerate(
            zip(self.rows, padding_of(inputs.mask, inputs.rows, end), strict=True)
        ):
            if row.sequence is not None:
                if pad != min(row.padding, end):
                    raise InvalidArgument(
                        f"row {n}: attention_mask has {pad} columns of padding, and the cache was given "
                        f"{row.padding}. {_ANEW}"
                    )
                continue
            if pad < self.columns:
                raise InvalidArgument(
                    f"row {n}: attention_mask shows column {pad}, which was padding when it was written"
                )
            row.padding = int(pad)
            if pad < end:
                start = int(pad) - self.columns
                private = inputs.ids is None or not in_order(inputs, n, start, 0)
                if private or inputs.ids is None:
                    self._open_private(row, identity)
                else:
                    self._open(row, np.ascontiguousarray(inputs.ids[n, start:]), identity)

    def _give_up_hits(self, inputs: Inputs, end: int, identity: Identity) -> None:
        """Whoever wants a column's outputs has it computed, though it was found in the cache."""
        wanted = end - max(inputs.keep, 1)
        for n, row in enumerate(self.rows):
            if row.sequence is None or inputs.ids is None or not wanted < row.end <= end:
                continue
            stay = wanted - row.padding
            self.hits -= row.length
            if stay >= 1 and self._behind_window(row, stay) is None:
                row.sequence.truncate(stay)
                row.length = row.known = stay
                self.hits += stay
            else:  # a prompt of one token has no hit
                row.close()
                first = row.padding - self.columns
                self._open(row, inputs.ids[n, first : first + 1].copy(), identity)

    def _tell(self, inputs: Inputs, end: int) -> None:
        """Tell the sequences their new ids; check those that they know."""
        for n, row in enumerate(self.rows):
            first = max(row.padding, self.columns)  # the first column of this forward that is no padding
            if row.sequence is None or first >= end:
                continue
            token = first - row.padding
            if not row.private and (
                inputs.ids is None or not in_order(inputs, n, first - self.columns, token)
            ):
                if row.length > token or len(row.prompt) > token:
                    raise InvalidArgument(
                        f"row {n}: the cache was begun with token ids, and the KV of this forward depends on "
                        "more than those (inputs_embeds, images, positions that don't count from the first "
                        "token, a mask of one's own)"
                    )
                row.private = True
            if inputs.ids is None:
                continue
            ids = inputs.ids[n, first - self.columns :]
            told = row.prompt[token : token + len(ids)]
            if (ids[: len(told)] != told).any():
                at = token + int(np.argmax(ids[: len(told)] != told))
                raise InvalidArgument(
                    f"row {n}: token {at} is {ids[at - token]}, and the cache was begun with "
                    f"{row.prompt[at]} there"
                )
            if not row.private and token + len(ids) > row.known:
                row.sequence.extend(np.ascontiguousarray(ids[row.known - token :]))
                row.known = token + len(ids)

    def _left_out(self, inputs: Inputs) -> int:
        """Columns of the forward that every row has in pages, as far as their outputs are not wanted."""
        ahead = min(row.end for row in self.rows) - self.columns
        return max(0, min(ahead, inputs.columns - max(inputs.keep, 1)))

    def _step(self, counts: NDArray[np.int64]) -> None:
        live = [n for n, row in enumerate(self.rows) if row.sequence is not None]
        longest = max((self.rows[n].length + int(counts[n]) for n in live), default=1)
        self._fit(len(live), longest, int(counts.sum()))
        asked = counts[live].astype(np.int32)
        step = self.batch.step(asked)
        if step.refused or (step.counts != asked).any():
            raise self._refused(asked, int(counts.sum()))
        self._store.copy(self.batch)

    def _refused(self, asked: Int32s, tokens: int) -> OutOfPages:
        """Why a step gave less than it was asked for: a row gets what there is, until there is nothing."""
        step = self.batch.last
        while not step.refused and (step.counts != asked).any() and self.batch.outstanding < _MOST_STEPS:
            asked = asked - step.counts
            step = self.batch.step(asked)
        refusal = step.refused[0] if step.refused else None
        reason = "there is not room for all of them" if refusal is None else refusal.reason
        error = OutOfPages(
            f"no room for the {tokens} new tokens of {len(self.rows)} rows: {reason}. The cache is as it was "
            "before this forward; close other caches, raise the limit, or use fewer or shorter rows"
        )
        if refusal is not None:
            error.asked, error.room, error.why = refusal.needed_bytes, refusal.room, refusal.why
            tenant = None if refusal.sequence is None else refusal.sequence.tenant
            error.tenant = "" if tenant is None else tenant.name
        return error

    def _fit(self, rows: int, tokens: int, step_tokens: int) -> None:
        """Have a batch with arrays that are large enough, and its rows in the model's order."""
        old = self._batch
        if (
            old is None
            or old.max_sequences < rows
            or old.max_tokens < tokens
            or old.max_step_tokens < max(step_tokens, rows)
        ):
            rows, tokens = _room(rows, 8), _room(tokens, 1024)
            self._batch = self.pool.batch(rows, tokens, max_step_tokens=_room(max(step_tokens, rows), 256))
            if old is not None:
                old.close()
            self._moved = True
        if self._moved:
            self._empty_batch()
            for row in self.rows:
                if row.sequence is not None:
                    self.batch.add(row.sequence)
            self._moved = False

    def _empty_batch(self) -> None:
        """Take all sequences out of the batch, and forget what steps that are not committed did for them."""
        self._moved = True
        if self._batch is not None:
            for sequence in reversed(self._batch.rows):
                self._batch.remove(sequence)
            while self._batch.outstanding:  # they are of no row any more
                self._batch.commit()

    def commit(self, layers: Iterable[int]) -> None:
        """The forward is through: count its columns.

        Parameters
        ----------
        layers : iterable of int
            The layers that must have written.

        Raises
        ------
        InvalidArgument
            One of them has not. The step is undone.
        """
        flight = self.flight
        if flight is None:
            return
        missing = sorted(set(layers) - flight.written)
        if missing:
            self.roll_back()
            raise InvalidArgument(
                f"the forward wrote no KV of layer {missing[0]} ({len(missing)} layers altogether): the "
                "model left it out, or its attention does not read the cache that it was given"
            )
        self.batch.commit()
        for row, count in zip(self.rows, flight.counts, strict=True):
            row.length += int(count)
        self.columns += flight.columns
        self.flight = None

    def roll_back(self) -> None:
        """Undo the step that is not committed, if there is one."""
        if self.flight is not None:
            self._undo(self.flight.fresh, self.flight.known)

    def _undo(self, fresh: bool, known: list[int]) -> None:
        if self.flight is not None:
            self.columns = self.flight.before
            self.flight = None
        if fresh or self.closed:
            self.reset()
            return
        self._empty_batch()
        for row, count in zip(self.rows, known, strict=True):
            if row.sequence is None:
                continue
            if not count:  # opened in this forward
                row.close()
                row.sequence, row.length, row.known, row.private = None, 0, 0, False
            elif count < row.known:
                row.sequence.truncate(count)
                row.known = count

    # -- what generation does with rows ----------------------------------------------------------------------

    def select(self, indices: NDArray[np.int64]) -> None:
        """Put row ``indices[n]`` in place n. A row that is named twice is forked, one that isn't is closed.

        Parameters
        ----------
        indices : int64 [new rows]
            Rows as they are now.

        Raises
        ------
        InvalidArgument
            There is no such row.
        """
        self.live()
        self.roll_back()
        if indices.ndim != 1 or ((indices < 0) | (indices >= len(self.rows))).any():
            raise InvalidArgument(f"rows {indices.tolist()}: the cache has rows 0 to {len(self.rows) - 1}")
        taken: set[int] = set()
        rows: list[Row] = []
        try:
            for index in indices.tolist():
                rows.append(self.rows[index].fork() if index in taken else self.rows[index])
                taken.add(index)
        except BaseException:
            for row in rows:
                if not any(row is old for old in self.rows):
                    row.close()
            raise
        self._moved |= indices.tolist() != list(range(len(self.rows)))
        for index, row in enumerate(self.rows):
            if index not in taken:
                row.close()
        self.rows = rows

    def crop(self, columns: int) -> None:
        """Forget the columns behind the first ``columns``.

        Parameters
        ----------
        columns : int
            How many stay.

        Raises
        ------
        InvalidArgument
            There are fewer; a window has moved on too far to go back. Nothing was changed.
        """
        self.live()
        self.roll_back()
        if not 0 <= columns <= self.columns:
            raise InvalidArgument(f"crop to {columns} columns: the cache has {self.columns}")
        if columns == self.columns:
            return
        if not columns:
            self.reset()
            return
        for n, row in enumerate(self.rows):
            keep = max(columns - row.padding, 0)
            if (gone := self._behind_window(row, keep)) is not None:
                raise InvalidArgument(
                    f"row {n}: can't go back from {row.length} tokens to {keep}; the window of {gone} "
                    "tokens has moved on and its pages were released; what the last forward added can be "
                    "taken back, and some more by chance"
                )
        for row in self.rows:
            keep = max(columns - row.padding, 0)
            if row.sequence is None or keep >= max(row.known, row.length):
                row.padding = min(row.padding, columns) if row.sequence is None else row.padding
                continue
            if keep:
                row.sequence.truncate(keep)
            else:
                row.close()
                row.sequence, row.padding, row.private, self._moved = None, columns, False, True
            row.length, row.known = min(row.length, keep), min(row.known, keep)
            row.prompt = row.prompt[:keep]
        self.columns = columns

    def _behind_window(self, row: Row, keep: int) -> int | None:
        """The window whose pages are gone that going on from ``keep`` tokens needs."""
        if row.sequence is None or keep >= row.length:
            return None
        size = self.pool.spec.page_tokens
        for g, group in enumerate(self.pool.spec.groups):
            first = int(first_positions(group.kind, group.window, np.array(keep))) // size
            if group.window and first * size < keep and not row.sequence.block_table(g)[first]:
                return group.window
        return None

    def take(self, other: "Rows") -> None:
        """Hold the rows of another cache of the pool too, in the same pages.

        Parameters
        ----------
        other : Rows
            Of the same pool.
        """
        other.live()
        other.roll_back()
        self.reset()
        self.columns = other.columns
        for row in other.rows:
            self.rows.append(row.fork())

    def reset(self) -> None:
        """Give everything back; published pages stay cached."""
        self.flight = None
        if not self.pool.closed:
            self._empty_batch()
        for row in self.rows:
            row.close()
        self.rows, self.columns, self.hits = [], 0, 0

    def close(self) -> None:
        """Give everything back for good. A second time is fine."""
        if not self._closed:
            self.reset()
            if self._batch is not None:
                self._batch.close()
                self._batch = None
            self._closed = True

    def tables(self, group: int, pages: int) -> Int32s:
        """The block table of a group, one row for each row of the model.

        Parameters
        ----------
        group : int
            The layer group.
        pages : int
            Its first columns.

        Returns
        -------
        int32 [rows, pages]
            0 for rows without tokens.
        """
        shown: Any = self.batch.block_table(group)
        table = np.zeros((len(self.rows), pages), dtype=np.int32)
        live = [n for n, row in enumerate(self.rows) if row.sequence is not None]
        table[live] = shown[: len(live), :pages]
        return table


def _room(needed: int, least: int) -> int:
    """A size with some room to grow into."""
    return max(least, 1 << (needed - 1).bit_length())

"""Sessions that leave the pool and come back: their pages in a connector, by exact content.

`save` copies the full pages of a sequence out; nothing about the sequence changes, and it may be closed then.
`load` brings pages in for a new sequence with the same beginning, behind what the pool itself still had: it
makes room for them by a step of the batch, as for any tokens, fills the frames, and commits, so that they are
charged, published and hit like pages that were computed here.

A page is found by geometry, the name of the weights, scope, adapter and its generation, the caller's extra
key and every token up to its end, as in the pool's own prefix index; names and tokens are compared exactly.

A page of several layer groups comes in whole or not at all. Pages that left a window before they were saved
are not there, so for models with windows call `save` as the prompt goes in, or expect less to come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvalloc.errors import InvalidArgument, SpecError, WrongPool

from .base import PageKey, root_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvalloc import Batch, Sequence, Tenant
    from kvalloc.store.protocol import Store

    from .base import Connector

    Scope = Tenant | str

__all__ = ["Archive"]

_AT_ONCE = 64  # pages that are in host memory at one time


class Archive:
    """The way between a store and a connector.

    Parameters
    ----------
    store : Store
        Where the pages lie.
    connector : Connector
        Where they go.
    weights : str
        What the pages were computed with: name and revision of the model. KV of other weights is never
        loaded.

    Raises
    ------
    SpecError
        The model has layers with a fixed state, of which a sequence keeps no pages.

    Examples
    --------
    >>> import tempfile
    >>> from kvalloc.connector import Archive, FileConnector
    >>> spec = kvalloc.KVSpec.uniform(layers=2, kv_heads=1, head_dim=8, dtype="float32")
    >>> pool = kvalloc.Pool(spec, device_bytes="1MiB")
    >>> acme, store, batch = pool.tenant("acme"), kvalloc.NumpyStore(pool), pool.batch(4, 256)
    >>> with tempfile.TemporaryDirectory() as where, FileConnector(where) as files:
    ...     archive = Archive(store, files, weights="tiny@1")
    ...     first = pool.open(acme, range(100))
    ...     row, out = batch.add(first), batch.step()
    ...     batch.commit()  # a model would have written the pages before
    ...     saved = archive.save(first)
    ...     batch.remove(first); first.close(); dropped = pool.reset_prefix_cache()
    ...     again = pool.open(acme, range(100))
    ...     row = batch.add(again)
    ...     saved, archive.load(batch, again)
    (6, 96)
    """

    def __init__(self, store: Store, connector: Connector, *, weights: str) -> None:
        spec = store.spec
        for group in spec.groups:
            if group.kind == "state":
                raise SpecError(
                    f"group {group.name!r} is a fixed state, which has no pages to keep; an archive is "
                    "for models whose layers all attend to tokens"
                )
        if not weights:
            raise InvalidArgument(
                f"weights is {weights!r}; name the model and its revision, say 'name@revision'"
            )
        self.store, self.connector, self.weights = store, connector, weights
        self._classes = list(range(len(spec.groups)))
        self._sizes = [spec.classes[cls].page_bytes // store.ranks for cls in self._classes]
        groups = repr(
            [(g.kind, g.layers, g.kv_heads, g.k_dim, g.v_dim, g.dtype, g.window) for g in spec.groups]
        )
        self._geometry = f"{groups} page {spec.page_tokens} rank {store.rank} of {store.ranks}"

    def __repr__(self) -> str:
        return f"<Archive of {self.weights!r} from {self.store!r} to {self.connector!r}>"

    def save(
        self,
        sequence: Sequence,
        *,
        share: Iterable[tuple[Scope, int]] | None = None,
        adapter: str | bytes | None = None,
        adapter_generation: int = 0,
        extra_key: str | bytes | None = None,
    ) -> int:
        """Put the full, written pages of a sequence into the connector.

        Parameters
        ----------
        sequence : Sequence
            One that runs: the pages of a suspended one lie elsewhere. Tokens of steps that are not committed,
            and those whose ids nobody told, are not saved.
        share, adapter, adapter_generation, extra_key
            What `Pool.open` was given for it.

        Returns
        -------
        int
            Pages of it that are in the connector now, counted over the groups.

        Raises
        ------
        InvalidArgument
            The sequence is suspended, or on its way.
        WrongPool, SequenceBusy, ClosedError

        Notes
        -----
        Another thread may move pages meanwhile, by a rebalance or a suspension: those are left out. So is all
        from the first page on that was compressed or cut: what is computed behind it is not exact.
        """
        if sequence.state != "running":
            raise InvalidArgument(
                f"{sequence!r} is {sequence.state}: its pages are not all in place; resume it first"
            )
        tokens, size = sequence.tokens, self.store.spec.page_tokens
        full = min(sequence.num_written, sequence.num_told) // size
        for cls in self._classes:
            # Compressed pages (below 0) and cut ones (0) are not what their keys promise, nor is what was
            # computed behind them, in any group.
            if self.store.spec.groups[cls].grows:
                lossy = np.flatnonzero(self._table(sequence, cls, full) <= 0)
                full = int(lossy[0]) if lossy.size else full
        keys = list(self._keys(sequence, tokens, full, share, adapter, adapter_generation, extra_key))
        kept = 0
        for cls in self._classes:
            table = self._table(sequence, cls, full)
            wanted = [at for at in np.flatnonzero(table).tolist() if keys[at][cls] not in self.connector]
            kept += int(np.count_nonzero(table)) - len(wanted)
            for begin in range(0, len(wanted), _AT_ONCE):
                places = wanted[begin : begin + _AT_ONCE]
                content = self.store.read_pages(cls, table[places])
                # What lies where it lay before is what was read; a frame that was left may be another page's.
                stays = self._table(sequence, cls, full) == table
                for at, page in zip(places, content, strict=True):
                    if stays[at]:
                        kept += self.connector.put(keys[at][cls], page)
        return kept

    def _table(self, sequence: Sequence, cls: int, full: int) -> NDArray[np.int32]:
        """Frames on the device of its first `full` pages; 0 for those that are elsewhere."""
        table = np.zeros(full, dtype=np.int32)
        if sequence.state == "running":
            shown = sequence.block_table(cls)[:full]
            table[: len(shown)] = shown
        return table

    def load(
        self,
        batch: Batch,
        sequence: Sequence,
        *,
        share: Iterable[tuple[Scope, int]] | None = None,
        adapter: str | bytes | None = None,
        adapter_generation: int = 0,
        extra_key: str | bytes | None = None,
    ) -> int:
        """Bring in the pages of a sequence's prompt that the connector has, behind those that were hit.

        Call it before the first step of the sequence and with no step outstanding; it steps and commits the
        batch with no tokens for the other rows.

        Parameters
        ----------
        batch : Batch
            A batch in which the sequence has a row.
        sequence : Sequence
            Newly opened.
        share, adapter, adapter_generation, extra_key
            What `Pool.open` was given for it.

        Returns
        -------
        int
            Tokens that need not be computed any more; `Sequence.num_written` has grown by as many.

        Raises
        ------
        InvalidArgument
            The sequence has no row in this batch, or the batch has a step outstanding.
        Exception
            What the store raised. The sequence has left the batch then, with what was loaded before.
        """
        if batch.pool is not self.store.pool:
            raise WrongPool(f"{batch!r} belongs to another pool than {self.store!r}")
        rows = batch.rows
        if sequence not in rows:
            raise InvalidArgument(f"{sequence!r} has no row in {batch!r}; add it first")
        if batch.outstanding:
            raise InvalidArgument(f"{batch!r} has {batch.outstanding} steps outstanding; commit them first")
        size, began = self.store.spec.page_tokens, sequence.num_written
        if began % size or sequence.num_slots != began:
            return 0
        # The last token is always computed: its logits are wanted.
        full = (sequence.num_tokens - 1) // size
        keys = list(
            self._keys(sequence, sequence.tokens, full, share, adapter, adapter_generation, extra_key)
        )
        row, counts = rows.index(sequence), np.zeros(len(rows), dtype=np.int32)
        at = began // size
        while at < full:
            pages = self._fetch(keys[at : min(full, at + min(_AT_ONCE, batch.max_step_tokens // size))])
            if not pages:
                break
            asked = len(pages) * size
            counts[row] = asked
            granted = int(batch.step(counts).counts[row])  # whole pages, since it begins at a page's edge
            del pages[granted // size :]
            try:
                if pages:
                    for cls in self._classes:
                        frames = sequence.block_table(cls)[at : at + len(pages)]
                        self.store.write_pages(cls, frames, np.stack([page[cls] for page in pages]))
            except BaseException:
                batch.remove(sequence)  # it forgets the step: what was not filled is not published
                batch.commit()
                raise
            batch.commit()
            if granted < asked:
                break
            at += len(pages)
        return sequence.num_written - began

    def _fetch(self, keys: list[list[PageKey]]) -> list[list[NDArray[np.uint8]]]:
        """Read pages up to the first that is missing in some group."""
        pages = []
        for page in keys:
            content = [np.empty(size, dtype=np.uint8) for size in self._sizes]
            if not all(self.connector.get(key, out) for key, out in zip(page, content, strict=True)):
                break
            pages.append(content)
        return pages

    def _keys(
        self,
        sequence: Sequence,
        tokens: NDArray[np.int32],
        full: int,
        share: Iterable[tuple[Scope, int]] | None,
        adapter: str | bytes | None,
        adapter_generation: int,
        extra_key: str | bytes | None,
    ) -> Iterator[list[PageKey]]:
        """The keys of the first `full` pages, one a group."""
        if sequence.tenant is None:
            raise InvalidArgument(f"the tenant of {sequence!r} is gone, and with it the scope of its pages")
        if sequence.tenant not in self.store.pool.tenants():
            raise WrongPool(f"{sequence!r} belongs to another pool than {self.store!r}")
        size = self.store.spec.page_tokens
        lost = dict(sequence.fallbacks)
        edges: list[tuple[int, str]] = []
        end = 0
        for scope, count in share or ():
            name = scope if isinstance(scope, str) else scope.name
            end += count
            edges.append((end, sequence.tenant.name if name in lost else name))
        parent = root_key(self._geometry, self.weights, adapter, adapter_generation, extra_key)
        scope_before = None
        for at in range(full):
            scope_here = next((name for end, name in edges if (at + 1) * size <= end), sequence.tenant.name)
            if scope_here != scope_before:
                parent = root_key(parent, scope_here)
                scope_before = scope_here
            ids = tokens[at * size : (at + 1) * size].astype("<i4").tobytes()
            page = [PageKey(group, parent, ids) for group in self._classes]
            yield page
            parent = page[0].chain

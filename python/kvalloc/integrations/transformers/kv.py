"""K and V between a model's layers and the pages of a store.

Two ways, chosen by the model's attention implementation. Gathered: `PagedKV.update` writes the new K and V
and returns those of all columns, gathered from the pages, as any attention function takes them. Paged: it
hands over nothing but a note on K (`Note`), and the attention function of attention.py writes and attends
over the pages through the store.
"""

import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kvalloc.errors import InvalidArgument
from kvalloc.integrations.transformers.rows import Flight, Rows
from kvalloc.store.steps import first_positions

__all__ = ["Note", "PagedKV", "take_note"]

_NOTE: Final = "_kvalloc_note"
_left = threading.local()


@dataclass(frozen=True, slots=True)
class Note:
    """What an attention function needs to know of the K and V that it was given.

    Attributes
    ----------
    kv : PagedKV
        Where they belong.
    layer : int
        Which layer's they are.
    latent : Tensor or None
        [rows, 1, columns, k_dim]. What is stored instead of K and V, in a layer with a latent.
    """

    kv: "PagedKV"
    layer: int
    latent: Tensor | None = None


def take_note(key: Tensor) -> Note | None:
    """What `PagedKV.update` noted on a K tensor.

    Parameters
    ----------
    key : Tensor
        What an attention function was given. Of a latent this is made out of what was noted on, so that note
        waits for the attention function of its thread that is called next.

    Returns
    -------
    Note or None
    """
    note: Note | None = getattr(key, _NOTE, None) or getattr(_left, "note", None)
    _left.note = None
    return note


class PagedKV:
    """The pages of one cache, as tensors.

    Parameters
    ----------
    store : TorchStore
        The tensors.
    rows : Rows
        The books.
    """

    def __init__(self, store: Any, rows: Rows) -> None:
        self.store = store
        self.rows = rows
        self._seen: Flight | None = None
        self._stored: Tensor | None = None
        self._index: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}

    @property
    def columns(self) -> int:
        """Columns of the model's batch, those of the forward included."""
        return self.rows.columns + self.flight().columns

    # -- writing ---------------------------------------------------------------------------------------------

    def flight(self) -> Flight:
        """The step of the forward that is going on."""
        self.rows.live()
        flight = self.rows.flight
        if flight is None:
            raise InvalidArgument(
                "the cache was not told of this forward: call the model that it was made for "
                "(KvallocCache.for_model), not a part of it or a wrapper around it"
            )
        if flight is not self._seen:
            self._seen = flight
            self._index.clear()
            self._stored = None if flight.whole else torch.from_numpy(flight.stored).to(self.store.device)
        return flight

    def update(self, layer: int, key: Tensor, value: Tensor, *, paged: bool) -> tuple[Tensor, Tensor]:
        """Take the K and V of a layer's new columns.

        Parameters
        ----------
        layer : int
            Of the model.
        key, value : Tensor [rows, kv_heads, columns, dim]
            Of a latent: the latent, and the part that carries the position.
        paged : bool
            Leave writing to the attention function.

        Returns
        -------
        key, value : Tensor [rows, kv_heads, columns of the layer, dim]
            Gathered from the pages; as they came if paged.

        Raises
        ------
        InvalidArgument
            They don't have the shape that the spec says.
        """
        flight = self.flight()
        split = key.shape[-1]
        group = self.store.spec.groups[self.store.spec.layer_map[layer][0]]
        latent = torch.cat((key, value), dim=-1) if group.kind == "latent" and key.shape[1] == 1 else None
        stored = (key, value) if latent is None else (latent,)
        shapes = [
            (len(self.rows), group.kv_heads, flight.columns, dim) for dim in (group.k_dim, group.v_dim) if dim
        ]
        if [tuple(t.shape) for t in stored] != shapes:
            raise InvalidArgument(
                f"layer {layer} gives K and V of {tuple(key.shape)} and {tuple(value.shape)}; the spec's "
                f"group {group.name!r} stores {' and '.join(map(str, shapes))} "
                "(rows, KV heads, columns, values of a head)"
            )
        if paged:
            note = Note(self, layer, latent)
            setattr(key, _NOTE, note)
            _left.note = None if latent is None else note
            return key, value
        self.store.write(layer, *self._packed(stored), self.rows.batch)
        flight.written.add(layer)
        gathered = self.gather(layer, key.dtype)
        if latent is None:
            return gathered
        return gathered[0][..., :split].contiguous(), gathered[0][..., split:].contiguous()

    def _packed(self, kv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        return self.packed(kv[0]), self.packed(kv[1]) if len(kv) > 1 else None

    def packed(self, tensor: Tensor) -> Tensor:
        """The stored columns of a tensor, row after row.

        Parameters
        ----------
        tensor : Tensor [rows, heads, columns, dim]

        Returns
        -------
        Tensor [tokens, heads, dim]
        """
        by_column = tensor.detach().transpose(1, 2)
        if self._stored is None:
            return by_column.reshape(-1, *by_column.shape[2:])
        return by_column[self._stored]

    def unpacked(self, tensor: Tensor) -> Tensor:
        """The inverse of `packed`, with 0 in columns that are not stored.

        Parameters
        ----------
        tensor : Tensor [tokens, heads, dim]

        Returns
        -------
        Tensor [rows, columns, heads, dim]
        """
        shape = (len(self.rows), self.flight().columns, *tensor.shape[1:])
        if self._stored is None:
            return tensor.reshape(shape)
        padded = tensor.new_zeros(shape)
        padded[self._stored] = tensor
        return padded

    # -- reading ---------------------------------------------------------------------------------------------

    def first_column(self, layer: int) -> int:
        """The first column that a layer's gathered K and V have: the others have left its window.

        Parameters
        ----------
        layer : int
            Of the model.

        Returns
        -------
        int
        """
        group = self.store.spec.groups[self.store.spec.layer_map[layer][0]]
        return 0 if group.window is None else max(self.rows.columns - group.window + 1, 0)

    def gather(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of a layer's columns, in one piece.

        Parameters
        ----------
        layer : int
            Of the model.
        dtype : torch.dtype
            What to return.

        Returns
        -------
        k, v : Tensor [rows, kv_heads, columns from `first_column` on, dim]
            Padding has the values of a token of its row. Of a latent, both are the latent.
        """
        view = self.store.views(layer)
        k = self._read(layer, view.k, view.k_scale, dtype)
        v = k if view.v is None else self._read(layer, view.v, view.v_scale, dtype)
        return k, v

    def _read(self, layer: int, view: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        frames, offsets, absent = self._where(layer)
        read = view[frames, offsets]
        if scale is not None:
            read = read.to(torch.float32) * scale[frames, offsets, :, None].to(torch.float32)
        if absent is not None:
            read[absent] = 0
        # Contiguous, so that attention sees what it sees of a cache that is one tensor.
        return read.to(dtype).transpose(1, 2).contiguous()

    def _where(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Frame and offset of each row's columns, and where there is none; worked out once a step."""
        group = self.store.spec.layer_map[layer][0]
        if group not in self._index:
            size, kept = self.store.spec.page_tokens, self.store.spec.groups[group]
            columns = np.arange(self.first_column(layer), self.columns)
            padding, length = np.array([(row.padding, row.length) for row in self.rows.rows]).T
            # What lies before a row's first token, or before its chunk, is masked: any token will do.
            first = first_positions(kept.kind, kept.window, length)
            tokens = np.maximum(columns - padding[:, None], first[:, None])
            table = self.rows.tables(group, int(tokens.max()) // size + 1)
            frames = np.take_along_axis(table, tokens // size, axis=1).astype(np.int64)
            if (frames < 0).any():
                raise InvalidArgument(
                    "some pages of this cache are compressed; gathered attention reads whole ones only: use "
                    "model.set_attn_implementation('kvalloc_paged')"
                )
            # Of rows that are all padding, behind the window of a prefix that was found, and in pages that
            # were given up (`given_up`): nobody attends to them.
            absent = torch.from_numpy(frames == 0) if (frames == 0).any() else None
            self._index[group] = (
                torch.from_numpy(frames).to(self.store.device),
                torch.from_numpy(tokens % size).to(self.store.device),
                None if absent is None else absent.to(self.store.device),
            )
        return self._index[group]

    def given_up(self) -> Tensor | None:
        """The columns in pages that were given up: gathered attention needs a mask that hides them.

        Returns
        -------
        Tensor bool [rows, columns] or None
            None if there are none.

        Raises
        ------
        InvalidArgument
            One mask won't do for all layers.
        """
        self.flight()
        spec, places = self.store.spec, self.store.spec.layer_map
        layers = {place[0]: layer for layer, place in enumerate(places) if place is not None}
        # Padding has a mask already, and a row that is nothing but padding so far may have no page.
        first = np.array([self.columns if row.sequence is None else row.padding for row in self.rows.rows])
        stored = torch.from_numpy(np.arange(self.columns) >= first[:, None]).to(self.store.device)
        found = []
        for group, layer in layers.items():
            absent = self._where(layer)[2] if spec.groups[group].grows else None
            gone = None if absent is None else absent & stored
            found.append(None if gone is None or not gone.any() else gone)
        hidden = [gone for gone in found if gone is not None]
        if hidden and not (len(hidden) == len(found) and all(torch.equal(x, hidden[0]) for x in hidden)):
            raise InvalidArgument(
                "pages of this cache were given up in some layers and not in others (they have windows, or "
                "tables of their own); gathered attention has one mask for all: use "
                "model.set_attn_implementation('kvalloc_paged')"
            )
        return hidden[0] if hidden else None

    # -- attending -------------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        query: Tensor,
        new: tuple[Tensor, ...] | None,
        *,
        scale: float | None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        v_dim: int | None = None,
    ) -> Tensor:
        """Write a layer's new K and V, and attend over its pages.

        Parameters
        ----------
        layer : int
            Of the model.
        query : Tensor [rows, heads, columns, k_dim]
        new : tuple of Tensor [rows, kv_heads, columns, dim] or None
            K and V, or a latent alone; None for a layer that uses another one's.
        scale, soft_cap, sinks, v_dim : optional
            As in ``TorchStore.attend``.

        Returns
        -------
        Tensor [rows, columns, heads, v_dim]
            0 in columns that are padding, or were in the cache before.
        """
        flight = self.flight()
        k, v = (None, None) if new is None else self._packed(new)
        out = self.store.attend(
            layer,
            self.packed(query),
            k,
            v,
            self.rows.batch,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            v_dim=v_dim,
        )
        flight.written.add(layer)
        return self.unpacked(out)

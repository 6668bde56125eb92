"""`KvallocCache`: a transformers cache whose K and V lie in pages."""

import inspect
import os
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, CacheLayerMixin

from kvalloc._core import Pool, Tenant
from kvalloc.errors import InvalidArgument
from kvalloc.integrations.transformers.attention import PAGED
from kvalloc.integrations.transformers.geometry import (
    check_layers,
    check_spec,
    device_of,
    own_layers,
)
from kvalloc.integrations.transformers.inputs import Identity, Inputs, Int32s
from kvalloc.integrations.transformers.kv import PagedKV
from kvalloc.integrations.transformers.rows import Rows
from kvalloc.spec import KVSpec
from kvalloc.store.torch_store import TorchStore
from kvalloc.typing import Size

__all__ = ["KvallocCache"]

# Arguments of a forward that don't change what K and V are.
_PLAIN: Final = frozenset(
    {
        "attention_mask",
        "cache_position",
        "input_ids",
        "labels",
        "logits_to_keep",
        "num_logits_to_keep",
        "position_ids",
    }
)

_model_keys: Final[weakref.WeakKeyDictionary[Any, bytes]] = weakref.WeakKeyDictionary()


class KvallocLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `KvallocCache`, as transformers wants to see it."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, kv: PagedKV, layer: int, config: Any) -> None:
        self._kv = kv
        self._layer = layer
        self._config = config
        group = kv.store.spec.groups[kv.store.spec.layer_map[layer][0]]
        self.sliding_window = group.window
        self.is_sliding = group.window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pages are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new columns' K and V, return those of all columns.

        Parameters
        ----------
        key_states, value_states : Tensor [rows, kv_heads, columns, dim]
            Of the new columns.
        *args, **kwargs
            Not used.

        Returns
        -------
        key, value : Tensor [rows, kv_heads, all columns, dim]
            With ``"kvalloc_paged"`` attention, the new columns alone.
        """
        return self._kv.update(self._layer, key_states, value_states, paged=_is_paged(self._config))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `update` returns, and the first of them."""
        first = self._kv.first_column(self._layer)
        return self._kv.rows.columns - first + query_length, first

    def get_seq_length(self) -> int:
        """Columns in the cache."""
        return self._kv.rows.columns

    def get_max_length(self) -> int:
        """The window; -1 if there is none."""
        return self.sliding_window or -1

    get_max_cache_shape = get_max_length

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise InvalidArgument("call this on the cache: the layers share their pages' sequences")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = (
        _refuse
    )


class KvallocCache(Cache):  # type: ignore[misc]
    """A transformers cache whose K and V lie in the pages of a pool. Made by `for_model`.

    Every row of the model's batch is a sequence of the pool, charged to one tenant. Full pages are published
    under the token ids that made them, so a later prompt that begins alike takes them over instead of
    computing them again.

    Attributes
    ----------
    pool : Pool
        Where the pages come from.
    store : TorchStore
        Their tensor.
    tenant : Tenant or str
        Who pays.

    Notes
    -----
    Give it to ``model.generate(..., past_key_values=cache)`` (``cache=cache`` from transformers 5.24 on), or
    call `generate`, which begins anew each time. Like any cache it continues what it holds: call `reset`
    before a prompt that has nothing to do with the last one; nothing is lost by it, since published pages
    stay findable.

    A forward that wants the outputs of its last columns only (``logits_to_keep``, as `generate` passes it)
    leaves out what is in pages already. Padding on the left is never stored.

    Attention is gathered (any implementation) or goes over the pages, after
    ``model.set_attn_implementation("kvalloc_paged")``.

    It is a context manager, and closes when it is dropped.

    Examples
    --------
    >>> with KvallocCache.for_model(model, device_bytes="512MiB") as cache:        # doctest: +SKIP
    ...     answer = model.generate(ids, past_key_values=cache, max_new_tokens=32)
    ...     other = cache.generate(ids, max_new_tokens=32)
    ...     print(cache.cached_tokens)
    """

    def __init__(self, model: Any, store: TorchStore, identity: Identity) -> None:
        self.store = store
        self.pool = store.pool
        self._identity = identity
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self._own = own_layers(store.spec)
        self._rows = Rows(store)
        self._kv = PagedKV(store, self._rows)
        self._parameters = inspect.signature(model.forward).parameters
        super().__init__(
            layers=[KvallocLayer(self._kv, layer, self._config) for layer in range(len(store.spec.layer_map))]
        )
        _hook(model)

    @classmethod
    def for_model(
        cls,
        model: Any,
        device_bytes: Size | None = None,
        *,
        pool: Pool | None = None,
        tenant: Tenant | str = "default",
        page_tokens: int = 16,
        dtype: object = None,
        extra_key: str | bytes | None = None,
        share: Many[tuple[Tenant | str, int]] = (),
    ) -> Self:
        """Make a cache for a model.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            A decoder that generates. The cache follows its forwards by hooks, to know their token ids.
        device_bytes : int or str, optional
            Make a pool of this size on the model's device, and a tenant of that name in it. Give either this
            or `pool`.
        pool : Pool, optional
            Take pages from this one. Caches of one pool share its tensor.
        tenant : Tenant or str, optional
            Who pays for the pages; a name for a new pool.
        page_tokens : int, optional
            Tokens of a page, for a new pool.
        dtype : str or dtype, optional
            How K and V are stored, for a new pool. Default: as the model computes.
        extra_key : str or bytes, optional
            Names the model's weights and all else that KV depends on besides token ids: pages are found only
            under the same key. Default: one of this model object's own.
        share : list of (Tenant or str, int), optional
            Parts of each prompt that are shared under a tenant above, see `Pool.open`.

        Returns
        -------
        KvallocCache

        Raises
        ------
        SpecError
            A layer of the model keeps something that pages don't hold, or the pool's spec is another model's.
            The message says which layer, and why.
        InvalidArgument, UnknownTenant, ClosedError, OutOfMemory
        """
        if (pool is None) == (device_bytes is None):
            raise InvalidArgument("give device_bytes for a new pool, or a pool")
        check_layers(model)
        device = device_of(model)
        if pool is None:
            decoder = model.config.get_text_config(decoder=True)
            spec = KVSpec.from_hf_config(decoder, page_tokens, model.dtype if dtype is None else dtype)
            check_spec(spec, model)
            pool = Pool(spec, 0 if device_bytes is None else device_bytes)
            if not isinstance(tenant, str):
                raise InvalidArgument(
                    "a new pool has no tenants yet; give a name, or the pool of that tenant"
                )
            pool.tenant(tenant)
        else:
            check_spec(pool.spec, model)
            pool.admit(tenant, 1)  # the tenant is there
        store = TorchStore.of(pool) or TorchStore(pool, device)
        if store.device != device:
            raise InvalidArgument(f"the pool's tensor lies on {store.device}, and the model on {device}")
        if extra_key is None:
            extra_key = _model_keys.setdefault(model, os.urandom(16))
        return cls(model, store, Identity(tenant, extra_key, share=tuple(share)))

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def tenant(self) -> Tenant | str:
        """Who pays for the pages."""
        return self._identity.tenant

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its pool was."""
        return self._rows.closed

    @property
    def cached_tokens(self) -> int:
        """Tokens, of all rows, that were in pages already when they came: not computed again."""
        return self._rows.hits

    @property
    def batch_size(self) -> int:
        """Rows; -1 before there are any."""
        return len(self._rows) or -1

    @property
    def is_compileable(self) -> bool:
        """False: every step's pages are others."""
        return False

    def __repr__(self) -> str:
        if self.closed:
            return "<KvallocCache, closed>"
        who = self.tenant if isinstance(self.tenant, str) else self.tenant.name
        shape = f"{len(self._rows)} rows of {self._rows.columns} columns"
        return f"<KvallocCache of {who!r}, {shape}, {self.cached_tokens} tokens reused>"

    def __bool__(self) -> bool:
        return True

    # -- generating ------------------------------------------------------------------------------------------

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, reserve: bool = False, **kwargs: Any
    ) -> Any:
        """Begin anew and call ``model.generate``.

        Parameters
        ----------
        input_ids : Tensor int64 [rows, columns]
            The prompts.
        attention_mask : Tensor [rows, columns], optional
            0 for padding on the left.
        reserve : bool, optional
            Reserve room for the prompts and ``max_new_tokens`` first, or refuse: then it can't run out on the
            way. Not for beams or several answers to a prompt, whose need nobody knows before. In a model with
            windows, the part of the prompts that its windows let go again still has to find room.
        **kwargs
            As ``model.generate`` takes them.

        Returns
        -------
        Tensor or ModelOutput
            What ``model.generate`` returns.

        Raises
        ------
        AdmissionRefused
            With `reserve`: there is no room now.
        OutOfPages, InvalidArgument, ClosedError
        """
        self.begin(input_ids, attention_mask, max_new_tokens=self._to_reserve(kwargs) if reserve else 0)
        name = "cache" if "cache" in self._parameters else "past_key_values"
        return self._model.generate(input_ids, attention_mask=attention_mask, **{name: self}, **kwargs)

    def _to_reserve(self, options: Mapping[str, Any]) -> int:
        """New tokens of each row, by what `generate` is given."""
        config = options.get("generation_config") or self._model.generation_config

        def chosen(name: str) -> int:
            return options.get(name) or getattr(config, name, None) or 0

        if not chosen("max_new_tokens"):
            raise InvalidArgument("reserve needs max_new_tokens")
        if max(chosen("num_beams"), chosen("num_return_sequences")) > 1:
            raise InvalidArgument("reserve is for one answer to each prompt, without beams")
        return chosen("max_new_tokens")

    def begin(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, max_new_tokens: int = 0
    ) -> int:
        """Begin anew: look the prompts up, and hold what is found.

        It is not needed before a forward; it tells how much there is, and can reserve. The next forward is
        given the whole prompts all the same, or their first part.

        Parameters
        ----------
        input_ids : Tensor int64 [rows, columns]
            The prompts.
        attention_mask : Tensor [rows, columns], optional
            0 for padding on the left.
        max_new_tokens : int, optional
            If above 0, reserve room for the prompts and so many tokens more, or refuse.

        Returns
        -------
        int
            Tokens found, of all rows.

        Raises
        ------
        AdmissionRefused
            With `max_new_tokens`: there is no room now. The cache is empty.
        InvalidArgument, ClosedError
        """
        if input_ids.ndim != 2:
            raise InvalidArgument(f"input_ids has shape {tuple(input_ids.shape)}; it must be [rows, columns]")
        ids = _int32(input_ids)
        mask = None if attention_mask is None else _mask(attention_mask)
        config = self._model.generation_config
        pad = config.pad_token_id
        if (
            mask is None
            and pad is not None
            and (ids == pad).any()
            and pad not in _listed(config.eos_token_id)
        ):
            raise InvalidArgument(f"input_ids contain the padding token {pad}: pass attention_mask too")
        return self._rows.begin(ids, mask, self._named(), max_new_tokens=max_new_tokens)

    def _named(self) -> Identity:
        """What rows that are opened now may be shared under: adapters may have been switched since."""
        if not getattr(self._model, "_hf_peft_config_loaded", False):
            return self._identity
        adapters = ",".join(self._model.active_adapters())
        return Identity(self._identity.tenant, self._identity.extra_key, adapters, self._identity.share)

    def is_of(self, model: Any) -> bool:
        """Whether it was made for this model object."""
        return self._model is model

    def before_forward(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Take the step of a forward of the model; called by its hook.

        Parameters
        ----------
        given : mapping
            The arguments of the forward, by name.

        Returns
        -------
        dict
            Arguments to change: the columns that are in pages are left out, and those in pages that were
            given up are masked, unless attention goes over the pages.

        Raises
        ------
        OutOfPages, InvalidArgument, ClosedError
        """
        if self._model.training and torch.is_grad_enabled():
            raise InvalidArgument("pages carry no gradient; call model.eval(), or use torch.no_grad()")
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        shaped = embeds if ids is None else ids
        if shaped is None:
            raise InvalidArgument("the forward has neither input_ids nor inputs_embeds")
        rows, columns = shaped.shape[:2]
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        own_mask = mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2)
        if own_mask and _is_paged(self._config):
            raise InvalidArgument(f"{PAGED!r} takes an attention_mask of [rows, columns] only, for padding")
        plain = not own_mask and not any(
            isinstance(value, Tensor) and name not in _PLAIN for name, value in given.items()
        )
        known = ids is not None and plain and (positions is None or positions.ndim == 2)
        keep = given.get("logits_to_keep", given.get("num_logits_to_keep"))
        wanted = ("labels", "output_hidden_states", "output_attentions")
        all_wanted = type(keep) is not int or not keep or any(_is_set(given.get(name)) for name in wanted)
        inputs = Inputs(
            rows,
            columns,
            _int32(ids) if known and ids is not None else None,
            None if mask is None or own_mask else _mask(mask),
            positions.cpu().numpy().astype(np.int64) if known and positions is not None else None,
            columns if all_wanted or not isinstance(keep, int) else min(keep, columns),
        )
        left_out = self._rows.prepare(inputs, self._named())
        changed = ("input_ids", "position_ids", "cache_position") if left_out else ()
        replaced = {name: given[name][..., left_out:] for name in changed if given.get(name) is not None}
        if not _is_paged(self._config):
            try:
                gone = self._kv.given_up()
                if gone is not None:
                    replaced["attention_mask"] = _hidden(mask, gone, own_mask)
            except BaseException:
                self._rows.roll_back()
                raise
        return replaced

    def after_forward(self, done: bool) -> None:
        """Commit the step of a forward, or undo it; called by the model's hook.

        Parameters
        ----------
        done : bool
            Whether the forward came to its end.

        Raises
        ------
        InvalidArgument
            A layer has written nothing. The step is undone.
        """
        if done:
            self._rows.commit(self._own)
        else:
            self._rows.roll_back()

    # -- what generation does with it ------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all rows; their full pages stay findable."""
        self._rows.live()
        self._rows.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns.

        Parameters
        ----------
        tokens_to_remove : int
            Minus the number of columns to forget. Above 0 (as older releases of transformers had it): the
            number of columns that stay.

        Raises
        ------
        InvalidArgument
            There are fewer; a window has moved on too far to go back.
        """
        columns = self._rows.columns
        stay = min(tokens_to_remove, columns) if tokens_to_remove > 0 else columns + tokens_to_remove
        self._rows.crop(stay)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these rows, in this order: one that is named twice shares its pages with its copy.

        Parameters
        ----------
        beam_idx : Tensor int64 [rows]
        """
        self._rows.select(beam_idx.cpu().numpy().astype(np.int64))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only.

        Parameters
        ----------
        indices : Tensor int64 [rows] or bool [rows so far]
        """
        chosen = indices.cpu().numpy()
        self._rows.select(np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make every row `repeats` rows, side by side, that share its pages.

        Parameters
        ----------
        repeats : int
        """
        self._rows.select(np.repeat(np.arange(len(self._rows)), repeats))

    def fork(self) -> Self:
        """Make a second cache with the same content in the same pages; `copy.deepcopy` does this too.

        Returns
        -------
        KvallocCache
        """
        other = type(self)(self._model, self.store, self._identity)
        other._rows.take(self._rows)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all pages back; published ones stay cached in the pool. A second time is fine.

        The pool and its tensor go when nobody has them any more: caches, batches, you.
        """
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _is_paged(config: Any) -> bool:
    return bool(config._attn_implementation == PAGED)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _listed(ids: Any) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def _int32(ids: Tensor) -> Int32s:
    return ids.to("cpu", torch.int32).contiguous().numpy()


def _hidden(mask: Tensor | None, gone: Tensor, own: bool) -> Tensor:
    """An attention mask [rows, columns] without these columns."""
    if own:
        raise InvalidArgument(
            "pages of this cache were given up, and a mask of the forward's own does not know which: pass an "
            f"attention_mask of [rows, columns], or use model.set_attn_implementation({PAGED!r})"
        )
    shown = torch.ones_like(gone, dtype=torch.int64) if mask is None else mask
    return shown.masked_fill(gone.to(shown.device), 0)


def _mask(mask: Tensor) -> Any:
    return (mask != 0).cpu().numpy()


def _hook(model: Any) -> None:
    """Have caches told of a model's forwards.

    The hooks stay. Whatever a dropped cache would remove might be removed in the middle of a forward, by the
    garbage collector, and torch's hooks must not change then.
    """
    if _before not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True, always_call=True)


def _given(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[KvallocCache | None, dict[str, Any]]:
    """The cache of a forward, if it is one of the model's, and all arguments by name."""
    if args:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        kwargs = {**{k: v for k, v in bound.items() if k != "kwargs"}, **bound.get("kwargs", {})}
    for cache in (kwargs.get("cache"), kwargs.get("past_key_values")):
        if isinstance(cache, KvallocCache) and cache.is_of(model):
            return cache, kwargs
    return None, kwargs


def _before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache, named = _given(model, args, kwargs)
    return None if cache is None else ((), {**named, **cache.before_forward(named)})


def _after(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache, _ = _given(model, args, kwargs)
    if cache is not None:
        cache.after_forward(output is not None)

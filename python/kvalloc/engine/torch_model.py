"""A transformers model below the reference scheduler, its KV in the pages of a store.

`TorchModel` is what `Engine` calls in place of the clock. A step's rows, some with a chunk of a prompt and
some with one token, go through the model as one flat sequence ``[1, num_tokens]``. Everything but attention
treats tokens alike; attention is handed to ``store.attend``, which knows from the batch where each row
begins and which pages hold what came before. So there is no padding, no mask and no cache object.

The hand-off is transformers' own: an attention function registered under a name, and a keyword argument of
the forward pass that every layer passes on to it. Models that keep their attention to themselves are
refused by name, before anything is committed.

In a layer with a latent (MLA) that function is given K and V as the model has expanded them, and what is
stored is what they were made of: a hook on the linear layer that expands it, ``kv_b_proj``, sees it come by.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface

from kvalloc.errors import ClosedError, InvalidArgument, SpecError
from kvalloc.kernels.latent import attend_latent, expansion

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from kvalloc import Batch, Plan, Step
    from kvalloc.store import Store

    from .request import Int32, Sampling
    from .rows import Rows

__all__ = ["TorchModel"]

NAME = "kvalloc_engine"
KEYWORD = "kvalloc_forward"


class TorchModel:
    """Runs the steps of `Engine` through a causal language model of transformers.

    While it is open the model's attention is ours; `close` puts back what it was.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode, on the store's device. Its spec is the pool's:
        ``KVSpec.from_hf_config(model.config, ...)``.
    store : Store
        The tensor of the pool, such as `kvalloc.TorchStore`.

    Raises
    ------
    SpecError
        The pool was made for another model, or the model's attention can't be replaced: which layer, and why.

    Examples
    --------
    >>> import numpy as np
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from kvalloc.engine import Engine, Literal, Request, WallClock
    >>> from kvalloc.engine.torch_model import TorchModel
    >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_hidden_layers=2, **sizes)).eval()
    >>> pool = kvalloc.Pool(kvalloc.KVSpec.from_hf_config(model.config, dtype="float32"), "4MiB")
    >>> tenants, prompt = {"acme": pool.tenant("acme")}, Literal(np.arange(3, 43, dtype=np.int32))
    >>> sizes = {"max_rows": 8, "token_budget": 16, "max_tokens": 256}
    >>> with kvalloc.TorchStore(pool) as store, TorchModel(model, store) as runner:
    ...     engine = Engine(pool, runner, tenants, clock=WallClock(), **sizes)
    ...     tokens = list(engine.stream(Request(0.0, "acme", prompt, max_new=5)))
    >>> len(tokens), engine.steps  # 40 tokens of the prompt in three steps, and four more
    (5, 7)
    """

    def __init__(self, model: Any, store: Store) -> None:
        config = model.config.get_text_config()
        layers, places = config.num_hidden_layers, store.spec.layer_map
        if len(places) != layers:
            raise SpecError(f"the pool's spec has {len(places)} layers, {_name(model)} has {layers}")
        latent: dict[int, Any] = {}  # layers, and their attention
        for layer, place in enumerate(places):
            group = None if place is None else store.spec.groups[place[0]]
            if group is None or group.kind == "state":
                raise SpecError(
                    f"layer {layer} of {_name(model)} keeps a state, not a key and a value for each head: "
                    "this runner can't split that from the model"
                )
            if group.kind == "latent":
                latent[layer] = _expander(model, layer, group.k_dim)
        AttentionInterface.register(NAME, _attention)
        self.model, self.store, self.closed = model, store, False
        self._before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        if config._attn_implementation != NAME:
            raise SpecError(f"{_name(model)} does not let its attention be replaced (AttentionInterface)")
        self._latents: dict[int, Any] = {}  # of the layers whose attention has not run yet
        self._hooks = [
            module.kv_b_proj.register_forward_pre_hook(partial(_see, self._latents, layer))
            for layer, module in latent.items()
        ]

    def __repr__(self) -> str:
        return f"<TorchModel {_name(self.model)} on {self.store!r}{', closed' if self.closed else ''}>"

    @property
    def eos(self) -> tuple[int, ...]:
        """The tokens that end a reply, as the model's generation config names them."""
        eos = self.model.generation_config.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def step(self, batch: Batch, step: Step, rows: Rows) -> Int32:
        """Run one step and return what each row sampled.

        Returns
        -------
        ndarray of int32, shape (rows,)
            -1 for a row whose prompt is not in yet, and for one that had no room.

        Raises
        ------
        SpecError
            A layer did not hand its attention over. The step is not committed.
        ClosedError
            After `close`.
        """
        n, counts = len(rows), step.counts
        ends = np.asarray(batch.query_start_loc)[1 : n + 1]
        ids = np.empty(step.num_tokens, dtype=np.int64)
        samples = counts > 0
        ids[ends[samples] - 1] = rows.last[:n][samples]
        for run in rows.prefilling:
            row, count = run.row, int(counts[run.row])
            if count:
                known = int(rows.lens[row])  # after this step
                ids[ends[row] - count : ends[row]] = run.sequence.tokens[known - count : known]
                samples[row] = count == run.todo
        which = samples.nonzero()[0]
        logits = self.forward(batch, step, ids, ends[which] - 1)
        sampled = np.full(n, -1, dtype=np.int32)
        how = [rows.running[row].request.sampling for row in which.tolist()]
        sampled[which] = choose(logits, how, rows.lens[which])
        return sampled

    def execute(self, plan: Plan) -> None:
        """Copy what a plan moves."""
        self.store.execute(plan)

    def forward(
        self, batch: Batch, step: Step, ids: NDArray[np.int64], places: NDArray[np.integer[Any]]
    ) -> Any:
        """Run the model on a step's tokens, given those.

        Parameters
        ----------
        batch, step : Batch, Step
            As its `step` left it, and what that returned.
        ids : ndarray of int64, shape (num_tokens,)
            The step's tokens, row after row.
        places : ndarray of int, shape (n,)
            Those among them whose logits are wanted.

        Returns
        -------
        Tensor of float, shape (n, vocabulary)

        Raises
        ------
        SpecError
            A layer did not hand its attention over.
        ClosedError
            After `close`.
        """
        if self.closed:
            raise ClosedError("the model's runner is closed")
        self._latents.clear()  # of a forward pass that failed
        device, forward = self.store.device, _Forward(self.store, batch, self._latents)
        with torch.inference_mode():
            self.store.copy(batch)
            positions = np.asarray(batch.positions)[: step.num_tokens].astype(np.int64)
            logits = self.model(
                input_ids=torch.from_numpy(ids).to(device)[None],
                position_ids=torch.from_numpy(positions).to(device)[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(places.astype(np.int64)).to(device),
                **{KEYWORD: forward},
            ).logits[0]
        missing = sorted(set(range(len(self.store.spec.layer_map))) - forward.layers)
        if missing:
            raise SpecError(
                f"layer {missing[0]} of {_name(self.model)} did not hand its attention over "
                f"({KEYWORD} did not reach it): the model is not supported"
            )
        return logits

    def close(self) -> None:
        """Give the model its own attention back. The store stays open."""
        if not self.closed:
            self.closed = True
            for hook in self._hooks:
                hook.remove()
            self.model.set_attn_implementation(self._before)

    def __enter__(self) -> TorchModel:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def choose(logits: Any, how: list[Sampling], places: Int32) -> Int32:
    """Choose a token for each row.

    Parameters
    ----------
    logits : Tensor of float, shape (rows, vocabulary)
        Of each row's last token.
    how : list of Sampling
        Each row's.
    places : ndarray of int32, shape (rows,)
        Place of the new token in its sequence.

    Returns
    -------
    ndarray of int32, shape (rows,)
    """
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, sampling in enumerate(how) if sampling.temperature > 0.0]
    if drawn:
        asked = [how[i] for i in drawn]

        def column(values: list[float]) -> Any:
            return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

        scaled = logits[drawn].double() / column([sampling.temperature for sampling in asked])
        shares, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        below = shares.cumsum(dim=-1)
        kept = below - shares < column([sampling.top_p for sampling in asked])  # the first one always
        mass = (shares * kept).cumsum(dim=-1)
        draws = column([sampling.draw(int(places[i])) for i, sampling in zip(drawn, asked, strict=True)])
        # The first token whose mass exceeds the draw; rounding must not lead beyond those that are kept.
        at = (mass <= draws * mass[:, -1:]).sum(dim=-1).minimum(kept.sum(dim=-1) - 1)
        tokens[drawn] = order.gather(1, at[:, None])[:, 0]
    chosen: Int32 = tokens.to(device="cpu", dtype=torch.int32).numpy()
    return chosen


class _Forward:
    """One forward pass: what its attention needs, and which layers have asked for it."""

    __slots__ = ("batch", "latents", "layers", "store")

    def __init__(self, store: Store, batch: Batch, latents: dict[int, Any]) -> None:
        self.store, self.batch, self.latents = store, batch, latents
        self.layers: set[int] = set()


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **others: Any,
) -> tuple[Any, None]:
    """Attend, called by transformers: ``[1, heads, num_tokens, dim]`` in, tokens before heads out."""
    forward: _Forward | None = others.get(KEYWORD)
    if forward is None:
        raise InvalidArgument(
            "the model's attention is kvalloc's while a TorchModel is open: call it through an Engine, "
            "or close the TorchModel first"
        )
    layer, spec = module.layer_idx, forward.store.spec
    place = spec.layer_map[layer]
    group = None if place is None else spec.groups[place[0]]
    window = None if group is None else group.window
    wrong = ""
    if attention_mask is not None:
        wrong = "a mask of its own"
    elif sliding_window not in (None, window):
        wrong = f"a window of {sliding_window}, and the spec says {window}"
    elif not getattr(module, "is_causal", True):
        wrong = "attention that is not causal"
    if wrong:
        raise SpecError(f"layer {layer} ({type(module).__name__}) asks for {wrong}")
    attend = partial(forward.store.attend, layer, batch=forward.batch, soft_cap=softcap, sinks=s_aux)
    if group is not None and group.kind == "latent":
        out = _attend_latent(module, query, key, group.k_dim, forward, attend, scaling)
    else:
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        out = attend(q, k, v, scale=scaling)[None]
    forward.layers.add(layer)
    return out, None


def _expander(model: Any, layer: int, k_dim: int) -> Any:
    """The attention of a layer with a latent of so many values, if its latent can be seen and attended to."""
    found = [
        module
        for module in model.modules()
        if getattr(module, "layer_idx", None) == layer and hasattr(module, "kv_b_proj")
    ]
    weight = expansion(found[0]) if len(found) == 1 else None
    if weight is None:
        raise SpecError(
            f"layer {layer} of {_name(model)} keeps a latent by the pool's spec, and this runner knows those "
            "that a plain linear kv_b_proj expands (as DeepSeek-V2 and V3 have it)"
        )
    rank, rope = weight.shape[1], getattr(found[0], "qk_rope_head_dim", 0)
    if not rope or rank + rope != k_dim:
        raise SpecError(
            f"layer {layer} of {_name(model)} keeps a latent of {rank} values and {rope} that carry the "
            f"position, and the pool's spec has {k_dim}"
        )
    if hasattr(found[0], "indexer"):
        raise SpecError(
            f"layer {layer} of {_name(model)} chooses by an indexer what it attends to, and keeps keys for "
            "that besides its latent: this runner does neither"
        )
    return found[0]


def _see(latents: dict[int, Any], layer: int, _module: Any, given: tuple[Any, ...]) -> None:
    """Keep what a layer is about to expand: ``[.., num_tokens, rank]``."""
    latents[layer] = given[0]


def _attend_latent(
    module: Any, query: Any, key: Any, k_dim: int, forward: _Forward, attend: Any, scaling: float | None
) -> Any:
    """Attend over latents. K ends with the part that carries the position, the same in all heads."""
    seen, weight = forward.latents.pop(module.layer_idx, None), expansion(module)
    if seen is None or weight is None:
        raise SpecError(f"layer {module.layer_idx} ({type(module).__name__}) did not expand its latent")
    rank = weight.shape[1]
    rope = k_dim - rank
    latent = torch.cat((seen.reshape(-1, 1, rank), key[0, :1, :, -rope:].transpose(0, 1)), dim=-1)

    def over_pages(absorbed: Any, scale: float) -> Any:
        return attend(absorbed[0].transpose(0, 1), latent, None, scale=scale, v_dim=rank)[None]

    return attend_latent(weight, query, rope, scaling, over_pages)


def _name(model: Any) -> str:
    return type(model).__name__

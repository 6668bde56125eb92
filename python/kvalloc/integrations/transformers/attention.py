"""Attention over pages, as an attention implementation of transformers: ``"kvalloc_paged"``.

Nothing of the history is gathered: the new columns' queries go to the store with their K and V, and the block
table says where the rest lies. No mask is made, since a row's own tokens are all that its block table shows.
"""

from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface

from kvalloc.errors import InvalidArgument
from kvalloc.integrations.transformers.kv import Note, take_note
from kvalloc.kernels.latent import attend_latent, expansion

__all__ = ["PAGED", "paged_attention"]

PAGED: Final = "kvalloc_paged"
"""The name for ``model.set_attn_implementation``."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over the pages of a `KvallocCache`.

    Parameters
    ----------
    module : torch.nn.Module
        The layer's attention.
    query : Tensor [rows, heads, columns, k_dim]
    key, value : Tensor [rows, kv_heads, columns, dim]
        What the layer got from the cache's `update`.
    attention_mask : None
        Padding is not in pages.
    scaling, softcap, s_aux : optional
        Factor of the scores, soft cap, sinks.
    dropout : float, optional
        Must be 0.
    sliding_window : int, optional
        Must be that of the spec.

    Returns
    -------
    out : Tensor [rows, columns, heads, v_dim]
    weights : None

    Raises
    ------
    InvalidArgument
        The layer has no K and V of a `KvallocCache`, or does what pages can't serve.
    """
    layer = getattr(module, "layer_idx", None)
    note = take_note(key)
    if note is None:
        raise InvalidArgument(
            f"layer {layer} attends by {PAGED!r} without a KvallocCache: pass one that was made for this "
            "model, or go back to model.set_attn_implementation('sdpa')"
        )
    kv, spec = note.kv, note.kv.store.spec
    why = None
    if attention_mask is not None:
        why = "a mask of its own"
    elif dropout:
        why = "dropout; call model.eval()"
    elif not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        why = "attention that is not causal"
    elif kwargs.get("position_bias") is not None:
        why = "a position bias"
    if why is not None:
        raise InvalidArgument(f"layer {layer} ({type(module).__name__}) asks for {why}; {PAGED!r} has none")
    window = spec.groups[spec.layer_map[note.layer][0]].window
    if sliding_window != window and sliding_window is not None and kv.columns > sliding_window:
        raise InvalidArgument(
            f"layer {layer} has a sliding window of {sliding_window}, and the spec says {window or 'none'}"
        )
    if note.latent is not None:
        return _attend_latent(module, query, note, scaling), None
    # A layer that uses the K and V of another one has written nothing.
    new = (key, value) if layer in (None, note.layer) else None
    out = kv.attend(note.layer, query, new, scale=scaling, soft_cap=softcap, sinks=s_aux)
    return out, None


def _attend_latent(module: Any, query: Tensor, note: Note, scaling: float | None) -> Tensor:
    """Multi-head latent attention on the latents."""
    weight, latent = expansion(module), note.latent
    if weight is None or latent is None:
        expand = type(getattr(module, "kv_b_proj", None)).__name__
        raise InvalidArgument(
            f"layer {note.layer} ({type(module).__name__}) expands its latent by {expand}, "
            f"and {PAGED!r} knows a plain linear kv_b_proj only; use gathered attention: "
            "model.set_attn_implementation('sdpa')"
        )
    rank = weight.shape[1]

    def attend(absorbed: Tensor, scale: float) -> Tensor:
        return note.kv.attend(note.layer, absorbed, (latent,), scale=scale, v_dim=rank)

    return attend_latent(weight, query, latent.shape[-1] - rank, scaling, attend)


AttentionInterface.register(PAGED, paged_attention)

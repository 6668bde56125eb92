"""Multi-head latent attention (MLA) on the latents themselves.

A token's latent is c, of `rank` values, and r, of `rope` values that carry the position. A head's K would be
``[to_k @ c, r]`` and its V ``to_v @ c``, by matrices that one linear layer of the model holds for all heads.
None of that is stored, or made of what is stored: ``q . (to_k @ c)`` is ``(q @ to_k) . c``, so one matrix
goes into the query and the other onto the result, and pages are read as they are: one KV head, whose V is
the first part of its K.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["attend_latent", "expansion"]


def expansion(module: object) -> Tensor | None:
    """The weights that would expand the latents of a layer of transformers.

    Parameters
    ----------
    module : torch.nn.Module
        The layer's attention.

    Returns
    -------
    Tensor [heads * (k_dim - rope + v_dim), rank] or None
        None if it has no plain linear ``kv_b_proj`` without a bias: then they are not known.
    """
    expand: Any = getattr(module, "kv_b_proj", None)
    # Of a subclass, or of what an adapter put there, the weights are not all it does.
    plain = type(expand) is nn.Linear and getattr(expand, "bias", None) is None
    weight: Tensor | None = expand.weight if plain else None
    return weight


def attend_latent(
    weight: Tensor,
    query: Tensor,
    rope: int,
    scale: float | None,
    attend: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """Attend over latents as if they had been expanded.

    Parameters
    ----------
    weight : Tensor [heads * (k_dim - rope + v_dim), rank]
        Of `expansion`.
    query : Tensor [rows, heads, columns, k_dim]
        With the part that carries the position at the end.
    rope : int
        Values of that part.
    scale : float or None
        Factor of the scores. Default: one over the square root of k_dim.
    attend : callable
        Takes queries [rows, heads, columns, rank + rope] and the scale; returns what is attended to, still
        latent, [rows, columns, heads, rank].

    Returns
    -------
    Tensor [rows, columns, heads, v_dim]
    """
    heads, k_dim = query.shape[1], query.shape[-1]
    nope = k_dim - rope
    by_head = weight.view(heads, -1, weight.shape[1])
    to_k, to_v = by_head[:, :nope], by_head[:, nope:]
    absorbed = torch.cat((query[..., :nope] @ to_k, query[..., nope:]), dim=-1)
    out = attend(absorbed, k_dim**-0.5 if scale is None else scale)
    # [rows, columns, heads, rank] by [heads, rank, v_dim], head by head.
    return (out.unsqueeze(-2) @ to_v.transpose(1, 2)).squeeze(-2)

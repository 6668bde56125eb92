"""A step's attention on a CUDA device: Triton for rows with one token, gather and SDPA for longer ones.

What the kernels read of a batch is uploaded once a step, through pinned memory that torch keeps until the
copy is through, and serves all layers.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvalloc.kernels import torch_cpu
from kvalloc.kernels.decode import Pages, paged_decode
from kvalloc.kernels.write import write_kv
from kvalloc.store.steps import Rows

__all__ = ["Plan", "attend", "plan", "write"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does in each layer of a group, on the device.

    Attributes
    ----------
    slots : int64 [tokens]
        Where each token is written; -1: nowhere.
    tokens : int64 [rows] or None
        Tokens of rows that have one; None if all have.
    table : int32 [rows, pages]
        Their block table.
    seq_lens : int32 [rows]
        Their lengths,
    longest, mean : int, float
        known to the host too.
    rest : torch_cpu.Plan or None
        Rows with more tokens.
    """

    slots: torch.Tensor
    tokens: torch.Tensor | None
    table: torch.Tensor
    seq_lens: torch.Tensor
    longest: int
    mean: float
    rest: torch_cpu.Plan | None


def plan(rows: Rows, kind: str, window: int | None, page_tokens: int, device: torch.device) -> Plan:
    """Turn a step into tensors on the device, once for all layers of a group.

    Parameters
    ----------
    rows : Rows
        The step.
    kind : str
        Of the layer group.
    window : int or None
        Its window or chunk.
    page_tokens : int
        Tokens of a page.
    device : torch.device

    Returns
    -------
    Plan
    """
    slots = np.full(rows.num_tokens, -1, np.int64)
    slots[rows.tokens] = rows.frames * page_tokens + rows.offsets
    one = rows.counts == 1
    lens = rows.seq_lens[one]
    pages = int(rows.end_page[one].max(initial=1))
    rest = None
    if not one.all():
        several = ~one
        longer = replace(
            rows,
            rows=rows.rows[several],
            first_token=rows.first_token[several],
            counts=rows.counts[several],
            seq_lens=rows.seq_lens[several],
            first_page=rows.first_page[several],
            end_page=rows.end_page[several],
        )
        rest = torch_cpu.plan(longer, kind, window, page_tokens, device)
    return Plan(
        slots=_upload(slots, device),
        tokens=None if one.all() else _upload(rows.first_token[one], device),
        table=_upload(rows.table[rows.rows[one], :pages], device),
        seq_lens=_upload(lens.astype(np.int32), device),
        longest=int(lens.max(initial=0)),
        mean=float(lens.mean()) if len(lens) else 0.0,
        rest=rest,
    )


def _upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def write(plan: Plan, view: torch_cpu.View, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
    """Put K and V of a step's tokens into their pages; arguments as of `torch_cpu.write`."""
    if k is not None:
        write_kv(k, v, view.k, view.v, plan.slots, view.k_scale, view.v_scale)


def attend(
    plan: Plan,
    q: torch.Tensor,
    view: torch_cpu.View,
    small: torch_cpu.View | None,
    staging: torch_cpu.Staging,
    *,
    kind: str,
    window: int | None,
    scale: float,
    v_dim: int,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a step's tokens over the pages of their rows; arguments as of `torch_cpu.attend`.

    Parameters
    ----------
    plan, q, view, small, staging, scale, v_dim, soft_cap, sinks
        As of `torch_cpu.attend`.
    kind : str
        Of the layer group.
    window : int or None
        Its window or chunk.

    Returns
    -------
    torch.Tensor [tokens, heads, v_dim]
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_dim)
    if plan.rest is not None:
        out = torch_cpu.attend(
            plan.rest, q, view, small, staging, scale=scale, v_dim=v_dim, soft_cap=soft_cap, sinks=sinks
        )
    if len(plan.seq_lens):
        decoded = paged_decode(
            q if plan.tokens is None else q.index_select(0, plan.tokens),
            view.k,
            view.v,
            plan.table,
            plan.seq_lens,
            scale=scale,
            window=window if kind == "window" else None,
            chunk=window if kind == "chunked" else None,
            soft_cap=soft_cap,
            sinks=sinks,
            k_scale=view.k_scale,
            v_scale=view.v_scale,
            small=None if small is None else Pages(*small),
            v_dim=v_dim if view.v is None else None,
            max_len=plan.longest,
            mean_len=plan.mean,
            out=out if plan.tokens is None else None,
        )
        if plan.tokens is not None:
            out.index_copy_(0, plan.tokens, decoded)
    return out

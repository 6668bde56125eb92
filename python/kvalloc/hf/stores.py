"""What a layer stores: KV heads and their dimensions, or the size of a fixed state, on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvalloc.errors import SpecError
from kvalloc.hf.classes import ONE_PER_HEAD, Kind
from kvalloc.hf.fields import Fields, field_error

__all__ = ["Attention", "State", "attention_of", "state_of"]


@dataclass(frozen=True, slots=True)
class Attention:
    """What one layer stores per token, on one tensor-parallel rank."""

    kind: Literal["full", "window", "chunked", "latent"]
    tokens: int
    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class State:
    """One layer's fixed state on one rank, in values: the recurrent part, and inputs a convolution keeps."""

    recurrent: int
    conv: int


def attention_of(fields: Fields, index: int, kind: Kind, tp: int) -> Attention | None:
    """What a layer of this kind stores per token; None if this one has no attention."""
    tokens = 0
    if kind == "window":
        tokens = fields.need("sliding_window", "sliding_window_size", "attention_window_size")
        limit = fields.number("max_position_embeddings")
        # A window that no sequence outgrows is no window.
        if limit is not None and tokens >= limit:
            kind, tokens = "full", 0
    elif kind == "chunked":
        tokens = fields.need("attention_chunk_size")
    rank = fields.number("kv_lora_rank")
    if rank is not None:
        if kind != "full":
            raise field_error("kv_lora_rank", rank, f"not known how a latent is kept in a {kind} layer")
        fields.get("v_head_dim")  # of the values after expansion: not stored
        return Attention("latent", 0, 1, rank + fields.need("qk_rope_head_dim", least=0), 0)
    heads, k_dim, v_dim = _shape(fields, index, kind)
    if heads == 0:
        return None
    assert kind in ("full", "window", "chunked")
    return Attention(kind, tokens, _divided(heads, tp), k_dim, v_dim)


def _divided(heads: int, tp: int) -> int:
    """KV heads of one rank: divided, or one of them replicated."""
    if heads % tp == 0:
        return heads // tp
    if tp % heads == 0:
        return 1
    error = SpecError(f"{heads} KV heads can't be divided among tp={tp} ranks, nor replicated evenly")
    error.field, error.given = "tp", tp
    raise error


def _shape(fields: Fields, index: int, kind: Kind) -> tuple[int, int, int]:
    """KV heads, values of a K head, values of a V head. No heads: the layer has no attention."""
    family = fields.model_type
    if family == "step3p5" and kind == "window":
        other = fields.inner("attention_other_setting")
        heads = other.number("num_attention_groups") or _kv_heads(fields, index)
        dim = other.number("head_dim") or fields.need("head_dim")
        return heads, dim, dim
    if family in ("mimo_v2", "mimo_v2_flash"):
        return _mimo(fields, kind)
    if family == "gemma4_text" and kind == "full" and not fields.per_layer:
        heads = fields.need("num_key_value_heads")
        if fields.flag("attention_k_eq_v"):
            heads = fields.number("num_global_key_value_heads") or heads
        dim = fields.number("global_head_dim") or fields.need("head_dim")
        return heads, dim, dim
    if family in ("deci", "nemotron-nas") and (blocks := fields.get("block_configs")) is not None:
        heads = _block_heads(fields, blocks, index)
    else:
        heads = _kv_heads(fields, index)
    dim = _head_dim(fields)
    return heads, dim, dim


def _mimo(fields: Fields, kind: Kind) -> tuple[int, int, int]:
    heads = fields.need("num_key_value_heads")
    k_dim = _head_dim(fields)
    v_dim = fields.number("v_head_dim") or k_dim
    if kind == "window":
        heads = fields.number("swa_num_key_value_heads") or heads
        k_dim = fields.number("swa_head_dim") or k_dim
        v_dim = fields.number("swa_v_head_dim") or v_dim
    return heads, k_dim, v_dim


def _kv_heads(fields: Fields, index: int) -> int:
    family = fields.model_type
    if family == "falcon":
        # multi_query means one head, whatever num_kv_heads says, except in the new architecture.
        if fields.flag("new_decoder_architecture"):
            return fields.number("num_kv_heads", "n_head_kv") or fields.need("num_attention_heads", "n_head")
        fields.get("num_kv_heads", "n_head_kv")
        return 1 if fields.flag("multi_query") else fields.need("num_attention_heads", "n_head")
    if family == "gpt_bigcode":
        return 1 if fields.flag("multi_query") else fields.need("num_attention_heads", "n_head")
    if family == "chatglm":
        if fields.flag("multi_query_attention"):
            return fields.need("multi_query_group_num")
        return fields.need("num_attention_heads")
    if family in ("dbrx", "mpt"):
        inner = fields.inner("attn_config")
        return (
            inner.need("kv_n_heads")
            if family == "dbrx"
            else inner.number("kv_n_heads") or fields.need("n_heads")
        )
    listed = fields.get("num_key_value_heads_per_layer", "num_kv_heads_per_layer")
    if listed is None:
        listed = fields.get("num_key_value_heads", "num_kv_heads", "num_attention_groups")
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        if index >= len(listed):
            raise field_error("num_key_value_heads", listed, f"has no entry for layer {index}")
        heads = listed[index]
        if heads is None:
            return 0
        if isinstance(heads, bool) or not isinstance(heads, int) or not 0 <= heads < 2**32:
            raise field_error("num_key_value_heads", listed, "must be whole numbers")
        return heads
    if listed is not None:
        return fields.need("num_key_value_heads", "num_kv_heads", "num_attention_groups")
    if family in ONE_PER_HEAD:
        return _heads(fields)
    error = SpecError(
        "config has no field 'num_key_value_heads', and its class no default for it "
        f"(model_type {family!r}); if there is one KV head per head, say so"
    )
    error.field = "num_key_value_heads"
    raise error


def _heads(fields: Fields) -> int:
    return fields.need("num_attention_heads", "n_head", "n_heads", "num_heads")


def _block_heads(fields: Fields, blocks: Any, index: int) -> int:
    """KV heads of one block of a pruned model (nemotron-nas)."""
    try:
        attention = Fields(blocks[index]["attention"])
    except (TypeError, LookupError):
        raise field_error("block_configs", blocks, f"has no attention for layer {index}") from None
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    heads = attention.number("num_key_value_heads")
    return heads if heads is not None else _heads(fields) // attention.need("n_heads_in_group")


def _head_dim(fields: Fields) -> int:
    given = fields.number("head_dim", "attention_head_dim", "kv_channels")
    if given is not None:
        return given
    hidden = fields.need("hidden_size", "n_embd", "d_model", "n_embed", "model_dim")
    heads = _heads(fields)
    if hidden % heads:
        raise field_error("hidden_size", hidden, f"is no multiple of {heads} heads, and there is no head_dim")
    return hidden // heads


def state_of(fields: Fields, tp: int) -> State:
    """The fixed state of one layer. A convolution of width w keeps w - 1 inputs."""
    family = fields.model_type
    if family in ("minimax", "minimax_text_01", "minimax_m1"):  # lightning attention: one matrix per head
        heads = _split("num_attention_heads", _heads(fields), tp)
        return State(heads * _head_dim(fields) ** 2, 0)
    if family.startswith("lfm2"):
        return State(
            0, _split("hidden_size", fields.need("hidden_size"), tp) * (fields.need("conv_L_cache") - 1)
        )
    if family == "recurrent_gemma":
        width = _split("lru_width", fields.number("lru_width") or fields.need("hidden_size"), tp)
        return State(width, width * (fields.need("conv1d_width") - 1))
    if family == "kimi_linear" or fields.get("linear_attn_config"):  # Kimi delta attention
        linear = fields.inner("linear_attn_config")
        heads = linear.number("num_heads") or fields.need("linear_num_heads")
        dim = linear.number("head_dim") or fields.need("linear_head_dim")
        kernel = linear.number("short_conv_kernel_size") or fields.need("linear_conv_kernel_dim")
        heads = _split("linear_attn_config.num_heads", heads, tp)
        return State(heads * dim * dim, 3 * heads * dim * (kernel - 1))
    if fields.get("linear_num_value_heads") is not None:  # gated delta net
        values = _split("linear_num_value_heads", fields.need("linear_num_value_heads"), tp)
        keys = _split("linear_num_key_heads", fields.need("linear_num_key_heads"), tp)
        k_dim, v_dim = fields.need("linear_key_head_dim"), fields.need("linear_value_head_dim")
        kernel = fields.need("linear_conv_kernel_dim")
        return State(values * k_dim * v_dim, (2 * keys * k_dim + values * v_dim) * (kernel - 1))
    return _mamba(fields, tp)


def _mamba(fields: Fields, tp: int) -> State:
    names = [
        "mamba_num_heads",
        "mamba_n_heads",
        "n_mamba_heads",
        *(["num_heads"] if fields.model_type == "mamba2" else []),
    ]
    size = fields.number("ssm_state_size", "mamba_d_state", "state_size")
    kernel = fields.number("conv_kernel", "mamba_d_conv", "conv_kernel_size")
    if size is None or kernel is None:
        raise field_error("layer_types", "a fixed state", "no known field says how large it is")
    expand = fields.number("mamba_expand", "expand") or 2
    heads = fields.number(*names)
    if heads is None:  # Mamba 1: a state per channel
        inner = fields.number("intermediate_size") if fields.model_type in ("mamba", "falcon_mamba") else None
        inner = _split("mamba_expand", inner or expand * fields.need("hidden_size"), tp)
        return State(inner * size, inner * (kernel - 1))
    dim = fields.get(
        "mamba_head_dim", "mamba_d_head", "mamba_headdim", *(["head_dim"] if "num_heads" in names else [])
    )
    if dim is None or dim == "auto":
        dim = (fields.number("mamba_d_ssm") or expand * fields.need("hidden_size")) // heads
    elif isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise field_error("mamba_head_dim", dim, "must be a whole number of at least 1")
    groups = fields.number("n_groups", "mamba_n_groups", "mamba_ngroups") or 1
    heads = _split(names[0], heads, tp)
    groups = 1 if groups == 1 else _split("n_groups", groups, tp)
    return State(heads * dim * size, (heads * dim + 2 * groups * size) * (kernel - 1))


def _split(name: str, number: int, tp: int) -> int:
    if number % tp:
        raise field_error(name, number, f"can't be divided among tp={tp} ranks")
    return number // tp

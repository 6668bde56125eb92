"""The configs of well-known models, as far as the KV cache depends on them.

Each entry has the fields of the model's ``config.json`` that `kvalloc.KVSpec.from_hf_config` reads, under
their own names and with the nesting of the original. They are here for planning and for tests; to serve a
model, read its own config.

>>> kvalloc.KVSpec.from_hf_config(kvalloc.models.get("Qwen2.5-7B")).bytes_per_token
57344
"""

import copy
import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

from kvalloc.errors import SpecError

__all__ = ["get", "names", "nearest"]

Config = dict[str, Any]

_WORDS: Final = re.compile(r"[a-z]+|\d+(?:\.\d+)?")


def names() -> tuple[str, ...]:
    """All models, sorted.

    Returns
    -------
    tuple of str
    """
    return tuple(sorted(_MODELS))


def get(name: str) -> Config:
    """The config of a model.

    Parameters
    ----------
    name : str
        Such as ``"qwen2.5-7b"``. The case does not matter, nor do ``_`` and blanks for ``-``, an organisation
        in front (``"Qwen/Qwen2.5-7B"``), or an ending that leaves the geometry as it is (``-Instruct``,
        ``-it``, ``-Chat``, ``-Base``, ``-hf``).

    Returns
    -------
    dict
        A copy, to be changed at will.

    Raises
    ------
    SpecError
        For an unknown model, with the names that are nearest.

    Examples
    --------
    >>> kvalloc.models.get("Qwen/Qwen2.5-7B-Instruct")["num_key_value_heads"]
    4
    """
    key = re.sub(r"[\s_]+", "-", name.strip().rpartition("/")[2].lower())
    key = _ALIASES.get(key, key)
    while key not in _MODELS and (shorter := re.sub(r"-(instruct|it|chat|base|hf)$", "", key)) != key:
        key = _ALIASES.get(shorter, shorter)
    if key not in _MODELS:
        listed = " or ".join(map(repr, nearest(key)))
        hint = (
            f"did you mean {listed}?" if listed else "`kvalloc models`, or kvalloc.models.names(), lists all."
        )
        error = SpecError(f"no model {name!r}: {hint}")
        error.field, error.given = "name", name
        raise error
    return copy.deepcopy(_MODELS[key])


def nearest(name: str, count: int = 4) -> tuple[str, ...]:
    """The models whose names are most like a name, at most two of a family.

    Parameters
    ----------
    name : str
        What somebody wrote.
    count : int, optional
        How many at most.

    Returns
    -------
    tuple of str
        The best first; empty if nothing is like it.

    Examples
    --------
    >>> kvalloc.models.nearest("Llama-8B")
    ('llama-3.1-8b', 'llama-2-7b', 'qwen3-8b', 'mixtral-8x7b')
    """
    key = re.sub(r"[\s_]+", "-", name.strip().rpartition("/")[2].lower())
    words = set(_WORDS.findall(key))
    scored = []
    for other in _MODELS:
        theirs = set(_WORDS.findall(other))
        alike = len(words & theirs) / len(words | theirs)
        scored.append((difflib.SequenceMatcher(None, key, other).ratio() + alike, other))
    found: list[str] = []
    families: dict[str, int] = {}
    for score, other in sorted(scored, key=lambda pair: (-pair[0], pair[1])):
        family = re.split(r"[-\d]", other)[0]
        if score < 0.6 or len(found) == count:
            break
        if families.get(family, 0) < 2:
            families[family] = families.get(family, 0) + 1
            found.append(other)
    return tuple(found)


def _gqa(
    model_type: str,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    head_dim: int | None = None,
    **more: Any,
) -> Config:
    """A config in the usual names."""
    config: Config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        **more,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    return config


def _mla(model_type: str, layers: int, heads: int, **more: Any) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **more,
    }


def _nested(model_type: str, text: Mapping[str, Any], **more: Any) -> Config:
    return {"model_type": model_type, "text_config": dict(text), **more}


def _llama4(rotary: list[int]) -> Config:
    # Without a list, every fourth layer has no rotary positions.
    more = {"attention_chunk_size": 8192, "no_rope_layers": rotary}
    return _nested("llama4", _gqa("llama4_text", 48, 40, 8, 5120, 128, **more))


def _every(period: int, layers: int, often: str, seldom: str) -> list[str]:
    """`seldom` in every `period`-th layer."""
    return [often if (i + 1) % period else seldom for i in range(layers)]


def _qwen2(layers: int, heads: int, kv_heads: int, hidden: int, max_window_layers: int) -> Config:
    # The window is set and switched off.
    off = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": max_window_layers}
    return _gqa("qwen2", layers, heads, kv_heads, hidden, max_position_embeddings=32768, **off)


def _gdn(model_type: str, layers: int, heads: int, kv_heads: int, hidden: int, values: int) -> Config:
    return _gqa(
        model_type,
        layers,
        heads,
        kv_heads,
        hidden,
        256,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=values,
        linear_value_head_dim=128,
    )


def _gemma3(layers: int, heads: int, kv_heads: int, hidden: int, head_dim: int, window: int) -> Config:
    pattern = {"sliding_window": window, "sliding_window_pattern": 6}
    return _gqa("gemma3_text", layers, heads, kv_heads, hidden, head_dim, **pattern)


def _gemma3n(layers: int, shared: int) -> Config:
    types = _every(5, layers, "sliding_attention", "full_attention")
    more = {"sliding_window": 512, "num_kv_shared_layers": shared, "layer_types": types}
    return _nested("gemma3n", _gqa("gemma3n_text", layers, 8, 2, 2048, 256, **more))


def _gpt_oss(layers: int) -> Config:
    types = _every(2, layers, "sliding_attention", "full_attention")
    return _gqa("gpt_oss", layers, 64, 8, 2880, 64, sliding_window=128, layer_types=types)


def _falcon(layers: int, heads: int, kv_heads: int, hidden: int, *, new: bool) -> Config:
    # The 7B says 71 KV heads and has one.
    return {
        "model_type": "falcon",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "hidden_size": hidden,
        "multi_query": True,
        "new_decoder_architecture": new,
    }


def _nemotron_h(pattern: str, heads: int, kv_heads: int, hidden: int, mamba_heads: int, state: int) -> Config:
    return {
        "model_type": "nemotron_h",
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "hidden_size": hidden,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": 64,
        "ssm_state_size": state,
        "n_groups": 8,
        "conv_kernel": 4,
        "expand": 2,
    }


_LIGHTNING: Final = {"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10}
_SLIDING_FIRST: Final = _every(6, 30, "sliding_attention", "full_attention")

_MODELS: Final[dict[str, Config]] = {
    # Llama and Mistral
    "llama-2-7b": _gqa("llama", 32, 32, 32, 4096),
    "llama-2-13b": _gqa("llama", 40, 40, 40, 5120),
    "llama-2-70b": _gqa("llama", 80, 64, 8, 8192),
    "llama-3.1-8b": _gqa("llama", 32, 32, 8, 4096),
    "llama-3.1-70b": _gqa("llama", 80, 64, 8, 8192),
    "llama-3.1-405b": _gqa("llama", 126, 128, 8, 16384),
    "llama-4-scout": _llama4([]),
    "llama-4-maverick": _llama4([1, 1, 1, 0] * 12),
    "smollm2-135m": _gqa("llama", 30, 9, 3, 576),
    "mistral-7b-v0.1": _gqa("mistral", 32, 32, 8, 4096, sliding_window=4096, max_position_embeddings=32768),
    "mistral-7b-v0.3": _gqa("mistral", 32, 32, 8, 4096, sliding_window=None, max_position_embeddings=32768),
    "mistral-nemo-12b": _gqa("mistral", 40, 32, 8, 5120, 128, sliding_window=None),
    "mixtral-8x7b": _gqa("mixtral", 32, 32, 8, 4096, sliding_window=None),
    "mixtral-8x22b": _gqa("mixtral", 56, 48, 8, 6144, sliding_window=None),
    # Qwen
    "qwen2.5-7b": _qwen2(28, 28, 4, 3584, 28),
    "qwen2.5-72b": _qwen2(80, 64, 8, 8192, 80),
    "qwen3-0.6b": _gqa("qwen3", 28, 16, 8, 1024, 128, sliding_window=None, use_sliding_window=False),
    "qwen3-1.7b": _gqa("qwen3", 28, 16, 8, 2048, 128, sliding_window=None, use_sliding_window=False),
    "qwen3-8b": _gqa("qwen3", 36, 32, 8, 4096, 128, sliding_window=None, use_sliding_window=False),
    "qwen3-14b": _gqa("qwen3", 40, 40, 8, 5120, 128, sliding_window=None, use_sliding_window=False),
    "qwen3-32b": _gqa("qwen3", 64, 64, 8, 5120, 128, sliding_window=None, use_sliding_window=False),
    "qwen3-30b-a3b": _gqa("qwen3_moe", 48, 32, 4, 2048, 128, sliding_window=None, use_sliding_window=False),
    "qwen3-235b-a22b": _gqa("qwen3_moe", 94, 64, 4, 4096, 128, sliding_window=None, use_sliding_window=False),
    "qwen3-coder-480b-a35b": _gqa(
        "qwen3_moe", 62, 96, 8, 6144, 128, sliding_window=None, use_sliding_window=False
    ),
    "qwen3-next-80b-a3b": _gdn("qwen3_next", 48, 16, 2, 2048, 32),
    "qwen3.5-27b": _nested("qwen3_5", _gdn("qwen3_5_text", 64, 24, 4, 5120, 48)),
    "qwen3.5-397b-a17b": _nested("qwen3_5_moe", _gdn("qwen3_5_moe_text", 60, 32, 2, 4096, 64)),
    # Gemma
    "gemma-2-9b": _gqa("gemma2", 42, 16, 8, 3584, 256, sliding_window=4096, max_position_embeddings=8192),
    "gemma-2-27b": _gqa("gemma2", 46, 32, 16, 4608, 128, sliding_window=4096, max_position_embeddings=8192),
    "gemma-3-270m": _gemma3(18, 4, 1, 640, 256, 512),
    "gemma-3-1b": _gemma3(26, 4, 1, 1152, 256, 512),
    # Heads, KV heads, head_dim and the pattern are left to the class.
    "gemma-3-4b": _nested(
        "gemma3",
        {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
    ),
    "gemma-3-12b": _nested("gemma3", _gemma3(48, 16, 8, 3840, 256, 1024)),
    "gemma-3-27b": _nested("gemma3", _gemma3(62, 32, 16, 5376, 128, 1024)),
    "gemma-3n-e2b": _gemma3n(30, 10),
    "gemma-3n-e4b": _gemma3n(35, 15),
    "gemma-4-26b-a4b": _nested(
        "gemma4",
        _gqa(
            "gemma4_text",
            30,
            16,
            8,
            2816,
            256,
            attention_k_eq_v=True,
            global_head_dim=512,
            layer_types=_SLIDING_FIRST,
            num_global_key_value_heads=2,
            num_kv_shared_layers=0,
            sliding_window=1024,
        ),
    ),
    # Latents
    "deepseek-v2-lite": _mla("deepseek_v2", 27, 16),
    "deepseek-v2": _mla("deepseek_v2", 60, 128),
    "deepseek-v3": _mla("deepseek_v3", 61, 128, num_nextn_predict_layers=1),
    "deepseek-r1": _mla("deepseek_v3", 61, 128, num_nextn_predict_layers=1),
    "deepseek-v3.2": _mla("deepseek_v32", 61, 128, num_nextn_predict_layers=1, index_head_dim=128),
    "kimi-k2": _mla("kimi_k2", 61, 64),
    "kimi-k2.5": _nested("kimi_k25", _mla("kimi_k2", 61, 64)),
    "glm-5": _mla("glm_moe_dsa", 78, 64, num_nextn_predict_layers=1, index_head_dim=128),
    "kimi-linear-48b-a3b": _mla(
        "kimi_linear",
        27,
        32,
        head_dim=72,
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    ),
    # Phi. The long variants have a window that no sequence outgrows.
    "phi-3-mini-4k": _gqa("phi3", 32, 32, 32, 3072, sliding_window=2047, max_position_embeddings=4096),
    "phi-3-mini-128k": _gqa("phi3", 32, 32, 32, 3072, sliding_window=262144, max_position_embeddings=131072),
    "phi-3-medium-128k": _gqa(
        "phi3", 40, 40, 10, 5120, sliding_window=131072, max_position_embeddings=131072
    ),
    "phi-4": _gqa("phi3", 40, 40, 10, 5120, sliding_window=None, max_position_embeddings=16384),
    "phi-4-mini": _gqa("phi3", 32, 24, 8, 3072, sliding_window=262144, max_position_embeddings=131072),
    # Others
    "gpt-oss-20b": _gpt_oss(24),
    "gpt-oss-120b": _gpt_oss(36),
    "falcon-7b": _falcon(32, 71, 71, 4544, new=False),
    "falcon-40b": _falcon(60, 128, 8, 8192, new=True),
    "falcon-180b": _falcon(80, 232, 8, 14848, new=True),
    "glm-4-9b": {
        "model_type": "chatglm",
        "num_layers": 40,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "kv_channels": 128,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
    },
    "glm-4.5-air": _gqa("glm4_moe", 46, 96, 8, 4096, 128),
    "glm-4.5": _gqa("glm4_moe", 92, 96, 8, 5120, 128),
    "glm-4.6": _gqa("glm4_moe", 92, 96, 8, 5120, 128),
    "minimax-text-01": _gqa("minimax_text_01", 80, 64, 8, 6144, 128, **_LIGHTNING),
    "minimax-m1": _gqa("minimax_m1", 80, 64, 8, 6144, 128, **_LIGHTNING),
    "minimax-m2": _gqa("minimax_m2", 62, 48, 8, 3072, 128, attn_type_list=[1] * 62),
    "mimo-v2-flash": {
        **_gqa("mimo_v2_flash", 48, 64, 4, 4096, 192),
        "v_head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window_size": 128,
        "hybrid_layer_pattern": [0 if i == 0 or i % 6 == 5 else 1 for i in range(48)],
    },
    "step-3.7-flash": _nested(
        "step3p7",
        {
            "model_type": "step3p5",
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_attention_groups": 8,
            "head_dim": 128,
            "hidden_size": 4096,
            "sliding_window": 512,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 96,
                "num_attention_groups": 8,
                "head_dim": 128,
            },
            # Layers for multi-token prediction follow the 45.
            "layer_types": ["sliding_attention" if i % 4 else "full_attention" for i in range(48)],
            "num_nextn_predict_layers": 3,
        },
    ),
    "nemotron-3-nano-30b-a3b": _nemotron_h(
        "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME", 32, 2, 2688, 64, 128
    ),
    "nemotron-h-56b": _nemotron_h("M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-", 64, 8, 8192, 256, 256),
    "starcoder2-3b": _gqa("starcoder2", 30, 24, 2, 3072, sliding_window=4096, max_position_embeddings=16384),
}

_ALIASES: Final = {
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "meta-llama-3-8b": "llama-3.1-8b",
    "meta-llama-3-70b": "llama-3.1-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "meta-llama-3.1-405b": "llama-3.1-405b",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-nemo-instruct-2407": "mistral-nemo-12b",
    "mistral-7b-instruct-v0.3": "mistral-7b-v0.3",
    "mistral-7b-instruct-v0.1": "mistral-7b-v0.1",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x7b-instruct-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "mixtral-8x22b-instruct-v0.1": "mixtral-8x22b",
    "kimi-k2-instruct-0905": "kimi-k2",
    "glm-5.1": "glm-5",
    "glm-5.2": "glm-5",
    "minimax-text-01-hf": "minimax-text-01",
    "minimax-m2.5": "minimax-m2",
    "phi-3-medium": "phi-3-medium-128k",
    "phi-3-mini-4k-instruct": "phi-3-mini-4k",
    "nvidia-nemotron-3-nano-30b-a3b-bf16": "nemotron-3-nano-30b-a3b",
    "nemotron-h-56b-base-8k": "nemotron-h-56b",
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
}

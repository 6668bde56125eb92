"""Reading the KV geometry out of a Hugging Face ``config.json``, without transformers.

`read` turns a config into one `Layer` per decoder layer: what KV it stores, what fixed state, or whose KV it
uses. What a config leaves out has the default of its model class (`_DEFAULTS`), since files are often saved
without fields that equal the default. A config that could mean two things is refused, naming the field: a
wrong number of bytes is worse than none.

To teach it a model: add its ``model_type`` to `_WINDOWS` (how its sliding layers are found), its class
defaults to `_DEFAULTS`, and a row to the table in ``tests/test_spec.py``. A model with its own names for
heads or states also gets a branch in `_shape` or `_state`.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from kvalloc.errors import SpecError

__all__ = ["Attention", "ConfigLike", "Layer", "State", "read"]

Kind: TypeAlias = Literal["full", "window", "chunked", "latent", "state", "none", "both"]


@runtime_checkable
class HasToDict(Protocol):
    """A transformers config: anything with ``to_dict()``."""

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data."""


ConfigLike: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str] | HasToDict"


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


@dataclass(frozen=True, slots=True)
class Layer:
    """What one decoder layer keeps. ``uses``: the layer whose KV it reads instead of its own."""

    attention: Attention | None = None
    state: State | None = None
    uses: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """All layers, and what else the config knows."""

    model_type: str
    layers: tuple[Layer, ...]
    extra: tuple[Layer, ...] = ()
    indexer_layers: int = 0
    indexer_dim: int = 0


# Classes without a window, or that list their layers.
_NEVER: Final = """
    apertus arcee baichuan bamba bloom chatglm codegen cohere dbrx deci deepseek deepseek_v2 deepseek_v3
    deepseek_v32 ernie4_5 ernie4_5_moe exaone falcon falcon_h1 falcon_mamba gemma glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe internlm2 internlm3 jamba kimi_k2 kimi_linear lfm2
    lfm2_moe llama llama4_text longcat_flash mamba mamba2 mimo_v2 mimo_v2_flash minicpm minicpm3 minimax
    minimax_m1 minimax_m2 minimax_text_01 mpt nemotron nemotron-nas nemotron_h olmo olmo2 olmoe openelm opt
    persimmon phi qwen qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma seed_oss smollm3 solar
    stablelm step3p5 xverse
"""
# Every layer slides if there is a window.
_ALL: Final = "ministral mistral mixtral phi3 phimoe starcoder2"
# Layers from max_window_layers on slide, if use_sliding_window.
_ABOVE: Final = """
    dots1 qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text
"""
# How the sliding layers of a class are found when the config has no list of layer types. A number n: every
# n-th layer is full, the others slide.
_WINDOWS: Final[dict[str, str | int]] = {
    **dict.fromkeys(_NEVER.split(), "never"),
    **dict.fromkeys(_ALL.split(), "all"),
    **dict.fromkeys(_ABOVE.split(), "above"),
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
}

# Class defaults of the fields that are read, where they differ from "as many KV heads as heads, no window".
_MLA: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_GDN: Final = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "cohere2": {"sliding_window": 4096},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "exaone4": {"sliding_window": 4096},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "gemma": {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3n_text": {
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
    "gemma4_text": {
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
    },
    "glm_moe_dsa": _MLA,
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "kimi_k2": _MLA,
    "kimi_linear": {**_MLA, "num_hidden_layers": 27, "num_attention_heads": 32, "full_attention_interval": 4},
    "llama4_text": {
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    },
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "nemotron_h": {"num_key_value_heads": 8, "conv_kernel": 4, "n_groups": 8, "ssm_state_size": 128},
    "olmo3": {"sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen2_moe": {"num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3_next": {"num_key_value_heads": 2, **_GDN},
    "qwen3_5_text": {"num_key_value_heads": 4, **_GDN},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, **_GDN},
    "starcoder2": {"num_key_value_heads": 2},
}
_ALIASES: Final = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "kimi_k2",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
}

# What layer types are called.
_TYPES: Final[dict[str, Kind]] = {
    **dict.fromkeys(["full_attention", "attention", "global_attention", "global", "full", "*"], "full"),
    **dict.fromkeys(["deepseek_sparse_attention"], "full"),
    **dict.fromkeys(["sliding_attention", "sliding_window", "sliding", "local_attention", "local"], "window"),
    "chunked_attention": "chunked",
    **dict.fromkeys(["linear_attention", "mamba", "mamba2", "ssm", "recurrent", "conv", "kda", "M"], "state"),
    **dict.fromkeys(["mlp", "moe", "-", "E"], "none"),
    "hybrid": "both",
}

# Fields that change what is cached. In a config of a class that isn't known, one that is set and was not read
# is refused.
_SUSPECT: Final = re.compile(
    r"sliding|window|chunk|layer_type|block_type|layers_type|_pattern|share|lora_rank|ssm|mamba|linear|conv"
    r"|recurrent|state_size|cross_attention|kv_heads|key_value|kv_groups|per_layer|swa|global|local|latent|block_config|compress"
    r"|cla_|yoco|multi_query|v_head_dim|attn_layer|attention_layer|attn_type|kv_source|index_"
)
_HARMLESS: Final = {
    "add_cross_attention",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "max_window_layers",
    "mlp_layer_types",
    "moe_shared_expert_intermediate_size",
    "n_shared_experts",
    "num_key_value_heads",
    "num_shared_experts",
    "q_lora_rank",
    "shared_expert_intermediate_size",
    "tie_word_embeddings",
}
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")


def read(config: ConfigLike, *, tp: int = 1, mtp: bool = False, indexer: bool = False) -> Model:
    """Read a config.

    Parameters
    ----------
    config : mapping, path or object with ``to_dict()``
        The content of a ``config.json``, its path or its folder's, or a transformers config.
    tp : int
        Tensor-parallel ranks: KV heads are divided among them, or replicated if there are fewer heads than
        ranks.
    mtp : bool
        Read the extra layers for multi-token prediction too.
    indexer : bool
        Read the keys of a sparse-attention indexer too.

    Returns
    -------
    Model
        One `Layer` per decoder layer, for one rank.

    Raises
    ------
    SpecError
        If the config can't be read without guessing; ``field`` names what is to blame.
    """
    fields = _Fields(_text(_load(config)))
    if fields.flag("is_encoder_decoder"):
        raise _error("is_encoder_decoder", True, "encoder-decoder models are not paged by this library")
    if fields.get("cross_attention_layers"):
        raise _error(
            "cross_attention_layers",
            fields.get("cross_attention_layers"),
            "cross-attention KV is not supported",
        )
    kinds = _kinds(fields)
    if fields.model_type == "longcat_flash":  # every layer has two attentions
        kinds = [kind for kind in kinds for _ in range(2)]
    layers = [_layer(fields, i, kind, tp) for i, kind in enumerate(kinds)]
    layers = _shared(fields, kinds, layers)
    extra = _extra(fields, layers, tp) if mtp else ()
    indexer_layers, indexer_dim = _indexer(fields, layers, extra) if indexer else (0, 0)
    fields.check_unread()
    if not any(layer.attention or layer.state for layer in layers):
        raise _error("layer_types", kinds, "no layer stores anything")
    return Model(fields.model_type, tuple(layers), extra, indexer_layers, indexer_dim)


# -- getting at the fields -----------------------------------------------------------------------------------


def _error(name: str, given: object, why: str) -> SpecError:
    shown = repr(given)
    error = SpecError(f"config field {name!r} is {shown if len(shown) < 80 else shown[:77] + '...'}: {why}")
    error.field = name
    error.given = given
    return error


def _load(config: ConfigLike) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, HasToDict) and not isinstance(config, type):
        return config.to_dict()
    if not isinstance(config, str | os.PathLike):
        raise SpecError(
            f"config must be a mapping, a path or an object with to_dict(), not {type(config).__name__}"
        )
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"config {str(config)!r} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecError(f"config {str(config)!r} is not JSON: {error}") from error
    if not isinstance(loaded, Mapping):
        raise SpecError(f"config {str(config)!r} holds {type(loaded).__name__}, not an object")
    return loaded


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal config that describes the decoder."""
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, HasToDict):
            inner = inner.to_dict()
        if isinstance(inner, Mapping) and inner:
            inner = dict(inner)
            if "model_type" not in inner and "model_type" in config:
                inner["model_type"] = config["model_type"]
            if config.get("is_encoder_decoder"):
                inner["is_encoder_decoder"] = True
            return _text(inner)
    return config


@dataclass
class _Fields:
    """A config with its class defaults, that knows which fields were looked at."""

    config: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        given = str(self.config.get("model_type") or "")
        self.model_type = _ALIASES.get(given, given)
        self.known = self.model_type in _WINDOWS
        self.defaults = _DEFAULTS.get(self.model_type, {})

    def get(self, *names: str) -> Any:
        """The first of these fields that is set, else the class default of one."""
        self.read.update(names)
        for name in names:
            if (value := self.config.get(name)) is not None:
                return value
        for name in names:
            # An explicit null means none, unless the class can't do without.
            if name in self.defaults and name not in self.config:
                return self.defaults[name]
        return None

    def number(self, *names: str, least: int = 1) -> int | None:
        """A whole number, None if there is none."""
        value = self.get(*names)
        if value is None:
            return None
        name = next((n for n in names if self.config.get(n) is not None), names[0])
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**32:
            raise _error(name, value, f"must be a whole number from {least} to 2**32 - 1")
        return value

    def need(self, *names: str, least: int = 1) -> int:
        """A whole number that must be there."""
        value = self.number(*names, least=least)
        if value is None:
            error = SpecError(
                f"config has no field {' or '.join(map(repr, names))}, and its class no default for it"
            )
            error.field = names[0]
            raise error
        return value

    def flag(self, name: str) -> bool:
        """A bool; absent is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise _error(name, value, "must be true or false")
        return bool(value)

    def inner(self, name: str) -> "_Fields":
        """The fields of an object within the config."""
        value = self.get(name)
        if value is None:
            value = {}
        if isinstance(value, HasToDict):
            value = value.to_dict()
        if not isinstance(value, Mapping):
            raise _error(name, value, "must be an object")
        return _Fields(value)

    def check_unread(self) -> None:
        """Refuse what could change the cache in a class that is not known."""
        if self.known:
            return
        for name, value in self.config.items():
            if value and name not in self.read and name not in _HARMLESS and _SUSPECT.search(name):
                raise _error(
                    name,
                    value,
                    f"not known what it means for the KV cache of model_type {self.model_type!r}; "
                    "describe the layers with KVSpec.from_groups",
                )


# -- which layers do what ------------------------------------------------------------------------------------


def _kinds(fields: _Fields) -> list[Kind]:
    """The kind of every layer."""
    listed = _listed(fields)
    if listed is not None:
        return listed
    layers = fields.need("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
    window = fields.number("sliding_window", "sliding_window_size", least=0)
    pattern = fields.get("sliding_window_pattern", "_sliding_window_pattern")
    rule = _WINDOWS.get(fields.model_type, "unknown")
    off = fields.get("use_sliding_window") is False
    fields.flag("use_sliding_window")
    if isinstance(pattern, str):
        return _spelled("sliding_window_pattern", pattern, layers)
    if pattern is not None:
        pattern = fields.need("sliding_window_pattern", "_sliding_window_pattern")
    elif isinstance(rule, int):
        pattern = rule
    if off or not window:
        return ["full"] * layers
    if pattern is not None:
        return ["window" if (i + 1) % pattern else "full" for i in range(layers)]
    if rule == "all":
        return ["window"] * layers
    if rule == "above":
        if not fields.flag("use_sliding_window"):
            return ["full"] * layers
        first = fields.need("max_window_layers", least=0)
        return ["window" if i >= first else "full" for i in range(layers)]
    why = "the class has no sliding window" if rule == "never" else "not known which layers slide"
    raise _error("sliding_window", window, f"{why} (model_type {fields.model_type!r}, no layer_types)")


def _listed(fields: _Fields) -> list[Kind] | None:
    """The kinds where the config names every layer, or its class has a rule of its own."""
    layers = fields.number("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        types = fields.get(name)
        if types:
            if isinstance(types, str) and "|" in types:
                types = types.replace("|", "")
            return _named(fields, name, types, layers)
    if (numbers := fields.get("hybrid_layer_pattern")) is not None:
        return _coded("hybrid_layer_pattern", numbers, layers, {0: "full", 1: "window"})
    if (numbers := fields.get("attn_type_list")) is not None:
        return _coded("attn_type_list", numbers, layers, {0: "state", 1: "full"})
    if (
        cycle := fields.get("block_types", "_block_types")
    ) is not None:  # recurrent_gemma: its attention is local
        kinds = _named(fields, "block_types", cycle, None)
        local: list[Kind] = ["window" if kind == "full" else kind for kind in kinds]
        return [local[i % len(local)] for i in range(layers or len(local))]
    if layers is None:
        return None
    if (full := fields.get("attn_layer_indices", "full_attn_idxs")) is not None:
        return _picked("attn_layer_indices", full, layers, first=0)
    linear = fields.inner("linear_attn_config")
    if (full := linear.get("full_attn_layers")) is not None:
        kinds = _picked("full_attn_layers", full, layers, first=1)
        others = linear.get("kda_layers") or []
        if sorted([*full, *others]) != list(range(1, layers + 1)):
            raise _error("linear_attn_config", linear.config, f"does not name each of {layers} layers once")
        return kinds
    if (period := fields.number("attn_layer_period")) is not None:
        offset = fields.need("attn_layer_offset", least=0)
        return ["full" if i % period == offset else "state" for i in range(layers)]
    if (period := fields.number("full_attention_interval")) is not None:
        return ["state" if (i + 1) % period else "full" for i in range(layers)]
    if fields.model_type == "llama4_text":
        return _llama4(fields, layers)
    if fields.model_type == "falcon_h1":
        return ["both"] * layers
    if fields.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return ["state"] * layers
    return None


def _llama4(fields: _Fields, layers: int) -> list[Kind]:
    """Layers with rotary positions attend within their chunk, the others to everything."""
    chunk = fields.number("attention_chunk_size")
    rotary = fields.get("no_rope_layers") or None
    if rotary is None:
        interval = fields.need("no_rope_layer_interval")
        rotary = [int((i + 1) % interval != 0) for i in range(layers)]
    return _coded("no_rope_layers", rotary, layers, {0: "full", 1: "chunked" if chunk else "full"})


def _named(fields: _Fields, name: str, types: Any, layers: int | None) -> list[Kind]:
    if not isinstance(types, Sequence) or not all(isinstance(t, str) for t in types):
        raise _error(name, types, "must be a list of layer types")
    unknown = sorted({t for t in types if t not in _TYPES})
    if unknown:
        raise _error(name, unknown, f"unknown layer types; known are {', '.join(sorted(_TYPES))}")
    # Layers for multi-token prediction may follow (step3p5 lists them).
    if layers is not None and len(types) > layers and fields.model_type == "step3p5":
        types = types[:layers]
    if layers is not None and len(types) != layers:
        raise _error(name, types, f"names {len(types)} layers, the model has {layers}")
    return [_TYPES[t] for t in types]


def _coded(name: str, numbers: Any, layers: int | None, meaning: dict[int, Kind]) -> list[Kind]:
    if not isinstance(numbers, Sequence) or not all(n in meaning for n in numbers):
        raise _error(name, numbers, f"must be a list of {' or '.join(map(str, meaning))}")
    if layers is not None and len(numbers) != layers:
        raise _error(name, numbers, f"names {len(numbers)} layers, the model has {layers}")
    return [meaning[n] for n in numbers]


def _picked(name: str, chosen: Any, layers: int, *, first: int) -> list[Kind]:
    if not isinstance(chosen, Sequence) or not all(n in range(first, layers + first) for n in chosen):
        raise _error(name, chosen, f"must be a list of layer numbers from {first} to {layers + first - 1}")
    return ["full" if i + first in chosen else "state" for i in range(layers)]


def _spelled(name: str, pattern: str, layers: int) -> list[Kind]:
    """A pattern such as "LLLG": local and global layers in turn, the last one global."""
    if not pattern or set(pattern) - {"L", "G"}:
        raise _error(name, pattern, "must be a word of L and G")
    turn = [pattern[i % len(pattern)] for i in range(layers)]
    turn[-1] = "G"
    return ["window" if letter == "L" else "full" for letter in turn]


# -- what a layer stores -------------------------------------------------------------------------------------


def _layer(fields: _Fields, index: int, kind: Kind, tp: int) -> Layer:
    if kind == "none":
        return Layer()
    state = _state(fields, tp) if kind in ("state", "both") else None
    if kind == "state":
        return Layer(state=state)
    return Layer(_attention(fields, index, "full" if kind == "both" else kind, tp), state)


def _attention(fields: _Fields, index: int, kind: Kind, tp: int) -> Attention | None:
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
            raise _error("kv_lora_rank", rank, f"not known how a latent is kept in a {kind} layer")
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


def _shape(fields: _Fields, index: int, kind: Kind) -> tuple[int, int, int]:
    """KV heads, values of a K head, values of a V head. No heads: the layer has no attention."""
    family = fields.model_type
    if family == "step3p5" and kind == "window":
        other = fields.inner("attention_other_setting")
        heads = other.number("num_attention_groups") or fields.need("num_attention_groups")
        dim = other.number("head_dim") or fields.need("head_dim")
        return heads, dim, dim
    if family in ("mimo_v2", "mimo_v2_flash"):
        return _mimo(fields, kind)
    if family == "gemma4_text" and kind == "full":
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


def _mimo(fields: _Fields, kind: Kind) -> tuple[int, int, int]:
    heads = fields.need("num_key_value_heads")
    k_dim = _head_dim(fields)
    v_dim = fields.number("v_head_dim") or k_dim
    if kind == "window":
        heads = fields.number("swa_num_key_value_heads") or heads
        k_dim = fields.number("swa_head_dim") or k_dim
        v_dim = fields.number("swa_v_head_dim") or v_dim
    return heads, k_dim, v_dim


def _kv_heads(fields: _Fields, index: int) -> int:
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
        inner = fields.inner("attn_config").number("kv_n_heads")
        return inner or fields.need("n_heads")
    listed = fields.get("num_key_value_heads_per_layer", "num_kv_heads_per_layer")
    if listed is None:
        listed = fields.get("num_key_value_heads", "num_kv_heads", "num_attention_groups")
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        if index >= len(listed):
            raise _error("num_key_value_heads", listed, f"has no entry for layer {index}")
        heads = listed[index]
        if heads is None:
            return 0
        if isinstance(heads, bool) or not isinstance(heads, int) or not 0 <= heads < 2**32:
            raise _error("num_key_value_heads", listed, "must be whole numbers")
        return heads
    if listed is not None:
        return fields.need("num_key_value_heads", "num_kv_heads", "num_attention_groups")
    return _heads(fields)


def _heads(fields: _Fields) -> int:
    return fields.need("num_attention_heads", "n_head", "n_heads", "num_heads")


def _block_heads(fields: _Fields, blocks: Any, index: int) -> int:
    """KV heads of one block of a pruned model (nemotron-nas)."""
    try:
        attention = _Fields(blocks[index]["attention"])
    except (TypeError, LookupError):
        raise _error("block_configs", blocks, f"has no attention for layer {index}") from None
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    heads = attention.number("num_key_value_heads")
    return heads if heads is not None else _heads(fields) // attention.need("n_heads_in_group")


def _head_dim(fields: _Fields) -> int:
    given = fields.number("head_dim", "attention_head_dim", "kv_channels")
    if given is not None:
        return given
    hidden = fields.need("hidden_size", "n_embd", "d_model", "n_embed", "model_dim")
    heads = _heads(fields)
    if hidden % heads:
        raise _error("hidden_size", hidden, f"is no multiple of {heads} heads, and there is no head_dim")
    return hidden // heads


def _state(fields: _Fields, tp: int) -> State:
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
        heads = linear.number("num_heads") or fields.number("linear_num_heads") or 32
        dim = linear.number("head_dim") or fields.number("linear_head_dim") or 128
        kernel = linear.number("short_conv_kernel_size") or fields.number("linear_conv_kernel_dim") or 4
        heads = _split("linear_attn_config.num_heads", heads, tp)
        return State(heads * dim * dim, 3 * heads * dim * (kernel - 1))
    if fields.get("linear_num_value_heads") is not None:  # gated delta net
        values = _split("linear_num_value_heads", fields.need("linear_num_value_heads"), tp)
        keys = _split("linear_num_key_heads", fields.need("linear_num_key_heads"), tp)
        k_dim, v_dim = fields.need("linear_key_head_dim"), fields.need("linear_value_head_dim")
        kernel = fields.need("linear_conv_kernel_dim")
        return State(values * k_dim * v_dim, (2 * keys * k_dim + values * v_dim) * (kernel - 1))
    return _mamba(fields, tp)


def _mamba(fields: _Fields, tp: int) -> State:
    names = [
        "mamba_num_heads",
        "mamba_n_heads",
        "n_mamba_heads",
        *(["num_heads"] if fields.model_type == "mamba2" else []),
    ]
    size = fields.number("ssm_state_size", "mamba_d_state", "state_size")
    kernel = fields.number("conv_kernel", "mamba_d_conv", "conv_kernel_size")
    if size is None or kernel is None:
        raise _error("layer_types", "a fixed state", "no known field says how large it is")
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
        raise _error("mamba_head_dim", dim, "must be a whole number of at least 1")
    groups = fields.number("n_groups", "mamba_n_groups", "mamba_ngroups") or 1
    heads = _split(names[0], heads, tp)
    groups = 1 if groups == 1 else _split("n_groups", groups, tp)
    return State(heads * dim * size, (heads * dim + 2 * groups * size) * (kernel - 1))


def _split(name: str, number: int, tp: int) -> int:
    if number % tp:
        raise _error(name, number, f"can't be divided among tp={tp} ranks")
    return number // tp


# -- sharing, and layers beside the decoder ------------------------------------------------------------------


def _shared(fields: _Fields, kinds: list[Kind], layers: list[Layer]) -> list[Layer]:
    """The last layers of some models read the KV of the last earlier layer of their kind."""
    count = fields.number("num_kv_shared_layers", least=0)
    if not count:
        return layers
    first = len(layers) - count
    if first < 1:
        raise _error("num_kv_shared_layers", count, f"must be less than the model's {len(layers)} layers")
    owner = {kind: max((i for i in range(first) if kinds[i] == kind), default=None) for kind in set(kinds)}
    shared = list(layers)
    for i in range(first, len(layers)):
        if (uses := owner[kinds[i]]) is None:
            raise _error(
                "num_kv_shared_layers",
                count,
                f"layer {i} has no earlier {kinds[i]} layer whose KV it could use",
            )
        shared[i] = replace(layers[i], attention=None, uses=uses)
    return shared


def _extra(fields: _Fields, layers: list[Layer], tp: int) -> tuple[Layer, ...]:
    """Layers for multi-token prediction."""
    count = fields.number("num_nextn_predict_layers", "mtp_num_hidden_layers", least=0)
    if not count:
        raise _error(
            "num_nextn_predict_layers", count, "the config names no layers for multi-token prediction"
        )
    types = fields.get("layer_types")
    if isinstance(types, Sequence) and len(types) >= len(layers) + count:
        named = types[len(layers) : len(layers) + count]
        return tuple(_layer(fields, len(layers) + i, _TYPES[t], tp) for i, t in enumerate(named))
    last = next((layer for layer in reversed(layers) if layer.attention), None)
    if last is None or any(layer.attention and layer.attention != last.attention for layer in layers):
        raise _error("num_nextn_predict_layers", count, "not known which kind of attention these layers have")
    return (Layer(last.attention),) * count


def _indexer(fields: _Fields, layers: list[Layer], extra: tuple[Layer, ...]) -> tuple[int, int]:
    """Layers that keep an indexer's key per token, and its values."""
    dim = fields.number("index_head_dim")
    if dim is None:
        raise _error("index_head_dim", None, "the config names no indexer")
    types = fields.get("indexer_types")
    own = sum(1 for layer in layers if layer.attention) if types is None else sum(t == "full" for t in types)
    return own + len(extra), dim

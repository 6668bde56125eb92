"""Which layers do what: the kind of every layer, from a list in the config or the rule of its class."""

from collections.abc import Sequence
from typing import Any, Final

from kvalloc.hf.classes import LISTED, TYPES, WINDOWS, Kind
from kvalloc.hf.fields import MOST_LAYERS, Fields, field_error

__all__ = ["kinds_of"]

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")


def kinds_of(fields: Fields) -> list[Kind]:
    """The kind of every layer."""
    listed = _listed(fields)
    if listed is not None:
        return listed
    layers = _layers(fields)
    if layers is None:
        layers = fields.need(*_LAYERS)
    if fields.model_type in LISTED:
        raise field_error(
            "layer_types", None, f"the layers of a {fields.model_type!r} differ, and nothing lists them"
        )
    window = fields.number("sliding_window", "sliding_window_size", least=0)
    pattern = fields.get("sliding_window_pattern", "_sliding_window_pattern")
    rule = WINDOWS.get(fields.model_type, "unknown")
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
    raise field_error("sliding_window", window, f"{why} (model_type {fields.model_type!r}, no layer_types)")


def _layers(fields: Fields) -> int | None:
    return fields.number(*_LAYERS, most=MOST_LAYERS)


def _list(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MOST_LAYERS:
        raise field_error(name, value, "must be a list")
    return value


def _listed(fields: Fields) -> list[Kind] | None:
    """The kinds where the config names every layer, or its class has a rule of its own."""
    layers = _layers(fields)
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
    if (cycle := fields.get("block_types", "_block_types")) is not None:
        # recurrent_gemma: its attention is local
        kinds = _named(fields, "block_types", cycle, None)
        if not kinds:
            raise field_error("block_types", cycle, "must name a layer at least")
        local: list[Kind] = ["window" if kind == "full" else kind for kind in kinds]
        return [local[i % len(local)] for i in range(layers or len(local))]
    if layers is None:
        return None
    if (full := fields.get("attn_layer_indices", "full_attn_idxs")) is not None:
        return _picked("attn_layer_indices", full, layers, first=0)
    linear = fields.inner("linear_attn_config")
    if (full := linear.get("full_attn_layers")) is not None:
        kinds = _picked("full_attn_layers", full, layers, first=1)
        others = _list("kda_layers", linear.get("kda_layers") or [])
        if sorted([*full, *others]) != list(range(1, layers + 1)):
            raise field_error(
                "linear_attn_config", linear.config, f"does not name each of {layers} layers once"
            )
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


def _llama4(fields: Fields, layers: int) -> list[Kind]:
    """Layers with rotary positions attend within their chunk, the others to everything."""
    chunk = fields.number("attention_chunk_size")
    rotary = fields.get("no_rope_layers") or None
    if rotary is None:
        interval = fields.need("no_rope_layer_interval")
        rotary = [int((i + 1) % interval != 0) for i in range(layers)]
    return _coded("no_rope_layers", rotary, layers, {0: "full", 1: "chunked" if chunk else "full"})


def _named(fields: Fields, name: str, types: Any, layers: int | None) -> list[Kind]:
    if not isinstance(types, Sequence) or not all(isinstance(t, str) for t in types):
        raise field_error(name, types, "must be a list of layer types")
    unknown = sorted({t for t in types if t not in TYPES})
    if unknown:
        raise field_error(name, unknown, f"unknown layer types; known are {', '.join(sorted(TYPES))}")
    # Layers for multi-token prediction may follow (step3p5 lists them).
    if layers is not None and len(types) > layers and fields.model_type == "step3p5":
        types = types[:layers]
    if layers is not None and len(types) != layers:
        raise field_error(name, types, f"names {len(types)} layers, the model has {layers}")
    return [TYPES[t] for t in types]


def _coded(name: str, numbers: Any, layers: int | None, meaning: dict[int, Kind]) -> list[Kind]:
    numbers = _list(name, numbers)
    if not all(isinstance(n, int) and n in meaning for n in numbers):
        raise field_error(name, numbers, f"must be a list of {' or '.join(map(str, meaning))}")
    if layers is not None and len(numbers) != layers:
        raise field_error(name, numbers, f"names {len(numbers)} layers, the model has {layers}")
    return [meaning[n] for n in numbers]


def _picked(name: str, chosen: Any, layers: int, *, first: int) -> list[Kind]:
    chosen = _list(name, chosen)
    if not all(isinstance(n, int) and n in range(first, layers + first) for n in chosen):
        raise field_error(
            name, chosen, f"must be a list of layer numbers from {first} to {layers + first - 1}"
        )
    return ["full" if i + first in chosen else "state" for i in range(layers)]


def _spelled(name: str, pattern: str, layers: int) -> list[Kind]:
    """A pattern such as "LLLG": local and global layers in turn, the last one global."""
    if not pattern or set(pattern) - {"L", "G"}:
        raise field_error(name, pattern, "must be a word of L and G")
    turn = [pattern[i % len(pattern)] for i in range(layers)]
    turn[-1] = "G"
    return ["window" if letter == "L" else "full" for letter in turn]

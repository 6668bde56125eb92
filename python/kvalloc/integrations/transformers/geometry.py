"""What a model of transformers keeps per layer, and whether pages can hold it."""

from typing import Any, Final

import torch
from transformers import DynamicCache

from kvalloc.errors import InvalidArgument, SpecError
from kvalloc.spec import KVSpec

__all__ = ["check_layers", "check_spec", "device_of", "own_layers"]

_REASONS: Final = {
    "LinearAttention": "it keeps the state of a recurrence or a convolution, which is not made of tokens",
    "Indexed": "it keeps the keys of a sparse-attention indexer besides K and V",
}


def check_layers(model: Any) -> None:
    """Refuse a model whose layers keep something else than K and V of tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.

    Raises
    ------
    SpecError
        The message says which layer, and what it keeps.
    InvalidArgument
        It is no model of transformers that generates.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise InvalidArgument(f"model must be one of transformers' that generates, not {name}")
    if config.is_encoder_decoder:
        raise SpecError(f"{name} is an encoder with a decoder; pages hold the KV of decoder-only models")
    for n, layer in enumerate(_layers(model)):
        kind = type(layer).__name__
        if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"):
            why = next(
                (reason for word, reason in _REASONS.items() if word in kind), f"transformers keeps a {kind}"
            )
            raise SpecError(f"layer {n} of {name} can't be held in pages: {why}")


def _layers(model: Any) -> list[Any]:
    """What transformers itself keeps for each layer."""
    layers: list[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return layers


def check_spec(spec: KVSpec, model: Any) -> None:
    """Refuse a spec that is not the model's.

    Parameters
    ----------
    spec : KVSpec
        Of a pool.
    model : transformers.PreTrainedModel
        The model whose KV the pool is to hold.

    Raises
    ------
    SpecError
        The message says which layer differs, and how.
    """
    name = type(model).__name__
    decoder = model.config.get_text_config(decoder=True)
    layers = _layers(model)
    if len(spec.layer_map) < len(layers):
        raise SpecError(f"{name} has {len(layers)} layers, and the spec {len(spec.layer_map)}")
    for n, layer in enumerate(layers):
        if type(layer).__name__ == "DummyLayer":  # it reads the KV of another one
            continue
        place = spec.layer_map[n]
        if place is None:
            raise SpecError(f"layer {n} of {name} has attention, and none in the spec")
        group = spec.groups[place[0]]
        window = getattr(layer, "sliding_window", None)
        longest = getattr(decoder, "max_position_embeddings", None)
        outgrown = window is not None and (longest is None or window < longest)
        if group.window != window and (group.window is not None or outgrown):
            raise SpecError(
                f"layer {n} of {name} has {_window(window)}, and {_window(group.window)} in the spec"
            )


def _window(tokens: int | None) -> str:
    return "no window" if tokens is None else f"a window of {tokens} tokens"


def own_layers(spec: KVSpec) -> list[int]:
    """The layers that store KV of their own: the first that names each place.

    Parameters
    ----------
    spec : KVSpec

    Returns
    -------
    list of int
    """
    first: dict[tuple[int, int], int] = {}
    for layer, place in enumerate(spec.layer_map):
        if place is not None:
            first.setdefault(place, layer)
    return sorted(first.values())


def device_of(model: Any) -> torch.device:
    """The device of a model.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    torch.device

    Raises
    ------
    InvalidArgument
        It lies on several, or on none.
    """
    devices: set[torch.device] = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        where = ", ".join(sorted(map(str, devices))) or "none"
        raise InvalidArgument(f"the model lies on these devices: {where}; its pages need it to lie on one")
    return devices.pop()

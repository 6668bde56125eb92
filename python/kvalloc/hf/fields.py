"""Getting at the fields of a config: where it comes from, class defaults, what was looked at."""

import json
import os
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from kvalloc.errors import SpecError
from kvalloc.hf.classes import ALIASES, DEFAULTS, WINDOWS

__all__ = ["MOST_LAYERS", "ConfigLike", "Fields", "HasToDict", "decoder", "field_error", "load"]


@runtime_checkable
class HasToDict(Protocol):
    """A transformers config: anything with ``to_dict()``."""

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data."""


ConfigLike: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str] | HasToDict"


# Fields that change what is cached. In a config of a class that isn't known, one that is set and was not read
# is refused.
_SUSPECT: Final = re.compile(
    r"sliding|window|chunk|layer_type|block_type|layers_type|_pattern|kv_share|shared_layers|lora_rank|ssm|mamba|conv"
    r"|linear_(?:att|num|key|value|head)|recurrent|state_size|cross_att|kv_heads|key_value|kv_groups|query_group"
    r"|heads_per_layer|per_layer_config|swa_|global_(?:att|head|k|layer)|local_(?:att|layer)|latent|block_config"
    r"|compress|cla_|yoco|multi_query|v_head_dim|attn_layer|attention_layer|attn_type|kv_source|index_"
)
_HARMLESS: Final = {
    "add_cross_attention",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "max_window_layers",
    "mlp_layer_types",
    "num_key_value_heads",
    "q_lora_rank",
}
MOST_LAYERS: Final = 1 << 16
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")


def field_error(name: str, given: object, why: str) -> SpecError:
    """An error that blames a field."""
    shown = repr(given)
    error = SpecError(f"config field {name!r} is {shown if len(shown) < 80 else shown[:77] + '...'}: {why}")
    error.field = name
    error.given = given
    return error


def load(config: ConfigLike) -> Mapping[str, Any]:
    """The config as plain data."""
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
        why = f"config {str(config)!r} can't be read: {error.strerror or error}"
        raise SpecError(f"{why}{_in_catalogue(config)}") from error
    except ValueError as error:
        raise SpecError(f"config {str(config)!r} is not JSON: {error}") from error
    if not isinstance(loaded, Mapping):
        raise SpecError(f"config {str(config)!r} holds {type(loaded).__name__}, not an object")
    return loaded


def _in_catalogue(config: str | os.PathLike[str]) -> str:
    """What to write instead, if this is the name of a model and not a path."""
    from kvalloc import models  # it is a leaf that nothing else here needs

    try:
        models.get(str(config))
    except SpecError:
        return ""
    return f"; for the catalogue's config of that model, give kvalloc.models.get({str(config)!r})"


def decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
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
            return decoder(inner)
    return config


@dataclass
class Fields:
    """A config with its class defaults, that knows which fields were looked at."""

    config: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        given = str(self.config.get("model_type") or "")
        self.model_type = ALIASES.get(given, given)
        self.known = self.model_type in WINDOWS
        self.defaults = DEFAULTS.get(self.model_type, {})
        self.per_layer = self._per_layer()

    def _per_layer(self) -> dict[int, Mapping[str, Any]]:
        """What newer configs override layer by layer."""
        given = self.config.get("per_layer_config") or {}
        self.read.add("per_layer_config")
        try:
            layers: dict[int, Mapping[str, Any]] = {int(i): dict(changes) for i, changes in given.items()}
        except (AttributeError, TypeError, ValueError):
            raise field_error("per_layer_config", given, "must map layer numbers to fields") from None
        for changes in layers.values():
            for name in changes:
                if name not in ("head_dim", "num_key_value_heads") and _SUSPECT.search(name):
                    raise field_error(
                        "per_layer_config", name, "not known what this field changes in a single layer"
                    )
        return layers

    def of_layer(self, index: int) -> "Fields":
        """The fields as one layer sees them."""
        changes = self.per_layer.get(index)
        if not changes:
            return self
        layer = copy(self)
        layer.config = {**self.config, **changes}
        return layer

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

    def number(self, *names: str, least: int = 1, most: int = 2**32 - 1) -> int | None:
        """A whole number, None if there is none."""
        value = self.get(*names)
        if value is None:
            return None
        name = next((n for n in names if self.config.get(n) is not None), names[0])
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise field_error(name, value, f"must be a whole number from {least} to {most}")
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
            raise field_error(name, value, "must be true or false")
        return bool(value)

    def inner(self, name: str) -> "Fields":
        """The fields of an object within the config."""
        value = self.get(name)
        if value is None:
            value = {}
        if isinstance(value, HasToDict):
            value = value.to_dict()
        if not isinstance(value, Mapping):
            raise field_error(name, value, "must be an object")
        return Fields(value)

    def check_unread(self) -> None:
        """Refuse what could change the cache in a class that is not known."""
        if self.known:
            return
        for name, value in self.config.items():
            if value and name not in self.read and name not in _HARMLESS and _SUSPECT.search(name):
                raise field_error(
                    name,
                    value,
                    f"not known what it means for the KV cache of model_type {self.model_type!r}; "
                    "describe the layers with KVSpec.from_groups",
                )

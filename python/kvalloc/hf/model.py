"""All layers of a model: `read`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvalloc.hf.classes import TYPES, Kind
from kvalloc.hf.fields import MOST_LAYERS, ConfigLike, Fields, decoder, field_error, load
from kvalloc.hf.kinds import kinds_of
from kvalloc.hf.stores import Attention, State, attention_of, state_of

__all__ = ["Layer", "Model", "read"]


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
    fields = Fields(decoder(load(config)))
    if fields.flag("is_encoder_decoder"):
        raise field_error("is_encoder_decoder", True, "encoder-decoder models are not paged by this library")
    if fields.get("cross_attention_layers"):
        raise field_error(
            "cross_attention_layers",
            fields.get("cross_attention_layers"),
            "cross-attention KV is not supported",
        )
    kinds = kinds_of(fields)
    if fields.model_type == "longcat_flash":  # every layer has two attentions
        kinds = [kind for kind in kinds for _ in range(2)]
    layers = [_layer(fields.of_layer(i), i, kind, tp) for i, kind in enumerate(kinds)]
    layers = _shared(fields, kinds, layers)
    extra = _extra(fields, layers, tp) if mtp else ()
    indexer_layers, indexer_dim = _indexer(fields, layers, extra) if indexer else (0, 0)
    fields.check_unread()
    if not any(layer.attention or layer.state for layer in layers):
        raise field_error("layer_types", kinds, "no layer stores anything")
    return Model(fields.model_type, tuple(layers), extra, indexer_layers, indexer_dim)


def _layer(fields: Fields, index: int, kind: Kind, tp: int) -> Layer:
    if kind == "none":
        return Layer()
    state = state_of(fields, tp) if kind in ("state", "both") else None
    if kind == "state":
        return Layer(state=state)
    return Layer(attention_of(fields, index, "full" if kind == "both" else kind, tp), state)


def _shared(fields: Fields, kinds: list[Kind], layers: list[Layer]) -> list[Layer]:
    """The last layers of some models read the KV of the last earlier layer of their kind."""
    count = fields.number("num_kv_shared_layers", least=0)
    if not count:
        return layers
    first = len(layers) - count
    if first < 1:
        raise field_error(
            "num_kv_shared_layers", count, f"must be less than the model's {len(layers)} layers"
        )
    owner = {kind: max((i for i in range(first) if kinds[i] == kind), default=None) for kind in set(kinds)}
    shared = list(layers)
    for i in range(first, len(layers)):
        if (uses := owner[kinds[i]]) is None:
            raise field_error(
                "num_kv_shared_layers",
                count,
                f"layer {i} has no earlier {kinds[i]} layer whose KV it could use",
            )
        shared[i] = replace(layers[i], attention=None, uses=uses)
    return shared


def _extra(fields: Fields, layers: list[Layer], tp: int) -> tuple[Layer, ...]:
    """Layers for multi-token prediction."""
    count = fields.number("num_nextn_predict_layers", "mtp_num_hidden_layers", least=0, most=MOST_LAYERS)
    if not count:
        raise field_error(
            "num_nextn_predict_layers", count, "the config names no layers for multi-token prediction"
        )
    types = fields.get("layer_types")
    named = fields.get("mtp_layer_types")
    if isinstance(types, Sequence) and len(types) >= len(layers) + count:
        named = types[len(layers) : len(layers) + count]
    if isinstance(named, Sequence) and len(named) == count:
        return tuple(_layer(fields, len(layers) + i, TYPES[t], tp) for i, t in enumerate(named) if t in TYPES)
    last = next((layer for layer in reversed(layers) if layer.attention), None)
    if last is None or any(layer.attention and layer.attention != last.attention for layer in layers):
        raise field_error(
            "num_nextn_predict_layers", count, "not known which kind of attention these layers have"
        )
    return (Layer(last.attention),) * count


def _indexer(fields: Fields, layers: list[Layer], extra: tuple[Layer, ...]) -> tuple[int, int]:
    """Layers that keep an indexer's key per token, and its values."""
    dim = fields.number("index_head_dim")
    if dim is None:
        raise field_error("index_head_dim", None, "the config names no indexer")
    types = fields.get("indexer_types")
    own = sum(1 for layer in layers if layer.attention) if types is None else sum(t == "full" for t in types)
    return own + len(extra), dim

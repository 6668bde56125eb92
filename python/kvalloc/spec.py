"""The geometry of a model's KV cache: what a page holds, how many bytes it has, how many tokens fit.

Layers with one lifetime and one shape form a `LayerGroup`; a sequence has one list of pages per group. A page
holds ``page_tokens`` tokens of all layers of its group, and has one number of bytes, padding included:
`PageClass.page_bytes`. Everything else (the arena, quotas, admission, this module's planner) counts in those
bytes.

``docs/geometry.md`` explains the words and works through a few models.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final, Literal, SupportsIndex, TypeAlias, cast

from kvalloc import _core, hf
from kvalloc.errors import SpecError
from kvalloc.layers import DTYPES, ArenaLayout, GroupKind, LayerGroup, PageClass, parse_dtype
from kvalloc.sizes import format_bytes, parse_bytes

__all__ = ["ArenaLayout", "GroupKind", "KVSpec", "LayerGroup", "Layout", "PageClass", "parse_dtype"]

Layout: TypeAlias = Literal["page_major", "layer_major"]
Place: TypeAlias = tuple[int, int]

_MOST: Final = 2**32 - 1
_MOST_PAGE_TOKENS: Final = 2**16


class KVSpec:
    """The geometry of a model's KV cache. Immutable, hashable, picklable.

    Make one with `uniform`, `from_groups` or `from_hf_config`.

    Attributes
    ----------
    page_tokens : int
        Tokens of a page.
    groups : tuple of LayerGroup
        The layer groups. Groups that keep every token come first.
    classes : tuple of PageClass
        First the class of each group, in order; then the smaller ones, if there is a `small_dtype`.
    layout : {"page_major", "layer_major"}
        ``[frame, layer, ...]`` or ``[layer, frame, ...]``.
    small_dtype : str or None
        Storage of compressed pages.
    layer_map : tuple of (int, int) or None
        For each layer of the model, (group, layer within the group) of the KV it reads; None for a layer
        without attention. Layers that share KV name the same place.
    state_map : tuple of (int, int) or None
        The same for fixed states.
    model_type : str or None
        What the config called the model.
    digest : bytes [16]
        The same for equal specs, in every process.

    Examples
    --------
    >>> spec = kvalloc.KVSpec.uniform(layers=28, kv_heads=4, head_dim=128)
    >>> spec.bytes_per_token, spec.page_bytes()
    (57344, 917504)
    >>> spec.tokens_in("24GiB")
    449376
    """

    __slots__ = (
        "__weakref__",
        "_native",
        "classes",
        "digest",
        "groups",
        "layer_map",
        "model_type",
        "state_map",
    )

    _native: _core.Spec
    groups: tuple[LayerGroup, ...]
    classes: tuple[PageClass, ...]
    layer_map: tuple[Place | None, ...]
    state_map: tuple[Place | None, ...]
    model_type: str | None
    digest: bytes

    def __init__(self) -> None:
        raise TypeError("use KVSpec.uniform, KVSpec.from_groups or KVSpec.from_hf_config")

    # -- making one ------------------------------------------------------------------------------------------

    @classmethod
    def uniform(
        cls,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: object = "float16",
        page_tokens: int = 16,
        *,
        v_head_dim: int | None = None,
        window: int | None = None,
        layout: Layout = "page_major",
        small_dtype: object = None,
    ) -> "KVSpec":
        """Make the spec of a model whose layers are all alike.

        Parameters
        ----------
        layers, kv_heads, head_dim : int
            Layers, KV heads per layer (on one rank), values per head.
        dtype : str or dtype, optional
            How K and V are stored, see `parse_dtype`.
        page_tokens : int, optional
            Tokens of a page, 1 to 65,536.
        v_head_dim : int, optional
            Values of a V head, if other than `head_dim`.
        window : int, optional
            Width of the sliding window of all layers.
        layout, small_dtype : optional
            As in `from_groups`.

        Returns
        -------
        KVSpec

        Raises
        ------
        SpecError
            For numbers that can't be.

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(layers=32, kv_heads=8, head_dim=128, window=4096).window_cap_bytes
        536870912
        """
        group = LayerGroup(
            name="full" if window is None else "window",
            kind="full" if window is None else "window",
            layers=layers,
            kv_heads=kv_heads,
            k_dim=head_dim,
            v_dim=head_dim if v_head_dim is None else v_head_dim,
            dtype=parse_dtype(dtype),
            window=window,
        )
        return cls.from_groups([group], page_tokens, layout=layout, small_dtype=small_dtype)

    @classmethod
    def from_groups(
        cls,
        groups: Iterable[LayerGroup],
        page_tokens: int = 16,
        *,
        layout: Layout = "page_major",
        small_dtype: object = None,
    ) -> "KVSpec":
        """Make a spec from layer groups.

        Parameters
        ----------
        groups : iterable of LayerGroup
            1 to 32 groups. The layers of the model are taken to be in their order, group by group
            (`layer_map`).
        page_tokens : int, optional
            Tokens of a page, 1 to 65,536.
        layout : {"page_major", "layer_major"}, optional
            ``"layer_major"`` needs the same number of layers in every group.
        small_dtype : str or dtype, optional
            Gives each group a second class of pages with fewer bytes, for compressed pages.

        Returns
        -------
        KVSpec

        Raises
        ------
        SpecError
            For numbers that can't be; if page sizes have no common multiple that is small enough.

        Examples
        --------
        >>> spec = kvalloc.KVSpec.from_groups([
        ...     kvalloc.LayerGroup("full", "full", layers=12, kv_heads=8, k_dim=64),
        ...     kvalloc.LayerGroup("window", "window", layers=12, kv_heads=8, k_dim=64, window=128),
        ... ])
        >>> spec.bytes_per_token, spec.grow_bytes_per_token, spec.window_cap_bytes
        (49152, 24576, 3145728)
        """
        groups = tuple(groups)
        kv: list[Place | None] = []
        states: list[Place | None] = []
        for g, group in enumerate(groups):
            places = [
                (g, i) for i in range(_count(f"group {group.name!r}: layers", group.layers, 1, 1 << 20))
            ]
            kv.extend(places if group.kind != "state" else [None] * len(places))
            states.extend(places if group.kind == "state" else [None] * len(places))
        return cls._make(groups, page_tokens, layout, small_dtype, tuple(kv), tuple(states), None)

    @classmethod
    def from_hf_config(
        cls,
        config: hf.ConfigLike,
        page_tokens: int = 16,
        dtype: object = "bfloat16",
        *,
        tp: int = 1,
        state_dtype: object = "float32",
        conv_dtype: object = None,
        mtp: bool = False,
        indexer: bool = False,
        layout: Layout = "page_major",
        small_dtype: object = None,
    ) -> "KVSpec":
        """Make the spec of a model from its Hugging Face config; transformers is not needed.

        Parameters
        ----------
        config : mapping, path or transformers config
            The content of a ``config.json``, the path of one or of its folder, or an object with
            ``to_dict()``. See `kvalloc.models` for the configs of well-known models.
        page_tokens : int, optional
            Tokens of a page.
        dtype : str or dtype, optional
            How K and V are stored, see `parse_dtype`.
        tp : int, optional
            Tensor-parallel ranks; the spec is that of one rank. KV heads are divided, or replicated where
            there are fewer heads than ranks. A latent is replicated.
        state_dtype : str or dtype, optional
            Storage of recurrent states (Mamba, delta net, lightning attention).
        conv_dtype : str or dtype, optional
            Storage of the inputs that their convolutions keep. The default is `dtype` if that has 16 bits or
            more, else ``"bfloat16"``.
        mtp : bool, optional
            Count the layers for multi-token prediction too.
        indexer : bool, optional
            Add a group for the keys of a sparse-attention indexer (DeepSeek-V3.2, GLM-5): fp8 with a float32
            scale.
        layout, small_dtype : optional
            As in `from_groups`.

        Returns
        -------
        KVSpec

        Raises
        ------
        SpecError
            If the config can't be read without guessing; ``field`` names the field.

        Notes
        -----
        A window that no sequence can outgrow (``max_position_embeddings``) is no window. What a config leaves
        out has the default of its model class.

        Examples
        --------
        >>> config = {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584,
        ...           "num_attention_heads": 28, "num_key_value_heads": 4,
        ...           "use_sliding_window": False, "sliding_window": 131072}
        >>> kvalloc.KVSpec.from_hf_config(config).bytes_per_token
        57344
        """
        model = hf.read(config, tp=_count("tp", tp, 1, 1 << 16), mtp=mtp, indexer=indexer)
        dtype = parse_dtype(dtype)
        if conv_dtype is None:
            conv_dtype = dtype if DTYPES[dtype][0] >= 2 else "bfloat16"
        recurrent, conv = (DTYPES[parse_dtype(d)][0] for d in (state_dtype, conv_dtype))
        groups, kv, states = _grouped(model, dtype, parse_dtype(state_dtype), recurrent, conv)
        return cls._make(groups, page_tokens, layout, small_dtype, kv, states, model.model_type or None)

    @classmethod
    def _make(
        cls,
        groups: tuple[LayerGroup, ...],
        page_tokens: int,
        layout: str,
        small_dtype: object,
        layer_map: tuple[Place | None, ...],
        state_map: tuple[Place | None, ...],
        model_type: str | None,
    ) -> "KVSpec":
        small = None if small_dtype is None else parse_dtype(small_dtype)
        native: list[tuple[str, str, int, int, int, int, int, str, int]] = [
            (
                str(g.name),
                g.kind,
                _count(f"group {g.name!r}: window", g.window or 0, 0, _MOST),
                _count(f"group {g.name!r}: layers", g.layers, 0, _MOST),
                _count(f"group {g.name!r}: kv_heads", g.kv_heads, 0, _MOST),
                _count(f"group {g.name!r}: k_dim", g.k_dim, 0, _MOST),
                _count(f"group {g.name!r}: v_dim", g.v_dim, 0, _MOST),
                g.dtype,
                _count(f"group {g.name!r}: state_bytes", g.state_bytes, 0, 2**64 - 1),
            )
            for g in groups
        ]
        spec = _core.Spec(_count("page_tokens", page_tokens, 1, _MOST_PAGE_TOKENS), native, layout, small)
        self = object.__new__(cls)
        classes = tuple(PageClass(*c) for c in spec.classes)
        geometry = repr((spec.page_tokens, spec.layout, spec.small, spec.groups, layer_map, state_map))
        for name, value in [
            ("_native", spec),
            ("groups", groups),
            ("classes", classes),
            ("layer_map", layer_map),
            ("state_map", state_map),
            ("model_type", model_type),
            ("digest", blake2b(geometry.encode(), digest_size=16, person=b"kvalloc spec").digest()),
        ]:
            object.__setattr__(self, name, value)
        return self

    def replace(
        self,
        *,
        page_tokens: int | None = None,
        layout: Layout | None = None,
        small_dtype: object = ...,
    ) -> "KVSpec":
        """Make the same spec with other pages.

        Parameters
        ----------
        page_tokens, layout, small_dtype : optional
            What is to change.

        Returns
        -------
        KVSpec

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(28, 4, 128).replace(page_tokens=64).page_bytes()
        3670016
        """
        return self._make(
            self.groups,
            self.page_tokens if page_tokens is None else page_tokens,
            self.layout if layout is None else layout,
            self.small_dtype if small_dtype is ... else small_dtype,
            self.layer_map,
            self.state_map,
            self.model_type,
        )

    def unwindowed(self) -> "KVSpec":
        """Make the same spec with every window and chunk kept in full, as an engine without windows does.

        Returns
        -------
        KVSpec

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(32, 8, 128, window=4096).unwindowed().grow_bytes_per_token
        131072
        """
        groups = tuple(
            LayerGroup(**{**asdict(g), "kind": "full", "window": None})
            if g.kind in ("window", "chunked")
            else g
            for g in self.groups
        )
        return self._make(
            groups,
            self.page_tokens,
            self.layout,
            self.small_dtype,
            self.layer_map,
            self.state_map,
            self.model_type,
        )

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._native.page_tokens

    @property
    def layout(self) -> Layout:
        """How the arena is cut."""
        return cast(Layout, self._native.layout)

    @property
    def small_dtype(self) -> str | None:
        """Storage of compressed pages."""
        return self._native.small

    @property
    def sizes(self) -> tuple[int, ...]:
        """The distinct page bytes, ascending."""
        return tuple(self._native.sizes)

    @property
    def granule(self) -> int:
        """Bytes of which extents are multiples: the least common multiple of the sizes."""
        return self._native.granule

    @property
    def anchor(self) -> int | None:
        """The first group that keeps every token."""
        return self._native.anchor

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of one token while every window holds it, no padding."""
        return self._native.bytes_per_token

    @property
    def grow_bytes_per_token(self) -> int:
        """Stored bytes of one more token once all windows are full, no padding."""
        return self._native.grow_bytes_per_token

    @property
    def window_cap_bytes(self) -> int:
        """Stored bytes per sequence of full windows and chunks, no padding."""
        return self._native.window_cap_bytes

    @property
    def state_bytes(self) -> int:
        """Stored bytes of the fixed states of one sequence, no padding."""
        return self._native.state_bytes

    def page_bytes(self, group: int = 0) -> int:
        """Bytes of a page of a group, padding included: the one number that is charged.

        Parameters
        ----------
        group : int, optional
            Index of the layer group.

        Returns
        -------
        int
        """
        return self.classes[range(len(self.groups))[group]].page_bytes

    def small_class(self, group: int = 0) -> PageClass | None:
        """The class into which pages of a group can be compressed.

        Parameters
        ----------
        group : int, optional
            Index of the layer group.

        Returns
        -------
        PageClass or None
        """
        group = range(len(self.groups))[group]
        return next((c for c in self.classes[len(self.groups) :] if c.group == group), None)

    # -- planning --------------------------------------------------------------------------------------------

    def pages_of(self, group: int, tokens: int) -> range:
        """The pages of a group that a sequence holds; earlier ones have left the window.

        Parameters
        ----------
        group : int
            Index of the layer group.
        tokens : int
            Tokens of the sequence. Pages that its next token needs count.

        Returns
        -------
        range
            Page ``i`` holds tokens ``i * page_tokens`` and following.

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(12, 8, 64, window=128).pages_of(0, 8192)
        range(504, 512)
        """
        return range(*self._native.pages_of(range(len(self.groups))[group], _tokens(tokens)))

    def peak_pages(self, group: int, tokens: int, step_tokens: int = 1) -> int:
        """The most pages of a group that a sequence holds on its way to a length.

        Parameters
        ----------
        group : int
            Index of the layer group.
        tokens : int
            The length.
        step_tokens : int, optional
            The most new tokens of one step: a window must hold those too.

        Returns
        -------
        int

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(30, 2, 128, window=4096).peak_pages(0, 16384, step_tokens=8192)
        769
        """
        step = _count("step_tokens", step_tokens, 1, _MOST)
        return self._native.peak_pages(range(len(self.groups))[group], _tokens(tokens), step)

    def bytes_for(self, tokens: int) -> int:
        """Bytes that one sequence holds: whole pages, without those its windows have left behind.

        Parameters
        ----------
        tokens : int
            Tokens of the sequence, 0 to 2**32 - 1.

        Returns
        -------
        int

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(64, 8, 128).bytes_for(275_760)
        72288829440
        """
        return self._native.bytes_for(_tokens(tokens))

    def peak_bytes(self, tokens: int, step_tokens: int = 1) -> int:
        """The most bytes that one sequence holds on its way to a length: what to reserve for it.

        Parameters
        ----------
        tokens : int
            The length.
        step_tokens : int, optional
            The most new tokens of one step.

        Returns
        -------
        int
            Never less for a longer sequence.
        """
        return self._native.peak_for(_tokens(tokens), _count("step_tokens", step_tokens, 1, _MOST))

    def tokens_in(self, size: str | SupportsIndex, sequences: int = 1, step_tokens: int = 1) -> int | None:
        """The longest length to which sequences can grow at the same time.

        Parameters
        ----------
        size : int or str
            Bytes of pages, such as ``"24GiB"``.
        sequences : int, optional
            How many sequences.
        step_tokens : int, optional
            The most new tokens of one step.

        Returns
        -------
        int or None
            Tokens of each; None if they fit at any length.

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(36, 8, 64).tokens_in(5_779_095_552)
        78384
        """
        sequences = _count("sequences", sequences, 1, _MOST)
        return self._native.tokens_in(
            parse_bytes(size), sequences, _count("step_tokens", step_tokens, 1, _MOST)
        )

    def sequences_in(self, size: str | SupportsIndex, tokens: int, step_tokens: int = 1) -> int:
        """How many sequences of a length fit at the same time.

        Parameters
        ----------
        size : int or str
            Bytes of pages, such as ``"24GiB"``.
        tokens : int
            Tokens of each sequence at its end.
        step_tokens : int, optional
            The most new tokens of one step.

        Returns
        -------
        int

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(28, 4, 128).sequences_in("56GiB", 32_768)
        32
        """
        step = _count("step_tokens", step_tokens, 1, _MOST)
        return self._native.sequences_in(parse_bytes(size), _tokens(tokens), step)

    def arena(self, size: str | SupportsIndex) -> ArenaLayout:
        """How an arena is cut: what is usable, what is rounded off.

        Parameters
        ----------
        size : int or str
            Bytes of the arena.

        Returns
        -------
        ArenaLayout

        Raises
        ------
        SpecError
            If it is too small for anything (``needed`` says how many bytes it takes) or too large to count.

        Examples
        --------
        >>> kvalloc.KVSpec.uniform(61, 1, 1152, page_tokens=64).arena("5GiB").rounded_off
        7798784
        """
        return ArenaLayout(*self._native.arena(parse_bytes(size)))

    # -- being a value ---------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a KVSpec is immutable: {name} can't be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a KVSpec is immutable: {name} can't be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVSpec):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        # model_type is a name, not geometry.
        return self._native, self.layer_map, self.state_map

    def __reduce__(self) -> tuple[Callable[..., "KVSpec"], tuple[object, ...]]:
        return KVSpec._make, (
            self.groups,
            self.page_tokens,
            self.layout,
            self.small_dtype,
            self.layer_map,
            self.state_map,
            self.model_type,
        )

    def __copy__(self) -> "KVSpec":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVSpec":
        return self

    def __repr__(self) -> str:
        parts = [f"{self.model_type}:"] if self.model_type else []
        parts.append(" + ".join(_shown(g) for g in self.groups) + ",")
        pages = ", ".join(format_bytes(self.page_bytes(i)) for i in range(len(self.groups)))
        parts.append(f"page_tokens={self.page_tokens}, pages of {pages},")
        if self.layout != "page_major":
            parts.append(f"{self.layout},")
        if self.small_dtype is not None:
            parts.append(f"small_dtype={self.small_dtype},")
        parts.append(f"{self.bytes_per_token:,} B a token")
        return f"<KVSpec {' '.join(parts)}>"


def _count(name: str, value: object, least: int, most: int) -> int:
    try:
        number = None if isinstance(value, bool) else cast(SupportsIndex, value).__index__()
    except AttributeError:
        number = None
    if number is None or not least <= number <= most:
        shown = value if number is None or number.bit_length() < 256 else f"of {number.bit_length()} bits"
        error = SpecError(f"{name} is {shown!r}: must be a whole number from {least} to {most}")
        error.field, error.given = name.rpartition(" ")[2], value
        raise error
    return number


def _tokens(tokens: int) -> int:
    return _count("tokens", tokens, 0, _MOST)


def _shown(group: LayerGroup) -> str:
    if group.kind == "state":
        return f"{group.layers} state layers ({format_bytes(group.state_bytes)} a sequence)"
    kind = group.kind if group.window is None else f"{group.kind} {group.window}"
    if group.kind == "latent":
        shape = f"{group.k_dim}"
    elif group.k_dim == group.v_dim:
        shape = f"{group.kv_heads}x{group.k_dim}"
    else:
        shape = f"{group.kv_heads}x({group.k_dim}+{group.v_dim})"
    return f"{group.layers} {kind} layers of {shape} {group.dtype}"


def _grouped(
    model: hf.Model, dtype: str, state_dtype: str, recurrent: int, conv: int
) -> tuple[tuple[LayerGroup, ...], tuple[Place | None, ...], tuple[Place | None, ...]]:
    """Layers to groups: one per kind and shape, those that keep every token first, states last."""
    layers = (*model.layers, *model.extra)
    shapes = list(dict.fromkeys(layer.attention for layer in layers if layer.attention is not None))
    shapes.sort(key=lambda a: a.kind not in ("full", "latent"))
    counts = dict.fromkeys(shapes, 0)
    kv: list[Place | None] = []
    states: list[Place | None] = []
    held = [layer.state for layer in layers if layer.state is not None]
    for layer in layers:
        if layer.attention is not None:
            kv.append((shapes.index(layer.attention), counts[layer.attention]))
            counts[layer.attention] += 1
        else:
            kv.append(None if layer.uses is None else kv[layer.uses])
        states.append(None)
    groups = [
        LayerGroup(
            name=_name(shape, shapes),
            kind=shape.kind,
            layers=counts[shape],
            kv_heads=shape.kv_heads,
            k_dim=shape.k_dim,
            v_dim=shape.v_dim,
            dtype=dtype,
            window=shape.tokens or None,
        )
        for shape in shapes
    ]
    if model.indexer_layers:
        # 128 values of fp8 and a float32 scale: 132 bytes a token and layer.
        dim = model.indexer_dim + 4
        groups.append(
            LayerGroup("indexer", "latent", layers=model.indexer_layers, k_dim=dim, dtype="float8_e4m3fn")
        )
    if held:
        size = sum(state.recurrent * recurrent + state.conv * conv for state in held)
        group = len(groups)
        order = iter(range(len(held)))
        states = [None if layer.state is None else (group, next(order)) for layer in layers]
        groups.append(LayerGroup("state", "state", layers=len(held), dtype=state_dtype, state_bytes=size))
    return tuple(groups), tuple(kv), tuple(states)


def _name(shape: hf.Attention, shapes: Sequence[hf.Attention]) -> str:
    if sum(other.kind == shape.kind for other in shapes) == 1:
        return shape.kind
    return f"{shape.kind}{shape.tokens or ''}-{shape.kv_heads}x{shape.k_dim}+{shape.v_dim}"

"""The parts of a spec: storage dtypes, layer groups, page classes, the layout of an arena."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from kvalloc.errors import SpecError

__all__ = ["DTYPES", "ArenaLayout", "GroupKind", "LayerGroup", "PageClass", "parse_dtype"]

GroupKind: TypeAlias = Literal["full", "window", "chunked", "latent", "state"]

# Storage dtypes: bytes of a value, bytes of the scale of one token and KV head.
DTYPES: Final = {
    "float32": (4, 0),
    "float16": (2, 0),
    "bfloat16": (2, 0),
    "float8_e4m3fn": (1, 0),
    "int8": (1, 2),
}
_DTYPE_NAMES: Final = {
    **{name: name for name in DTYPES},
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
}


def parse_dtype(dtype: object) -> str:
    """The canonical name of a storage dtype.

    Parameters
    ----------
    dtype : str or dtype
        A name ("float16", "bfloat16", "float32", "float8_e4m3fn", "int8" or a usual short form such as
        "fp8"), a torch or numpy dtype, or anything whose ``str()`` is such a name.

    Returns
    -------
    str

    Raises
    ------
    SpecError
        For any other.

    Examples
    --------
    >>> [kvalloc.layers.parse_dtype(name) for name in ("torch.bfloat16", "fp8", "half")]
    ['bfloat16', 'float8_e4m3fn', 'float16']
    """
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    known = _DTYPE_NAMES.get(name.removeprefix("torch.").lower())
    if known is None:
        error = SpecError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
        error.field, error.given = "dtype", dtype
        raise error
    return known


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same lifetime and geometry.

    Parameters
    ----------
    name : str
        Unique in its spec, 1 to 64 bytes.
    kind : {"full", "window", "chunked", "latent", "state"}
        Which tokens the layers attend to: all; the last `window` with the present one among them; those since
        the last multiple of `window`; all, stored as one latent (MLA); none, the layers keep a state of fixed
        size.
    layers : int
        Layers that store something. A layer that reads another layer's KV does not count.
    kv_heads : int, optional
        KV heads of each layer, on one rank. 1 for a latent, 0 for a state.
    k_dim : int, optional
        Values of a K head; for a latent its rank plus the rope part. 0 for a state.
    v_dim : int, optional
        Values of a V head. The default is `k_dim`; 0 for a latent or a state.
    dtype : str or dtype, optional
        How K and V are stored, see `parse_dtype`.
    window : int, optional
        Tokens of the window or of a chunk; for these two kinds only.
    state_bytes : int, optional
        Bytes of the state of one sequence in all layers; for a state only.

    Raises
    ------
    SpecError
        For an unknown kind or dtype. Other numbers are checked when a `KVSpec` is made.

    Examples
    --------
    >>> kvalloc.LayerGroup("window", "window", layers=12, kv_heads=8, k_dim=64, window=128).bytes_per_token
    24576
    >>> kvalloc.LayerGroup("mla", "latent", layers=61, k_dim=576).bytes_per_token
    70272
    """

    name: str
    kind: GroupKind
    layers: int
    kv_heads: int = -1
    k_dim: int = 0
    v_dim: int = -1
    dtype: str = "float16"
    window: int | None = None
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(GroupKind):
            raise SpecError(
                f"group {self.name!r}: kind {self.kind!r} must be one of {', '.join(get_args(GroupKind))}"
            )
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        if self.kv_heads == -1:
            object.__setattr__(self, "kv_heads", 1 if self.kind == "latent" else 0)
        if self.v_dim == -1:
            object.__setattr__(self, "v_dim", 0 if self.kind in ("latent", "state") else self.k_dim)
        if (self.window is not None) != (self.kind in ("window", "chunked")):
            needs = "needs a window" if self.window is None else "has no window"
            raise SpecError(f"group {self.name!r}: a group of kind {self.kind!r} {needs}")

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of one token in all layers, no padding; 0 for a state."""
        size, scale = DTYPES[self.dtype]
        sides = (self.k_dim > 0) + (self.v_dim > 0)
        return self.layers * self.kv_heads * ((self.k_dim + self.v_dim) * size + sides * scale)

    @property
    def grows(self) -> bool:
        """Whether every token is kept to the end of the sequence."""
        return self.kind in ("full", "latent")


@dataclass(frozen=True, slots=True)
class PageClass:
    """A page class: a layer group with a storage dtype.

    Attributes
    ----------
    group : int
        Index of the layer group.
    dtype : str
        Storage.
    page_bytes : int
        Bytes from one page to the next, padding included: what is charged for a page.
    raw_bytes : int
        Bytes that a page stores.
    layer_bytes : int
        Bytes from one layer to the next within a page; 0 for a state. K comes first, then V, then the scales
        of K and of V (int8 only).
    size : int
        Index of its frame size: classes with equal `page_bytes` share one.
    """

    group: int
    dtype: str
    page_bytes: int
    raw_bytes: int
    layer_bytes: int
    size: int

    @property
    def padding(self) -> int:
        """Bytes of a page that hold nothing."""
        return self.page_bytes - self.raw_bytes


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """How a device or host arena is cut.

    Attributes
    ----------
    bytes : int
        Usable bytes.
    rounded_off : int
        Bytes asked for that are not used, because no whole page fits.
    extent_bytes, extents : int
        Bytes of an extent, and their number; the last one may be partial.
    reserved : int
        Usable bytes that are never given out: padding entries of block tables point there.
    """

    bytes: int
    rounded_off: int
    extent_bytes: int
    extents: int
    reserved: int

"""Where the bytes of a page lie. Numbers only: every store makes its views from these.

A store's arena is one run of bytes. A frame of a class begins at ``frame * page_bytes`` (page-major), and
in it each layer has its K, then its V, then, for int8, their float16 scales. Layer-major cuts the arena
into one region per layer first, and a frame is ``layer_bytes`` in each. So every tensor of a layer is a
strided view of the arena: ``[frames, page_tokens, kv_heads, dim]``, and nothing is copied to look at it.
"""

from dataclasses import dataclass
from typing import Final

from kvalloc.errors import InvalidArgument
from kvalloc.layers import DTYPES, LayerGroup, PageClass
from kvalloc.spec import KVSpec

__all__ = ["ClassGeometry", "Plane", "class_geometry"]

SCALE: Final = "float16"
_ALIGN: Final = 16


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of each layer: K, V, or the scales of one of them.

    Attributes
    ----------
    dtype : str
        Storage.
    offset : int
        Bytes from where the layer begins in its page.
    shape : tuple of int
        Of one page: ``(page_tokens, kv_heads, dim)``, without ``dim`` for scales.
    """

    dtype: str
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClassGeometry:
    """A page class in an arena of one rank.

    Attributes
    ----------
    index : int
        Of the class in ``spec.classes``.
    group : LayerGroup
        Its group, with the heads of this rank.
    dtype : str
        Storage of K and V.
    frames : int
        Frames in the arena, frame 0 included.
    page_bytes : int
        Bytes of a page on this rank.
    frame_stride, layer_stride : int
        Bytes from one frame, and from one layer, to the next.
    parts : int
        Pieces in which a page lies: 1 (page-major) or the layers (layer-major).
    k, v, k_scale, v_scale : Plane or None
        The tensors of a layer; no V for a latent, scales for int8 only, none of them for a state.
    """

    index: int
    group: LayerGroup
    dtype: str
    frames: int
    page_bytes: int
    frame_stride: int
    layer_stride: int
    parts: int
    k: Plane | None
    v: Plane | None
    k_scale: Plane | None
    v_scale: Plane | None

    @property
    def part_bytes(self) -> int:
        """Bytes of one piece of a page."""
        return self.page_bytes // self.parts

    def strided(self, plane: Plane, layer: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Where a layer's tensor lies, for all frames.

        Returns
        -------
        offset : int
            Of its first element, from the start of the arena, in elements of the plane's dtype.
        shape, strides : tuple of int
            ``(frames, page_tokens, kv_heads[, dim])`` and steps in elements.
        """
        size = DTYPES[plane.dtype][0]
        inner = [1]
        for extent in plane.shape[:0:-1]:
            inner.insert(0, inner[0] * extent)
        start = layer * self.layer_stride + plane.offset
        return start // size, (self.frames, *plane.shape), (self.frame_stride // size, *inner)

    def part(self, part: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
        """Where a piece of every page lies: offset, shape ``(frames, part_bytes)`` and strides, in bytes."""
        return part * self.layer_stride, (self.frames, self.part_bytes), (self.frame_stride, 1)


def class_geometry(spec: KVSpec, index: int, arena_bytes: int, ranks: int = 1) -> ClassGeometry:
    """Work out where the pages of a class lie.

    Parameters
    ----------
    spec : KVSpec
        The geometry of the pool.
    index : int
        Index of the class.
    arena_bytes : int
        Usable bytes of the arena in the books, for all ranks together.
    ranks : int, optional
        Ranks that share the spec's heads.

    Returns
    -------
    ClassGeometry

    Raises
    ------
    InvalidArgument
        If the heads of the group can't be divided by the ranks.
    """
    cls: PageClass = spec.classes[index]
    group = _of_rank(spec.groups[cls.group], ranks)
    page_bytes, layer_bytes = _divided(cls, group, ranks)
    frames = arena_bytes // cls.page_bytes
    layer_major = spec.layout == "layer_major"
    planes = _planes(group, cls.dtype, spec.page_tokens) if group.kind != "state" else {}
    return ClassGeometry(
        index=index,
        group=group,
        dtype=cls.dtype,
        frames=frames,
        page_bytes=page_bytes,
        frame_stride=layer_bytes if layer_major else page_bytes,
        layer_stride=arena_bytes // ranks // group.layers if layer_major else layer_bytes,
        parts=group.layers if layer_major else 1,
        k=planes.get("k"),
        v=planes.get("v"),
        k_scale=planes.get("k_scale"),
        v_scale=planes.get("v_scale"),
    )


def _planes(group: LayerGroup, dtype: str, tokens: int) -> dict[str, Plane]:
    """K, V and their scales, one behind the other."""
    size, scale = DTYPES[dtype]
    planes: dict[str, Plane] = {}
    at = 0
    for name, dim in (("k", group.k_dim), ("v", group.v_dim)):
        if dim:
            planes[name] = Plane(dtype, at, (tokens, group.kv_heads, dim))
            at += tokens * group.kv_heads * dim * size
    if scale:
        if at % scale:
            raise InvalidArgument(
                f"group {group.name!r}: its int8 values take {at} bytes a page and layer, so that the "
                "float16 scales behind them would lie at an odd address; use an even page_tokens"
            )
        for name in list(planes):
            planes[f"{name}_scale"] = Plane(SCALE, at, (tokens, group.kv_heads))
            at += tokens * group.kv_heads * scale
    return planes


def _of_rank(group: LayerGroup, ranks: int) -> LayerGroup:
    """The group with the heads of one rank."""
    if ranks == 1:
        return group
    once = "make the spec of one rank (KVSpec.from_hf_config(config, tp=...)), and leave ranks at 1"
    if group.kind in ("latent", "state"):
        raise InvalidArgument(
            f"group {group.name!r}: a {group.kind} has no heads to divide by {ranks} ranks; {once}"
        )
    if group.kv_heads % ranks:
        raise InvalidArgument(
            f"group {group.name!r}: {group.kv_heads} KV heads can't be divided by {ranks} ranks; {once}"
        )
    return LayerGroup(
        group.name,
        group.kind,
        group.layers,
        group.kv_heads // ranks,
        group.k_dim,
        group.v_dim,
        group.dtype,
        group.window,
    )


def _divided(cls: PageClass, group: LayerGroup, ranks: int) -> tuple[int, int]:
    """Bytes of a page and of a layer on one rank: all classes shrink alike, so frame numbers stay."""
    if ranks > 1 and (cls.page_bytes % (_ALIGN * ranks) or cls.layer_bytes % (_ALIGN * ranks)):
        raise InvalidArgument(
            f"group {group.name!r}: pages of {cls.page_bytes} bytes with layers of {cls.layer_bytes} "
            f"can't be cut for {ranks} ranks; use page_tokens that are a multiple of 16"
        )
    return cls.page_bytes // ranks, cls.layer_bytes // ranks

"""Which components exist, which layer writes them, which layers read them: static tables, no arrays.

A layer's cache *is* its attention variant, so this table is the only place that says what is kept.
Cache shapes, bytes, slots, sharding and reports are all derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvjax.config import require


@dataclass(frozen=True)
class Component:
    """One named stream of features per token.

    A *state* (k, v, a latent) is the concatenation of its components along `axis` of their features.
    Components with the same `param` are made by one projection, then split.
    """

    name: str
    features: tuple[int, ...]
    state: str
    param: str
    axis: int = 0
    head_axis: int | None = 0
    """Axis of the features that counts heads: stored outermost and split over devices. None: no heads."""
    rotate: bool = False
    norm: str | None = None
    """Parameter of an RMS norm over the last feature axis, before rotation."""
    cumulative: bool = False
    """A layer reads all entries of its group so far, not only the latest."""
    window: int | None = None
    """Only the last `window` tokens are kept."""
    cached: bool = True
    """False: handed down to later layers within a call, never stored."""

    @property
    def size(self) -> int:
        """Elements per token and slot."""
        return prod(self.features)


@dataclass(frozen=True)
class Segment:
    """`repeats` equal groups of consecutive layers; `layers[j]` names what layer j of each group writes."""

    repeats: int
    layers: tuple[tuple[str, ...], ...]
    reads: tuple[str, ...]
    window: int | None = None

    @property
    def depth(self) -> int:
        """Layers of the segment."""
        return self.repeats * len(self.layers)

    def per_group(self, name: str) -> int:
        """Slots of component `name` that one group fills."""
        return sum(name in writes for writes in self.layers)


@dataclass(frozen=True)
class Plan:
    """All components and segments of a model, in the order in which its layers run."""

    components: tuple[Component, ...]
    segments: tuple[Segment, ...]

    def __post_init__(self):
        names = [c.name for c in self.components]
        require(len(set(names)) == len(names), f"components {names} carry a name twice: names must be unique")
        for segment in self.segments:
            for name in {*segment.reads, *(n for writes in segment.layers for n in writes)}:
                require(name in names, f"a segment names component {name!r}, which is not among {names}")

    def component(self, name: str) -> Component:
        """The component called `name`."""
        return next(c for c in self.components if c.name == name)

    def select(self, names: tuple[str, ...]) -> tuple[Component, ...]:
        """The components called `names`, in the order of the table."""
        return tuple(c for c in self.components if c.name in names)

    def first_slot(self, segment: int, name: str) -> int:
        """Slots of component `name` that the segments before `segment` fill."""
        return sum(s.repeats * s.per_group(name) for s in self.segments[:segment])

    def slots(self, name: str) -> int:
        """Slots of component `name` in the whole model."""
        return self.first_slot(len(self.segments), name)

    @property
    def cached(self) -> tuple[Component, ...]:
        """The components that the cache holds."""
        return tuple(c for c in self.components if c.cached)


def latest(own: tuple, before, cumulative: bool) -> tuple:
    """The routing rule: which entries of a component a layer reads.

    Args:
        own: entries that the layer's group has made so far, oldest first.
        before: the last entry of earlier segments, or None.
        cumulative: whether the component accumulates over its group.
    Returns:
        All entries of the group if cumulative, else the latest one: the group's, or an earlier segment's.
    """
    if own:
        return tuple(own) if cumulative else (own[-1],)
    return () if before is None else (before,)

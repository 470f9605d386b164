"""Which components exist, which layer writes them, which layers read them: static tables, no arrays.

A layer's cache *is* its attention variant, so this table is the only place that says what is kept.
Cache shapes, bytes, slots, sharding and reports are all derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from jax import Array

from kvjax.config import require


@dataclass(frozen=True)
class Component:
    """One named stream of features per token.

    A *state* is the concatenation of its components along `axis` of their features. Sharing schemes know these states:
    `k` and `v`, keys and values by head; `latent`, which holds both; `k_a`, `k_b`, `v_a`, `v_b`, their factors.
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
    interleaved: bool = False
    """Rotated pairs are neighbours (2i, 2i + 1), not the halves (i, i + width / 2)."""
    bias: str | None = None
    """Parameter added to the projection."""
    norm: str | None = None
    """Parameter of an RMS norm over the last feature axis, after the bias and before rotation."""
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
    source: bool = False
    """No layer: makes the components that it writes from the normed stream, once (YOCO)."""

    @property
    def depth(self) -> int:
        """Layers of the segment."""
        return 0 if self.source else self.repeats * len(self.layers)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of everything that its layers write."""
        return tuple(dict.fromkeys(name for writes in self.layers for name in writes))

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of what it reads of earlier segments: all that its first layer does not write itself."""
        return tuple(name for name in self.reads if name not in self.layers[0])

    def per_group(self, name: str) -> int:
        """Slots of component `name` that one group fills."""
        return sum(name in writes for writes in self.layers)


@dataclass(frozen=True)
class Plan:
    """All components and segments of a model, in the order in which its layers run."""

    components: tuple[Component, ...]
    segments: tuple[Segment, ...]
    depth_average: bool = False
    """After each segment, of one layer, the stream becomes a learned mean of all streams so far (DenseFormer)."""

    def __post_init__(self):
        object.__setattr__(self, "segments", tuple(s for s in self.segments if s.repeats))
        names = [c.name for c in self.components]
        require(len(set(names)) == len(names), f"components {names} carry a name twice: names must be unique")
        for segment in self.segments:
            for name in {*segment.reads, *segment.writes}:
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

    def reads(self) -> tuple[dict[str, int], ...]:
        """For each layer, how many entries of every component it reads to decode a token: the routing rule, counted.

        What is held is `slots`; a layer that shares another's entries, or rebuilds from several, reads them all the
        same. Components that are not cached are counted too: they are read within a call.
        """
        return tuple({name: len(slots) for name, slots in self.slots_read(*place).items()} for place in self.places)

    @property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """For each layer, in order: its segment, its group there, and its index in the group."""
        return tuple((number, group, index) for number, segment in enumerate(self.segments) if not segment.source
                     for group in range(segment.repeats) for index in range(len(segment.layers)))

    def slots_read(self, number: int, group: int | Array, index: int) -> dict[str, tuple]:
        """Slots of every component that a layer reads, by the routing rule: {name: (slot, ...)}.

        `number` is the layer's segment, `group` its group there, which may be traced, and `index` its place in that.
        """
        segment = self.segments[number]
        def of(name: str) -> tuple:
            first = self.first_slot(number, name)
            base, made = first + group * segment.per_group(name), range(self._made(segment, index, name))
            return latest(tuple(base + i for i in made), first - 1 if first else None, self.component(name).cumulative)
        return {name: of(name) for name in segment.reads}

    def _made(self, segment: Segment, index: int, name: str) -> int:
        """Entries of a component that the layers of a group up to layer `index` write."""
        return sum(name in writes for writes in segment.layers[:index + 1])

    @property
    def silent_from(self) -> int:
        """Number of the first segment from which on nothing is written: one token of a prompt is enough there."""
        return max((i + 1 for i, segment in enumerate(self.segments) if segment.writes), default=0)

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
    if cumulative:
        return tuple(own)
    if own:
        return (own[-1],)
    return () if before is None else (before,)

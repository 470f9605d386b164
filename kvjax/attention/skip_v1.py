"""SkipV1Former: every layer after the first takes a share of its value heads from the first layer.

From "Improving Model Representation and Reducing KV Cache via Skip Connections with First Value Heads".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.sharing import Sharing, names_of, require_multiple, require_states
from kvjax.config import register, require

STATES = ("v", "latent", "v_a", "v_b")
"""What is shared, along its first axis: value heads, a latent's features, ranks of value factors."""


@register("skip_v1")
@dataclass(frozen=True)
class SkipV1(Sharing):
    """Values of layers 2..L are [own | the last ones of layer 1], by heads; keys are their own.

    Of a latent its features are shared, layer 1's after its norm and the own ones with a norm of their own; of
    Kronecker factors their ranks (both beyond what the paper measures: this project's assumptions).
    """

    share: float = 0.5
    """Share of the value heads that is layer 1's; the paper's is a half."""

    def __post_init__(self):
        super().__post_init__()
        require(0 <= self.share < 1, f"SkipV1.share is {self.share}: it must be at least 0 and below 1")

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        components, first, later = self.halves(components)
        reads = names_of(components)
        return Plan(components, (Segment(1, (first,), reads, window), Segment(layers - 1, (later,), reads, window)))

    def halves(self, components: tuple[Component, ...]) -> tuple[tuple, tuple, tuple]:
        """Components split in [own | layer 1's], the names that layer 1 writes, and those that other layers write."""
        require_states(self, components, STATES, "it has no values that could come from layer 1")
        if not self.share:
            return components, names_of(components), names_of(components)
        split = {c.name: self._split(c) for c in components if c.state in STATES}
        own = tuple(split[c.name][0] if c.name in split else c for c in components)
        borrowed = tuple(first for _, first in split.values())
        return own + borrowed, names_of(own + borrowed), names_of(own)

    def _split(self, c: Component) -> tuple[Component, Component]:
        """A layer's own part of a component, and the part that is layer 1's."""
        size = c.features[0]
        borrowed = round(size * self.share)
        require(abs(borrowed - size * self.share) < 1e-9 and borrowed < size,
                f"SkipV1: a share of {self.share} of the {size} of {c.name} {c.features} is not a whole number below "
                f"{size}: change the share, or the size")
        def part(name: str, n: int) -> Component:
            return dataclasses.replace(c, name=name, features=(n, *c.features[1:]), axis=0)
        return part(c.name, size - borrowed), part(f"{c.name}_first", borrowed)


@register("skip_v1_yoco")
@dataclass(frozen=True)
class SkipV1Yoco(SkipV1):
    """SkipV1 whose upper half also reads the keys of layer L/2 (the paper's combination with YOCO)."""

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        require_multiple(self, layers, 2)
        require_states(self, components, ("v", "v_a", "v_b"), "the upper half reads older keys with newer values, and "
                       "a latent holds both")
        components, first, later = self.halves(components)
        values = tuple(c.name for c in components if c.name in later and c.state in STATES)
        def run(repeats: int, writes: tuple[str, ...]) -> Segment:
            return Segment(repeats, (writes,), names_of(components), window)
        # Layer L/2 stands alone: what later layers read of a long scan would be kept for all of its layers.
        middle = (run(layers // 2 - 2, later), run(1, later)) if layers > 2 else ()
        return Plan(components, (run(1, first), *middle, run(layers // 2, values)))

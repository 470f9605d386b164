"""YOCO (Sun et al., 2024, arXiv:2405.05254): the upper half of the layers reads one set of keys and values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.cross_layer import ONE_LATENT, VALUES
from kvjax.attention.sharing import Sharing, names_of, require_multiple, require_states
from kvjax.config import register, require


@register("yoco")
@dataclass(frozen=True)
class Yoco(Sharing):
    """Half of the layers attend to a sliding window; a source then makes the components that all others read.

    For S tokens G d (L min(S, W) + 2 S) elements of keys and values are kept. A prompt passes the upper half with its
    last token only, since nothing is written there.
    """

    window: int = 1024
    """W, tokens that the lower half sees."""

    def __post_init__(self):
        super().__post_init__()
        require(self.window > 0, f"Yoco.window is {self.window}: it must be above 0")

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        require_multiple(self, layers, 2)
        require(window is None or self.window <= window,
                f"Yoco.window {self.window} exceeds the model's window {window}: lower it")
        near = tuple(dataclasses.replace(c, name=f"{c.name}_window", window=self.window) for c in components)
        lower, upper = names_of(near), names_of(components)
        return Plan((*near, *components), (
            Segment(layers // 2, (lower,), lower, self.window),
            Segment(1, (upper,), (), source=True),
            Segment(layers // 2, ((),), upper, window)))


@register("yoco_values")
@dataclass(frozen=True)
class YocoValues(Sharing):
    """YOCO-V: the upper half reads the values of layer L/2 (a baseline of the SkipV1Former paper)."""

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        require_multiple(self, layers, 2)
        require_states(self, components, VALUES, ONE_LATENT)
        names = names_of(components)
        upper = tuple(c.name for c in components if c.state not in VALUES)
        def run(repeats: int, writes: tuple[str, ...]) -> Segment:
            return Segment(repeats, (writes,), names, window)
        # Layer L/2 stands alone: what later layers read of a long scan would be kept for all of its layers.
        return Plan(components, (run(layers // 2 - 1, names), run(1, names), run(layers // 2, upper)))

"""Cross-layer attention (Brandon et al., 2024, arXiv:2405.12981): neighbouring layers read one layer's entries."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.sharing import Sharing, names_of, require_multiple, require_states
from kvjax.config import register

VALUES = ("v", "v_a", "v_b")
"""States that hold values and nothing else."""
ONE_LATENT = "keys and values come from one latent, so that values alone cannot be shared"


@register("cross_layer")
@dataclass(frozen=True)
class CrossLayer(Sharing):
    """CLA-s: of every s layers the first writes, the others read what it wrote."""

    layers: int = 2
    """s."""

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        require_multiple(self, layers, self.layers)
        names = names_of(components)
        return Plan(components, (Segment(layers // self.layers, (names, *[()] * (self.layers - 1)), names, window),))


@register("cross_layer_values")
@dataclass(frozen=True)
class CrossLayerValues(Sharing):
    """CLA-V: pairs of layers share values only (a baseline of the SkipV1Former paper)."""

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        require_multiple(self, layers, 2)
        require_states(self, components, VALUES, ONE_LATENT)
        names = names_of(components)
        second = tuple(c.name for c in components if c.state not in VALUES)
        return Plan(components, (Segment(layers // 2, (names, second), names, window),))

"""DenseFormer (Pagliardini et al., 2024, arXiv:2402.02622): each layer reads a learned mean of all earlier streams."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.sharing import Sharing, names_of
from kvjax.config import register


@register("denseformer")
@dataclass(frozen=True)
class DenseFormer(Sharing):
    """After each layer the stream becomes a weighted sum of the embeddings and of all layers' outputs so far.

    The weights start as the identity. Nothing is shared and nothing saved: a baseline of the SkipV1Former paper. Layers
    are segments of their own, because a scan would keep the growing history once for every layer.
    """

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        names = names_of(components)
        return Plan(components, (Segment(1, (names,), names, window),) * layers, depth_average=True)

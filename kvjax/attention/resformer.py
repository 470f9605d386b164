"""ResFormer (Zhou et al., 2024, arXiv:2410.17897): values are mixed with the first layer's before they are cached."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
from jax import Array

from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.sharing import Sharing, names_of
from kvjax.attention.variant import Attention, Layer, Param, Weights
from kvjax.config import register, require

FIRST = "v_first"


@dataclass(frozen=True)
class MixedValues(GroupedQuery):
    """Grouped-query attention with v = mix * own v + (1 - mix) * layer 1's v."""

    def components(self) -> tuple[Component, ...]:
        keys, values = super().components()
        return keys, values, dataclasses.replace(values, name=FIRST, state=FIRST, cached=False)

    def row_shapes(self, layer: Layer) -> dict[str, Param]:
        if _is_first(layer):
            return super().row_shapes(_without_copy(layer))
        return super().row_shapes(layer) | {"v_mix": Param((), (), jax.nn.initializers.constant(0.5))}

    def rows(self, layer: Layer, weights: Weights, x: Array, positions: Array,
             handed: dict[str, Array]) -> dict[str, Array]:
        rows = super().rows(_without_copy(layer), weights, x, positions, handed)
        if _is_first(layer):
            return rows | {FIRST: rows["v"]}
        mix = weights["v_mix"]
        return rows | {"v": (mix * rows["v"] + (1 - mix) * handed[FIRST]).astype(x.dtype)}


@register("resformer")
@dataclass(frozen=True)
class ResFormer(Sharing):
    """A learned mix of each layer's values with layer 1's, 0.5 at the start; saves nothing."""

    def adapt(self, attention: Attention) -> Attention:
        require(type(attention) is GroupedQuery, "ResFormer mixes the values of heads before they are cached, and "
                f"{attention} does not cache such values: use GroupedQuery")
        return MixedValues(**vars(attention))

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        kept = tuple(c.name for c in components if c.cached)
        return Plan(components, (Segment(1, (names_of(components),), kept, window),
                                 Segment(layers - 1, (kept,), names_of(components), window)))


def _is_first(layer: Layer) -> bool:
    return FIRST in (c.name for c in layer.writes)


def _without_copy(layer: Layer) -> Layer:
    return dataclasses.replace(layer, writes=tuple(c for c in layer.writes if c.name != FIRST))

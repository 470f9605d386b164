"""KVPath: layers are grouped in paths; a path keeps one alpha state, and each layer of it a small delta.

States are taken before positional encoding; a layer's delta is made from its own normed input, alpha from that of the
path's first layer (this project's assumption). From KVPath, "a KV representation paradigm that connects key
and value states across network depth".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.residual import ResidualHeads
from kvjax.attention.sharing import Sharing, names_of, require_multiple, require_states
from kvjax.attention.variant import Attention
from kvjax.config import register, require

SPLIT_AXIS = {"k": -1, "v": -1, "latent": -1, "k_a": 0, "k_b": 0, "v_a": 0, "v_b": 0}
"""Where alpha and delta are put together: features of keys, values and latents, ranks of Kronecker factors."""


@register("path_concat")
@dataclass(frozen=True)
class PathConcat(Sharing):
    """KVPath-Concat: k = [k_alpha | rot(k_delta)], v = [v_alpha | v_delta], of a latent c = [c_alpha | c_delta].

    Alpha is not rotated. Cached per path of m layers and head: 2 d_alpha + 2 m delta, of a latent c_alpha + m (delta +
    dr). This project's assumptions: a norm of heads (qk_norm) acts on alpha and on delta each by itself; the parts of a
    latent, for which the source gives no dimensions; and the ranks of Kronecker factors, all rotated as usual.
    """

    layers: int
    """m, layers of a path."""
    delta: int
    """Features of each head's keys and of its values (or of the latent, or ranks) that are a layer's own."""

    def __post_init__(self):
        super().__post_init__()
        require(self.delta > 0, f"PathConcat.delta is {self.delta}: it must be above 0")

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        require_multiple(self, layers, self.layers)
        require_states(self, components, tuple(SPLIT_AXIS), "it has no state to split")
        split = {c.name: self._split(c) for c in components if c.state in SPLIT_AXIS}
        alphas = tuple(alpha for alpha, _ in split.values() if alpha.features[SPLIT_AXIS[alpha.state]])
        own = tuple(split[c.name][1] if c.name in split else c for c in components)
        everything, later = names_of(alphas + own), names_of(own)
        return Plan(alphas + own, (Segment(layers // self.layers, (everything, *[later] * (self.layers - 1)),
                                           everything, window),))

    def _split(self, c: Component) -> tuple[Component, Component]:
        """Alpha, which may be of no features, and delta."""
        axis = SPLIT_AXIS[c.state]
        size = c.features[axis]
        require(self.delta <= size, f"PathConcat.delta {self.delta} exceeds the {size} of {c.name} {c.features}")
        require(not (c.rotate and axis == -1 and self.delta % 2),
                f"PathConcat.delta {self.delta} is odd: rotary embedding turns pairs of its features")
        def part(suffix: str, n: int) -> Component:
            features = list(c.features)
            features[axis] = n
            names = {name: f"{value.removesuffix('_proj')}_{suffix}" for name in ("name", "param", "norm", "bias")
                     if (value := getattr(c, name))}
            return dataclasses.replace(c, **names, features=tuple(features), axis=axis,
                                       rotate=c.rotate and not (axis == -1 and suffix == "alpha"))
        return part("alpha", size - self.delta), part("delta", self.delta)


@register("path_residual")
@dataclass(frozen=True)
class PathResidual(Sharing):
    """KVPath-Residual: later layers of a path add k_expand k_delta to its keys and values (see `residual`)."""

    layers: int
    """m, layers of a path."""
    delta: int
    """Features of a correction, per key-value head."""

    def __post_init__(self):
        super().__post_init__()
        require(self.delta > 0, f"PathResidual.delta is {self.delta}: it must be above 0")

    def adapt(self, attention: Attention) -> Attention:
        require(type(attention) is GroupedQuery,
                f"PathResidual adds to the keys and values of heads, and {attention} keeps none: use GroupedQuery, or "
                "PathConcat")
        require(self.delta <= attention.head_dim,
                f"PathResidual.delta {self.delta} exceeds head_dim {attention.head_dim}")
        return ResidualHeads(**vars(attention), delta=self.delta)

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        require_multiple(self, layers, self.layers)
        parts = tuple(c for c in components if self.layers > 1 or not c.cumulative)
        once = tuple(c.name for c in parts if not c.cumulative)
        each = tuple(c.name for c in parts if c.cumulative)
        return Plan(parts, (Segment(layers // self.layers, (once, *[each] * (self.layers - 1)), names_of(parts),
                                    window),))

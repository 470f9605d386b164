"""KVPath-Residual: the layers of a path correct the first one's keys and values by a few features each.

    k^0 = h^0 k_alpha,      k^l = k^(l-1) + k_expand^l (h^l k_delta^l)        and the same for values.

Cached per path of m layers: 2 d + 2 (m - 1) delta elements for each key-value head. Keys are cached before rotation,
because corrections of later layers still add to them; norms and rotation follow the reconstruction. One expansion for
each key-value head is this project's assumption: the source leaves it open.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.partials import Partial, attend, attend_parts, feature_parts_values, parts_scores, separated
from kvjax.attention.variant import Layer, Param, View, Weights, fan_in, rms_norm
from kvjax.kernels.decode.api import Attending
from kvjax.kernels.decode.heads import RebuiltHeads, by_key_head, put_together, rotations
from kvjax.kernels.decode.program import Past


@dataclass(frozen=True)
class ResidualHeads(GroupedQuery):
    """Grouped-query attention whose keys and values are rebuilt along a path of layers."""

    delta: int = 2
    """Features of a correction, per key-value head."""

    def components(self) -> tuple[Component, ...]:
        full = [dataclasses.replace(c, name=f"{c.name}_alpha", param=f"{c.name}_alpha", norm=None, rotate=False)
                for c in super().components()]
        corrections = [Component(f"{s}_delta", (self.kv_heads, self.delta), s, f"{s}_delta", cumulative=True,
                                 bias=f"{s}_bias_delta" if self.qkv_bias else None) for s in ("k", "v")]
        return (*full, *corrections)

    def query_shapes(self, layer: Layer) -> dict[str, Param]:
        heads = "kv_heads" if self.kv_heads > 1 else None
        expand = Param((self.kv_heads, self.head_dim, self.delta), (heads, None, None), fan_in(self.delta))
        expansions = {f"{c.state}_expand": expand for c in layer.writes if c.cumulative}
        norms = {name: Param((self.head_dim,), (None,), jax.nn.initializers.ones)
                 for name in ("qk_norm_q", "qk_norm_k") if self.qk_norm}
        plain = GroupedQuery.query_shapes(dataclasses.replace(self, qk_norm=False), layer)
        return plain | norms | expansions

    def queries(self, layer: Layer, weights: Weights, x: Array, positions: Array) -> Array:
        """[B, T, H, d]."""
        queries = self.projected_queries(weights, x)
        if self.qk_norm:
            queries = rms_norm(queries, weights["qk_norm_q"], layer.norm_eps)
        return layer.rotate(queries, positions)

    def partial(self, layer: Layer, path: tuple[Weights, ...], queries: Array, view: View) -> Partial:
        """Rebuilds the viewed keys and values."""
        values = _rebuilt(path, view, "v")
        return attend_parts((queries,), (self._keys(layer, path, view),), (values,), view.mask, self.scale)

    def absorbed(self, layer: Layer, path: tuple[Weights, ...], queries: Array, view: View) -> Partial:
        """Rebuilds keys only; the output is the means of v_alpha and of all v_delta [B, T, H, d + l delta]."""
        values = (view["v_alpha"], *view.entries.get("v_delta", ()))
        return attend((queries,), (self._keys(layer, path, view),), values, view.mask, self.scale,
                      scores=parts_scores, combine=feature_parts_values)

    def reads_in_place(self, layer: Layer) -> bool:
        return False

    def attending(self, layer: Layer, path: tuple[Weights, ...], queries: Array,
                  entries: dict[str, int]) -> Attending:
        new, deltas = queries.shape[1], entries.get("k_delta", 0)
        names = [[(f"{s}_alpha", 0), *((f"{s}_delta", j) for j in range(deltas))] for s in ("k", "v")]
        widths = [self.head_dim, *[self.delta] * deltas]
        program = RebuiltHeads(
            new, self.heads // self.kv_heads, self.kv_heads, tuple(enumerate(widths)),
            tuple((i, self.kv_heads, width) for i, width in enumerate(widths, 1 + deltas)),
            norm_eps=layer.norm_eps if self.qk_norm else None, rotated=layer.rope.base is not None)
        def constants(past: Past) -> tuple[tuple[Array, bool], ...]:
            made = [(expand.reshape(-1, self.delta), True) for expand in _expansions(path, "k")]
            made += [(path[-1]["qk_norm_k"][:, None], False)] if self.qk_norm else []
            turns = rotations(layer.rope.frequencies(self.head_dim), layer.rope.rotation_factor,
                              past.room or past.size, past.block)
            return (*made, (jnp.asarray(turns), False)) if program.rotated else tuple(made)
        return Attending(program, (by_key_head(queries, self.kv_heads),), (*names[0], *names[1]),
                         put_together(new), self.scale, split=1 if self.kv_heads > 1 else 2,
                         constants=constants, by_slot=program.rotated)

    def head_queries(self, layer: Layer, path: tuple[Weights, ...], queries: Array) -> Array:
        return queries

    def head_states(self, layer: Layer, path: tuple[Weights, ...], view: View) -> tuple[Array, Array]:
        return self._keys(layer, path, view), _rebuilt(path, view, "v")

    def release(self, layer: Layer, path: tuple[Weights, ...], part: Partial) -> Partial:
        """Expands the means: sum p v = sum p v_alpha + sum_j v_expand^j (sum p v_delta^j)."""
        expansions = _expansions(path, "v")
        full, *corrections = separated(part.out, [self.head_dim, *[self.delta] * len(expansions)], axis=-1)
        for expand, correction in zip(expansions, corrections, strict=True):
            grouped = correction.reshape(*correction.shape[:2], self.kv_heads, -1, self.delta)
            full += jnp.einsum("gdr,btghr->btghd", expand.astype(jnp.float32), grouped).reshape(full.shape)
        return Partial(full, part.lse)

    def _keys(self, layer: Layer, path: tuple[Weights, ...], view: View) -> Array:
        keys = _rebuilt(path, view, "k")
        if self.qk_norm:
            keys = rms_norm(keys, path[-1]["qk_norm_k"], layer.norm_eps)
        return layer.rotate(keys, view.positions)


def _expansions(path: tuple[Weights, ...], state: str) -> list[Array]:
    return [weights[f"{state}_expand"] for weights in path if f"{state}_expand" in weights]


def _rebuilt(path: tuple[Weights, ...], view: View, state: str) -> Array:
    """The layer's keys or values [B, S, G, d] before rotation, from the rows: no rounded state is carried."""
    full = view[f"{state}_alpha"]
    total = full.astype(jnp.float32)
    for expand, rows in zip(_expansions(path, state), view.entries.get(f"{state}_delta", ()), strict=True):
        total += jnp.einsum("gdr,bsgr->bsgd", expand, rows, preferred_element_type=jnp.float32)
    return total.astype(full.dtype)

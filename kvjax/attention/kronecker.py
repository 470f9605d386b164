"""Kronecker Product Attention (arXiv:2610.12657) and, as its degenerate split, Tensor Product Attention.

Queries, keys and values are means over ranks of Kronecker products of two small matrices made from the token:

    K_t = 1/R sum_r A_r (x) B_r      A_r [h1, d1], B_r [h2, d2], H = h1 h2, d = d1 d2,

so head (i1, i2) = i1 h2 + i2 has feature (j1, j2) = j1 d2 + j2 equal to 1/R sum_r A_r[i1, j1] B_r[i2, j2].
Only the factors are cached: (RK + RV)(h1 d1 + h2 d2) elements a token. Rotation acts on the rows of B alone.
Tensor Product Attention (arXiv:2501.06425) is the split h1 = H, h2 = 1, d1 = 1, d2 = d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.partials import Partial, attend, joined
from kvjax.attention.tiled import attend_factors, by_kernel
from kvjax.attention.variant import Attention, Layer, Param, View, Weights, project
from kvjax.config import register, require
from kvjax.kernels.decode.api import Attending
from kvjax.kernels.decode.kronecker import KroneckerFactors, by_row, by_token


@register("kronecker")
@dataclass(frozen=True)
class Kronecker(Attention):
    """H = h1 h2 heads of width d = d1 d2, kept as factors of ranks RK and RV.

    The query rank of 6 and Xavier initial values over D -> R h d are this project's assumptions: the paper
    leaves them open.
    """

    h1: int
    h2: int
    d1: int = 8
    d2: int = 8
    q_rank: int = 6
    k_rank: int = 2
    v_rank: int = 2
    dense_query: bool = False
    """Queries by one full projection instead of factors."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("h1", "h2", "d1", "d2", "q_rank", "k_rank", "v_rank"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be above 0")
        require(self.d2 % 2 == 0, f"d2 is {self.d2}: it must be even, rotary embedding turns pairs of features")

    @property
    def heads(self) -> int:
        """H, query heads."""
        return self.h1 * self.h2

    @property
    def head_dim(self) -> int:
        """d, width of a head."""
        return self.d1 * self.d2

    def components(self) -> tuple[Component, ...]:
        def factor(name: str, rank: int, heads: int, width: int, rotate: bool = False, split: int | None = None):
            return Component(name, (rank, heads, width), state=name, param=name, head_axis=split, rotate=rotate)
        # A's heads are the outer ones: splitting them splits the model's heads; B is needed whole by every split.
        return (
            factor("k_a", self.k_rank, self.h1, self.d1, split=1),
            factor("k_b", self.k_rank, self.h2, self.d2, rotate=True),
            factor("v_a", self.v_rank, self.h1, self.d1, split=1),
            factor("v_b", self.v_rank, self.h2, self.d2),
        )

    def projection_init(self, shape: tuple[int, ...]) -> Callable[..., Array]:
        return jax.nn.initializers.normal((2 / (shape[0] + prod(shape[1:]))) ** 0.5)

    def query_shapes(self, layer: Layer) -> dict[str, Param]:
        if self.dense_query:
            return {"q_proj": self.projection(layer.width, (self.heads, self.head_dim), ("heads", None))}
        return {
            "q_a": self.projection(layer.width, (self.q_rank, self.h1, self.d1), (None, "heads", None)),
            "q_b": self.projection(layer.width, (self.q_rank, self.h2, self.d2), (None, None, None)),
        }

    def queries(self, layer: Layer, weights: Weights, x: Array, positions: Array) -> Array:
        """[B, T, H, d], rotated and, if factored, averaged over ranks."""
        if self.dense_query:
            queries = project(x, weights["q_proj"])
            rows = queries.reshape(*queries.shape[:-1], self.d1, self.d2)
            return layer.rotate(rows, positions).reshape(queries.shape)
        a = project(x, weights["q_a"])
        b = layer.rotate(project(x, weights["q_b"]), positions)
        return kronecker_mean(a, b)

    def partial(self, layer: Layer, path: tuple[Weights, ...], queries: Array, view: View) -> Partial:
        """Rebuilds the viewed keys and values; ranks may come in parts, as a sharing scheme says."""
        whole = lambda state: joined(view.parts(layer.state(state)), 2)
        keys, values = (whole("k_a"), whole("k_b")), (whole("v_a"), whole("v_b"))
        if by_kernel(view.mask):
            out, lse = attend_factors(queries, keys, values, view.mask, self.head_dim**-0.5)
            return Partial(out.astype(jnp.float32), lse)
        return attend(queries, kronecker_mean(*keys), kronecker_mean(*values), view.mask, self.head_dim**-0.5)

    def absorbed(self, layer: Layer, path: tuple[Weights, ...], queries: Array, view: View) -> Partial:
        """Scores and values in factor space; no key or value is built.

        T queries cost T R products a key here, and T + R once keys are rebuilt: chunks of many queries rebuild,
        one block of the cache at a time. Tokens of a compacted cache may have a bias, the same for all heads.
        """
        biases = view.parts(layer.state("bias"))
        if queries.shape[1] > max(self.k_rank, self.v_rank) and not biases:
            return self.partial(layer, path, queries, view)
        pairs = lambda a, b: tuple(zip(*(view.parts(layer.state(state)) for state in (a, b)), strict=True))
        keys, values = (pairs("k_a", "k_b"), biases), pairs("v_a", "v_b")
        return attend(queries, keys, values, view.mask, self.head_dim**-0.5,
                      scores=self._factor_scores, combine=self._factor_values)

    def attending(self, layer: Layer, path: tuple[Weights, ...], queries: Array,
                  entries: dict[str, int]) -> Attending | None:
        if layer.state("bias"):
            return None
        sizes, new = (self.h1, self.h2, self.d1, self.d2), queries.shape[1]
        states = [layer.state(state) for state in ("k_a", "k_b", "v_a", "v_b")]
        number = {c.name: i for i, c in enumerate(c for state in states for c in state)}
        pairs = lambda a, b: tuple((number[x.name], number[y.name], x.features[0]) for x, y in zip(a, b, strict=True))
        program = KroneckerFactors(new, *sizes, pairs(*states[:2]), pairs(*states[2:]))
        def result(outputs: tuple[Array, ...], lse: Array) -> tuple[Array, Array]:
            means = by_token(outputs[0], new, self.h1, self.h2, self.d2)
            return means, by_token(lse, new, self.h1, self.h2, 1)[..., 0]
        return Attending(program, (by_row(queries, *sizes),), tuple((name, 0) for name in number), result,
                         self.head_dim**-0.5)

    def _factor_scores(self, queries: Array, keys: tuple[tuple[tuple[Array, Array], ...], tuple[Array, ...]]) -> Array:
        pairs, biases = keys
        scores = sum(self._rank_scores(queries, a, b) for a, b in pairs) / self.k_rank
        return sum((bias.astype(jnp.float32)[:, None, None, :, 0] for bias in biases), scores)

    def _rank_scores(self, queries: Array, a: Array, b: Array) -> Array:
        batch, length = queries.shape[:2]
        queries = queries.reshape(batch, length, self.h1, self.h2, self.d1, self.d2)
        # A first: what is left per key is R h2-rows of width d2, contracted with B's rows as they lie in the cache.
        half = jnp.einsum("bthkij,bsrhi->bhtkjrs", queries, a, preferred_element_type=jnp.float32)
        scores = jnp.einsum("bhtkjrs,bsrkj->bhkts", half, b.astype(jnp.float32))
        return scores.reshape(batch, self.heads, length, a.shape[1])

    def _factor_values(self, weights: Array, values: tuple[tuple[Array, Array], ...]) -> Array:
        return sum(self._rank_values(weights, a, b) for a, b in values) / self.v_rank

    def _rank_values(self, weights: Array, a: Array, b: Array) -> Array:
        batch, _, length, keys = weights.shape
        weights = weights.reshape(batch, self.h1, self.h2, length, keys)
        weighted = jnp.einsum("bhkts,bsrhi->bkthirs", weights, a.astype(jnp.float32))
        out = jnp.einsum("bkthirs,bsrkj->bthkij", weighted, b.astype(jnp.float32))
        return out.reshape(batch, length, self.heads, self.head_dim)


def kronecker_mean(a: Array, b: Array) -> Array:
    """Mean over ranks of A_r (x) B_r: [B, T, R, h1, d1], [B, T, R, h2, d2] -> [B, T, h1 h2, d1 d2]."""
    batch, length, rank, h1, d1 = a.shape
    h2, d2 = b.shape[3:]
    product = jnp.einsum("btrhi,btrkj->bthkij", a, b) / rank
    return product.reshape(batch, length, h1 * h2, d1 * d2)

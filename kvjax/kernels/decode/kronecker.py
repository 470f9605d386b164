"""Kronecker factors (KPA, TPA): no key or value is built."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels.decode.program import Arrays, Shape, div, dot, rem


def by_row(queries: Array, h1: int, h2: int, d1: int, d2: int) -> Array:
    """[B, T, h1 h2, d1 d2] -> [B, h1 T h2 d2, d1], as `KroneckerFactors` takes them."""
    batch, new = queries.shape[:2]
    return queries.reshape(batch, new, h1, h2, d1, d2).transpose(0, 2, 1, 3, 5, 4).reshape(batch, -1, d1)


def by_token(rows: Array, new: int, h1: int, h2: int, d2: int) -> Array:
    """What `KroneckerFactors` gives [B, h1 T h2 d2, d1] -> [B, T, h1 h2, d1 d2]."""
    batch, _, d1 = rows.shape
    return rows.reshape(batch, h1, new, h2, d2, d1).transpose(0, 2, 1, 3, 5, 4).reshape(batch, new, h1 * h2, d1 * d2)


@dataclass(frozen=True)
class KroneckerFactors:
    """Keys and values that are means over ranks of Kronecker products A_r (x) B_r, contracted factor by factor.

    A is stored [h1, R, d1], B [R, h2, d2], each flattened; parts of ranks come in arrays of their own.
    Query and output: [h1 n h2 d2, d1], n new tokens.
    With Q spread to the columns (i1, r) that its row meets, Q A is a matrix product over A's rows as they lie, and what
    is left of a score is a product with B, feature by feature. Values mirror that.
    """

    new: int
    h1: int
    h2: int
    d1: int
    d2: int
    keys: tuple[tuple[int, int, int], ...]
    """(block of A, block of B, ranks) of every part."""
    values: tuple[tuple[int, int, int], ...]

    @property
    def rows(self) -> int:
        return self.new * self.h1 * self.h2

    @property
    def work(self) -> int:
        return max(ranks for *_, ranks in (*self.keys, *self.values)) * self.rows * self.d2

    @property
    def sums(self) -> tuple[Shape, ...]:
        return tuple((ranks * self.rows * self.d2, self.h1 * ranks * self.d1) for _, _, ranks in self.values)

    @property
    def outputs(self) -> tuple[Shape, ...]:
        return ((self.rows * self.d2, self.d1),)

    def tokens(self, rows: Array) -> Array:
        return rem(div(rows, self.h2), self.new)

    def divided(self, ways: int) -> KroneckerFactors:
        return replace(self, h1=self.h1 // ways)

    def scores(self, queries: Arrays, constants: Arrays, blocks: Arrays, positions: Array) -> Array:
        total, ranks = 0.0, sum(r for _, _, r in self.keys)
        for a, b, r in self.keys:
            half = dot(self._spread_queries(queries[0], r), blocks[a], (1, 0))
            product = half.reshape(r, self.new * self.h1, self.h2 * self.d2, -1) * self._b(blocks[b], r)
            total += product.sum(axis=0).reshape(self.rows, self.d2, -1).sum(axis=1)
        return total / ranks

    def weighted(self, weights: Array, blocks: Arrays) -> Arrays:
        made = []
        for a, b, r in self.values:
            per_head = jnp.broadcast_to(weights[:, None], (self.rows, self.d2, weights.shape[1]))
            per_head = per_head.reshape(1, self.new * self.h1, self.h2 * self.d2, -1)
            product = (per_head * self._b(blocks[b], r)).reshape(r * self.rows * self.d2, -1)
            made.append(dot(product.astype(blocks[a].dtype), blocks[a], (1, 1)))
        return tuple(made)

    def spread(self, factors: Array) -> Arrays:
        each = jnp.broadcast_to(factors[:, None], (self.rows, self.d2, 1)).reshape(-1, 1)
        return tuple(jnp.concatenate([each] * r, axis=0) for _, _, r in self.values)

    def finish(self, sums: Arrays) -> Arrays:
        total, ranks = 0.0, sum(r for _, _, r in self.values)
        for own, (_, _, r) in zip(sums, self.values, strict=True):
            folded = dot(own * self._meets(r), self._columns(r), (1, 1))
            total += folded.reshape(r, -1, self.d1).sum(axis=0)
        return (total / ranks,)

    def _b(self, block: Array, ranks: int) -> Array:
        return block.astype(jnp.float32).reshape(ranks, 1, self.h2 * self.d2, -1)

    def _spread_queries(self, queries: Array, ranks: int) -> Array:
        """[h1 n h2 d2, d1] -> [R h1 n h2 d2, h1 R d1], zero where a row does not meet a column."""
        wide = dot(queries, self._columns(ranks).astype(queries.dtype), (1, 0))
        return (jnp.concatenate([wide] * ranks, axis=0) * self._meets(ranks)).astype(queries.dtype)

    def _columns(self, ranks: int) -> Array:
        """[d1, h1 R d1]: 1 where a column (i1, r, j1) is of feature j1."""
        shape = (self.d1, self.h1 * ranks * self.d1)
        feature, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return (rem(column, self.d1) == feature).astype(jnp.float32)

    def _meets(self, ranks: int) -> Array:
        """[R h1 n h2 d2, h1 R d1]: 1 where rank and head i1 of row and column are the same."""
        shape = (ranks * self.rows * self.d2, self.h1 * ranks * self.d1)
        row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        per_rank = self.rows * self.d2
        rank, head = div(row, per_rank), div(rem(row, per_rank), self.new * self.h2 * self.d2)
        same = (rem(div(column, self.d1), ranks) == rank) & (div(column, ranks * self.d1) == head)
        return same.astype(jnp.float32)

"""Heads whose keys and values lie in the cache as they are, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.kernels.decode.program import Arrays, Shape, div, dot, rem


def by_key_head(queries: Array, heads: int) -> Array:
    """[B, T, H, d] -> [B, G, n, d], as `HeadParts` takes them."""
    batch, new, _, width = queries.shape
    grouped = queries.reshape(batch, new, heads, -1, width)
    return jnp.moveaxis(grouped, 1, 3).reshape(batch, heads, -1, width)


def by_token(rows: Array, new: int) -> Array:
    """What `HeadParts` gives [B, heads n, d] -> [B, T, query heads, d]."""
    batch, _, width = rows.shape
    return jnp.swapaxes(rows.reshape(batch, -1, new, width), 1, 2)


def put_together(new: int, axis: int = -1) -> Callable[[Arrays, Array], tuple[Array, Array]]:
    """What makes [B, T, H, width], joined along `axis`, and [B, T, H] of a program's outputs and log-sum-exps."""
    def result(outputs: Arrays, lse: Array) -> tuple[Array, Array]:
        return jnp.concatenate([by_token(out, new) for out in outputs], axis=axis), by_token(lse, new)[..., 0]
    return result


@dataclass(frozen=True)
class HeadParts:
    """Heads whose keys and values lie in parts, each part an array of its own.

    Multi-head to multi-query attention (one part each), KVPath-Concat (parts of features), SkipV1 (values in parts of
    heads), and absorbed latent attention (one head; the values are parts of the keys).
    Queries: for each part of the keys [G, n, features], the n queries to each head ordered as (query head, new token).
    Outputs: for each part of the values [heads n, features].
    """

    new: int
    shared: int
    """Query heads that share a key-value head."""
    heads: int
    """G, key-value heads."""
    keys: tuple[tuple[int, int], ...]
    """(number of the block, features of a head) of every part of the keys."""
    values: tuple[tuple[int, int, int], ...]
    """(number of the block, heads, features of a head) of every part: of all G heads, or of consecutive ones."""

    @property
    def queries(self) -> int:
        """n, queries to a key-value head."""
        return self.shared * self.new

    @property
    def rows(self) -> int:
        return self.heads * self.queries

    @property
    def work(self) -> int:
        return max(self.rows, *(features for _, features in self.keys))

    @property
    def sums(self) -> tuple[Shape, ...]:
        return tuple((heads * self.queries, features) for _, heads, features in self.values)

    outputs = sums

    def tokens(self, rows: Array) -> Array:
        return rem(rows, self.new)

    def divided(self, ways: int) -> HeadParts:
        if self.heads == 1:
            return replace(self, shared=self.shared // ways)
        return replace(self, heads=self.heads // ways, values=tuple((b, h // ways, d) for b, h, d in self.values))

    def scores(self, queries: Arrays, constants: Arrays, blocks: Arrays, positions: Array) -> Array:
        def of_head(g: int) -> Array:
            return sum(dot(q[g], blocks[block][g * d:(g + 1) * d], (1, 0))
                       for q, (block, d) in zip(queries, self.keys, strict=True))
        return jnp.concatenate([of_head(g) for g in range(self.heads)], axis=0)

    def weighted(self, weights: Array, blocks: Arrays) -> Arrays:
        made = []
        for (block, heads, d), first in zip(self.values, self._first_heads(), strict=True):
            rows = lambda g, n=self.queries: slice(g * n, (g + 1) * n)
            values = blocks[block]
            made.append(jnp.concatenate([dot(weights[rows(first + g)].astype(values.dtype), values[g * d:(g + 1) * d],
                                             (1, 1)) for g in range(heads)], axis=0))
        return tuple(made)

    def spread(self, factors: Array) -> Arrays:
        return tuple(factors[first * self.queries:(first + heads) * self.queries]
                     for (_, heads, _), first in zip(self.values, self._first_heads(), strict=True))

    def finish(self, sums: Arrays) -> Arrays:
        return sums

    def _first_heads(self) -> list[int]:
        """The first head of each part of the values: parts of features all start at head 0."""
        if all(heads == self.heads for _, heads, _ in self.values):
            return [0] * len(self.values)
        sizes = [heads for _, heads, _ in self.values]
        return [sum(sizes[:i]) for i in range(len(sizes))]


@dataclass(frozen=True)
class RebuiltHeads(HeadParts):
    """Heads whose keys are rebuilt, k_alpha + sum_j k_expand^j k_delta^j, normed and rotated (KVPath-Residual).

    The first of `keys` is alpha, the others are deltas. Values are means of v_alpha and of each v_delta.
    Queries: one array [G, n, d]. Constants: [G d, delta] for each delta; with a norm its scale [d, 1]; with rotation
    `rotations`.
    """

    norm_eps: float | None = None
    """Of the keys' RMS norm; None: they have none."""
    rotated: bool = True

    def scores(self, queries: Arrays, constants: Arrays, blocks: Arrays, positions: Array) -> Array:
        turn = self._turn(constants[-1], positions) if self.rotated else lambda x: x
        def of_head(g: int) -> Array:
            keys = self._normed(self._rebuilt(g, constants, blocks), constants)
            return dot(queries[0][g], turn(keys).astype(queries[0].dtype), (1, 0))
        return jnp.concatenate([of_head(g) for g in range(self.heads)], axis=0)

    def _rebuilt(self, g: int, constants: Arrays, blocks: Arrays) -> Array:
        (alpha, d), *deltas = self.keys
        keys = blocks[alpha][g * d:(g + 1) * d].astype(jnp.float32)
        for expand, (block, features) in zip(constants, deltas, strict=False):
            keys += dot(expand[g * d:(g + 1) * d], blocks[block][g * features:(g + 1) * features], (1, 0))
        return keys.astype(blocks[alpha].dtype)

    def _normed(self, keys: Array, constants: Arrays) -> Array:
        if self.norm_eps is None:
            return keys
        wide = keys.astype(jnp.float32)
        factor = jax.lax.rsqrt((wide * wide).mean(axis=0, keepdims=True) + self.norm_eps)
        return (wide * factor * constants[len(self.keys) - 1].astype(jnp.float32)).astype(keys.dtype)

    def _turn(self, table: Array, positions: Array) -> Callable[[Array], Array]:
        """A function that rotates keys [d, S] by their positions [1, S]."""
        half, block = self.keys[0][1] // 2, positions.shape[1]
        within, before = table[:, :block], table[:, block:]
        places = jax.lax.broadcasted_iota(jnp.int32, positions.shape, 1)
        starts = div(jnp.maximum(positions - places, 0), block)
        column = jax.lax.broadcasted_iota(jnp.int32, before.shape, 1)
        def of(number: Array) -> Array:
            return jnp.where(column == number, before, 0).sum(axis=1, keepdims=True)
        # Of a ring's tokens the newer ones, which come first in a block, are a turn ahead of the others.
        first, last = starts[:, :1], starts[:, block - 1:]
        start = jnp.where(starts == first, of(first), of(last))
        (cos, sin), (cos0, sin0) = ((x[:half], x[half:]) for x in (within, start))
        cos, sin = cos * cos0 - sin * sin0, sin * cos0 + cos * sin0  # the angle of a sum

        def turn(keys: Array) -> Array:
            first, second = (x.astype(jnp.float32) for x in (keys[:half], keys[half:]))
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=0)
        return turn


def rotations(frequencies: np.ndarray, factor: float, room: int, block: int) -> np.ndarray:
    """[d, block + 128 k] float32: cosines over sines of places in a block, times `factor`; then of blocks' starts.

    `frequencies` [d / 2] are angles per position, `room` the number of positions.
    """
    def table(places: np.ndarray) -> np.ndarray:
        angles = frequencies[:, None] * places
        return np.concatenate([np.cos(angles), np.sin(angles)])
    starts = np.arange(0, room, block)
    before = np.pad(table(starts), ((0, 0), (0, -len(starts) % 128)))
    return np.concatenate([factor * table(np.arange(block)), before], axis=1).astype(np.float32)

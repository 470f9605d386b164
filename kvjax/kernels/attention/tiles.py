"""How tiles of keys and values are made of what a layer writes: nothing of batches, memory or devices.

Tiles are [features, tokens]: tokens fill the lanes whatever the width of a head. Their gradients are JAX's own, taken
inside the kernels that use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jax import Array

Arrays = tuple[Array, ...]


class Tiles(Protocol):
    """Makes the keys, or the values, of a group of query heads from blocks [F, tokens] of what they come from.

    Called with float32; hashable, because it is static.
    """

    def __call__(self, blocks: Arrays) -> Arrays:
        """[features, tokens] for each query head of the group, or one that serves all of them."""


@dataclass(frozen=True)
class JoinedTiles:
    """One head whose features come in parts, each an array of its own."""

    def __call__(self, blocks: Arrays) -> Arrays:
        return (jnp.concatenate(blocks, axis=0),)


@dataclass(frozen=True)
class KroneckerTiles:
    """Means over ranks of A_r (x) B_r, for the h2 heads that share a row of each A (arXiv:2610.12657, section 3).

    Blocks: the row of all A [R d1, tokens], and all of B [h2 R d2, tokens].
    """

    h2: int
    d1: int
    d2: int

    def __call__(self, blocks: Arrays) -> Arrays:
        # Split, not sliced: the transpose of a slice is a padded array.
        a, b = blocks
        ranks = a.shape[0] // self.d1
        rows, heads = jnp.split(a, ranks * self.d1), jnp.split(b, self.h2 * ranks)
        return tuple(sum(self._product(rows[r * self.d1:(r + 1) * self.d1], heads[i * ranks + r])
                         for r in range(ranks)) / ranks for i in range(self.h2))

    def _product(self, a: list[Array], b: Array) -> Array:
        """d1 rows [1, tokens] (x) [d2, tokens] -> [d1 d2, tokens]."""
        return jnp.concatenate([row * b for row in a], axis=0)

"""What is static in a call, and who sees whom."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.kernels.attention.tiles import Tiles
from kvjax.kernels.decode.program import div


@dataclass(frozen=True)
class Plan:
    """Causal attention of T tokens to themselves, in blocks."""

    tiles: Tiles
    scale: float
    window: int | None = None
    """How many tokens a query sees at most, itself included; None: all."""
    packed: bool = False
    """Whether rows are of several documents, which do not see each other."""
    block: int = 512
    """Queries, and keys, that are together at once; divides T."""

    def keys_of(self, block: Array) -> tuple[Array, Array]:
        """The first and the last block of keys that any query of a block sees."""
        if self.window is None:
            return jnp.int32(0), block
        return div(jnp.maximum(block * self.block - self.window + 1, 0), self.block), block

    def queries_of(self, block: Array, blocks: int) -> tuple[Array, Array]:
        """The first and the last block of queries, of so many, that see any key of a block."""
        if self.window is None:
            return block, jnp.int32(blocks - 1)
        newest = div(block * self.block + self.block + self.window - 2, self.block)
        return block, jnp.minimum(newest, blocks - 1)


def seen(plan: Plan, keys: Array, queries: Array, key_segments: Array | None = None,
         query_segments: Array | None = None) -> Array:
    """Which keys, at places [S, 1], the queries at places [1, T] see: bool [S, T]."""
    visible = keys <= queries
    if plan.window is not None:
        visible &= queries - keys < plan.window
    return visible & (key_segments == query_segments) if plan.packed else visible

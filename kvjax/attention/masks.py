"""Who may see whom, as structure; the dense form is made for one block of scores at a time."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array


@struct.dataclass
class Mask:
    """Visibility of S keys to T queries.

    Order is compared, never positions: packed documents restart their positions, and the mask stays causal.
    """

    query_order: Array
    """[T] or [B, T]: place of each query in its row."""
    key_order: Array
    """[S] or [B, S]: place of each key in its row."""
    query_segments: Array | None = None
    """[B, T] document ids; only keys of the same id are seen."""
    key_segments: Array | None = None
    """[B, S]."""
    valid: Array | None = None
    """[B, S] bool: keys that exist."""
    window: int | None = struct.field(pytree_node=False, default=None)
    """A query sees keys with query - key < window."""
    own: bool = struct.field(pytree_node=False, default=False)
    """Keys and queries are the same tokens: block-wise attention skips what lies above the diagonal."""

    complete: bool = struct.field(pytree_node=False, default=False)
    """These are all keys there are: nothing will be merged, so nobody needs the log-sum-exp."""
    kernel: str = struct.field(pytree_node=False, default="xla")
    """What attends, if the tokens are the queries' own: see `ModelConfig.kernel`."""

    def dense(self) -> Array:
        """Bool [B or 1, T, S]."""
        distance = self.query_order[..., :, None] - self.key_order[..., None, :]
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        seen = seen if seen.ndim == 3 else seen[None]
        if self.query_segments is not None:
            seen &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return seen if self.valid is None else seen & self.valid[:, None, :]

    def block(self, queries: slice, keys: slice) -> Mask:
        """The part of the mask for some queries and keys."""
        def cut(x, where):
            return None if x is None else x[..., where]
        return self.replace(
            query_order=cut(self.query_order, queries), key_order=cut(self.key_order, keys),
            query_segments=cut(self.query_segments, queries), key_segments=cut(self.key_segments, keys),
            valid=cut(self.valid, keys))


def own_tokens(length: int, segment_ids: Array | None, window: int | None, complete: bool = False,
               kernel: str = "xla") -> Mask:
    """The mask of `length` new tokens among themselves: causal, within documents, within the window."""
    order = jnp.arange(length)
    return Mask(order, order, segment_ids, segment_ids, window=window, own=True, complete=complete,
                kernel=kernel)

"""Attention of tokens to themselves by a kernel: arrays as layers make them in, gradients of those arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.kernels.attention import reference
from kvjax.kernels.attention.plan import Plan
from kvjax.kernels.attention.tiles import Arrays, JoinedTiles, KroneckerTiles, Tiles

LEAST = 128
"""Tokens from which on a kernel attends; plain JAX does fewer at once anyway."""
BLOCKS = (512, 256, 128)
MOST_HEADS = 8
"""Query heads that are served by a tile in one step of a kernel."""
FAST_BYTES = 2**24
"""Of a TPU's fast memory, that one kernel may take."""
PADDING = 1.25
"""How many times longer than need be rows may get for larger blocks."""


def attend_heads(implementation: str, queries: Array, keys: Arrays, values: Arrays, segments: Array | None,
                 window: int | None, scale: float, interpret: Any = False) -> tuple[Array, Array]:
    """Causal attention with keys and values as they are, whole or in parts of their features.

    Args:
        queries: [B, T, H, d].
        keys, values: parts [B, T, G, features]; G divides H, and may be 1 beside parts of more heads.
        segments: int [B, T], documents that do not see each other.
        window: tokens that a query sees at most, itself included.
    Returns:
        means [B, T, H, value features] in the queries' type, log-sum-exps [B, T, H] float32.
    Raises ValueError, with the reason, if the implementation cannot.
    """
    groups, heads = max(x.shape[2] for x in (*keys, *values)), queries.shape[2]
    fits = lambda n: fast_bytes(JoinedTiles(), n, queries, keys, values, BLOCKS[0]) <= FAST_BYTES  # noqa: E731
    shared = [n for n in range(1, MOST_HEADS + 1) if heads // groups % n == 0]
    together = max(filter(fits, shared), default=1)
    return _attend(implementation, JoinedTiles(), heads // together, queries, keys, values, segments, window, scale,
                   interpret)


def attend_factors(implementation: str, queries: Array, keys: tuple[Array, Array], values: tuple[Array, Array],
                   segments: Array | None, window: int | None, scale: float,
                   interpret: Any = False) -> tuple[Array, Array]:
    """Causal attention with keys and values that are means over ranks of A_r (x) B_r, which are never built in memory.

    Args:
        keys, values: factors A [B, T, R, h1, d1] and B [B, T, R, h2, d2]; the queries' heads are h1 h2, their features
            d1 d2.
    The others, and what is returned, are those of `attend_heads`.
    """
    h1, d1 = keys[0].shape[3:]
    h2, d2 = keys[1].shape[3:]
    if implementation == "gpu":
        from kvjax.kernels.attention.gpu import Sizes
        sizes = Sizes(h1, h2, d1, d2, keys[0].shape[2], values[0].shape[2], scale, window)
        ids = None if segments is None else segments.astype(jnp.int32)
        return on_gpu(sizes, None, interpret or None, queries, *keys, *values, ids)
    rows = [_rows_of_factors(*factors) for factors in (keys, values)]
    return _attend(implementation, KroneckerTiles(h2, d1, d2), h1, queries, *rows, segments, window, scale, interpret)


def _rows_of_factors(a: Array, b: Array) -> tuple[Array, Array]:
    """[B, T, h1, R d1] and [B, T, 1, h2 R d2], as `KroneckerTiles` takes them."""
    per_head = lambda x: jnp.swapaxes(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1)  # noqa: E731
    return per_head(a), per_head(b).reshape(*b.shape[:2], 1, -1)


def _attend(implementation: str, tiles: Tiles, groups: int, queries: Array, keys: Arrays, values: Arrays,
            segments: Array | None, window: int | None, scale: float, interpret: Any) -> tuple[Array, Array]:
    length, heads = queries.shape[1], queries.shape[2] // groups
    room = [n for n in BLOCKS if fast_bytes(tiles, heads, queries, keys, values, n) <= FAST_BYTES]
    if implementation != "reference":
        _check(implementation, queries, heads, room)
    block, padded = block_of(length, room or BLOCKS)
    def tokens_last(x: Array) -> Array:
        """[B, T, heads, F] -> [B, heads, F, T], padded; what is padded comes last, where no token sees it."""
        return jnp.pad(jnp.moveaxis(x, 1, -1), (*[(0, 0)] * (x.ndim - 1), (0, padded - length)))
    plan = Plan(tiles, scale, window, segments is not None, block)
    q = tokens_last(queries.reshape(*queries.shape[:2], groups, -1, queries.shape[-1]))
    documents = None if segments is None else jnp.pad(segments.astype(jnp.int32), ((0, 0), (0, padded - length)))
    out, lse = run(implementation, plan, q, *(tuple(map(tokens_last, x)) for x in (keys, values)), documents, interpret)
    def by_token(x: Array) -> Array:
        """[B, groups, n, ..., T] -> [B, T, heads, ...]."""
        x = jnp.moveaxis(x[..., :length], -1, 1)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])
    return by_token(out), by_token(lse)


def _check(implementation: str, queries: Array, heads: int, room: list[int]) -> None:
    """Raises ValueError for what only a compiler would refuse otherwise; `room` is the blocks that fit."""
    why = None
    if implementation != "tpu":
        why = "it attends with Kronecker factors only"
    elif queries.dtype not in (jnp.bfloat16, jnp.float32):
        why = f"it takes bfloat16 or float32, and this is {queries.dtype}"
    elif not room:
        why = f"{heads} heads at once of {queries.shape[-1]} features do not fit a TPU's fast memory"
    if why:
        raise ValueError(f"kernel {implementation!r} cannot attend to these tokens: {why}; choose auto or xla")


def fast_bytes(tiles: Tiles, heads: int, queries: Array, keys: Arrays, values: Arrays, block: int) -> int:
    """Of fast memory that the most demanding of the TPU's kernels takes, about, for so many heads at once.

    What is read and written is there twice: one block is copied while another is worked on.
    """
    def made(parts: Arrays) -> int:
        one = [jax.ShapeDtypeStruct((x.shape[-1], 1), jnp.float32) for x in parts]
        return sum(tile.shape[0] for tile in jax.eval_shape(tiles, one))
    item, features = queries.dtype.itemsize, heads * queries.shape[-1]
    of_heads = 2 * 3 * features * item + 4 * features  # queries, gradients of means and of queries, and a sum
    of_tiles = (made(keys) + made(values)) * (item + 2 * 4)  # tiles, their gradients, and these pulled back
    of_sources = 2 * sum(x.shape[-1] for x in (*keys, *values)) * (item + 4)
    return block * (of_heads + of_tiles + of_sources) + 4 * 4 * block**2  # and scores, a few times


def block_of(length: int, blocks: Sequence[int]) -> tuple[int, int]:
    """Tokens of a block, and the length of rows padded to whole blocks: the largest that pads little."""
    padded = {block: -(-length // block) * block for block in blocks}
    block = max(block for block in blocks if padded[block] <= PADDING * min(padded.values()))
    return block, padded[block]


def run(implementation: str, plan: Plan, queries: Array, keys: Arrays, values: Arrays, segments: Array | None,
        interpret: Any = False) -> tuple[Array, Array]:
    """What `tpu.forward` says, by tpu or reference; differentiable, the log-sum-exps too."""
    if implementation == "reference":
        return reference.attention(plan, queries, keys, values, segments)
    return _differentiable(plan, interpret, queries, keys, values, segments)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(plan: Plan, interpret: Any, queries: Array, keys: Arrays, values: Arrays,
                    segments: Array | None) -> tuple[Array, Array]:
    from kvjax.kernels.attention import tpu  # Pallas: where it is asked for
    return tpu.forward(plan, queries, keys, values, segments, interpret)


def _forward(plan: Plan, interpret: Any, *given: Any):
    out, lse = _differentiable(plan, interpret, *given)
    return (out, lse), (*given, out, lse)


def _backward(plan: Plan, interpret: Any, kept: tuple, gradients: tuple[Array, Array]):
    from kvjax.kernels.attention import tpu
    *given, segments, out, lse = kept
    d_out, d_lse = gradients
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-2) - d_lse
    return *_typed(tpu.backward(plan, *given, segments, lse, d_out, delta, interpret), tuple(given)), _none(segments)


def _typed(gradients: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, like)


def _none(segments: Array | None) -> Any:
    """The gradient of whole numbers."""
    return None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)


_differentiable.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def on_gpu(sizes: Any, tiles: Any, interpret: Any, *given: Any) -> tuple[Array, Array]:
    """What `gpu.forward` says of queries, k_a, k_b, v_a, v_b and segments; differentiable."""
    from kvjax.kernels.attention import gpu
    return gpu.forward(sizes, *given, tiles=tiles, interpret=interpret)


def _forward_on_gpu(sizes: Any, tiles: Any, interpret: Any, *given: Any):
    result = on_gpu(sizes, tiles, interpret, *given)
    return result, (*given, *result)


def _backward_on_gpu(sizes: Any, tiles: Any, interpret: Any, kept: tuple, gradients: tuple[Array, Array]):
    from kvjax.kernels.attention import gpu
    *arrays, segments, _, _ = kept
    d_out, d_lse = gradients
    found = gpu.backward(sizes, *kept, d_out, d_lse, tiles=tiles, interpret=interpret)
    return *_typed(found, tuple(arrays)), _none(segments)


on_gpu.defvjp(_forward_on_gpu, _backward_on_gpu)

"""Softmax attention in mergeable parts: every part carries its output and its log-sum-exp.

Attention over rows and over blocks of a cache are separate parts, merged exactly; so a cache is read in place,
block by block, and never concatenated with new rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention import tiled
from kvjax.attention.masks import Mask
from kvjax.attention.tiled import by_kernel

MASKED = -1e30
"""Score of an unseen key: finite, so that fully masked rows stay free of NaN and vanish when merged."""

QUERY_BLOCK = 512
"""Queries whose scores are held at once; sequences up to this length are done in one piece."""
GROUPS = 4
"""Runs of blocks, each as long as the keys that its last block sees: 5/8 of the full products instead of all."""


class Partial(NamedTuple):
    """Attention over some of the keys."""

    out: Array
    """[B, T, H, value width] float32: normalised over the keys of this part."""
    lse: Array | None
    """[B, T, H] float32: log of the sum of exponentiated scores. None from cuDNN, where nothing is merged."""


def nothing_seen(like: Partial) -> Partial:
    """The attention of queries that saw no key: the neutral element of `merge`, with the shapes of `like`."""
    return Partial(jnp.zeros(like.out.shape, jnp.float32), jnp.full(like.lse.shape, MASKED, jnp.float32))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both parts (exact)."""
    lse = jnp.logaddexp(a.lse, b.lse)
    weigh = lambda part: part.out * jnp.exp(part.lse - lse)[..., None]  # noqa: E731
    return Partial(weigh(a) + weigh(b), lse)


def dot_scores(queries: Array, keys: Array) -> Array:
    """Float32 scores [B, H, T, S] of queries [B, T, H, d] and keys [B, S, G, d], G dividing H."""
    batch, length, heads, width = queries.shape
    keys = jnp.swapaxes(keys, 1, 2)  # heads first: one plain matrix product per head, much faster on CPUs
    grouped = jnp.swapaxes(queries, 1, 2).reshape(batch, keys.shape[1], -1, width)
    scores = jnp.einsum("bgtd,bgsd->bgts", grouped, keys, preferred_element_type=jnp.float32)
    return scores.reshape(batch, heads, length, keys.shape[2])


def dot_values(weights: Array, values: Array) -> Array:
    """Float32 outputs [B, T, H, d] of weights [B, H, T, S] and values [B, S, G, d], G dividing H."""
    batch, heads, length, keys = weights.shape
    values = jnp.swapaxes(values, 1, 2)
    grouped = weights.reshape(batch, values.shape[1], -1, keys).astype(values.dtype)
    out = jnp.einsum("bgts,bgsd->bgtd", grouped, values, preferred_element_type=jnp.float32)
    return jnp.swapaxes(out.reshape(batch, heads, length, values.shape[3]), 1, 2)


def joined(parts: tuple[Array, ...], axis: int) -> Array:
    """The parts as one array; a single part is returned as it is."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def separated(x: Array, sizes: list[int], axis: int) -> list[Array]:
    """Inverse of `joined`: the parts of x, of these sizes along an axis."""
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=axis)


def parts_scores(queries: tuple[Array, ...], keys: tuple[Array, ...]) -> Array:
    """`dot_scores` of queries and keys whose features come in parts; the keys are not concatenated."""
    return sum(dot_scores(q, k) for q, k in zip(queries, keys, strict=True))


def feature_parts_values(weights: Array, values: tuple[Array, ...]) -> Array:
    """`dot_values` of values whose features come in parts."""
    return jnp.concatenate([dot_values(weights, v) for v in values], axis=-1)


def head_parts_values(weights: Array, values: tuple[Array, ...]) -> Array:
    """`dot_values` of values whose heads come in parts."""
    queries_per_head = weights.shape[1] // sum(v.shape[2] for v in values)
    sizes = [queries_per_head * v.shape[2] for v in values]
    parts = zip(separated(weights, sizes, axis=1), values, strict=True)
    return jnp.concatenate([dot_values(w, v) for w, v in parts], axis=2)


def attend(
    queries: Any,
    keys: Any,
    values: Any,
    mask: Mask,
    scale: float,
    *,
    scores: Callable[[Any, Any], Array] = dot_scores,
    combine: Callable[[Any, Any], Array] = dot_values,
) -> Partial:
    """Softmax attention that never holds all scores of a long sequence: cuDNN's where that honours the mask, or blocks.

    Args:
        queries: array or tree of arrays [B, T, ...].
        keys, values: arrays or trees of arrays [B, S, ...].
        mask: visibility of keys to queries.
        scale: factor on the scores.
        scores: (queries, keys) -> float32 [B, H, T, S], a function of its arguments only.
        combine: (weights [B, H, T, S], values) -> float32 [B, T, H, value width], likewise.
    """
    def dense(queries, keys, values, mask):
        return _softmax(scores(queries, keys) * scale, values, mask, combine)

    if scores is dot_scores and combine is dot_values and cudnn_honours(queries, keys, values, mask):
        blocks = lambda q, k, v: _blockwise(dense, q, k, v, mask).out
        cudnn = partial(_cudnn, mask.window, scale)
        out = jax.lax.platform_dependent(queries, keys, values, cuda=cudnn, default=blocks)
        return Partial(out, None)
    return _blockwise(dense, queries, keys, values, mask)


def attend_parts(queries: tuple[Array, ...], keys: tuple[Array, ...], values: tuple[Array, ...], mask: Mask,
                 scale: float) -> Partial:
    """`attend` with heads whose features come in parts [B, T, heads, features].

    A kernel joins them where it reads them. Parts of keys may be of one head beside parts of many.
    """
    if by_kernel(mask) and mask.kernel != "gpu":  # of heads as they are, cuDNN has the kernel
        out, lse = tiled.attend_heads(joined(queries, -1), keys, values, mask, scale)
        return Partial(out.astype(jnp.float32), lse)
    heads = max(k.shape[2] for k in keys)
    keys = tuple(jnp.broadcast_to(k, (*k.shape[:2], heads, k.shape[3])) for k in keys)
    return attend(joined(queries, -1), joined(keys, -1), joined(values, -1), mask, scale)


def _cudnn(window: int | None, scale: float, queries: Array, keys: Array, values: Array) -> Array:
    near = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(queries, keys, values, scale=scale, is_causal=True, local_window_size=near,
                                       implementation="cudnn")
    return out.astype(jnp.float32)


def _blockwise(dense: Callable[..., Partial], queries: Any, keys: Any, values: Any, mask: Mask) -> Partial:
    """`dense`, for at most a block of queries at a time."""
    length = mask.query_order.shape[-1]
    if length <= QUERY_BLOCK:
        return dense(queries, keys, values, mask)
    parts = []
    for rows in _row_groups(length):
        seen = _keys_seen(rows, mask)
        inputs = _cut(queries, rows), _cut(keys, seen), _cut(values, seen), mask.block(rows, seen)
        parts.append(_in_blocks(dense, *inputs))
    return Partial(*(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)))


def has_cudnn_attention() -> bool:
    """Whether this process has a CUDA device of compute capability 8.0 or more."""
    device = jax.devices()[0]
    return "cuda" in device.client.platform_version.lower() and float(device.compute_capability) >= 8


def cudnn_honours(queries: Array, keys: Array, values: Array, mask: Mask) -> bool:
    """Whether cuDNN's attention computes just this: half precision, causal, no packed documents, whole sequences."""
    width, mesh = queries.shape[-1], jax.sharding.get_abstract_mesh()
    return (has_cudnn_attention() and queries.dtype in (jnp.bfloat16, jnp.float16)
            and mesh.shape.get("sequence", 1) == 1 and keys.shape == values.shape and width % 8 == 0 and width <= 128
            and mask.own and mask.complete and mask.query_segments is None and mask.valid is None)


def _cut(tree: Any, where: slice) -> Any:
    return jax.tree.map(lambda x: x[:, where], tree)


def _row_groups(length: int) -> list[slice]:
    """Runs of whole blocks of queries, the odd rest last. Early ones see few keys, so causal attention costs less."""
    whole = length // QUERY_BLOCK * QUERY_BLOCK
    size = -(-whole // (QUERY_BLOCK * GROUPS)) * QUERY_BLOCK
    starts = [*range(0, whole, size), *([whole] if whole < length else [])]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], length], strict=True)]


def _keys_seen(rows: slice, mask: Mask) -> slice:
    """The keys that a group of queries can see at all, as far as that is known before running."""
    if not mask.own:
        return slice(0, mask.key_order.shape[-1])
    start = 0 if mask.window is None else max(0, rows.start - mask.window + 1)
    return slice(start, rows.stop)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(dense: Callable[..., Partial], queries: Any, keys: Any, values: Any, mask: Mask) -> Partial:
    """`dense` for one block of queries after another.

    The backward pass does each block again, so that it too holds one block of scores. It is written out because
    `jax.checkpoint` in a scan, itself in a scan over layers, keeps the dense masks of all blocks.
    """
    def step(_, block):
        queries, mask = block
        return None, dense(queries, keys, values, mask)
    _, parts = jax.lax.scan(step, None, (_stack(queries), _stack_mask(mask)))
    return _unstack(parts)


def _in_blocks_forward(dense, *arguments):
    return _in_blocks(dense, *arguments), arguments


def _in_blocks_backward(dense, arguments, cotangents):
    queries, keys, values, mask = arguments

    def step(totals, block):
        queries, mask, cotangent = block
        _, pull_back = jax.vjp(lambda *inputs: dense(*inputs, mask), queries, keys, values)
        of_queries, *of_rest = pull_back(cotangent)
        return jax.tree.map(lambda total, x: total + x.astype(jnp.float32), totals, of_rest), of_queries

    totals = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), [keys, values])
    totals, of_queries = jax.lax.scan(step, totals, (_stack(queries), _stack_mask(mask), _stack(cotangents)))
    of_keys, of_values = jax.tree.map(lambda x, like: x.astype(like.dtype), totals, [keys, values])
    of_mask = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), mask)
    return _unstack(of_queries), of_keys, of_values, of_mask


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


def _stack(tree: Any) -> Any:
    """[B, T, ...] -> [blocks, B, T / blocks, ...]; a rest shorter than a block is one block."""
    def stack(x: Array) -> Array:
        blocks = max(1, x.shape[1] // QUERY_BLOCK)
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, -1, *x.shape[2:]), 1, 0)
    return jax.tree.map(stack, tree)


def _unstack(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), tree)


def _stack_mask(mask: Mask) -> Mask:
    """The mask with what belongs to queries stacked in blocks; what belongs to keys is repeated for each."""
    order = _stack(jnp.atleast_2d(mask.query_order))
    repeated = lambda x: None if x is None else jnp.broadcast_to(x, (len(order), *x.shape))
    return mask.replace(query_order=order, query_segments=_stack(mask.query_segments),
                        key_order=repeated(mask.key_order), key_segments=repeated(mask.key_segments),
                        valid=repeated(mask.valid))


def _softmax(scores: Array, values: Any, mask: Mask, combine: Callable) -> Partial:
    scores = jnp.where(mask.dense()[:, None], scores, MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = combine(weights, values) / jnp.moveaxis(total, 1, 2)
    return Partial(out, jnp.moveaxis((top + jnp.log(total))[..., 0], 1, 2))

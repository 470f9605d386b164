"""How many slots each head gets: measured curves of loss over slots, and exchanges that lower their sum."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention.partials import MASKED
from kvjax.compaction.attention_matching import attention_outputs, compact


def sensitivity(method: str, queries: Array, keys: Array, values: Array, sizes: Sequence[int], *,
                bias: Array | None = None, counted: Array | None = None, scale: float | None = None,
                **options) -> Array:
    """Losses [..., points] of heads compacted to each of `sizes` slots: squared output error over squared outputs.

    Arguments as in `kvjax.compaction.attention_matching.compact`; outputs are those of `queries`.
    """
    weight = 1.0 if counted is None else jnp.asarray(counted, jnp.float32)[..., None]
    sound = lambda x, held: jnp.where(held[..., None], jnp.asarray(x), 0)  # padding may hold anything
    held = jnp.ones(keys.shape[:-1], bool) if bias is None else bias > MASKED / 2
    given = queries if counted is None else sound(queries, counted)
    outputs = attention_outputs(given, sound(keys, held), sound(values, held), bias, scale) * weight

    def loss(size):  # of the same shapes for all sizes: compiled once
        made = compact(method, queries, keys, values, max(sizes), bias=bias, counted=counted, scale=scale,
                       counts=jnp.full(keys.shape[:-2], size), **options)
        error = attention_outputs(given, made.keys, made.values, made.bias, scale) * weight - outputs
        return (error**2).sum(axis=(-2, -1)) / (outputs**2).sum(axis=(-2, -1))
    return jnp.stack([loss(size) for size in sizes], axis=-1)


def exchange(losses: np.ndarray, sizes: Sequence[int], total: int) -> np.ndarray:
    """Slots of each head [heads], from `sizes`, of low total loss; never more than `total`, and never above uniform's.

    Starts uniform, with the largest size that all heads can have. Then, over and over: the head that gains most per
    slot grows to another size, paid for from what is left and by heads that lose least per slot shrinking to others.
    It ends when no such exchange lowers the total loss. The total is met as closely as exchanges allow.

    Args:
        losses: [heads, points], of each head at each size. Curves may be of any form.
        sizes: [points], ascending.
        total: slots of all heads together.

    Raises ValueError if shapes do not fit, losses are not finite, sizes do not ascend from 1 up, or the total is below
    the smallest size for every head.
    """
    losses, sizes = np.asarray(losses, float), np.asarray(sizes, int)
    _check(losses, sizes, total)
    uniform = np.searchsorted(sizes, total // len(losses), side="right") - 1
    levels = np.full(len(losses), uniform)
    while (better := _exchanged(losses, sizes, levels, total)) is not None:
        levels = better
    return sizes[levels]


def _exchanged(losses: np.ndarray, sizes: np.ndarray, levels: np.ndarray, total: int) -> np.ndarray | None:
    """Levels after the first exchange that lowers the loss, or None."""
    heads = np.arange(len(losses))
    gain, growth = losses[heads, levels][:, None] - losses, sizes - sizes[levels][:, None]
    rate = np.where((growth > 0) & (gain > 0), gain / np.maximum(growth, 1), 0)
    for index in np.argsort(-rate, axis=None, kind="stable")[: np.count_nonzero(rate)]:
        head, level = np.unravel_index(index, rate.shape)
        made = levels.copy()
        made[head] = level
        if _paid(losses, sizes, made, head, total) and losses[heads, made].sum() < losses[heads, levels].sum() - 1e-12:
            return made
    return None


def _paid(losses: np.ndarray, sizes: np.ndarray, levels: np.ndarray, grown: int, total: int) -> bool:
    """Shrinks heads other than `grown`, in place, until the total is kept; False if that is not possible."""
    heads = np.arange(len(losses))
    while sizes[levels].sum() > total:
        freed = sizes[levels][:, None] - sizes
        cost = (losses - losses[heads, levels][:, None]) / np.maximum(freed, 1)
        cost[(freed <= 0) | (heads[:, None] == grown)] = np.inf
        head, level = np.unravel_index(np.argmin(cost), cost.shape)
        if np.isinf(cost[head, level]):
            return False
        levels[head] = level
    return True


def _check(losses: np.ndarray, sizes: np.ndarray, total: int) -> None:
    if losses.ndim != 2 or sizes.shape != losses.shape[1:]:
        raise ValueError(f"losses have shape {losses.shape} and sizes {sizes.shape}: give [heads, points] and [points]")
    if not np.isfinite(losses).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(losses))[0])
        raise ValueError(f"the loss at {place} is {losses[place]}: losses must be finite")
    if sizes[0] < 1 or (np.diff(sizes) <= 0).any():
        raise ValueError(f"sizes are {sizes.tolist()}: they must ascend, from at least 1")
    if total < len(losses) * sizes[0]:
        raise ValueError(f"the total is {total}: {len(losses)} heads need at least {sizes[0]} slots each, "
                         f"{len(losses) * sizes[0]} in all; give more, or smaller sizes")

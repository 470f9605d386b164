"""Next-token loss over masked, possibly packed, batches."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

Batch = Mapping[str, Array]
"""Arrays [B, T]: tokens and targets (int32); loss_mask (float32), segment_ids, positions (int32) may be absent."""


@jax.custom_vjp
def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Negative log-likelihood of `targets` and log-partition of the logits.

    The backward pass is written out so that the logits are the only array with a vocabulary axis that is kept:
    differentiating `logsumexp` would keep their exponentials too.

    Args:
      logits: [..., V] float32.
      targets: [...] int32, each in 0..V-1.

    Returns: two [...] float32 arrays, in nats.
    """
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum instead of a gather: it fuses, and a sharded vocabulary needs no all-gather.
    chosen = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0), axis=-1)
    return log_partition - chosen, log_partition


def _is_target(logits: Array, targets: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


def _forward(logits: Array, targets: Array):
    nll, log_partition = cross_entropy(logits, targets)
    return (nll, log_partition), (logits, targets, log_partition)


def _backward(residuals, cotangents):
    logits, targets, log_partition = residuals
    nll_bar, partition_bar = (c[..., None] for c in cotangents)
    softmax = jnp.exp(logits - log_partition[..., None])
    return softmax * (nll_bar + partition_bar) - jnp.where(_is_target(logits, targets), nll_bar, 0), None


cross_entropy.defvjp(_forward, _backward)


def loss_sums(logits: Array, batch: Batch) -> dict[str, Array]:
    """Sums over the tokens that count: of the loss (nats), of the squared log-partition, and of the mask.

    Args:
      logits: [B, T, V] float32.
      batch: `targets` and, if not every token counts, `loss_mask`.

    Returns: float32 scalars `loss`, `z` and `tokens`; dividing the first two by the last is left to the caller,
      so that parts of a batch add up.
    """
    nll, log_partition = cross_entropy(logits, batch["targets"])
    mask = batch.get("loss_mask")
    mask = jnp.ones_like(nll) if mask is None else mask.astype(jnp.float32)
    return {"loss": jnp.sum(mask * nll), "z": jnp.sum(mask * log_partition**2), "tokens": jnp.sum(mask)}

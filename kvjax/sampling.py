"""Drawing the next token from logits: temperature, top-k, top-p and min-p, all as traced values."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.config import require


def check_settings(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raises ConfigError, naming the value and the fix, unless the settings of `sample` make sense."""
    require(0 <= temperature < float("inf"), f"temperature is {temperature}: it must be finite and 0 (greedy) or more")
    require(top_k == int(top_k) and top_k >= 0, f"top_k is {top_k}: it must be a whole number, 0 (off) or more")
    require(0 < top_p <= 1, f"top_p is {top_p}: it must be above 0 and at most 1 (off)")
    require(0 <= min_p <= 1, f"min_p is {min_p}: it must be between 0 (off) and 1")


def sample(key: jax.Array, logits: jax.Array, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> jax.Array:
    """Draws one token per row.

    Args:
      key: one PRNG key. Row i draws with `fold_in(key, i)`: rows are independent of one another, and what a row
        draws depends on the key, its index and its own logits, never on the rest of the batch.
      logits: [B, V] float32.
      temperature, top_k, top_p, min_p: as in `filter_logits`; each a scalar, or [B] for settings of each row's own.
        Temperature 0 is greedy: the first of the most likely tokens, whatever the other settings.

    Returns: [B] int32 token ids.
    """
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), logits.shape[:1])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits.shape[0]))

    def draw():
        # Measured from the maximum, so that a tiny temperature gives 0 and -inf, never infinity.
        distance = logits - logits.max(axis=-1, keepdims=True)
        tempered = distance / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)[:, None]
        return jax.vmap(jax.random.categorical)(keys, filter_logits(tempered, top_k, top_p, min_p))

    greedy = jnp.argmax(logits, axis=-1)
    drawn = jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)


def filter_logits(logits: jax.Array, top_k=0, top_p=1.0, min_p=0.0) -> jax.Array:
    """Sets the logits of excluded tokens to -inf.

    The filters apply in this order, each to the distribution that the one before leaves:
      top_k: the k most likely tokens (exactly k: of equally likely ones the lower id wins); 0 keeps all.
      top_p: the fewest tokens, most likely first, whose probabilities add up to top_p; 1 keeps all.
      min_p: tokens at least min_p times as likely as the most likely one; 0 keeps all.
    The most likely token always survives.

    Args:
      logits: [B, V], already divided by the temperature.
      top_k, top_p, min_p: scalars or [B]; traced values, so that changing them compiles nothing.
    """
    top_k, top_p, min_p = (jnp.asarray(x).reshape(-1, 1) for x in (top_k, top_p, min_p))

    def filtered():
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        ordered = jnp.take_along_axis(logits, order, axis=-1)
        rank = jnp.arange(logits.shape[-1])[None]
        keep = (top_k == 0) | (rank < top_k)
        probability = jax.nn.softmax(ordered, axis=-1, where=keep)
        mass_before = jnp.cumsum(probability, axis=-1) - probability
        # Rounding can bring the mass to 1 before the last token, so "off" is a case of its own.
        keep &= (top_p >= 1) | (mass_before < top_p) | (rank == 0)
        keep &= ordered >= ordered[:, :1] + jnp.log(min_p)
        return jnp.put_along_axis(logits, order, jnp.where(keep, ordered, -jnp.inf), axis=-1, inplace=False)

    # The sort costs more than the rest of the draw: skipped where every filter is off.
    on = jnp.any(top_k > 0) | jnp.any(top_p < 1) | jnp.any(min_p > 0)
    return jax.lax.cond(on, filtered, lambda: logits)

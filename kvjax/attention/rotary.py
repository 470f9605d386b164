"""Rotary position embedding (Su et al., 2021), half-split pairs: feature i turns with feature i + width/2."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def rotate(x: Array, positions: Array, base: float) -> Array:
    """Rotates the last axis of `x` by its token's position.

    Args:
        x: [B, T, ..., width], width even.
        positions: [B, T] integers.
        base: wavelength base; pair i turns by position * base^(-2i/width).
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    angles = angles.reshape(*positions.shape, *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

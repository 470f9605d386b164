"""Quantised storage of cached components: elements of one byte, and a scale for each group of them.

Symmetric absmax quantisation, token by token: nothing is calibrated, and nothing that is stored changes later.
One scale serves a head of features [G, d], a rank of a factor [R, h, w] (what lies under one index of the first of
several feature axes), or a latent as a whole (one feature axis).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention.components import Component
from kvjax.config import require

FLOATING = ("float32", "bfloat16", "float16")
"""Types that a cache stores as they are."""
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Types that are stored with scales, each with the value that a group's largest element becomes."""
SCALE_TYPE = jnp.dtype(jnp.bfloat16)
SMALLEST_SCALE = float(jnp.finfo(SCALE_TYPE).tiny)
"""Keeps the scale of a group of zeros from being one."""


def storage_type(dtype) -> np.dtype:
    """The element type of a cache, from its name or anything that names a type.

    Raises ConfigError if a cache cannot be of that type, or the devices here cannot hold it.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:  # not a type, or one that this JAX does not have
        name = str(dtype)
    require(name in (*FLOATING, *LARGEST), f"a cache of type {name}: choose a floating type ({', '.join(FLOATING)}) "
                                           f"or a quantised one ({', '.join(LARGEST)})")
    require(name in FLOATING or _available(name), f"a cache of type {name}: this JAX, or the {jax.default_backend()} "
                                                  "devices here, do not have the type; choose int8")
    return jnp.dtype(name)


def _available(name: str) -> bool:
    """Whether JAX has the type, and converts it on the devices here."""
    if not hasattr(jnp, name):
        return False
    try:
        with jax.ensure_compile_time_eval():
            jnp.ones((1,), name).astype(jnp.float32).block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def is_quantised(dtype) -> bool:
    """Whether components of this type have scales."""
    return jnp.dtype(dtype).name in LARGEST


def scale_component(component: Component) -> Component:
    """The component that holds the scales of `component`, kept and split over devices as that one is."""
    name = f"{component.name}_scale"
    groups = component.features[0] if len(component.features) > 1 else 1
    return Component(name, (groups,), name, name, head_axis=0 if component.head_axis == 0 else None,
                     window=component.window)


def quantise(rows: Array, component: Component, dtype) -> tuple[Array, Array]:
    """Rounds rows to multiples of their groups' scales.

    Args:
        rows: [..., *features] of `component`, in any floating type.
        dtype: one of `LARGEST`.
    Returns:
        Values [..., *features] of type `dtype`, and scales [..., groups] of type `SCALE_TYPE`. |x - value * scale| is
        at most scale / 2 for int8, and the larger of |x| / 16 and scale / 1024 for float8_e4m3fn. Of a group with an
        element that is not finite, the scale is NaN: it is read back as NaN.
    """
    limit, rows = LARGEST[jnp.dtype(dtype).name], rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=_grouped(component), keepdims=True)
    scales = jnp.maximum(largest / limit, SMALLEST_SCALE)
    # Values are multiples of the scale that is stored. (A cast and its inverse is what compilers may leave out.)
    scales = jax.lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=7)
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    values = jnp.clip(rows / scales, -limit, limit)
    values = jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values
    groups = scale_component(component).features
    return values.astype(dtype), scales.astype(SCALE_TYPE).reshape(*rows.shape[: -len(component.features)], *groups)


def dequantise(values: Array, scales: Array, component: Component, dtype) -> Array:
    """Rows [..., *features] of type `dtype` from the values and scales of `quantise`."""
    scales = scales.astype(jnp.float32).reshape(*scales.shape, *[1] * (len(component.features) - 1))
    return (values.astype(jnp.float32) * scales).astype(dtype)


def _grouped(component: Component) -> tuple[int, ...]:
    """Trailing axes of the features that share a scale."""
    return tuple(range(-max(len(component.features) - 1, 1), 0))

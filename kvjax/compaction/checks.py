"""Refusals by value: what is known raises at once; what is traced is checked under `checkify` only.

Under `jax.jit` the checks are `checkify.debug_check`s: `checkify.checkify` makes errors of them, and without it nothing
of them is compiled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import checkify


def check(ok: Array, message: str, **values: Array) -> None:
    """Raises ValueError where `ok` does not hold.

    Args:
        ok: [...] bool.
        message: format string; `{place}` is the first index at which `ok` is false.
        values: arrays [...] as `ok`, named in `message`: shown as they are at that place.
    """
    shape, ok = jnp.shape(ok), jnp.ravel(ok)
    if isinstance(ok, jax.core.Tracer):
        flat = jnp.argmin(ok)
        place = jnp.stack([*map(jnp.asarray, jnp.unravel_index(flat, shape)), *[flat] * (not shape)])
        checkify.debug_check(jnp.all(ok), message, place=place, **{k: jnp.ravel(v)[flat] for k, v in values.items()})
    elif not (held := np.asarray(ok)).all():
        place = np.unravel_index(held.argmin(), shape)
        shown = {name: np.asarray(value)[place] for name, value in values.items()}
        raise ValueError(message.format(place=[int(i) for i in place], **shown))


def check_finite(name: str, x: Array, fix: str, where: Array | bool = True) -> None:
    """Raises ValueError if an element of x [...] (of those of `where`, which broadcasts) is infinite or NaN."""
    ok = jnp.broadcast_to(jnp.isfinite(x) | jnp.logical_not(where), jnp.shape(x))
    check(ok, f"{name} at {{place}} is {{value}}: {fix}", value=x)

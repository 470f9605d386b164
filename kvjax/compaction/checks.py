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
    held, flat = _first_false(ok)
    if isinstance(held, jax.core.Tracer):
        place = jnp.stack(jnp.unravel_index(flat, jnp.shape(ok))) if jnp.ndim(ok) else flat
        checkify.debug_check(held, message, place=place, **{k: jnp.ravel(v)[flat] for k, v in values.items()})
    elif not held:
        place = np.unravel_index(int(flat), jnp.shape(ok))
        shown = {name: np.asarray(value[place]) for name, value in values.items()}
        raise ValueError(message.format(place=[int(i) for i in place], **shown))


def check_finite(name: str, x: Array, fix: str, where: Array | bool = True) -> None:
    """Raises ValueError if an element of x [...] (of those of `where`, which broadcasts) is infinite or NaN."""
    check(_finite(x, where), f"{name} at {{place}} is {{value}}: {fix}", value=x)


@jax.jit
def _first_false(ok: Array) -> tuple[Array, Array]:
    """Whether all hold, and the flat index of the first that does not."""
    return jnp.all(ok), jnp.argmin(ok)


@jax.jit
def _finite(x: Array, where: Array | bool) -> Array:
    return jnp.broadcast_to(jnp.isfinite(x) | jnp.logical_not(where), x.shape)

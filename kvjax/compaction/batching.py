"""Many heads by a function of one: one after another on CPUs, side by side elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

ELEMENTS_AT_ONCE = 2**27
"""Scores of heads that are held at once where heads are done side by side."""
_in_head = ContextVar("in_head", default=False)
"""Whether the function of a head is being traced: those that it calls are of the same head."""


def over_heads(function: Callable, ranks: tuple[int, ...], *arrays: Array | None, elements: int = 1, **static) -> Any:
    """Results [..., *result] of a function of one head, over any leading axes.

    Args:
        function: of a module (programs are kept by its identity); takes one array for each of `arrays`, each of the
            rank that `ranks` says, or None for None, and `static`.
        ranks: of the arrays without their leading axes; leading axes broadcast.
        elements: of the largest array that a head makes: bounds how many are done side by side.
        static: hashable settings.

    On CPUs a `lax.map` does one head at a time: what a head makes stays in fast memory, and LAPACK is never called for
    a batch. Such a call waits, on one of XLA's threads, for work that it gives to all of them: as many calls at once as
    there are threads wait for ever (jaxlib 0.10.2, two cores). `jax.vmap` is one more leading axis.
    """
    lead = jnp.broadcast_shapes(*(x.shape[: x.ndim - rank] for x, rank in zip(arrays, ranks, strict=True)
                                  if x is not None))
    if _in_head.get() and not lead:
        return function(*arrays, **static)
    given = tuple(None if x is None else jnp.asarray(x) for x in arrays)
    return _run(function, tuple(sorted(static.items())), ranks, lead, heads_at_once(elements), given)


def heads_at_once(elements: int) -> int | None:
    """How many heads of so many elements are done side by side; None: one after another."""
    return None if jax.default_backend() == "cpu" else max(1, ELEMENTS_AT_ONCE // elements)


def _flat(x: Array, lead: tuple[int, ...], rank: int) -> Array:
    core = x.shape[x.ndim - rank:]
    return jnp.broadcast_to(x, (*lead, *core)).reshape(prod(lead), *core)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _run(function: Callable, static: tuple, ranks: tuple[int, ...], lead: tuple[int, ...], at_once: int | None,
         arrays: tuple) -> Any:
    """Results [*lead, ...] of arrays whose leading axes broadcast to `lead`."""
    flat = tuple(None if x is None else _flat(x, lead, rank) for x, rank in zip(arrays, ranks, strict=True))
    out = _each(function, static, at_once)(flat)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)


def _each(function: Callable, static: tuple, at_once: int | None) -> Callable:
    """A function of arrays [heads, ...], one head by one, whose `vmap` is one more axis of heads."""
    def one_head(x):
        token = _in_head.set(True)
        try:
            return function(*x, **dict(static))
        finally:
            _in_head.reset(token)

    @jax.custom_batching.custom_vmap
    def run(arrays):
        return jax.lax.map(one_head, arrays, batch_size=at_once)

    @run.def_vmap
    def run_more(size, batched, arrays):
        arrays = jax.tree.map(lambda x, split: x if split else jnp.broadcast_to(x, (size, *x.shape)), arrays,
                              batched[0])
        out = run(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays))
        return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out), jax.tree.map(lambda x: True, out)

    return run

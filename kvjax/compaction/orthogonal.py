"""Orthonormal bases that grow by a few vectors at a time: Gram-Schmidt by blocks, everything done twice.

In float32 as precise as Householder's transformations, and made of matrix products alone: on CPUs LAPACK's factors of
tall matrices wait for threads of their own (many times slower where other work keeps the cores busy), on GPUs they
come one matrix after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

BLOCK = 8
"""Vectors that are taken at once."""
DEPENDENT = 4e-6
"""A vector of which a smaller share is left, once others are taken out of it, is a sum of these: the rest is rounding
errors (at most 5e-7 of vectors of 20 000 elements), which point anywhere."""
dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def orthonormal_basis(rows: Array) -> tuple[Array, Array]:
    """`rows [t, N] = lower [t, t] @ basis [t, N]`, `lower` lower triangular.

    Rows of the basis are orthonormal, or 0 for rows that are sums of rows before them, with 0 on the diagonal.
    """
    number, size = len(rows), min(BLOCK, len(rows))
    blocks = -(-number // size)
    rows = jnp.pad(rows, ((0, blocks * size - number), (0, 0)))

    def take(i, made):
        lower, basis = made
        block = jax.lax.dynamic_slice_in_dim(rows, i * size, size)
        new, coefficients, within = orthonormal_to(basis, block)
        lower = jax.lax.dynamic_update_slice_in_dim(lower, coefficients, i * size, 0)
        return (jax.lax.dynamic_update_slice(lower, within, (i * size, i * size)),
                jax.lax.dynamic_update_slice_in_dim(basis, new, i * size, 0))

    lower, basis = jax.lax.fori_loop(0, blocks, take, (jnp.zeros((len(rows), len(rows))), jnp.zeros_like(rows)))
    return lower[:number, :number], basis[:number]


def orthonormal_to(basis: Array, rows: Array) -> tuple[Array, Array, Array]:
    """`rows [m, N] = coefficients [m, t] @ basis [t, N] + within [m, m] @ new [m, N]`, `new` orthonormal to `basis`.

    The basis may hold rows of 0. Rows that are sums of the basis and of rows before them are 0 in `new` and on the
    diagonal of `within`, which is lower triangular.
    """
    coefficients = dot(rows, basis.T)
    new, within = _orthonormal(rows - dot(coefficients, basis), DEPENDENT * jnp.linalg.norm(rows, axis=1))
    again = dot(new, basis.T)  # the first time leaves rounding errors of the size of `rows`
    new, within_again = _orthonormal(new - dot(again, basis), jnp.full(len(rows), 0.5))
    return new, coefficients + dot(within, again), dot(within, within_again)


def _orthonormal(rows: Array, least: Array) -> tuple[Array, Array]:
    """`rows [m, N] = lower [m, m] @ new [m, N]`; rows of which no more than `least` [m] is left are 0 in `new`."""
    def step(i, made):
        new, lower = made
        shares = dot(new, rows[i])
        rest = rows[i] - dot(shares, new)
        size = jnp.linalg.norm(rest)
        size = jnp.where(size > least[i], size, 0)
        return (new.at[i].set(jnp.where(size > 0, rest / jnp.where(size > 0, size, 1), 0)),
                lower.at[i].set(shares.at[i].set(size)))
    return _steps(len(rows), step, (jnp.zeros_like(rows), jnp.zeros((len(rows), len(rows)))))


def inverse_of_lower(lower: Array) -> Array:
    """Inverse of a small lower triangular matrix."""
    step = lambda i, made: made.at[i].set((jnp.eye(len(lower))[i] - dot(lower[i].at[i].set(0), made)) / lower[i, i])
    return _steps(len(lower), step, jnp.zeros_like(lower))


def _steps(number: int, step: Callable, start: Any) -> Any:
    return step(0, start) if number == 1 else jax.lax.fori_loop(0, number, step, start)

"""Attention of a call's own tokens by a kernel, on each device's own sequences and heads."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array

from kvjax.attention.masks import Mask
from kvjax.kernels.attention import api
from kvjax.sharding import per_device


def by_kernel(mask: Mask) -> bool:
    """Whether a kernel attends: to a call's own tokens, from as many on as fill one of its blocks."""
    return mask.own and mask.kernel not in ("auto", "xla") and mask.query_order.shape[-1] >= api.LEAST


def attend_heads(queries: Array, keys: tuple[Array, ...], values: tuple[Array, ...], mask: Mask,
                 scale: float) -> tuple[Array, Array]:
    """(means, log-sum-exps) of parts of heads; see `kvjax.kernels.attention.api.attend_heads`."""
    together = max(x.shape[2] for x in (*keys, *values))
    head = "kv_heads" if together > 1 else "heads"
    axes = lambda x: ("batch", None, head if x.shape[2] == together > 1 else None, None)  # noqa: E731
    return _per_device(api.attend_heads, mask, scale, (queries, keys, values),
                       (("batch", None, head, None), tuple(map(axes, keys)), tuple(map(axes, values))), head)


def attend_factors(queries: Array, keys: tuple[Array, Array], values: tuple[Array, Array], mask: Mask,
                   scale: float) -> tuple[Array, Array]:
    """(means, log-sum-exps) of Kronecker factors; see `kvjax.kernels.attention.api.attend_factors`."""
    pair = ("batch", None, None, "kv_heads", None), ("batch", None, None, None, None)
    return _per_device(api.attend_factors, mask, scale, (queries, keys, values),
                       (("batch", None, "kv_heads", None), pair, pair), "kv_heads")


def _per_device(attend: Callable, mask: Mask, scale: float, arguments: tuple, axes: tuple,
                head: str) -> tuple[Array, Array]:
    ways = dict(jax.sharding.get_abstract_mesh().shape).get("sequence", 1)
    if ways > 1:
        raise ValueError(f"kernel {mask.kernel!r} does not attend over {ways} parts of a sequence: choose kernel xla, "
                         "or mesh.sequence 1")
    segments = [] if mask.query_segments is None else [mask.query_segments]
    def run(queries: Array, keys: tuple, values: tuple, segments: list) -> tuple[Array, Array]:
        return attend(mask.kernel, queries, keys, values, *(segments or [None]), mask.window, scale)
    arguments, axes = (*arguments, segments), (*axes, [("batch", None)] * len(segments))
    outputs = ("batch", None, head, None), ("batch", None, head)
    return per_device(run, axes, outputs, arguments)(*arguments)

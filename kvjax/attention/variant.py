"""What an attention variant is: its components, its weights, and how queries attend to rows or to a cache.

A variant is a registered frozen dataclass of sizes with pure functions of weights: no framework, no state.
Training, prefill and decoding run the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.masks import Mask
from kvjax.attention.partials import Partial, separated
from kvjax.attention.rotary import Rope
from kvjax.config import Variant
from kvjax.kernels.decode.api import Attending

Weights = dict[str, Array]


class HeadSizes(NamedTuple):
    """Sizes of plain attention with few heads of keys and values."""

    heads: int
    """G, key-value heads."""
    key_dim: int
    value_dim: int
    scale: float
    """Factor on the scores."""


@dataclass(frozen=True)
class Param:
    """Declaration of one weight: everything that is known before it exists."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis of each dimension (`kvjax.sharding` maps them to mesh axes)."""
    init: Callable[..., Array]
    """(key, shape, dtype) -> initial value."""
    bias: bool = False
    """It is added: no matrix, whatever its shape."""

    def stacked(self, layers: int) -> Param:
        """The same weight for each of `layers` scanned layers, with a leading axis; each is initialised on its own."""
        def init(key, shape, dtype=jnp.float32):
            return jax.vmap(lambda k: self.init(k, self.shape, dtype))(jax.random.split(key, shape[0]))
        return Param((layers, *self.shape), ("layers", *self.axes), init, self.bias)

    @property
    def is_matrix(self) -> bool:
        """Whether it has two axes or more and is no bias: the leading axis of scanned layers does not count."""
        return not self.bias and sum(axis != "layers" for axis in self.axes) >= 2


def bias_param(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Param:
    """Declares a bias, zero at first."""
    return Param(shape, axes, jax.nn.initializers.zeros, bias=True)


@dataclass(frozen=True)
class Layer:
    """What one layer is told about its place in the model: static sizes only."""

    width: int
    """D, the width of its input."""
    writes: tuple[Component, ...]
    reads: tuple[Component, ...]
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    output_init: float = 0.0

    def state(self, name: str) -> tuple[Component, ...]:
        """The components that state `name` is made of, as this layer reads it."""
        return tuple(c for c in self.reads if c.state == name)

    def rotate(self, x: Array, positions: Array, interleaved: bool = False) -> Array:
        """Rotary embedding of the last axis of x [B, T, ..., width] at positions [B, T]."""
        return self.rope.rotate(x, positions, interleaved)


@struct.dataclass
class View:
    """Tokens that may be attended to: this call's rows, or one block of a cache."""

    entries: dict[str, tuple[Array, ...]]
    """Component name -> the entries that the layer reads, each [B, S, *features]."""
    positions: Array
    """[B, S] logical positions."""
    mask: Mask

    def __getitem__(self, name: str) -> Array:
        """The one entry of a component that does not accumulate, [B, S, *features]."""
        (entry,) = self.entries[name]
        return entry

    def parts(self, components: tuple[Component, ...]) -> tuple[Array, ...]:
        """The one entry of each of `components`."""
        return tuple(self[c.name] for c in components)


def fan_in(size: int, scale: float = 1.0) -> Callable[..., Array]:
    """Normal initial values of standard deviation scale / sqrt(size)."""
    return jax.nn.initializers.normal(scale * size**-0.5) if scale else jax.nn.initializers.zeros


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, computed in float32, returned in x's type."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def project(x: Array, weight: Array) -> Array:
    """[B, T, D] times [D, *features] -> [B, T, *features]."""
    return jnp.tensordot(x, weight, axes=1)


class Attention(Variant):
    """Base of attention variants. Subclasses are frozen dataclasses, registered by `kvjax.register`.

    They have sizes `heads` and `head_dim` (query heads and value width of a head), and implement `components`,
    `query_shapes`, `queries` and `partial`; the rest has defaults that suit most variants.
    """

    heads: int
    head_dim: int

    @property
    def score_dim(self) -> int:
        """Features that a query and a key are compared by."""
        return self.head_dim

    def components(self) -> tuple[Component, ...]:
        """The components that a layer of its own keeps per token."""
        raise NotImplementedError

    def query_shapes(self, layer: Layer) -> dict[str, Param]:
        """The weights that make queries."""
        raise NotImplementedError

    def queries(self, layer: Layer, weights: Weights, x: Array, positions: Array) -> Any:
        """Rotated queries of x [B, T, D] in whatever form `partial` takes, T on axis 1 of every array."""
        raise NotImplementedError

    def partial(self, layer: Layer, path: tuple[Weights, ...], queries: Any, view: View) -> Partial:
        """Attention of the queries to a view; `path` holds the weights of the group's layers up to this one."""
        raise NotImplementedError

    def absorb(self, layer: Layer, path: tuple[Weights, ...], queries: Any) -> Any:
        """The queries in the form that `absorbed` takes: made once, before the blocks of a cache are read."""
        return queries

    def absorbed(self, layer: Layer, path: tuple[Weights, ...], queries: Any, view: View) -> Partial:
        """Attention to a block of the cache, on the cached components as they are.

        `release(absorbed(absorb(queries), view))` equals `partial(queries, view)`.
        """
        return self.partial(layer, path, queries, view)

    def reads_in_place(self, layer: Layer) -> bool:
        """Whether `absorbed` multiplies cached heads as they are and makes nothing of the size of the cache."""
        return False

    def attending(self, layer: Layer, path: tuple[Weights, ...], queries: Any,
                  entries: dict[str, int]) -> Attending | None:
        """How a kernel does what `absorbed` does over the whole past; None: by no kernel.

        `entries` says how many entries of each component the layer reads.
        """
        return None

    def release(self, layer: Layer, path: tuple[Weights, ...], part: Partial) -> Partial:
        """What `absorbed` found in all blocks, merged, as outputs of heads [B, T, H, value width]: done once."""
        return part

    def as_heads(self, layer: Layer) -> HeadSizes | None:
        """Sizes of the plain attention that attention to cached tokens amounts to; None: it has no such form.

        Whatever has it can be compacted (`kvjax.compaction`): its keys and values may be replaced by others.
        """
        return None

    def head_queries(self, layer: Layer, path: tuple[Weights, ...], queries: Any) -> Array:
        """Queries of that plain attention, [B, T, H, key_dim], of those of `queries`."""
        raise NotImplementedError

    def head_states(self, layer: Layer, path: tuple[Weights, ...], view: View) -> tuple[Array, Array]:
        """Its keys [B, S, G, key_dim] and values [B, S, G, value_dim], rotated, of a view of the cache."""
        raise NotImplementedError

    def from_heads(self, layer: Layer, path: tuple[Weights, ...], part: Partial) -> Partial:
        """What it gives [B, T, H, value_dim] as outputs of heads [B, T, H, head_dim]."""
        return part

    def projection_init(self, shape: tuple[int, ...]) -> Callable[..., Array]:
        """Initial values of an input projection [D, *features]."""
        return fan_in(shape[0])

    def shapes(self, layer: Layer) -> dict[str, Param]:
        """All weights of one layer, by the names and layouts of the method's definition."""
        output = Param((self.heads, self.head_dim, layer.width), ("heads", None, "embed"),
                       fan_in(self.heads * self.head_dim, layer.output_init))
        return self.query_shapes(layer) | self.row_shapes(layer) | {"o_proj": output}

    def projection(self, width: int, features: tuple[int, ...], axes: tuple[str | None, ...]) -> Param:
        """Declares an input projection [D, *features] whose features have logical `axes`."""
        shape = (width, *features)
        return Param(shape, ("embed", *axes), self.projection_init(shape))

    def row_shapes(self, layer: Layer) -> dict[str, Param]:
        """The weights that make the layer's components."""
        shapes = {}
        for name, parts in _by_param(layer.writes).items():
            features = list(parts[0].features)
            features[parts[0].axis] = sum(c.features[c.axis] for c in parts)
            axes = tuple("kv_heads" if i == parts[0].head_axis and n > 1 else None for i, n in enumerate(features))
            shapes[name] = self.projection(layer.width, tuple(features), axes)
            if parts[0].bias:
                shapes[parts[0].bias] = bias_param(tuple(features), axes)
            if parts[0].norm:
                shapes[parts[0].norm] = Param((features[-1],), (None,), jax.nn.initializers.ones)
        return shapes

    def rows(self, layer: Layer, weights: Weights, x: Array, positions: Array,
             handed: dict[str, Array]) -> dict[str, Array]:
        """The components that the layer writes for x [B, T, D]: {name: [B, T, *features]}.

        `handed` holds the latest entries of components that earlier layers made.
        """
        rows = {}
        for name, parts in _by_param(layer.writes).items():
            y = project(x, weights[name])
            if parts[0].bias:
                y = y + weights[parts[0].bias].astype(y.dtype)
            if parts[0].norm:
                y = rms_norm(y, weights[parts[0].norm], layer.norm_eps)
            if parts[0].rotate:
                y = layer.rotate(y, positions, parts[0].interleaved)
            rows |= _split(y, parts)
        return rows

    def output(self, weights: Weights, out: Array) -> Array:
        """Heads [B, T, H, value width] -> [B, T, D]."""
        return jnp.einsum("bthd,hde->bte", out, weights["o_proj"])


def _by_param(components: tuple[Component, ...]) -> dict[str, list[Component]]:
    groups: dict[str, list[Component]] = {}
    for component in components:
        groups.setdefault(component.param, []).append(component)
    return groups


def _split(y: Array, parts: list[Component]) -> dict[str, Array]:
    axis = parts[0].axis % len(parts[0].features) + 2
    pieces = separated(y, [c.features[c.axis] for c in parts], axis)
    return dict(zip((c.name for c in parts), pieces, strict=True))

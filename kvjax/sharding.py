"""One table from logical axes to mesh axes, for weights, activations and cache components alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.config import MeshConfig, require

AXES = ("data", "fsdp", "tensor", "sequence")

RULES: dict[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": "sequence",
    "embed": "fsdp",
    "latent": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "feed_forward": "tensor",
    "vocab": "tensor",
}
"""Logical axis -> mesh axes; an axis that is not listed is not split."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The device mesh of a run. Raises ConfigError if its axes do not multiply to the devices."""
    devices = jax.devices() if devices is None else devices
    sizes = list(dataclasses.astuple(config))
    fixed = prod(n for n in sizes if n != -1)
    if -1 in sizes:
        require(len(devices) % fixed == 0,
                f"{config}: the fixed axes multiply to {fixed}, which does not divide the {len(devices)} devices")
        sizes[sizes.index(-1)] = len(devices) // fixed
    require(prod(sizes) == len(devices),
            f"{config}: the axes multiply to {prod(sizes)}, but there are {len(devices)} devices; -1 fills one axis")
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def default_device() -> jax.Device:
    """Where JAX puts arrays that nothing else places: `jax.default_device`'s, else this process's first."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def target_platform() -> str:
    """What is compiled for: the platform of the mesh in force, whose devices may not be here, or `default_device`'s."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return (default_device() if device is None else device).platform


def spec(*axes: str | None) -> PartitionSpec:
    """Partition of an array whose dimensions have these logical axes."""
    return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))


def named(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Placement on `mesh` of an array whose dimensions have these logical axes."""
    return NamedSharding(mesh, spec(*axes))


def constrain(x: Array, *axes: str | None) -> Array:
    """Tells the compiler how `x` is placed on the mesh that is set; without a mesh it does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return x
    fits = tuple(axis if _divides(mesh, axis, n) else None for axis, n in zip(axes, x.shape, strict=True))
    return jax.lax.with_sharding_constraint(x, spec(*fits))


def per_device(function: Callable, in_axes: Any, out_axes: Any, like: Any) -> Callable:
    """Runs `function` on each device's own part of its arguments; without a mesh, on the whole.

    Args:
        function: works on any part of a batch and of the heads as it does on the whole.
        in_axes: one tree of logical axes (tuples, as `spec` takes them) per argument.
        out_axes: the same for the result.
        like: the arguments, or anything of their shapes; axes that do not divide them are not split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return function
    undivided = _undivided(mesh, in_axes, like)
    def specs(tree):
        keep = lambda axes: spec(*(None if a in undivided else a for a in axes))  # noqa: E731
        return jax.tree.map(keep, tree, is_leaf=_is_axes)
    return jax.shard_map(function, in_specs=specs(in_axes), out_specs=specs(out_axes), check_vma=False)


def parts(axis: str, in_axes: Any, like: Any) -> int:
    """Into how many parts `per_device`, called with the last two, splits a logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    whole = mesh.empty or mesh.manual_axes or axis in _undivided(mesh, in_axes, like)
    return 1 if whole else _ways(mesh, axis)


def _undivided(mesh, in_axes: Any, like: Any) -> set[str | None]:
    """Logical axes that some of the arrays cannot be split along."""
    arrays = zip(jax.tree.leaves(in_axes, is_leaf=_is_axes), jax.tree.leaves(like), strict=True)
    return {axis for axes, x in arrays for axis, size in zip(axes, x.shape, strict=True)
            if not _divides(mesh, axis, size)}


def pin_layout(x: Array, *axes: str | None) -> Array:
    """Keeps `x` in row-major order in memory, so that the compiler does not copy what it is read from.

    Each device pins its own part: across a mesh the compiler would gather a pinned array whole.
    """
    pin = lambda part: with_layout_constraint(part, Layout(tuple(range(part.ndim))))  # noqa: E731
    return per_device(pin, (axes,), axes, (x,))(x)


def _mesh_axes(axis: str | None) -> tuple[str, ...]:
    names = RULES.get(axis) if axis else None
    return (names,) if isinstance(names, str) else names or ()


def _ways(mesh, axis: str | None) -> int:
    return int(np.prod([mesh.shape[name] for name in _mesh_axes(axis)], dtype=int))


def _divides(mesh, axis: str | None, size: int) -> bool:
    return size % _ways(mesh, axis) == 0


def check_divides(mesh: Mesh, axis: str | None, size: int, what: str) -> None:
    """Raises ConfigError, with the numbers and the fix, if `size` does not split over the mesh axes of `axis`."""
    ways = _ways(mesh, axis)
    names = " x ".join(f"mesh.{name}={mesh.shape[name]}" for name in _mesh_axes(axis))
    require(size % ways == 0, f"{what}: its {axis} axis of {size} does not split {ways} ways ({names}); "
                              f"change the mesh, or the size to a multiple of {ways}")


def _is_axes(x) -> bool:
    return isinstance(x, tuple) and all(a is None or isinstance(a, str) for a in x)

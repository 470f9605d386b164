"""Where a model's weights lie on a mesh, and whether its sizes split over it."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvjax.config import Config, ModelConfig
from kvjax.model.parameters import parameters
from kvjax.sharding import check_divides, named


def parameter_shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """Placement of every weight of a model, as a tree like its parameters."""
    return jax.tree.map(lambda p: named(mesh, *p.axes), parameters(config))


def place_parameters(config: ModelConfig, params: dict, mesh: Mesh) -> dict:
    """A model's weights, in the host's memory and the same in all processes, split over a mesh."""
    def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    return jax.tree.map(place, params, parameter_shardings(config, mesh))


def check(config: Config, mesh: Mesh) -> None:
    """Raises ConfigError, with the numbers and the fix, if a size does not divide over its mesh axes."""
    for path, param in jax.tree.leaves_with_path(parameters(config.model)):
        for axis, size in zip(param.axes, param.shape, strict=True):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            check_divides(mesh, axis, size, f"weight {where} {param.shape}")
    per_step = config.train.batch_size // config.train.accumulation
    check_divides(mesh, "batch", per_step, f"train.batch_size {config.train.batch_size} / accumulation "
                                            f"{config.train.accumulation}")
    check_divides(mesh, "length", config.model.context_length, "model.context_length")

"""Where a model's weights lie on a mesh, and whether its sizes split over it."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from kvjax.config import Config, ModelConfig
from kvjax.model.parameters import parameters
from kvjax.sharding import check_divides, named


def parameter_shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """Placement of every weight of a model, as a tree like its parameters."""
    return jax.tree.map(lambda p: named(mesh, *p.axes), parameters(config))


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

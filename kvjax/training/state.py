"""The training state, created already sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.config import Config
from kvjax.model.placement import parameter_shardings


@struct.dataclass
class TrainState:
    """Everything that a step reads and changes, except the data."""

    step: Array
    """Finished steps, int32."""
    params: Any
    opt_state: optax.OptState
    key: Array
    """Typed PRNG key of the run; each step folds its number in."""


def _initial(model: nn.Module, optimizer: optax.GradientTransformation, config: Config,
             params: Any = None) -> TrainState:
    init_key, key = jax.random.split(jax.random.key(config.train.seed))
    if params is None:
        params = model.init(init_key, jnp.zeros((1, config.model.context_length), jnp.int32))["params"]
    return TrainState(jnp.int32(0), params, optimizer.init(params), key)


def abstract_state(model: nn.Module, optimizer: optax.GradientTransformation, config: Config, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of the state; the optimizer's are those of the parameters they belong to."""
    shapes = jax.eval_shape(lambda: _initial(model, optimizer, config))
    replicated = NamedSharding(mesh, PartitionSpec())
    params = parameter_shardings(config.model, mesh)
    opt_state = optax.tree_map_params(optimizer, lambda _, sharding: sharding, shapes.opt_state, params,
                                      transform_non_params=lambda _: replicated)
    shardings = TrainState(replicated, params, opt_state, replicated)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def shardings_of(state: TrainState) -> TrainState:
    """The shardings of a concrete or abstract state."""
    return jax.tree.map(lambda x: x.sharding, state)


def init_state(model: nn.Module, optimizer: optax.GradientTransformation, config: Config, mesh: Mesh,
               params: Any = None) -> TrainState:
    """A new state, each array made directly on the devices that hold it.

    `params`: weights on the mesh to start from, which are given up to the state; None: random ones.
    """
    shardings = shardings_of(abstract_state(model, optimizer, config, mesh))
    with jax.set_mesh(mesh):
        make = partial(_initial, model, optimizer, config)
        return jax.jit(make, out_shardings=shardings, donate_argnums=0)(params)

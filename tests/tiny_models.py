"""Models of random weights over bytes, as evaluation restores them."""

import jax
import jax.numpy as jnp

from kvjax import build_model
from kvjax.attention import GroupedQuery, SkipV1
from kvjax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from kvjax.data.tokenizers import ByteTokenizer
from kvjax.evaluation.run import Restored
from kvjax.model.placement import parameter_shardings
from kvjax.sharding import make_mesh

CONTEXT = 48
"""Tokens that they read unless something else is asked for."""


def restored_model(mesh=None, source=DataConfig.source, **changes):
    """A model on `mesh`, else on one device; `changes` are settings of it, and `source` is its text."""
    settings = dict(attention=GroupedQuery(4, 2, 8), sharing=SkipV1(), vocab_size=256, layers=2, width=32,
                    feed_forward_width=32, context_length=CONTEXT, dtype="float32", output_init=1.0) | changes
    config = Config(model=ModelConfig(**settings), train=TrainConfig(steps=1, batch_size=8),
                    data=DataConfig(source=source), optimizer=OptimizerConfig(warmup_steps=0))
    model, mesh = build_model(config.model), mesh or make_mesh(MeshConfig(), jax.devices()[:1])
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return Restored(config, model, jax.device_put(params, parameter_shardings(config.model, mesh)), ByteTokenizer(), 0,
                    mesh)

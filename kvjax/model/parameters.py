"""Every weight of a model, declared once: shape, logical axes and initial value."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

from kvjax.attention.sharing import make_plan
from kvjax.attention.variant import Layer, Param, fan_in
from kvjax.config import ModelConfig

Table = dict[str, "Param | Table"]


def layer_spec(config: ModelConfig, segment: int, index: int) -> Layer:
    """What layer `index` of each group of a segment is told."""
    plan = make_plan(config)
    part = plan.segments[segment]
    return Layer(config.width, plan.select(part.layers[index]), plan.select(part.reads),
                 config.rope_base, config.norm_eps, config.output_init)


def feed_forward_table(config: ModelConfig) -> Table:
    """SwiGLU (Shazeer, 2020)."""
    width, hidden = config.width, config.feed_forward_width
    return {
        "gate": Param((width, hidden), ("embed", "feed_forward"), fan_in(width)),
        "up": Param((width, hidden), ("embed", "feed_forward"), fan_in(width)),
        "down": Param((hidden, width), ("feed_forward", "embed"), fan_in(hidden, (2 * config.layers) ** -0.5)),
    }


def layer_table(config: ModelConfig, segment: int, index: int) -> Table:
    """Weights of one layer."""
    norm = Param((config.width,), (None,), jax.nn.initializers.ones)
    return {
        "attention_norm": norm,
        "attention": config.attention.shapes(layer_spec(config, segment, index)),
        "feed_forward_norm": norm,
        "feed_forward": feed_forward_table(config),
    }


def group_table(config: ModelConfig, segment: int) -> Table:
    """Weights of one group of layers."""
    layers = make_plan(config).segments[segment].layers
    return {f"layer_{index}": layer_table(config, segment, index) for index in range(len(layers))}


def outer_table(config: ModelConfig) -> Table:
    """Weights outside the layers."""
    vocab, width = config.vocab_size, config.width
    table: Table = {
        "embedding": Param((vocab, width), ("vocab", "embed"), fan_in(width)),
        "final_norm": Param((width,), (None,), jax.nn.initializers.ones),
    }
    if not config.tie_embeddings:
        table["unembedding"] = Param((width, vocab), ("embed", "vocab"), fan_in(width))
    return table


def parameters(config: ModelConfig) -> Table:
    """All weights, as a tree like the model's parameters; those of scanned layers have a leading `layers` axis."""
    def stacked(segment: int) -> Table:
        repeats = make_plan(config).segments[segment].repeats
        return jax.tree.map(lambda p: p.stacked(repeats), group_table(config, segment))
    segments = {f"segment_{i}": stacked(i) for i in range(len(make_plan(config).segments))}
    return outer_table(config) | segments


def parameter_count(config: ModelConfig) -> int:
    """Number of weights of a model."""
    return sum(prod(p.shape) for p in jax.tree.leaves(parameters(config)))


def abstract_parameters(config: ModelConfig) -> dict:
    """The parameters as float32 shapes, without making them."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), parameters(config))

"""What passes between the layers of a model, as a plain function of its parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Segment
from kvjax.attention.sharing import make_attention, make_plan
from kvjax.config import ModelConfig
from kvjax.model.decoder import (
    Context,
    GroupAttention,
    computed,
    feed_forward,
    normalize,
    restarting_positions,
    weighted_sum,
)
from kvjax.model.parameters import group_table, layer_spec, source_table

Tree = dict[str, Any]


@partial(jax.jit, static_argnums=0)
def layer_inputs(config: ModelConfig, params: Tree, tokens: Array, segment_ids: Array | None = None) -> Array:
    """What the attention of every layer reads: the stream after the layer's norm.

    Args:
        config: the model, of any attention and sharing; dropout is off.
        params: its parameters.
        tokens: int [B, T]. From an id outside the vocabulary on, results are NaN.
        segment_ids: int [B, T], one number per document of a packed row, as the model takes them.
    Returns:
        [L, B, T, D] in the compute type, layers in the order in which they run.
    """
    plan = make_plan(config)
    positions = restarting_positions(jnp.zeros_like(tokens) if segment_ids is None else segment_ids)
    context = Context(positions, segment_ids)
    x = _embed(config, params, tokens, positions)
    streams, rows, inputs = [x], {}, []
    for number, segment in enumerate(plan.segments):
        weights = params[f"segment_{number}"]
        if segment.source:
            rows |= _source_rows(config, number, weights["source"], x, context)
        else:
            x, seen, made = _run_segment(config, number, segment, weights, x, context, rows)
            rows |= made
            inputs.append(seen)
        if plan.depth_average:
            streams.append(x)
            x = weighted_sum(params[f"depth_weights_{number}"], streams)
    known = jnp.cumprod(_known(config, tokens, positions), axis=1)[..., None] > 0
    return jnp.where(known, jnp.concatenate(inputs), jnp.nan)


def _known(config: ModelConfig, tokens: Array, positions: Array) -> Array:
    """[B, T] bool: ids and positions that the tables hold."""
    known = (tokens >= 0) & (tokens < config.vocab_size)
    return known & (positions < config.context_length) if config.positions == "learned" else known


def _embed(config: ModelConfig, params: Tree, tokens: Array, positions: Array) -> Array:
    known = _known(config, tokens, positions)
    x = params["embedding"][jnp.where(known, tokens, 0)]
    if config.positions == "learned":
        x = x + params["position_embedding"][jnp.where(known, positions, 0)]
    return x.astype(config.dtype)


def _source_rows(config: ModelConfig, number: int, weights: Tree, x: Array, context: Context) -> dict[str, Array]:
    """What a segment without layers makes of the stream, {name: [B, T, ...]}."""
    weights = jax.tree.map(partial(computed, config), weights, source_table(config, number)["source"])
    x = normalize(config, weights, "norm", x)
    return make_attention(config).rows(layer_spec(config, number, 0), weights, x, context.positions, {})


def _run_segment(config: ModelConfig, number: int, segment: Segment, weights: Tree, x: Array, context: Context,
                 rows: dict[str, Array]) -> tuple[Array, Array, dict[str, Array]]:
    """The stream after a segment, its layers' inputs [layers, B, T, D], and the last rows that later segments read."""
    later = {name for after in make_plan(config).segments[number + 1:] for name in after.needs}
    handed = {name: rows[name] for name in segment.needs if name in rows}
    tables = group_table(config, number)

    def group(x: Array, scanned: tuple[Array, Tree]):
        index, weights = scanned
        attention, inputs = GroupAttention(config, number, index, context, handed), []
        for name, table in tables.items():
            layer = jax.tree.map(partial(computed, config), weights[name], table)
            inputs.append(normalize(config, layer, "attention_norm", x))
            x = x + attention.step(layer["attention"], inputs[-1])
            x = x + feed_forward(layer["feed_forward"], normalize(config, layer, "feed_forward_norm", x))
        return x, (jnp.stack(inputs), {name: made[-1] for name, made in attention.made.items() if name in later})

    x, (inputs, made) = jax.lax.scan(group, x, (jnp.arange(segment.repeats), weights))
    return x, inputs.reshape(-1, *inputs.shape[2:]), {name: row[-1] for name, row in made.items()}

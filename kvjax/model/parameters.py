"""Every weight of a model, declared once: shape, logical axes and initial value."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.attention.components import Segment
from kvjax.attention.rotary import Rope, RopeScaling
from kvjax.attention.sharing import make_attention, make_plan
from kvjax.attention.variant import Layer, Param, bias_param, fan_in
from kvjax.config import ModelConfig, require

Table = dict[str, "Param | Table"]
Shapes = dict[str, tuple[int, ...]]


def layer_spec(config: ModelConfig, segment: int, index: int) -> Layer:
    """What layer `index` of each group of a segment is told."""
    plan = make_plan(config)
    part = plan.segments[segment]
    require(config.rope_scaling is None or isinstance(config.rope_scaling, RopeScaling),
            f"rope_scaling is {config.rope_scaling}: choose LinearScaling, Llama3Scaling or YarnScaling")
    rope = Rope(config.rope_base if config.positions == "rotary" else None, config.rope_scaling)
    return Layer(config.width, plan.select(part.layers[index]), plan.select(part.reads), rope, config.norm_eps,
                 config.output_init)


def norm_table(config: ModelConfig, name: str) -> Table:
    """RMSNorm or LayerNorm of the stream: a scale, and the latter's bias."""
    scale = {name: Param((config.width,), (None,), jax.nn.initializers.ones)}
    bias = {f"{name}_bias": bias_param((config.width,), (None,))}
    return scale | bias if config.norm == "layer" else scale


def feed_forward_table(config: ModelConfig) -> Table:
    """SwiGLU (Shazeer, 2020) or a plain GELU layer."""
    width, hidden = config.width, config.feed_forward_width
    inner = Param((width, hidden), ("embed", "feed_forward"), fan_in(width))
    table = {"gate": inner} if config.feed_forward == "swiglu" else {}
    table |= {
        "up": inner,
        "down": Param((hidden, width), ("feed_forward", "embed"), fan_in(hidden, (2 * config.layers) ** -0.5)),
    }
    if not config.feed_forward_bias:
        return table
    sizes = {"gate": (hidden, "feed_forward"), "up": (hidden, "feed_forward"), "down": (width, None)}
    return table | {f"{name}_bias": bias_param((sizes[name][0],), (sizes[name][1],)) for name in table}


def layer_table(config: ModelConfig, segment: int, index: int) -> Table:
    """Weights of one layer."""
    attention = make_attention(config).shapes(layer_spec(config, segment, index))
    return norm_table(config, "attention_norm") | norm_table(config, "feed_forward_norm") | {
        "attention": attention, "feed_forward": feed_forward_table(config)}


def source_table(config: ModelConfig, segment: int) -> Table:
    """Weights of a segment that only makes components."""
    rows = make_attention(config).row_shapes(layer_spec(config, segment, 0))
    return {"source": norm_table(config, "norm") | rows}


def group_table(config: ModelConfig, segment: int) -> Table:
    """Weights of one group of layers."""
    layers = make_plan(config).segments[segment].layers
    return {f"layer_{index}": layer_table(config, segment, index) for index in range(len(layers))}


def outer_table(config: ModelConfig) -> Table:
    """Weights outside the layers."""
    vocab, width = config.vocab_size, config.width
    table: Table = {
        "embedding": Param((vocab, width), ("vocab", "embed"), fan_in(width)),
    } | norm_table(config, "final_norm")
    if config.positions == "learned":
        table["position_embedding"] = Param((config.context_length, width), (None, "embed"), fan_in(width))
    if not config.tie_embeddings:
        table["unembedding"] = Param((width, vocab), ("embed", "vocab"), fan_in(width))
    return table | _depth_table(config)


def _depth_table(config: ModelConfig) -> Table:
    """Weights of DenseFormer's means: layer i's over the embeddings and i + 1 outputs, the last one at first."""
    def newest(key, shape, dtype=jnp.float32):
        return jnp.zeros(shape, dtype).at[-1].set(1)
    plan = make_plan(config)
    numbers = range(len(plan.segments)) if plan.depth_average else ()
    return {f"depth_weights_{i}": Param((i + 2,), (None,), newest) for i in numbers}


def parameters(config: ModelConfig) -> Table:
    """All weights, as a tree like the model's parameters; those of scanned layers have a leading `layers` axis."""
    def table(number: int, segment: Segment) -> Table:
        if segment.source:
            return source_table(config, number)
        return jax.tree.map(lambda p: p.stacked(segment.repeats), group_table(config, number))
    segments = {f"segment_{i}": table(i, segment) for i, segment in enumerate(make_plan(config).segments)}
    return outer_table(config) | segments


def parameter_count(config: ModelConfig) -> int:
    """Number of weights of a model."""
    return sum(prod(p.shape) for p in jax.tree.leaves(parameters(config)))


def abstract_parameters(config: ModelConfig) -> dict:
    """The parameters as float32 shapes, without making them."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), parameters(config))


def flat(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by their path, such as segment_0/layer_0/attention/q_proj."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree.leaves_with_path(tree)}


def unflat(leaves: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `flat` for trees of dictionaries."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def tree_shapes(tree: Any) -> Shapes:
    """Shapes of all arrays of a tree, by path."""
    return {path: tuple(leaf.shape) for path, leaf in flat(tree).items()}


def shapes_of(config: ModelConfig) -> Shapes:
    """Shapes of all parameters of a model, by path."""
    return tree_shapes(parameters(config))


def shape_differences(found: Shapes, wanted: Shapes) -> list[str]:
    """One line for each weight that is missing, unknown or misshapen."""
    return ([f"missing: {name} {list(wanted[name])}" for name in wanted if name not in found]
            + [f"unknown: {name} {list(found[name])}" for name in found if name not in wanted]
            + [f"misshapen: {name} is {list(found[name])}, should be {list(wanted[name])}"
               for name in wanted if name in found and found[name] != wanted[name]])

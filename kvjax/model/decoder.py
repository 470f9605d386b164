"""The decoder-only language model: thin Linen shells around pure functions of weights.

One body serves training, prefill and decoding; a call with a cache reads it through handles and returns the new rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from kvjax.attention.components import Segment, latest
from kvjax.attention.masks import Mask, own_tokens
from kvjax.attention.partials import Partial, merge
from kvjax.attention.sharing import make_attention, make_plan
from kvjax.attention.variant import Param, View, rms_norm
from kvjax.cache import Cache
from kvjax.config import ModelConfig, require
from kvjax.model.parameters import Table, group_table, layer_spec, outer_table, source_table
from kvjax.model.past import attend_to_past
from kvjax.model.prefix import attend_to_prefix
from kvjax.sharding import constrain, pin_layout

STREAM = ("batch", "length", None)
INPUTS = "attention inputs"

REMAT = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
         "full": jax.checkpoint_policies.nothing_saveable}


@struct.dataclass
class Context:
    """What is the same for all layers of a call."""

    positions: Array
    """[B, T] of the tokens that pass the layers."""
    segment_ids: Array | None = None
    """[B, T]."""
    cache: Cache | None = None
    row_positions: Array | None = None
    """[B, S] of the tokens whose rows are read, where only some of them pass the layers; None: `positions`."""
    order: Array | None = None
    """[B, T]: the place of those tokens among the S."""
    keep_inputs: bool = struct.field(pytree_node=False, default=False)
    """Layers return their normed attention inputs too, as rows called `INPUTS`."""

    def only(self, last: Array) -> Context:
        """The context of one token of each row, the one at `last` [B]."""
        positions = jnp.take_along_axis(self.positions, last[:, None], axis=1)
        return self.replace(positions=positions, row_positions=self.positions, order=last[:, None])

    def own_mask(self, window: int | None, kernel: str) -> Mask:
        """Which of the rows of this call the tokens see, and by which kernel."""
        if self.order is None:
            return own_tokens(self.positions.shape[1], self.segment_ids, window, complete=self.cache is None,
                              kernel=kernel)
        return Mask(self.order, jnp.arange(self.row_positions.shape[1]), window=window)


class Weights(nn.Module):
    """Turns a table of declarations into parameters; sub-tables become sub-modules."""

    table: Table

    @nn.compact
    def __call__(self) -> dict[str, Any]:
        def one(name: str, entry: Param | Table):
            if isinstance(entry, Param):
                return self.param(name, entry.init, entry.shape, jnp.float32)
            return Weights(entry, name=name)()
        return {name: one(name, entry) for name, entry in self.table.items()}


class Group(nn.Module):
    """The layers of one group, unrolled: the body of the layer scan."""

    config: ModelConfig
    segment: int

    @nn.compact
    def __call__(self, x: Array, index: Array, context: Context, handed: dict) -> tuple[Array, dict]:
        """Runs group `index` on the stream [B, T, D]; returns it with the rows made, {name: [per group, B, T, ...]}."""
        attention = GroupAttention(self.config, self.segment, index, context, handed)
        for j in range(len(attention.segment.layers)):
            weights = self._weights(j, decoding=context.cache is not None)
            y = normalize(self.config, weights, "attention_norm", x)
            if context.keep_inputs:
                attention.made.setdefault(INPUTS, []).append(y)
            x = constrain(x + self.dropout(attention.step(weights["attention"], y)), *STREAM)
            y = normalize(self.config, weights, "feed_forward_norm", x)
            x = constrain(x + self.dropout(feed_forward(weights["feed_forward"], y)), *STREAM)
        return x, {name: jnp.stack(rows) for name, rows in attention.made.items()}

    def _weights(self, index: int, decoding: bool) -> dict[str, Any]:
        name = f"layer_{index}"
        table = group_table(self.config, self.segment)[name]
        weights = jax.tree.map(partial(computed, self.config.dtype), Weights(table, name=name)(), table)
        return jax.tree.map(in_place, weights, table) if decoding else weights

    def dropout(self, x: Array) -> Array:
        return dropout(self, self.config.dropout, x)


class Source(nn.Module):
    """Makes components from the normed stream, for all later layers."""

    config: ModelConfig
    segment: int

    @nn.compact
    def __call__(self, x: Array, context: Context) -> dict[str, Array]:
        """{name: [1, B, T, ...]} of the stream [B, T, D]."""
        table = source_table(self.config, self.segment)["source"]
        weights = jax.tree.map(partial(computed, self.config.dtype), Weights(table, name="source")(), table)
        if context.cache is not None:
            weights = jax.tree.map(in_place, weights, table)
        layer = layer_spec(self.config, self.segment, 0)
        x = normalize(self.config, weights, "norm", x)
        rows = make_attention(self.config).rows(layer, weights, x, context.positions, {})
        return {name: row[None] for name, row in rows.items()}


class GroupAttention:
    """Runs the attention of a group's layers in turn, and keeps what they make for each other."""

    def __init__(self, config: ModelConfig, segment: int, index: Array, context: Context, handed: dict):
        self.config, self.plan, self.variant = config, make_plan(config), make_attention(config)
        self.number, self.segment = segment, self.plan.segments[segment]
        self.index, self.context = index, context
        self.handed = {name: row.astype(config.dtype) for name, row in handed.items()}
        self.made: dict[str, list[Array]] = {}
        self.path: tuple[dict, ...] = ()

    def step(self, weights: dict[str, Array], x: Array) -> Array:
        """Attention of the next layer on its normed input x [B, T, D] -> [B, T, D]."""
        variant, layer = self.variant, layer_spec(self.config, self.number, len(self.path))
        self.path = (*self.path, weights)
        queries = variant.queries(layer, weights, x, self.context.positions)
        available = self.handed | {name: rows[-1] for name, rows in self.made.items()}
        for name, row in variant.rows(layer, weights, x, self.context.positions, available).items():
            self.made.setdefault(name, []).append(row)
        result = variant.partial(layer, self.path, queries, self._own_view())
        if self.context.cache is not None:
            result = self._attend_past(layer, queries, result)
        return variant.output(weights, result.out.astype(x.dtype))

    def _route(self, name: str, own: list, before) -> tuple:
        return latest(tuple(own), before, self.plan.component(name).cumulative)

    def _own_view(self) -> View:
        entries = {name: self._route(name, self.made.get(name, []), self.handed.get(name))
                   for name in self.segment.reads}
        context = self.context
        positions = context.positions if context.row_positions is None else context.row_positions
        return View(entries, positions, context.own_mask(self.segment.window, self.config.kernel))

    def _attend_past(self, layer, queries, result: Partial) -> Partial:
        past = self.context.cache.past(next(c.name for c in layer.reads if c.cached))
        read = self.plan.slots_read(self.number, self.index, len(self.path) - 1)
        slots = {c.name: read[c.name] for c in layer.reads if c.cached}
        found = attend_to_past(self.config.kernel, self.variant, layer, self.path, queries, past, slots,
                               self.context.positions, self.segment.window, self.config.dtype)
        return self._attend_prefix(layer, queries, merge(result, found))

    def _attend_prefix(self, layer, queries, result: Partial) -> Partial:
        prefix, place = self.context.cache.prefix, (self.number, len(self.path) - 1)
        if prefix is None:
            return result
        entries = [entry for entry, (number, _, index) in zip(prefix.entries, self.plan.places, strict=True)
                   if (number, index) == place]
        if entries[0] is None:
            return result
        found = attend_to_prefix(self.config.kernel, self.variant, layer, self.path, queries, prefix,
                                 jnp.asarray(entries)[self.index], self.context.positions, self.config.dtype)
        return merge(result, found)


def in_place(weight: Array, param: Param) -> Array:
    """Keeps a weight as it lies in memory: a loop of decode steps would hold a rearranged copy of all layers.

    Weights whose last axes do not fill a TPU tile are left to the compiler: row-major order would pad them.
    """
    rows, lanes = weight.shape[-2:] if weight.ndim > 1 else (0, 0)
    return pin_layout(weight, *param.axes) if rows % 8 == 0 and lanes and lanes % 128 == 0 else weight


def computed(dtype, weight: Array, param: Param) -> Array:
    """Matrices in the compute type; the scales of norms stay as exact as they are trained."""
    return weight.astype(dtype) if len(param.axes) > 1 else weight


def normalize(config: ModelConfig, weights: dict[str, Array], name: str, x: Array) -> Array:
    """The model's norm called `name` of x [B, T, D], computed in float32."""
    if config.norm == "rms":
        return rms_norm(x, weights[name], config.norm_eps)
    centred = x.astype(jnp.float32)
    centred = centred - centred.mean(axis=-1, keepdims=True)
    return (rms_norm(centred, weights[name], config.norm_eps) + weights[f"{name}_bias"]).astype(x.dtype)


def feed_forward(weights: dict[str, Array], x: Array) -> Array:
    """SwiGLU, or without a gate GELU, of x [B, T, D]."""
    def linear(name: str, x: Array) -> Array:
        y = x @ weights[name]
        return y + weights[f"{name}_bias"].astype(y.dtype) if f"{name}_bias" in weights else y
    up = linear("up", x)
    return linear("down", jax.nn.silu(linear("gate", x)) * up if "gate" in weights else jax.nn.gelu(up))


def dropout(module: nn.Module, rate: float, x: Array) -> Array:
    """Zeroes features at random and scales the others up, if the call brought a dropout key."""
    if not rate or not module.has_rng("dropout"):
        return x
    kept = jax.random.bernoulli(module.make_rng("dropout"), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def weighted_sum(weights: Array, streams: list[Array]) -> Array:
    """Sum of streams [B, T, D], each times its weight, in float32."""
    total = sum(w * x.astype(jnp.float32) for w, x in zip(weights, streams, strict=True))
    return total.astype(streams[-1].dtype)


def restarting_positions(segment_ids: Array) -> Array:
    """Positions [B, T] that begin at 0 in every document of `segment_ids` [B, T]."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


class Decoder(nn.Module):
    """A language model whose attention variant, and so whose cache, is what its configuration says."""

    config: ModelConfig

    def setup(self):
        table = outer_table(self.config)
        self.outer = {name: self.param(name, p.init, p.shape, jnp.float32) for name, p in table.items()}
        self.segments = [self._scanned(i) for i in range(len(make_plan(self.config).segments))]

    def _scanned(self, segment: int) -> nn.Module:
        if make_plan(self.config).segments[segment].source:
            return Source(self.config, segment, name=f"segment_{segment}")
        body = Group
        if self.config.remat != "none":
            body = nn.remat(Group, policy=REMAT[self.config.remat], prevent_cse=False)
        # Its check that broadcast variables stay the same traces the body once more, and none are made here.
        scanned = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True},
                          length=make_plan(self.config).segments[segment].repeats,
                          in_axes=(0, nn.broadcast, nn.broadcast), check_constancy_invariants=False)
        return scanned(self.config, segment, name=f"segment_{segment}")

    def __call__(self, tokens: Array, positions: Array | None = None, segment_ids: Array | None = None) -> Array:
        """Logits [B, T, V] float32 of tokens [B, T], each attending to itself and to earlier ones.

        Args:
            tokens: int [B, T].
            positions: int [B, T]; default: 0, 1, … , restarting with every document.
            segment_ids: int [B, T], one number per document of a packed row; documents do not see each other.
        """
        limit = self.config.context_length
        if self.config.positions == "learned" and tokens.shape[1] > limit:
            raise ValueError(f"tokens have length {tokens.shape[1]}: the table of learned positions has {limit}")
        if positions is None:
            positions = restarting_positions(jnp.zeros_like(tokens) if segment_ids is None else segment_ids)
        x, _ = self._run(tokens, Context(positions, segment_ids))
        return self._logits(x)

    def layer_inputs(self, tokens: Array, segment_ids: Array | None = None) -> Array:
        """What the attention of every layer reads, after the layer's norm: [L, B, T, D], layers as they run.

        From an id outside the vocabulary on it is NaN, as logits are.
        """
        positions = restarting_positions(jnp.zeros_like(tokens) if segment_ids is None else segment_ids)
        x, rows = self._run(tokens, Context(positions, segment_ids, keep_inputs=True))
        return jnp.where(jnp.isnan(x[..., :1]), jnp.nan, rows[INPUTS])

    def following_inputs(self, tokens: Array, cache: Cache) -> Array:
        """`layer_inputs` of new tokens [B, T] that follow the cached ones."""
        positions = cache.positions[:, None] + jnp.arange(tokens.shape[1])
        x, rows = self._run(tokens, Context(positions, cache=cache, keep_inputs=True))
        return jnp.where(jnp.isnan(x[..., :1]), jnp.nan, rows[INPUTS])

    def extend(self, tokens: Array, cache: Cache, last: Array | None = None) -> tuple[Array, dict[str, Array]]:
        """Logits of new tokens [B, T] that follow the cached ones, and the rows to append.

        `last` [B] picks one token per row: logits are then [B, V], else [B, T, V].
        """
        positions = cache.positions[:, None] + jnp.arange(tokens.shape[1])
        x, rows = self._run(tokens, Context(positions, cache=cache), last)
        logits = self._logits(x)
        return (logits if last is None else logits[:, 0]), rows

    def _run(self, tokens: Array, context: Context, last: Array | None = None) -> tuple[Array, dict[str, Array]]:
        """The stream after the last layer, of all tokens or of those at `last` [B], and the rows of all layers."""
        plan, known = make_plan(self.config), self._known(tokens, context.positions)
        x = self._embed(tokens, known, context.positions)
        streams, rows = [x], {}
        def pick(x):
            return jnp.take_along_axis(x, last[:, None, None], axis=1)
        for number, segment in enumerate(plan.segments):
            if last is not None and number == plan.silent_from:
                x, context = pick(x), context.only(last)
            x, new = self._run_segment(number, segment, x, context, rows)
            for name, made in new.items():
                rows.setdefault(name, []).append(made)
            if plan.depth_average:
                streams.append(x)
                x = weighted_sum(self.outer[f"depth_weights_{number}"], streams)
        # An unknown id is not silently another token: from there on a row is NaN.
        known = jnp.cumprod(known, axis=1)[..., None] > 0
        if last is not None:
            known = pick(known)
            x = pick(x) if plan.silent_from == len(plan.segments) else x
        return jnp.where(known, x, jnp.nan), {name: jnp.concatenate(made) for name, made in rows.items()}

    def _run_segment(self, number: int, segment: Segment, x: Array, context: Context,
                     rows: dict[str, list[Array]]) -> tuple[Array, dict[str, Array]]:
        """The stream after a segment, and the rows that it made, {name: [slots, B, T, ...]}."""
        if segment.source:
            return x, self.segments[number](x, context)
        # Float32, because gradients of what many layers read would add up in the compute type.
        handed = {name: rows[name][-1][-1].astype(jnp.float32) for name in segment.needs if name in rows}
        x, new = self.segments[number](x, jnp.arange(segment.repeats), context, handed)
        return x, {name: made.reshape(-1, *made.shape[2:]) for name, made in new.items()}

    def _known(self, tokens: Array, positions: Array) -> Array:
        """[B, T] bool: ids and positions that the tables hold."""
        known = (tokens >= 0) & (tokens < self.config.vocab_size)
        return known & (positions < self.config.context_length) if self.config.positions == "learned" else known

    def _embed(self, tokens: Array, known: Array, positions: Array) -> Array:
        # Rounding to the compute type comes after the look-up: before, the gradients of a frequent token would add up
        # in that type.
        x = constrain(self.outer["embedding"], "vocab", None)[jnp.where(known, tokens, 0)]
        if self.config.positions == "learned":
            x = x + self.outer["position_embedding"][jnp.where(known, positions, 0)]
        return constrain(dropout(self, self.config.dropout, x.astype(self.config.dtype)), *STREAM)

    def embed(self, tokens: Array, positions: Array) -> Array:
        """What the first layer reads, [B, T, D], of tokens [B, T] at positions [B, T]; NaN where tables have none."""
        known = self._known(tokens, positions)
        return jnp.where(known[..., None], self._embed(tokens, known, positions), jnp.nan)

    def _logits(self, x: Array) -> Array:
        x = normalize(self.config, self.outer, "final_norm", x)
        matrix = self.outer["embedding"].T if self.config.tie_embeddings else self.outer["unembedding"]
        logits = jnp.matmul(x, matrix.astype(x.dtype), preferred_element_type=jnp.float32)
        logits = constrain(logits, "batch", "length", "vocab")
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class AttentionGroup(nn.Module):
    """The attention of one layer group alone, to be used inside other models."""

    config: ModelConfig
    segment: int = 0

    @nn.compact
    def __call__(self, x: Array, positions: Array | None = None, segment_ids: Array | None = None) -> Array:
        """Attention output [B, T, D] of x [B, T, D]; of a group of several layers, the sum of what each adds to x."""
        if positions is None:
            ids = jnp.zeros(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids
            positions = restarting_positions(ids)
        attention = GroupAttention(self.config, self.segment, 0, Context(positions, segment_ids), {})
        total = jnp.zeros_like(x)
        for j in range(len(attention.segment.layers)):
            table = group_table(self.config, self.segment)[f"layer_{j}"]["attention"]
            weights = jax.tree.map(partial(computed, x.dtype), Weights(table, name=f"layer_{j}")(), table)
            total = total + attention.step(weights, x + total)
        return total


def build_model(config: ModelConfig) -> Decoder:
    """The Linen module of a configuration. Raises ConfigError if its sizes do not fit together."""
    make_plan(config)
    return Decoder(config)


def build_attention(config: ModelConfig, segment: int = 0) -> AttentionGroup:
    """The attention of one layer group as a Linen module: (x, positions, segment_ids) -> y.

    Raises ConfigError for a segment that the model does not have, or one that reads what another segment makes.
    """
    plan = make_plan(config)
    require(0 <= segment < len(plan.segments),
            f"segment {segment}: the model has segments 0 to {len(plan.segments) - 1}")
    part = plan.segments[segment]
    require(not part.source, f"segment {segment} has no attention: it only makes {', '.join(part.writes)}")
    foreign = sorted(set(part.reads) - set(part.writes))
    require(not foreign, f"segment {segment} reads {', '.join(foreign)} of an earlier segment: it does not stand alone")
    return AttentionGroup(config, segment)

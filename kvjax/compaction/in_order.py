"""Compaction in the order of layers: the queries of a layer are those that compacted layers before its group lead to.

Attention Matching calls this on-policy: what a layer will be asked after compaction is what it is fitted to. The
reference tokens pass each group of layers twice, once with the whole cache and once with what was fitted. (Without a
sharing scheme a group is one layer. Layers of one group see each other uncompacted, and so do all that read one entry.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Segment
from kvjax.attention.sharing import make_plan
from kvjax.cache import Cache
from kvjax.compaction.compacting import Fitting, begin
from kvjax.compaction.entries import Entry
from kvjax.compaction.references import References, checked, counted_tokens
from kvjax.config import ModelConfig
from kvjax.model.decoder import INPUTS, Context, Decoder, Group, Source, weighted_sum


def compact_in_order(model: Decoder, params: Any, cache: Cache, slots: int | Array, tokens: Array,
                     counts: Array | None = None, **options: Any) -> Cache:
    """`compact` on tokens that follow the cache, with every layer's queries as the layers before it make them.

    Args:
        tokens: int [B, N], padded on the right: the context once more, or a continuation.
        counts: int [B], how many are real; None: all.
        options: as `compact` takes them.
    Raises what `compact` raises.
    """
    fitting = begin(model, params, cache, slots, **options)
    pass_ = _Pass(model, params, cache, fitting, tokens, counts)
    for number, segment in enumerate(make_plan(model.config).segments):
        pass_.run(number, segment)
    return fitting.assembled([pass_.fitted[number] for number in range(len(fitting.entries))])


class _Pass:
    """The reference tokens on their way through the layers."""

    def __init__(self, model: Decoder, params: Any, cache: Cache, fitting: Fitting, tokens: Array,
                 counts: Array | None):
        self.config, self.params, self.fitting = model.config, params, fitting
        self.counted = counted_tokens(tokens, counts)
        tokens = jnp.where(self.counted, jnp.asarray(tokens), 0)
        self.positions = cache.positions[:, None] + jnp.arange(tokens.shape[1])
        self.x = model.apply({"params": params}, tokens, self.positions, method="embed")
        self.streams, self.rows, self.inputs, self.fitted = [self.x], {}, {}, {}

    def run(self, number: int, segment: Segment) -> None:
        """Takes the tokens through a segment."""
        params = self.params[f"segment_{number}"]
        if segment.source:
            made = _source(self.config, number, params, self.x, self._context(self.fitting.cache))
            self.rows |= {name: rows[-1] for name, rows in made.items()}
            return
        handed = {name: self.rows[name].astype(jnp.float32) for name in segment.needs if name in self.rows}
        for group in range(segment.repeats):
            self._run_group(number, group, params, handed)
        plan = make_plan(self.config)
        if plan.depth_average:
            self.streams.append(self.x)
            self.x = weighted_sum(self.params[f"depth_weights_{number}"], self.streams)

    def _run_group(self, number: int, group: int, params: Any, handed: dict) -> None:
        run = partial(_group, self.config, number, params, self.x, group, handed=handed)
        x, rows = run(context=self._context(self.fitting.cache))
        layers = [i for i, place in enumerate(make_plan(self.config).places) if place[:2] == (number, group)]
        self.inputs |= dict(zip(layers, rows[INPUTS], strict=True))
        entries = [self._fit(layer) for layer in layers]
        if None not in entries:
            compacted = self.fitting.cache_of_group(number, entries, [self.fitted[entry] for entry in entries])
            x, rows = run(context=self._context(compacted))
        self.x, self.rows = x, self.rows | {name: made[-1] for name, made in rows.items() if name != INPUTS}

    def _fit(self, layer: int) -> int | None:
        """The number of the layer's entry, which is fitted once the queries of all its readers are known; else None."""
        for number, entry in enumerate(self.fitting.entries):
            if layer in entry.readers and all(reader in self.inputs for reader in entry.readers):
                if number not in self.fitted:
                    self.fitted[number] = self.fitting.fit(number, self._references(entry))
                return number
        return None

    def _references(self, entry: Entry) -> References:
        inputs = jnp.stack([self.inputs[reader] for reader in entry.readers])
        return checked(References(inputs, self.positions, self.counted), "the reference tokens")

    def _context(self, cache: Cache) -> Context:
        return Context(self.positions, cache=cache, keep_inputs=True)


@partial(jax.jit, static_argnums=(0, 1))
def _group(config: ModelConfig, number: int, params: Any, x: Array, group: Array, context: Context,
           handed: dict) -> tuple[Array, dict[str, Array]]:
    """Group `group` of a segment on the stream x [B, N, D]: the stream after it, and the rows that it made."""
    weights = jax.tree.map(lambda weight: weight[group], params)
    return Group(config, number).apply({"params": weights}, x, group, context, handed)


@partial(jax.jit, static_argnums=(0, 1))
def _source(config: ModelConfig, number: int, params: Any, x: Array, context: Context) -> dict[str, Array]:
    return Source(config, number).apply({"params": params}, x, context)

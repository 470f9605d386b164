"""Measurements of one context: what compaction changes in predictions and in the outputs of attention."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention.partials import MASKED, merge
from kvjax.attention.sharing import make_attention, make_plan
from kvjax.cache import Cache, init_cache
from kvjax.compaction import fold_bias, references
from kvjax.compaction.attention_matching import FITTED
from kvjax.compaction.compacting import Fitting, begin, form_of
from kvjax.compaction.entries import entries_of, path_of
from kvjax.compaction.evaluate_report import Bound, Drift, Measured
from kvjax.compaction.fitting import attention_outputs
from kvjax.compaction.key_choice import SNAPKV_WINDOW
from kvjax.compaction.matched_heads import Heads, problem_of
from kvjax.compaction.references import References
from kvjax.config import ModelConfig
from kvjax.decoding import decode
from kvjax.model.decoder import Decoder
from kvjax.model.parameters import layer_spec
from kvjax.model.past import attend_to_past
from kvjax.model.prefix import attend_to_prefix

OWN_REFERENCES = {"snapkv": "window", "kvzip": "repeated"}
"""Methods that come with reference queries of their own; the others take those that were asked for."""
CHUNK = 512
"""Tokens of a context that are prefilled at once."""
Caches = dict[str, tuple[Cache, float | None]]


@dataclass(frozen=True)
class How:
    """What is the same for all compactions."""

    model: Decoder
    params: Any
    context_tokens: int
    references: str
    """repeated, context or generated."""
    reference_tokens: int
    keep: int
    cache_dtype: str
    seed: int

    def references_of(self, method: str) -> str:
        """The kind of a method's reference queries."""
        return OWN_REFERENCES.get(method, self.references)


@dataclass(frozen=True)
class Asked:
    """Queries, and what attention to a context of which nothing is lost gives them."""

    by: References
    outputs: list[Array]
    """Of each layer that is compacted: [1, N, H, value width]."""


@dataclass(frozen=True)
class Prepared:
    """A context, and what all compactions of it are compared with."""

    cache: Cache
    """Of all its tokens."""
    continuation: Array
    """int32 [1, N + 1]."""
    logprobs: Array
    """float32 [N, V]: of the next token, read through `cache`."""
    references: dict[str, References]
    near: Asked
    """By the calibration queries."""
    far: Asked
    """By those of the continuation."""
    queries: list[tuple[Array, Array]] | None
    """Of each entry: calibration queries and those of the continuation, [1, G, N, key_dim]; None: attention has no
    heads of keys that biases could be folded into."""
    seconds: dict[str, float | None]
    """Of prefill, and of the reference queries; None: not measured."""

    @property
    def perplexity(self) -> float:
        """Of the continuation, with all tokens in the cache."""
        return _perplexity(self.logprobs, self.continuation)


def prepare(how: How, tokens: np.ndarray, methods: tuple[str, ...], warm: bool) -> Prepared:
    """Reads a context and its continuation, int32 [context + continuation + 1], with all tokens in the cache.

    `warm`: it was done before with the same sizes, so that nothing is compiled; only then is it timed.
    """
    context, rest = tokens[None, :how.context_tokens], jnp.asarray(tokens[None, how.context_tokens:])
    (last, cache), prefill = _timed(lambda: _prefilled(how, context, len(tokens)), warm)
    make = lambda kind: _references(kind, how, context, cache, last, rest.shape[1] - 1)
    found, making = _timed(lambda: make(how.references), warm)
    kinds = {how.references_of(method) for method in methods} - {how.references}
    found = {how.references: found} | {kind: make(kind) for kind in kinds}
    near, far = found[how.references], references.of_following(how.model, how.params, cache, rest[:, :-1])
    queries = None
    if isinstance(form_of(how.model.config, entries_of(how.model.config)[0].places[0]), Heads):
        queries = list(zip(*(_queries_of(how, cache, by) for by in (near, far)), strict=True))
    return Prepared(cache, rest, _logprobs(how.model, how.params, rest[:, :-1], cache), found,
                    *(Asked(by, outputs_of(how, cache, by)) for by in (near, far)), queries,
                    {"prefill": prefill, "references": making})


def _queries_of(how: How, cache: Cache, by: References) -> list[Array]:
    """Of each entry, [1, G, N, key_dim]."""
    return [problem_of(how.model.config, how.params, cache, number, entry, by.read_by(entry.readers)).queries
            for number, entry in enumerate(entries_of(how.model.config))]


def _timed(run: Callable[[], Any], warm: bool) -> tuple[Any, float | None]:
    """What a function returns, and how many seconds that takes; None if it is compiled in that time."""
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return result, time.perf_counter() - start if warm else None


def _prefilled(how: How, context: np.ndarray, room: int) -> tuple[Array, Cache]:
    """Logits [1, V] after the context, and its cache."""
    cache = init_cache(how.model.config, 1, room, how.cache_dtype)
    for at in range(0, context.shape[1], CHUNK):
        last, cache = _extended(how.model, how.params, context[:, at:at + CHUNK], cache)
    return last, cache


@partial(jax.jit, static_argnums=0)
def _extended(model: Decoder, params: Any, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
    return decode(model, params, tokens, cache, last_only=True)


@partial(jax.jit, static_argnums=0)
def _logprobs(model: Decoder, params: Any, tokens: Array, cache: Cache) -> Array:
    """[N, V] of the tokens that follow `tokens` [1, N], which follow the cache."""
    return jax.nn.log_softmax(decode(model, params, tokens, cache)[0][0])


def _references(kind: str, how: How, context: np.ndarray, cache: Cache, last: Array, follow: int) -> References:
    """Reference queries of one kind; `last` [1, V] are the logits after the context, `follow` tokens are drawn."""
    model, params = how.model, how.params
    if kind == "window":
        return references.of_context(model, params, context).newest(SNAPKV_WINDOW)
    if kind == "context":
        found = references.of_context(model, params, context)
    elif kind == "repeated":
        found = references.of_following(model, params, cache, context)
    else:
        found = references.of_continuations(model, params, cache, last.argmax(-1), follow, how.seed)
    return found.thinned(how.reference_tokens)


def outputs_of(how: How, cache: Cache, by: References) -> list[Array]:
    """Of each layer that is compacted: what its queries get of a cache alone, [1, N, H, value width]."""
    config, found = how.model.config, []
    for number, entry in enumerate(entries_of(config)):
        for layer, (segment, group, index) in zip(entry.readers, entry.places, strict=True):
            found.append(_outputs(config, segment, index, how.params, group, cache, number, by.inputs[layer],
                                  by.positions))
    return found


@partial(jax.jit, static_argnums=(0, 1, 2))
def _outputs(config: ModelConfig, segment: int, index: int, params: Any, group: Array, cache: Cache, entry: Array,
             inputs: Array, positions: Array) -> Array:
    place, variant, layer = (segment, group, index), make_attention(config), layer_spec(config, segment, index)
    path = path_of(config, params, place)
    queries = variant.queries(layer, path[-1], inputs, positions)
    slots = {name: slots for name, slots in make_plan(config).slots_read(*place).items()
             if any(c.name == name and c.cached for c in layer.reads)}
    found = attend_to_past(config.kernel, variant, layer, path, queries, cache.past(next(iter(slots))), slots,
                           positions, None, config.dtype)
    if cache.prefix is not None:
        found = merge(found, attend_to_prefix(config.kernel, variant, layer, path, queries, cache.prefix, entry,
                                              positions, config.dtype))
    return found.out


def measure_case(how: How, prepared: Prepared, method: str, ratio: float, warm: bool) -> list[Measured]:
    """Figures of one method at one ratio, for every reading of what it makes; `warm` as in `prepare`."""
    left = round(how.context_tokens / ratio)
    made = compacted(how, prepared, method, left - how.keep, warm)
    bound = bound_of(how, prepared, made["biased"][0]) if "folded" in made else None
    return [Measured(method, reading, ratio, left, *_read(how, prepared, cache),
                     near_error=_errors(how, prepared.near, cache), far_error=_errors(how, prepared.far, cache),
                     seconds=seconds, nbytes=cache.nbytes,
                     bytes_per_slot=cache.prefix.cache.nbytes / cache.prefix.cache.capacity,
                     bound=bound if reading == "folded" else None)
            for reading, (cache, seconds) in made.items()]


def compacted(how: How, prepared: Prepared, method: str, slots: int, warm: bool) -> Caches:
    """The compacted cache of each reading, and the seconds it took. All are of the same fit."""
    found = prepared.references[how.references_of(method)]
    fitting = begin(how.model, how.params, prepared.cache, slots, method=method, keep=how.keep, seed=how.seed)
    if method not in FITTED:
        return {"copied": _timed(lambda: _fitted(fitting, found), warm)}
    if prepared.queries is None:  # biases of factors cannot be folded
        made = {"biased": _timed(lambda: _fitted(fitting, found), warm)}
    else:
        made = _heads_fitted(fitting, found, warm)
    cache, seconds = made["biased"]
    return made | {"dropped": (without_biases(cache), seconds)}


def _fitted(fitting: Fitting, found: References) -> Cache:
    return fitting.assembled([fitting.fit(number, found.read_by(entry.readers))
                              for number, entry in enumerate(fitting.entries)])


def _heads_fitted(fitting: Fitting, found: References, warm: bool) -> Caches:
    """With biases, folded, and refitted without them: tokens are chosen and biases fitted once."""
    folding = dataclasses.replace(fitting, options=dataclasses.replace(fitting.options, fold=True))
    matched, seconds = _timed(lambda: [fitting.form.matched(fitting, number, found.read_by(entry.readers))
                                       for number, entry in enumerate(fitting.entries)], warm)
    # Folding biases of 0 leaves the keys as they are, and fits values to them.
    bare = [(problem, made._replace(bias=jnp.where(made.bias > MASKED / 2, 0, MASKED))) for problem, made in matched]
    readings = ("biased", fitting, matched), ("folded", folding, matched), ("refitted", folding, bare)
    caches = {}
    for reading, how, pairs in readings:
        run = lambda how=how, pairs=pairs: how.assembled([how.form.rows(how, *pair) for pair in pairs])
        cache, more = _timed(run, warm)
        caches[reading] = cache, seconds + more if warm else None
    return caches


def without_biases(cache: Cache) -> Cache:
    """A compacted cache whose biases are left out, values as they are. All slots of all heads must be in use."""
    held = cache.prefix.cache
    components = {name: x for name, x in held.components.items() if name != "bias"}
    held = held.replace(components=components, table=tuple(c for c in held.table if c.name != "bias"))
    return cache.replace(prefix=cache.prefix.replace(cache=held))


def _read(how: How, prepared: Prepared, cache: Cache) -> tuple[float, float]:
    """Divergence and perplexity of the continuation, read through a compacted cache."""
    tokens = prepared.continuation
    found = _logprobs(how.model, how.params, tokens[:, :-1], cache)
    return float(_divergence(prepared.logprobs, found)), _perplexity(found, tokens)


@jax.jit
def _divergence(full: Array, found: Array) -> Array:
    """Mean KL(full || found) of log-probabilities [N, V], in nats."""
    return (jnp.exp(full) * (full - found)).sum(-1).mean()


def _perplexity(logprobs: Array, tokens: Array) -> float:
    """Of tokens [1, N + 1] but the first."""
    return float(jnp.exp(-jnp.take_along_axis(logprobs, tokens[0, 1:, None], axis=-1).mean()))


def _errors(how: How, asked: Asked, cache: Cache) -> list[float]:
    """Relative RMS error of attention outputs, by layer."""
    return [float(_rms(made - full) / _rms(full))
            for made, full in zip(outputs_of(how, cache, asked.by), asked.outputs, strict=True)]


def _rms(x: Array) -> Array:
    """Of the lengths of vectors [..., d]."""
    return jnp.sqrt((x * x).sum(-1).mean())


def bound_of(how: How, prepared: Prepared, cache: Cache) -> Bound:
    """FoldBias's bound on what folding does to outputs, and what it does: keys not rounded, values not fitted again.

    `cache` is the one with biases.
    """
    found: dict[str, list[float]] = {field.name: [] for field in dataclasses.fields(Bound)}
    fitting = begin(how.model, how.params, cache, 1)
    scale = fitting.form.sizes.scale
    for number, (near, far) in enumerate(prepared.queries):
        (keys, values, bias), *_ = problem_of(how.model.config, how.params, cache, number, fitting.entries[number],
                                              prepared.far.by.thinned(1).read_by(fitting.entries[number].readers))
        direction = fold_bias.fit_direction(near)
        folded, none = fold_bias.fold_keys(keys, bias, direction, scale), jnp.where(bias > MASKED / 2, 0, MASKED)
        for name, queries in (("near", near), ("far", far)):
            exact = attention_outputs(queries, keys, values, bias, scale)
            change, size = attention_outputs(queries, folded, values, none, scale) - exact, _rms(exact)
            bound = fold_bias.output_error_bound(bias, values, queries, direction)
            found[f"{name}_bound"].append(float(_rms(bound[..., None]) / size))
            found[f"{name}_actual"].append(float(_rms(change) / size))
            found[f"{name}_excess"].append(float((jnp.linalg.norm(change, axis=-1) - bound).max() / size))
    return Bound(**found)


def drift_of(prepared: Prepared) -> Drift | None:
    """How the queries of the continuation differ from those of the references; None if there are none."""
    if prepared.queries is None:
        return None
    found: dict[str, list[Any]] = {field.name: [] for field in dataclasses.fields(Drift)}
    for near, far in prepared.queries:
        direction = fold_bias.fit_direction(near)
        for name, queries in (("near", near), ("far", far)):
            along = jnp.einsum("bgnd,bgd->bgn", queries, direction, precision="highest")
            found[f"{name}_mean"].append(along.mean(-1)[0].tolist())
            found[f"{name}_sd"].append(along.std(-1)[0].tolist())
        apart = jnp.linalg.norm(far.mean(2) - near.mean(2), axis=-1) / jnp.sqrt(near.var(2).sum(-1))
        found["means_apart"].append(apart[0].tolist())
    return Drift(**found)

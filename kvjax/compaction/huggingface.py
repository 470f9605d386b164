"""Caches for the transformers library: a model that kvjax exports goes on there from what a cache holds.

    kvjax.convert.to_huggingface(config, params, folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    past = to_huggingface_cache(config, compact(..., fold=True))
    logits = model(tokens, past_key_values=past, position_ids=positions).logits     # cache=past from 5.24 on

transformers numbers new tokens by how many a cache holds, and a compacted one holds fewer than were read: every call
needs `position_ids`, which begin at `cache.positions`. Masks go by places in the cache and are right without help; a
mask of padding, where one is given, has a column for each token that is held, not for each that was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.sharing import make_plan
from kvjax.cache import Cache, Prefix, contents, from_stored
from kvjax.compaction.entries import MASKED_IN_CACHE
from kvjax.config import ConfigError, ModelConfig, require
from kvjax.convert.architectures import write_config
from kvjax.quantisation import dequantise, is_quantised, scale_component

if TYPE_CHECKING:
    import transformers


def to_huggingface_cache(config: ModelConfig, cache: Cache, device: Any = "cpu") -> transformers.DynamicCache:
    """A cache for the model that `kvjax.convert.to_huggingface` writes, of the same tokens.

    Every layer gets keys and values [B, G, n, d]: those of the prefix first, then the tokens that follow it. Keys are
    rotated there as they are here. Layers with a window get what their next token sees.

    Args:
        config: the model: one that can be exported, with GroupedQuery.
        cache: not changed; compacted or not. What is quantised is read in the compute type, all else keeps its type.
        device: where torch puts the tensors.
    Raises:
        ConfigError: no standard kernel can read the cache: the prefix has biases, heads or rows hold different numbers
            of tokens; the model cannot be exported, or has other attention; the cache is another model's, or more was
            appended than fits it; torch or transformers is missing.
    """
    settings = _settings(config)
    _check_cache(config, cache)
    if cache.prefix is not None:
        _check_prefix(cache.prefix)
    torch, transformers = _packages()
    past = transformers.DynamicCache(config=transformers.AutoConfig.for_model(**settings))
    for layer, (keys, values) in enumerate(_layers(config, cache)):
        past.update(_tensor(torch, keys, device), _tensor(torch, values, device), layer)
        if config.window is not None:  # tokens before the window were read, and count
            past.layers[layer].cumulative_length = int(cache.positions[0])
    return past


def _settings(config: ModelConfig) -> dict[str, Any]:
    """The config.json of the exported model."""
    require(type(config.attention) is GroupedQuery, f"attention is {config.attention}: transformers has standard keys "
                                                    "and values of heads for GroupedQuery only")
    return write_config(config)[1]


def _check_cache(config: ModelConfig, cache: Cache) -> None:
    held = [(c, cache.components[c.name].shape[0]) for c in cache.table]
    wanted = [(stored.component, stored.slots) for stored in contents(config, cache.dtype)]
    require(held == wanted, f"the cache is of another model: it holds components {_sizes(held)}, and the model's are "
                            f"{_sizes(wanted)}")
    require(not bool(cache.overflowed.any()), "more tokens were appended than the cache has room for, and some were "
                                              "dropped: make it with more room")
    _check_rows(cache.lengths, "tokens")


def _sizes(held: list[tuple[Component, int]]) -> dict[str, tuple[int, ...]]:
    return {c.name: (slots, *c.features) for c, slots in held}


def _check_rows(lengths: Array, what: str) -> None:
    lengths = np.asarray(lengths)
    require((lengths == lengths[0]).all(), f"rows hold {lengths.tolist()} {what}: standard kernels read equally many "
                                           "of each; convert rows of one length together")


def _check_prefix(prefix: Prefix) -> None:
    require(None not in prefix.entries, f"the prefix has entries {prefix.entries} for the layers: transformers' masks "
                                        "are for layers that are all compacted")
    _check_rows(prefix.cache.lengths, "compacted tokens")
    if "bias" not in prefix.cache.components:
        return
    count = int(prefix.cache.lengths[0])
    bias = np.asarray(prefix.cache.components["bias"][..., :count].astype(jnp.float32))
    there = bias > MASKED_IN_CACHE
    require(not (there & (bias != 0)).any(), "the prefix has biases, which standard kernels do not add: compact with "
                                             "fold=True, so that keys hold them")
    used = there.sum(axis=-1)
    require(there.all(), f"heads hold {used.min()} to {used.max()} compacted tokens: standard kernels have no mask for "
                         "each head; compact with one number of slots for all")


def _packages() -> tuple[ModuleType, ModuleType]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError("a cache for transformers needs packages: pip install torch 'transformers>=5'\n"
                          f"  {error}") from error
    return torch, transformers


def _layers(config: ModelConfig, cache: Cache) -> Iterator[tuple[Array, Array]]:
    """Keys and values [B, G, n, d] of each layer."""
    plan = make_plan(config)
    dtype = jnp.dtype(config.dtype) if is_quantised(cache.dtype) else cache.dtype
    held = _held(cache, config.window)
    for layer, place in enumerate(plan.places):
        slots = plan.slots_read(*place)
        yield tuple(_with_prefix(cache, layer, name, _read(cache, name, slots[name][-1], held, dtype))
                    for name in ("k", "v"))


def _held(cache: Cache, window: int | None) -> np.ndarray:
    """Where the tokens lie that a layer gets, oldest first."""
    if window is None:
        return np.arange(int(cache.lengths[0]))
    position, size = int(cache.positions[0]), cache.past("k").size
    return np.arange(max(position - window + 1, 0), position) % size


def _with_prefix(cache: Cache, layer: int, name: str, rows: Array) -> Array:
    if cache.prefix is None:
        return rows
    own = cache.prefix.cache
    before = _read(own, name, cache.prefix.entries[layer], np.arange(int(own.lengths[0])), rows.dtype)
    return jnp.concatenate([before, rows], axis=2)


def _read(cache: Cache, name: str, slot: int, held: np.ndarray, dtype) -> Array:
    """Tokens `held` of one slot, [B, G, n, d]."""
    component = next(c for c in cache.table if c.name == name)
    def rows(c: Component) -> Array:
        return from_stored(c, jnp.take(cache.components[c.name][slot], held, axis=-1)[None])[0]
    found = rows(component)
    if is_quantised(cache.dtype):
        found = dequantise(found, rows(scale_component(component)), component, dtype)
    return jnp.swapaxes(found.astype(dtype), 1, 2)


def _tensor(torch: ModuleType, x: Array, device: Any) -> Any:
    x = np.array(x)
    if x.dtype == jnp.bfloat16:  # a type that torch does not take from numpy
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)

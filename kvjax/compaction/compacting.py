"""A cache in which few fitted keys and values stand for all tokens so far (Attention Matching, FoldBias).

    cache = compact(model, params, cache, slots=100, references=references)

What comes out is a cache: it appends, decodes, is saved and counts its bytes like any other. Tokens that follow keep
their positions. It can be compacted again, its prefix with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.sharing import make_plan
from kvjax.cache import LANES, Cache, Prefix, init_cache, round_up, stored_axes, tokens_kept
from kvjax.cache import capacity as whole_blocks
from kvjax.compaction.attention_matching import find_method
from kvjax.compaction.entries import MASKED_IN_CACHE, Entry, Place, entries_of, entry_of_layers, sizes_of
from kvjax.compaction.key_choice import SNAPKV_WINDOW
from kvjax.compaction.matched_factors import Factors
from kvjax.compaction.matched_heads import Heads, check_storable
from kvjax.compaction.references import References
from kvjax.config import ModelConfig, require
from kvjax.model.decoder import Decoder
from kvjax.model.prefix import bias_type
from kvjax.quantisation import SCALE_TYPE, is_quantised, scale_component
from kvjax.sharding import constrain

Fitted = dict[str, Array]
"""What is left of an entry: {component: [B, t, *features]}, biases included."""


def compact(model: Decoder, params: Any, cache: Cache, slots: int | Array, references: References,
            **options: Any) -> Cache:
    """Replaces the tokens that a cache holds by few fitted ones.

    Layers with a window keep what they have. Of every other layer, or of every set of layers that read the same
    entries, each head of keys and values is fitted by itself.

    Args:
        model, params: the model.
        cache: what is compacted; not changed.
        slots: how many tokens are left for each head; or int [entries, B, G], for each head its own number.
        references: the queries that attention is matched on (`kvjax.compaction.references`).
        options: see `Options`.
    Raises:
        ConfigError: the model keeps nothing that can be compacted; a number of slots that is below 1 or above the
            tokens there are; references of another model or batch; a cache that overflowed.
        ValueError: an unknown method; fits that are not possible, as `attention_matching` and `fold_bias` say; keys or
            values that overflow the type of the cache.
    """
    fitting = begin(model, params, cache, slots, **options)
    wanted = (model.config.layers, len(cache.lengths), model.config.width)
    layers, batch, _, width = references.inputs.shape
    require((layers, batch, width) == wanted, f"references are inputs of {layers} layers, {batch} rows and width "
            f"{width}: the model and the cache have {wanted}")
    if fitting.options.method == "snapkv":
        references = references.newest(SNAPKV_WINDOW)
    return fitting.assembled([fitting.fit(number, references.read_by(entry.readers))
                              for number, entry in enumerate(fitting.entries)])


@dataclass(frozen=True)
class Options:
    """How a cache is compacted."""

    method: str = "am_highest"
    """One of `kvjax.compaction.attention_matching.METHODS`; "snapkv" looks at the newest of the references only."""
    fold: bool = False
    """Biases are folded into keys (FoldBias), so that attention without biases reads the cache."""
    keep: int = 0
    """So many of the newest tokens are left as they are."""
    room: int | None = None
    """Tokens that the new cache has room for beside the compacted ones, those kept included; None: those kept and as
    many more as the old one had room for."""
    seed: int = 0
    """Of method "random"."""


@dataclass(frozen=True)
class Fitting:
    """A compaction under way: entries are fitted one by one, then put together."""

    config: ModelConfig
    params: Any
    cache: Cache
    entries: tuple[Entry, ...]
    form: Heads | Factors
    counts: np.ndarray
    """int32 [entries, B, G], slots of each head."""
    options: Options

    @property
    def most(self) -> int:
        """The most slots that any head has."""
        return int(self.counts.max())

    def key(self, number: int) -> Array:
        """The random key of an entry."""
        return jax.random.fold_in(jax.random.key(self.options.seed), number)

    def fit(self, number: int, references: References) -> Fitted:
        """What is left of entry `number`; the references are inputs of its readers [readers, B, N, D]."""
        return self.form.fit(self, number, references)

    def assembled(self, fitted: list[Fitted]) -> Cache:
        """The compacted cache, of what is left of each entry."""
        prefix = Prefix(self._prefix(fitted, self.counts), entry_of_layers(self.config, self.entries))
        return self._rest.replace(prefix=prefix)

    def cache_of_group(self, segment: int, numbers: list[int], fitted: list[Fitted]) -> Cache:
        """A cache for the layers of one group alone, whose entries have these numbers."""
        held = sorted(set(numbers))
        prefix = self._prefix([fitted[numbers.index(number)] for number in held], self.counts[held])
        entries = tuple(held.index(numbers[index]) if number == segment else None
                        for number, _, index in make_plan(self.config).places)
        return self._rest.replace(prefix=Prefix(prefix, entries))

    @cached_property
    def _rest(self) -> Cache:
        """What is not compacted, with room for more."""
        keep, room = self.options.keep, self.options.room
        reach = _reach(self.cache, int(self.cache.positions.max()) + room)
        return _shortened(self.config, self.cache, keep, room, reach)

    def _prefix(self, fitted: list[Fitted], counts: np.ndarray) -> Cache:
        """A cache of the entries, of one slot each; biases that are all 0 are left out."""
        rows = {c.name: jnp.stack([made[c.name] for made in fitted]) for c in self.form.table()}
        for name in rows.keys() - {"bias"}:
            check_storable(name, rows[name], self.cache.dtype)
        held = jnp.asarray(counts.max(axis=(0, 2)))
        seen = (jnp.arange(self.most) < held[:, None])[..., *[None] * (rows["bias"].ndim - 3)]
        biased = bool(((rows["bias"] != 0) & seen).any())
        empty = _empty_prefix(self.form, len(fitted), counts.shape[1], self.most, self.cache.dtype, biased)
        return empty.append(rows, held)


def init_compacted(config: ModelConfig, batch: int, slots: int, room: int, dtype=None, *, biased: bool = True,
                   reach: int | None = None) -> Cache:
    """A compacted cache of zeros, with the shapes that `compact` gives: to restore a saved one, to compile for one.

    Args:
        config, batch, dtype: as `kvjax.init_cache` takes them.
        slots: the most that any head has.
        room: tokens beside the compacted ones.
        biased: whether there are biases; False: they were folded, and all heads have as many slots.
        reach: the position that the compacted one had reached, and the room; None: the room. Windows need it.
    """
    cache, entries = init_cache(config, batch, room, dtype), entries_of(config)
    prefix = _empty_prefix(form_of(config, entries[0].places[0]), len(entries), batch, slots, cache.dtype, biased)
    room = whole_blocks(room)
    return _shortened(config, cache, 0, room, _reach(cache, reach or room)).replace(
        prefix=Prefix(prefix, entry_of_layers(config, entries)))


def begin(model: Decoder, params: Any, cache: Cache, slots: int | Array, **options: Any) -> Fitting:
    """Checks what `compact` is given, before anything is computed."""
    options = Options(**options)
    require(options.keep >= 0, f"keep is {options.keep}: it must be 0 or more")
    require(not bool(cache.overflowed.any()), "more was appended to the cache than it has room for, and was dropped: "
                                              "make it with more room")
    entries = entries_of(model.config)
    form = form_of(model.config, entries[0].places[0])
    counts = _slots(slots, _compactable(cache, len(entries), form.heads, options.keep))
    find_method(options.method)
    room = options.room
    if room is None:
        room = max(1, cache.capacity - int(cache.lengths.max()) + options.keep)
    require(room >= max(options.keep, 1),
            f"room is {room}: it must be at least 1, and the {options.keep} tokens that are kept")
    return Fitting(model.config, params, cache, entries, form, counts,
                   replace(options, room=whole_blocks(room)))


def form_of(config: ModelConfig, place: Place) -> Heads | Factors:
    """What a prefix of the model keeps."""
    sizes = sizes_of(config, place)
    return Factors(config, place) if sizes is None else Heads(sizes)


def _slots(slots: int | Array, tokens: np.ndarray) -> np.ndarray:
    """Slots of each head, int32 [entries, B, G]: of one with fewer tokens all that it has."""
    slots = np.asarray(slots)
    require(np.issubdtype(slots.dtype, np.integer), f"slots are of type {slots.dtype}: give whole numbers")
    require(slots.shape in ((), tokens.shape), f"slots have shape {slots.shape}: give one number, or one for each "
                                               f"entry, row and head {tokens.shape}")
    require(slots.min() >= 1, f"slots are {slots.min()} somewhere: each head keeps at least 1")
    require(slots.max() <= tokens.max(), f"slots are {slots.max()} somewhere, and there are {tokens.max()} tokens to "
                                         "compact: choose fewer")
    return np.minimum(slots, tokens).astype(np.int32)


def _compactable(cache: Cache, entries: int, heads: int, keep: int) -> np.ndarray:
    """Tokens that are compacted of each head, those of the prefix included: [entries, B, G]."""
    own = np.maximum(np.asarray(cache.lengths) - keep, 0)
    held = np.broadcast_to(own[:, None], (entries, len(own), heads))
    if cache.prefix is not None:
        held = held + np.asarray(_prefix_slots(cache.prefix.cache))
    rows = held.max(axis=(0, 2))
    require(rows.min() > 0, f"rows hold {rows.tolist()} tokens beside the {keep} that are kept: there must be at least "
                            "one to compact in each")
    return held


def _prefix_slots(cache: Cache) -> Array:
    """Slots in use of each entry, row and head, [entries, B, G], or [entries, B, 1] if all are used."""
    if "bias" not in cache.components:
        return cache.lengths[None, :, None]
    used = cache.components["bias"] > MASKED_IN_CACHE
    return (used & (jnp.arange(cache.capacity) < cache.lengths[:, None, None])).sum(axis=-1)


def _empty_prefix(form: Heads | Factors, entries: int, batch: int, slots: int, dtype, biased: bool) -> Cache:
    table, tokens = tuple(c for c in form.table() if biased or c.name != "bias"), round_up(slots, LANES)
    types = {c.name: bias_type(dtype) if c.name == "bias" else dtype for c in table}
    if is_quantised(dtype):
        scales = tuple(scale_component(c) for c in table if c.name != "bias")
        table, types = (*table, *scales), types | {c.name: SCALE_TYPE for c in scales}
    def empty(c: Component) -> Array:
        return constrain(jnp.zeros((entries, batch, c.size, tokens), types[c.name]), *stored_axes(c))
    none = lambda dtype: jnp.zeros((batch,), dtype)
    return Cache({c.name: empty(c) for c in table}, none(jnp.int32), none(bool), none(jnp.int32), table, tokens)


def _reach(cache: Cache, positions: int) -> int:
    """Room of rings for so many positions; 0 without rings, where it says nothing."""
    return whole_blocks(positions) if any(c.window is not None for c in cache.table) else 0


@partial(jax.jit, static_argnums=(0, 2, 3, 4))
def _shortened(config: ModelConfig, cache: Cache, keep: int, room: int, reach: int) -> Cache:
    """A cache without prefix that holds the last `keep` tokens, and all that windows see."""
    lengths = jnp.minimum(cache.lengths, keep)
    new = init_cache(config, len(lengths), room, cache.dtype)
    def moved(c: Component) -> Array:
        if c.window is None:
            return _last_tokens(cache.components[c.name], new.components[c.name], cache.lengths - lengths, keep)
        return _ring(cache.components[c.name], tokens_kept(c, reach), cache.positions)
    components = {c.name: constrain(moved(c), *stored_axes(c)) for c in new.table}
    return new.replace(components=components, lengths=lengths, offsets=cache.positions - lengths,
                       overflowed=cache.overflowed)


def _last_tokens(old: Array, new: Array, starts: Array, keep: int) -> Array:
    """`new` [slots, B, F, S] with the `keep` tokens of `old` from `starts` [B] on."""
    if not keep:
        return new
    index = jnp.minimum(starts[:, None] + jnp.arange(keep), old.shape[3] - 1)
    return new.at[..., :keep].set(jnp.take_along_axis(old, index[None, :, None], axis=3))


def _ring(old: Array, size: int, positions: Array) -> Array:
    """A ring of `size` slots with the tokens of another: position p lies in slot p mod size."""
    newest = positions[:, None] - 1
    wanted = newest - (newest - jnp.arange(size)) % size
    there = (wanted >= 0) & (wanted > newest - old.shape[3])
    moved = jnp.take_along_axis(old, (wanted % old.shape[3])[None, :, None], axis=3)
    return jnp.where(there[None, :, None], moved, 0)

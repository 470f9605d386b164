"""Slots of each head of a model, by how much it loses: heads that can do with few give theirs to those that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.cache import Cache
from kvjax.compaction.budgets import exchange, sensitivity
from kvjax.compaction.compacting import begin
from kvjax.compaction.matched_heads import Heads, problem_of
from kvjax.compaction.references import References
from kvjax.config import require
from kvjax.model.decoder import Decoder

SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Sizes at which losses of heads are measured, as shares of the mean."""


def slots_by_head(model: Decoder, params: Any, cache: Cache, slots: int, references: References, *,
                  method: str = "am_highest", keep: int = 0, shares: Sequence[float] = SHARES) -> np.ndarray:
    """Slots of every head, int [entries, B, G] as `compact` takes them: `slots` on average over a sequence's heads.

    Every head is compacted to a few sizes and its loss measured, the squared error of its outputs over their square;
    then sizes are exchanged while the sum of losses falls (`kvjax.compaction.budgets`). A prefix is allocated for its
    largest head, so this buys accuracy at the same number of attended slots, not memory.

    Args:
        model, params, cache, references, method, keep: as `compact` takes them.
        shares: sizes to choose from, as shares of `slots`, ascending.
    Raises what `compact` raises; ConfigError for Kronecker factors, whose heads share their tokens.
    """
    fitting = begin(model, params, cache, slots, method=method, keep=keep)
    require(isinstance(fitting.form, Heads), "heads of Kronecker factors share their tokens: give one number of slots")
    sizes = sorted({min(max(round(share * slots), 1), _most(cache, keep)) for share in shares} | {slots})
    losses = np.stack([_losses(fitting, number, references, sizes) for number in range(len(fitting.entries))])
    entries, batch, heads, points = losses.shape
    rows = np.moveaxis(losses, 1, 0).reshape(batch, entries * heads, points)
    found = np.stack([exchange(row, sizes, slots * entries * heads) for row in rows])
    return np.moveaxis(found.reshape(batch, entries, heads), 0, 1)


def _most(cache: Cache, keep: int) -> int:
    """Tokens that can be compacted of the longest row."""
    prefix = 0 if cache.prefix is None else np.asarray(cache.prefix.cache.lengths)
    return int((np.maximum(np.asarray(cache.lengths) - keep, 0) + prefix).max())


def _losses(fitting, number: int, references: References, sizes: list[int]) -> np.ndarray:
    """Of each row and head of an entry at each size, [B, G, points]."""
    entry = fitting.entries[number]
    (keys, values, bias), queries, counted = problem_of(
        fitting.config, fitting.params, fitting.cache, number, entry, references.read_by(entry.readers),
        fitting.options.keep)
    return np.asarray(sensitivity(fitting.options.method, queries, keys, values, sizes, bias=bias, counted=counted,
                                  scale=fitting.form.sizes.scale, key=fitting.key(number)))

"""What a model's cache holds: measured on an allocated cache, against the formula and multi-head attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from rich.table import Table

from kvjax.attention.sharing import make_plan
from kvjax.cache import cache_bytes_per_token, init_cache
from kvjax.config import ModelConfig


@dataclass(frozen=True)
class ComponentRow:
    """One cached component of the whole model."""

    name: str
    features: tuple[int, ...]
    """Sizes of one entry."""
    slots: int
    """Entries per token over all layers."""
    bytes_per_token: float
    """Measured: bytes of the allocated array, divided by the tokens of context it serves."""


@dataclass(frozen=True)
class CacheReport:
    """Bytes per token of context, all over the whole model."""

    dtype: str
    length: int
    """Tokens of context of the measured cache."""
    components: tuple[ComponentRow, ...]
    measured: float
    formula: float
    multi_head: float
    """What multi-head attention in a model of this width keeps: keys and values of D elements in every layer."""

    @property
    def factor(self) -> float:
        """How many times smaller than that of multi-head attention the cache is."""
        return self.multi_head / self.measured


def report(config: ModelConfig, length: int | None = None, dtype: str | None = None) -> CacheReport:
    """Allocates a cache for one sequence and measures it.

    Args:
      config: the model.
      length: tokens of context, rounded up to what a cache allocates; default: the context length. It matters only
        where a window limits what is kept.
      dtype: element type; default: the model's compute type.
    """
    cache = init_cache(config, 1, config.context_length if length is None else length, dtype)
    kept = jnp.dtype(config.dtype if dtype is None else dtype)
    plan = make_plan(config)
    rows = tuple(ComponentRow(c.name, c.features, plan.slots(c.name), cache.components[c.name].nbytes / cache.capacity)
                 for c in plan.cached)
    return CacheReport(
        dtype=kept.name, length=cache.capacity, components=rows,
        measured=sum(row.bytes_per_token for row in rows),
        formula=cache_bytes_per_token(config, kept, cache.capacity),
        multi_head=2.0 * config.layers * config.width * kept.itemsize)


def table(result: CacheReport) -> Table:
    """The report as a table for the terminal."""
    out = Table("component", "features", "slots", "bytes / token",
                title=f"cache, {result.dtype}, with room for {result.length} tokens")
    for column in out.columns[2:]:
        column.justify = "right"
    for row in result.components:
        features = " x ".join(str(n) for n in row.features)
        out.add_row(row.name, features, str(row.slots), f"{row.bytes_per_token:,.0f}")
    out.add_section()
    out.add_row("measured", "", "", f"{result.measured:,.0f}")
    out.add_row("formula", "", "", f"{result.formula:,.0f}")
    out.add_row("multi-head", "", "", f"{result.multi_head:,.0f}")
    out.add_row("times smaller", "", "", f"{result.factor:.2f}")
    return out

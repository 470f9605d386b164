"""What a model's cache holds, and what a decode step reads of it: measured on the cache that
`init_cache` makes.

Held and read are two things: layers that share entries hold them once and each read them; a layer of a KVPath-Residual
path reads the corrections of all layers before it. What is held limits batch and context, what is read takes time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from rich.table import Table

from kvjax.attention.sharing import make_plan
from kvjax.cache import Stored, cache_bytes_per_token, contents, init_cache
from kvjax.config import ModelConfig
from kvjax.config_files import load_config
from kvjax.convert.folder import load_model_config
from kvjax.quantisation import SCALE_TYPE, is_quantised, scale_component, storage_type


@dataclass(frozen=True)
class ComponentRow:
    """One cached component of the whole model."""

    name: str
    features: tuple[int, ...]
    """Sizes of one entry."""
    slots: int
    """Entries held per token over all layers."""
    bytes_per_token: float
    """Held. Measured: bytes of the array that `init_cache` makes, divided by the tokens of context it serves."""
    reads: int
    """Entries that the layers read per token in one decode step."""

    @property
    def read(self) -> float:
        """Bytes read per token of context in one decode step."""
        return self.bytes_per_token / self.slots * self.reads


@dataclass(frozen=True)
class CacheReport:
    """Bytes per token of context, all over the whole model."""

    dtype: str
    length: int
    """Tokens of context of the measured cache."""
    components: tuple[ComponentRow, ...]
    measured: float
    """Bytes held, of the arrays that `init_cache` makes."""
    formula: float
    """The same from the plan."""
    read: float
    """Bytes that one decode step of a full cache reads, each layer its entries once."""
    multi_head: float
    """What multi-head attention in a model of this width holds, and reads: keys and values of D elements in every
    layer, of the same type (of a quantised one with a scale for each head) and without a window."""

    @property
    def factor(self) -> float:
        """How many times less than multi-head attention the cache holds."""
        return self.multi_head / self.measured

    @property
    def read_factor(self) -> float:
        """How many times less than with multi-head attention a decode step reads."""
        return self.multi_head / self.read


def report(config: ModelConfig, length: int | None = None, dtype: str | None = None) -> CacheReport:
    """Measures the cache that `init_cache` makes for one sequence, without allocating it.

    Args:
      config: the model.
      length: tokens of context, rounded up to what a cache allocates; default: the context length. It matters only
        where a window limits what is kept.
      dtype: element type; default: the model's compute type.
    Raises:
      ConfigError: a length below 1, or a type that a cache cannot be of.
    """
    dtype = storage_type(config.dtype if dtype is None else dtype)
    length = config.context_length if length is None else length
    cache = jax.eval_shape(partial(init_cache, config, 1, length, dtype))  # what it would be: nothing is allocated
    reads = entries_read(config)

    def row(stored: Stored) -> ComponentRow:
        name = stored.component.name
        held = cache.components[name].size * stored.dtype.itemsize / cache.capacity
        return ComponentRow(name, stored.component.features, stored.slots, held, reads[name])

    rows = tuple(map(row, contents(config, dtype)))
    return CacheReport(
        dtype=dtype.name, length=cache.capacity, components=rows,
        measured=sum(row.bytes_per_token for row in rows), formula=cache_bytes_per_token(config, dtype, cache.capacity),
        read=sum(row.read for row in rows), multi_head=multi_head_bytes(config, dtype))


def multi_head_bytes(config: ModelConfig, dtype: np.dtype) -> float:
    """Bytes per token of multi-head attention of a model's width and depth, with heads as wide as the model's."""
    scales = round(config.width / config.attention.head_dim) * SCALE_TYPE.itemsize if is_quantised(dtype) else 0
    return 2.0 * config.layers * (config.width * dtype.itemsize + scales)


def entries_read(config: ModelConfig) -> Counter[str]:
    """Entries of each cached component, and of its scales, that all layers together read to decode a token."""
    plan, total = make_plan(config), Counter()
    for layer in plan.reads():
        total.update(layer)
    return total + Counter({scale_component(c).name: total[c.name] for c in plan.cached})


def find_model(name_or_folder: str | Path) -> ModelConfig:
    """The model of a run, of any other trained model (`kvjax.convert.folder`), or of a configuration by name or path.

    Raises ConfigError if it is neither, or does not load.
    """
    path = Path(name_or_folder)
    if path.is_dir() or path.suffix == ".gguf":
        return load_model_config(path)
    return load_config(str(name_or_folder)).model


def table(result: CacheReport) -> Table:
    """The report as a table for the terminal."""
    out = Table("component", "features", "held", "bytes held", "read", "bytes read",
                title=f"cache, {result.dtype}, with room for {result.length:,} tokens (whole tiles)",
                caption="entries and bytes per token of context, of all layers")
    for column in out.columns[2:]:
        column.justify = "right"
    for row in result.components:
        features = " x ".join(str(n) for n in row.features)
        out.add_row(row.name, features, str(row.slots), f"{row.bytes_per_token:,.0f}", str(row.reads),
                    f"{row.read:,.0f}")
    out.add_section()
    out.add_row("measured", "", "", f"{result.measured:,.0f}", "", f"{result.read:,.0f}")
    out.add_row("formula", "", "", f"{result.formula:,.0f}")
    out.add_row("multi-head", "", "", f"{result.multi_head:,.0f}", "", f"{result.multi_head:,.0f}")
    out.add_row("times smaller", "", "", f"{result.factor:.2f}", "", f"{result.read_factor:.2f}")
    return out

"""Parameters by layer: a model's layers as a plain list, whatever segments and groups they are stacked in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.attention.sharing import make_plan
from kvjax.config import ModelConfig

Tree = dict[str, Any]


def unstack_layers(config: ModelConfig, params: Tree) -> tuple[Tree, list[Tree]]:
    """The weights outside the layers, and those of each layer, in the order in which they run.

    Weights of a layer are {attention_norm, attention: {...}, feed_forward_norm, feed_forward: {...}}.
    """
    stacked = {f"segment_{number}" for number, segment in enumerate(make_plan(config).segments) if not segment.source}
    outer = {name: value for name, value in params.items() if name not in stacked}
    layers = [jax.tree.map(lambda x, g=group: x[g], params[f"segment_{number}"][f"layer_{index}"])
              for number, group, index in make_plan(config).places]
    return outer, layers


def stack_layers(config: ModelConfig, outer: Tree, layers: list[Tree]) -> Tree:
    """Inverse of `unstack_layers`."""
    places: dict[tuple[int, int], list[Tree]] = {}
    for (number, _, index), layer in zip(make_plan(config).places, layers, strict=True):
        places.setdefault((number, index), []).append(layer)
    params = dict(outer)
    for (number, index), group in places.items():
        segment = params.setdefault(f"segment_{number}", {})
        segment[f"layer_{index}"] = jax.tree.map(lambda *x: jnp.stack(x), *group)
    return params

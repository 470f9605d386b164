"""What passes between the layers of a model, as a plain function of its parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import Array

from kvjax.config import ModelConfig
from kvjax.model.decoder import build_model


@partial(jax.jit, static_argnums=0)
def layer_inputs(config: ModelConfig, params: dict[str, Any], tokens: Array, segment_ids: Array | None = None) -> Array:
    """What the attention of every layer reads: the stream after the layer's norm.

    Args:
        config: the model, of any attention and sharing; dropout is off.
        params: its parameters.
        tokens: int [B, T].
        segment_ids: int [B, T], one number per document of a packed row, as the model takes them.
    Returns:
        [L, B, T, D] in the compute type, layers in the order in which they run.
    """
    return build_model(config).apply({"params": params}, tokens, segment_ids, method="layer_inputs")

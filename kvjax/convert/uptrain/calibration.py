"""Activations of a source model over text, which conversions are fitted and judged on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.config import ModelConfig, require
from kvjax.convert.uptrain.regression import Calibration
from kvjax.model.activations import layer_inputs

TEST_SHARE = 8
"""One part of this many is kept for judging."""


def calibrate(source: ModelConfig, params: dict[str, Any], batches: Iterator[dict[str, np.ndarray]],
              tokens: int) -> Calibration:
    """Runs the source model over batches with `tokens` [B, T] and, if packed, `segment_ids`, until `tokens` are done.

    Raises ConfigError if there are fewer than two sequences, or than there are features to regress on.
    """
    rows, seen = [], 0
    while seen < tokens:
        batch = next(batches)
        segments = batch.get("segment_ids")
        inputs = layer_inputs(source, params, jnp.asarray(batch["tokens"]), None if segments is None else segments)
        rows.append(np.asarray(inputs.astype(jnp.float32)))
        seen += batch["tokens"].size
    inputs = np.concatenate(rows, axis=1)
    layers, count, length, width = inputs.shape
    test = max(1, count // TEST_SHARE)
    fit = (count - test) * length
    require(fit >= 2 * width, f"{fit} tokens are too few to fit maps of {width} features: calibrate on more")
    return Calibration(inputs[:, test:].reshape(layers, -1, width), inputs[:, :test].reshape(layers, -1, width), length)

"""Activations of a source model over text, which conversions are fitted and judged on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from kvjax.config import ModelConfig, require
from kvjax.convert.uptrain.regression import Calibration
from kvjax.model.activations import layer_inputs

TEST_PART = 8
"""One sequence of this many is kept for judging."""


def calibrate(source: ModelConfig, params: dict[str, Any], batches: Iterator[dict[str, np.ndarray]],
              tokens: int) -> Calibration:
    """Runs the source model over batches until `tokens` are done: keys as `kvjax.data.pipeline` makes them.

    What does not count for the loss (padding) does not count here.

    Raises ConfigError if there are fewer than two sequences, or than there are features to regress on.
    """
    rows, counts, seen = [], [], 0
    while seen < tokens:
        batch = next(batches)
        inputs = layer_inputs(source, params, batch["tokens"], batch.get("segment_ids"))
        rows.append(multihost_utils.process_allgather(inputs.astype(jnp.float32), tiled=True))
        counts.append(np.asarray(batch.get("loss_mask", np.ones_like(batch["tokens"]))) > 0)
        seen += batch["tokens"].size
    inputs, counted = np.concatenate(rows, axis=1), np.concatenate(counts)
    test = max(1, len(counted) // TEST_PART)
    halves = [inputs[:, part][:, counted[part]] for part in (slice(test, None), slice(test))]
    enough = 2 * source.width
    require(halves[0].shape[1] >= enough, f"{halves[0].shape[1]} tokens are too few to fit maps of {source.width} "
            f"features: calibrate on {enough} or more")
    return Calibration(*halves, counted.shape[1])

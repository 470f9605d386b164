"""Activations of a source model over text, which conversions are fitted and judged on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from kvjax.config import ModelConfig, require
from kvjax.convert.uptrain.regression import Calibration
from kvjax.model.activations import layer_inputs

TEST_PART = 8
"""One sequence of this many is kept for judging."""
STALE = 64
"""After so many sequences that came before, and twice as many as there are, a text is taken to be read up."""


def calibrate(source: ModelConfig, params: dict[str, Any], batches: Iterable[dict[str, np.ndarray]],
              tokens: int) -> Calibration:
    """Runs the source model over batches until `tokens` are done: keys as `kvjax.data.pipeline` makes them.

    What does not count for the loss (padding) does not count here, and neither does a sequence that came before: of a
    small text, what maps are judged on must not be what they were fitted on.

    Raises ConfigError if there are fewer than two sequences, or too few tokens for the features to regress on.
    """
    rows, counts = [], []
    for batch, new in _distinct(batches, tokens):
        inputs = layer_inputs(source, params, batch["tokens"], batch.get("segment_ids"))
        rows.append(np.stack([_gathered(inputs[i])[new].astype(np.float32) for i in range(len(inputs))]))
        counts.append(np.asarray(batch.get("loss_mask", np.ones_like(batch["tokens"])))[new] > 0)
    require(sum(map(len, counts)) > 1, "the text to calibrate on has not two different sequences: give more text")
    inputs, counted = np.concatenate(rows, axis=1), np.concatenate(counts)
    test = max(1, len(counted) // TEST_PART)
    halves = [inputs[:, part][:, counted[part]] for part in (slice(test, None), slice(test))]
    enough = 2 * source.width
    require(halves[0].shape[1] >= enough, f"the text to calibrate on has {halves[0].shape[1]} tokens to fit maps of "
            f"{source.width} features on, and {enough} are wanted: give more text")
    return Calibration(*halves, counted.shape[1], source.window)


def _gathered(x: Array) -> np.ndarray:
    """What lies on the devices of all processes; one layer at a time, since each device gets all of it."""
    return multihost_utils.process_allgather(x, tiled=True)


def _distinct(batches: Iterable[dict[str, np.ndarray]],
              tokens: int) -> Iterator[tuple[dict[str, np.ndarray], list[int]]]:
    """Batches with the places of sequences that did not come before, until so many tokens came, or long none is new."""
    seen, stale = set(), 0
    for batch in batches:
        new, stale = [], stale + len(batch["tokens"])
        for place, row in enumerate(batch["tokens"]):
            if (key := np.asarray(row).tobytes()) not in seen:
                seen.add(key)
                new.append(place)
        if new:
            stale = 0
            yield batch, new
        if stale > 2 * len(seen) + STALE or len(seen) * batch["tokens"].shape[1] >= tokens:
            return

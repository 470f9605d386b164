"""What runs wrote about themselves while they trained: losses and speed, from `metrics.jsonl`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.config import Config, load, require
from kvjax.training import run_folder

SMOOTHED = 3
"""Reports that a smoothed curve takes the mean of, half of them to either side."""


@dataclass(frozen=True)
class Curves:
    """The reports of one run. Losses are nats per token, by the number of steps done."""

    name: str
    tokens_per_step: int
    """Padding included."""
    losses: Mapping[int, float]
    """Of the batch of each reported step."""
    validation: Mapping[int, float]
    """Held-out; the last may be on more text than those before."""
    speeds: tuple[float, ...]
    """Training tokens per second of each report, in order."""

    @property
    def speed(self) -> float | None:
        """Median tokens per second, the first report left out; None with fewer than two."""
        return statistics.median(self.speeds[1:]) if len(self.speeds) > 1 else None


def read(folder: Path, name: str | None = None) -> Curves:
    """Reads a run's curves, under its folder's name unless another is given.

    Raises ConfigError if the folder is not a run's, or holds no metrics.
    """
    require(folder.is_dir(), f"{folder} is no folder: name the folder of a run, such as runs/quickstart")
    config, path = load(Config, folder / run_folder.CONFIG), folder / run_folder.METRICS
    require(path.exists(), f"{folder} has no {run_folder.METRICS}: its training has not begun, or the file was removed")
    lines = metrics(folder)
    return Curves(name or folder.name, config.train.batch_size * config.model.context_length,
                  {line["step"]: line["loss"] for line in lines if "loss" in line},
                  {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line},
                  tuple(line["tokens_per_second"] for line in lines if "tokens_per_second" in line))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; those that are damaged are left out."""
    lines = map(_line, (folder / run_folder.METRICS).read_text(errors="replace").splitlines())
    return [line for line in lines if "step" in line]


def _line(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):  # cut off
        return {}


def mean(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean over runs at the steps that all of them reported, in order."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: statistics.mean(curve[step] for curve in curves) for step in steps}


def smoothed(values: Sequence[float], window: int = SMOOTHED) -> np.ndarray:
    """The mean of each value and its neighbours, `window` in all; at the ends of those that are there."""
    kernel = np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")

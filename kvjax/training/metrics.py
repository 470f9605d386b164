"""What a run reports while it goes: speed, metric files, and a progress bar or plain lines."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from kvjax.config import Config, ConfigError, TrainConfig, to_dict
from kvjax.training import run_folder

PEAK_FLOPS = {
    "TPU v2": 22.5e12, "TPU v3": 61.5e12, "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12,
    "TPU v5": 459e12, "TPU v6 lite": 918e12, "TPU v6e": 918e12, "TPU7x": 1153.5e12,
    "V100": 125e12, "T4": 65e12, "A10G": 70e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 3090": 71e12,
    "RTX 4090": 165.2e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
}
"""Dense bfloat16 (float16 where there is none) multiply-adds and adds per second of one device, by part of its kind."""


def peak_flops(device: jax.Device) -> float | None:
    """Peak FLOPs per second of a device; None where it isn't known, a CPU for example."""
    matching = [kind for kind in PEAK_FLOPS if kind in device.device_kind]
    return PEAK_FLOPS[max(matching, key=len)] if matching else None


class Meter:
    """Measures speed between two reports by the wall clock; what happens between `restart` and a step is left out."""

    def __init__(self, tokens_per_step: int, flops_per_token: float, devices: Iterable[jax.Device]):
        self._tokens_per_step = tokens_per_step
        peaks = [peak_flops(device) for device in devices]
        self._utilisation = None if None in peaks else flops_per_token / sum(peaks)
        self._started: float | None = None
        self._steps = 0

    def restart(self) -> None:
        """Measures from now on."""
        self._started, self._steps = time.perf_counter(), 0

    def finished_step(self) -> None:
        """Counts a step. The first of a run, which includes compilation, starts the clock instead."""
        if self._started is None:
            self.restart()
        else:
            self._steps += 1

    def rates(self) -> dict[str, float]:
        """Tokens per second, and model FLOPs utilisation where the device's peak is known; empty without a step."""
        if not self._steps:
            return {}
        speed = self._steps * self._tokens_per_step / (time.perf_counter() - self._started)
        return {"tokens_per_second": speed} | ({"mfu": speed * self._utilisation} if self._utilisation else {})


def check_wandb(config: TrainConfig) -> None:
    """Raises ConfigError if the run is to report to Weights & Biases and the package is missing."""
    if config.wandb is None or jax.process_index() != 0:
        return
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"train.wandb is {config.wandb!r}, which needs a package: pip install wandb (then wandb "
                          "login), or set it to None") from error


def open_wandb(config: Config, run_dir: Path) -> Any:
    """The run at Weights & Biases: a new one, or the one that this folder has already; None without a project."""
    if config.train.wandb is None:
        return None
    import wandb
    path = run_dir / run_folder.WANDB_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return wandb.init(project=config.train.wandb, name=run_dir.resolve().name, id=path.read_text(), resume="allow",
                      dir=str(run_dir), config=to_dict(config))


class MetricsFiles:
    """Metrics as JSON lines, for TensorBoard and, if wanted, at Weights & Biases, written by the first process only; a
    context manager.

    A run that resumes after `start` steps drops what was written for later ones: those steps are done again. Weights &
    Biases keeps it and ignores the repetition, which has the same values.
    """

    def __init__(self, run_dir: Path, start: int, config: Config | None = None):
        self._lines = self._board = self._wandb = None
        if jax.process_index() == 0:
            path = run_dir / run_folder.METRICS
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            partial = path.with_name(path.name + run_folder.UNFINISHED)
            partial.write_text("".join(f"{line}\n" for line in lines if _step(line) <= start))
            partial.replace(path)
            self._lines = path.open("a", buffering=1)
            self._board = SummaryWriter(str(run_dir / run_folder.TENSORBOARD), purge_step=start + 1)
            self._wandb = config and open_wandb(config, run_dir)

    def __enter__(self) -> MetricsFiles:
        return self

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        if self._lines is not None:
            self._lines.close()
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Adds the values of a step."""
        if self._lines is None:
            return
        self._lines.write(json.dumps({"step": step} | values) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)


def is_reported(run_dir: Path, step: int) -> bool:
    """Whether the metrics of a run hold the validation loss of `step`."""
    path = run_dir / run_folder.METRICS
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return any(_step(line) == step and "validation_loss" in json.loads(line) for line in lines)


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut off in the middle: the step is done again


class Display:
    """A progress bar in a terminal, plain lines elsewhere, nothing in processes other than the first."""

    def __init__(self, config: TrainConfig, length: int, start: int):
        self._steps, self._tokens_per_step = config.steps, config.batch_size * length
        self._console = Console(quiet=jax.process_index() != 0, highlight=False, soft_wrap=True)
        self._bar = Progress(TextColumn("step {task.completed}/{task.total}"), BarColumn(),
                             TextColumn("{task.description}"), TextColumn("ETA"), TimeRemainingColumn(),
                             console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("compiling", total=config.steps, completed=start)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def say(self, text: RenderableType) -> None:
        """Prints text or a table, above the bar."""
        self._console.print(text, markup=False)

    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=step)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Shows loss, speed and time left after `step`."""
        text, speed = f"loss {metrics['loss']:.4f}", metrics.get("tokens_per_second")
        text += f"  {short(speed)} tokens/s" if speed else ""
        text += f"  MFU {metrics['mfu']:.1%}" if "mfu" in metrics else ""
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            left = f"  ETA {clock((self._steps - step) * self._tokens_per_step / speed)}" if speed else ""
            self.say(f"step {step}/{self._steps}  {text}{left}")


def short(number: float) -> str:
    """A number in thousands or millions, as 9.5k."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))

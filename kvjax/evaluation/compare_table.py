"""What `compare` found: results, their tables as Markdown, and all figures as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.config import Config, ModelConfig, to_dict
from kvjax.evaluation.cache_report import CacheReport
from kvjax.evaluation.compare_speed import Speed
from kvjax.model import parameter_count


@dataclass(frozen=True)
class RunResult:
    """One run. Losses are nats per token on the held-out text."""

    seed: int
    folder: str
    """Its name, beside the table."""
    start_loss: float
    """Of the untrained model."""
    tokens: int
    """Held-out tokens that were scored."""
    loss: float | None = None
    """After the last step; None if the run diverged."""
    nats_per_byte: float | None = None
    diverged: str | None = None
    """Why the run ended before its last step."""
    tokens_per_second: float | None = dataclasses.field(default=None, compare=False)
    """Of training, padding included: the median of the reports after the first; None if there are none."""


@dataclass(frozen=True)
class Spread:
    """A mean over runs and their sample standard deviation, None with one run."""

    mean: float
    sd: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.sd is None else f" ± {self.sd:.4f}")


@dataclass(frozen=True)
class ConfigResult:
    """All runs of one configuration."""

    name: str
    model: ModelConfig
    cache: CacheReport
    runs: tuple[RunResult, ...]
    speed: Speed | None = dataclasses.field(default=None, compare=False)

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return parameter_count(self.model)

    @property
    def training_speed(self) -> float | None:
        """Median tokens per second over the runs that tell theirs."""
        found = [run.tokens_per_second for run in self.runs if run.tokens_per_second is not None]
        return statistics.median(found) if found else None

    def spread(self, quantity: str) -> Spread | None:
        """Of a field of `RunResult` over all runs; None if a run lacks it, so that no mean leaves runs out."""
        values = [getattr(run, quantity) for run in self.runs]
        if None in values:
            return None
        return Spread(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def shown(self, quantity: str) -> str:
        """`spread` as a cell of the table."""
        diverged = ", ".join(str(run.seed) for run in self.runs if run.diverged)
        return str(self.spread(quantity) or (f"diverged: seed {diverged}" if diverged else "–"))


@dataclass(frozen=True)
class Table:
    """A table of text, whose first column holds names and the others figures."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        rows = ((f"`{name}`", *figures) for name, *figures in self.rows)
        head, *lines = (f"| {' | '.join(cells)} |" for cells in (self.header, *rows))
        return "\n".join([head, "|---|" + "--:|" * (len(self.header) - 1), *lines])


def quality(results: Sequence[ConfigResult]) -> Table:
    """Losses beside what the cache holds and a decode step reads."""
    header = ("config", "parameters", "loss at the start", "validation loss", "nats / byte", "bytes held / token",
              "times less than MHA", "bytes read / token", "times less than MHA")
    return Table(header, tuple((r.name, f"{r.parameters:,}", r.shown("start_loss"), r.shown("loss"),
                                r.shown("nats_per_byte"), f"{r.cache.measured:,.0f}", f"{r.cache.factor:.2f}",
                                f"{r.cache.read:,.0f}", f"{r.cache.read_factor:.2f}") for r in results))


def speed(results: Sequence[ConfigResult]) -> Table:
    """Speed and memory, where they were measured."""
    contexts = list(results[0].speed.decode_seconds)
    header = ("config", "training tokens / s", "training step MiB",
              *(f"decode tokens / s (ms a step) at {n:,}" for n in contexts))

    def row(result: ConfigResult) -> tuple[str, ...]:
        training, taken = result.training_speed, result.speed
        decode = (f"{taken.batch / seconds:,.0f} ({1e3 * seconds:.3g})" for seconds in taken.decode_seconds.values())
        return (result.name, f"{training:,.0f}" if training else "–", f"{taken.step_bytes / 2**20:,.1f}", *decode)
    return Table(header, tuple(map(row, results)))


def tokens_per_run(config: Config) -> int:
    """Tokens that a run reads, padding included."""
    return config.train.steps * config.train.batch_size * config.model.context_length


def content(config: Config, results: Sequence[ConfigResult]) -> dict[str, Any]:
    """The tables' figures, those of every run, and the settings that all runs share, for JSON."""
    shared = {name: value for name, value in to_dict(config).items() if name != "model"}
    del shared["train"]["seed"]
    return {"tokens_per_run": tokens_per_run(config), "seeds": [run.seed for run in results[0].runs],
            "vocab_size": config.model.vocab_size, "context_length": config.model.context_length,
            "configs": [_entry(result) for result in results], "shared": shared}


def _entry(result: ConfigResult) -> dict[str, Any]:
    spreads = {name: result.spread(name) for name in ("start_loss", "loss", "nats_per_byte")}
    return {"name": result.name, "parameters": result.parameters, "model": to_dict(result.model),
            **{name: spread and dataclasses.asdict(spread) for name, spread in spreads.items()},
            "cache": dataclasses.asdict(result.cache) | {"factor": result.cache.factor,
                                                         "read_factor": result.cache.read_factor},
            "training_tokens_per_second": result.training_speed,
            "speed": result.speed and dataclasses.asdict(result.speed),
            "runs": [dataclasses.asdict(run) for run in result.runs]}

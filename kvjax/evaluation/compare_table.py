"""What `compare` found, as Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.config import Config, require, to_dict
from kvjax.evaluation.cache_report import CacheReport


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
    parameters: int
    cache: CacheReport
    runs: tuple[RunResult, ...]

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


def markdown(config: Config, results: Sequence[ConfigResult]) -> str:
    """The table and what its figures mean. `config`: any of those compared."""
    lines = ["| config | parameters | loss at the start | validation loss | nats / byte | bytes / token | "
             "times smaller than MHA |", "|---|--:|--:|--:|--:|--:|--:|"]
    lines += [f"| `{r.name}` | {r.parameters:,} | {r.shown('start_loss')} | {r.shown('loss')} | "
              f"{r.shown('nats_per_byte')} | {r.cache.measured:,.0f} | {r.cache.factor:.2f} |" for r in results]
    return "\n".join(lines) + f"\n\n{caption(config, results)}\n"


def caption(config: Config, results: Sequence[ConfigResult]) -> str:
    """Steps, tokens, seeds, and how the figures were got."""
    train, length, runs = config.train, config.model.context_length, results[0].runs
    spread = f"± is the sample standard deviation over n = {len(runs)} seeds" if len(runs) > 1 else \
        "n = 1 seed, which shows no spread"
    types = {r.name: r.cache.dtype for r in results}
    cache = ", ".join(f"{name} {kept}" for name, kept in types.items()) if len(set(types.values())) > 1 else \
        results[0].cache.dtype
    return (f"Every run: {train.steps:,} steps of {train.batch_size} x {length:,} tokens (padding included), "
            f"{tokens_per_run(config):,} in all, in an order that depends on the seed alone. "
            f"Seeds: {', '.join(str(run.seed) for run in runs)}; {spread}. "
            f"Losses: nats per token on the same {runs[0].tokens:,} held-out tokens, before the first step and after "
            f"the last. Bytes: of all layers, measured on a cache with room for {results[0].cache.length:,} "
            f"tokens ({cache}); MHA is multi-head attention of the same width and depth.")


def tokens_per_run(config: Config) -> int:
    """Tokens that a run reads, padding included."""
    return config.train.steps * config.train.batch_size * config.model.context_length


def content(config: Config, results: Sequence[ConfigResult]) -> dict[str, Any]:
    """The table's figures, those of every run, and the settings that all runs share, for JSON."""
    shared = {name: value for name, value in to_dict(config).items() if name != "model"}
    del shared["train"]["seed"]
    return {"tokens_per_run": tokens_per_run(config), "seeds": [run.seed for run in results[0].runs],
            "vocab_size": config.model.vocab_size, "context_length": config.model.context_length,
            "configs": [_entry(result) for result in results], "shared": shared}


def _entry(result: ConfigResult) -> dict[str, Any]:
    spreads = {name: result.spread(name) for name in ("start_loss", "loss", "nats_per_byte")}
    return {"name": result.name, "parameters": result.parameters,
            **{name: spread and dataclasses.asdict(spread) for name, spread in spreads.items()},
            "cache": dataclasses.asdict(result.cache) | {"factor": result.cache.factor},
            "runs": [dataclasses.asdict(run) for run in result.runs]}


def write(folder: Path, config: Config, results: Sequence[ConfigResult]) -> str:
    """Writes table.md and table.json; returns the Markdown.

    Raises ConfigError if the runs were not scored on the same number of tokens: their text changed in between.
    """
    scored = {run.folder: run.tokens for result in results for run in result.runs}
    require(len(set(scored.values())) == 1, "the held-out text changed between these runs, so their losses can't be "
            "compared: " + ", ".join(f"{path} was scored on {n:,} tokens" for path, n in scored.items())
            + "; choose another --out")
    text = markdown(config, results)
    (folder / "table.json").write_text(json.dumps(content(config, results), indent=2) + "\n")
    (folder / "table.md").write_text(text, encoding="utf-8")
    return text

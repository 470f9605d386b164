"""Trains several configurations under identical conditions and writes one report: report.md, .json and .html.

    python -m kvjax.evaluation.compare mha_125m kpa_125m_matched --out runs/compared --seeds 0 1 2

Every run is an ordinary one, in OUT/NAME_seedSEED, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from kvjax.config import Config, ConfigError, differences, load, require
from kvjax.config_files import load_config
from kvjax.data.tokenizers import load_tokenizer
from kvjax.evaluation import cache_report, curves, run
from kvjax.evaluation.compare_report import FILES, write
from kvjax.evaluation.compare_speed import Decoding, measure
from kvjax.evaluation.compare_table import ConfigResult, RunResult
from kvjax.evaluation.plotting import check_plotting
from kvjax.model import build_model
from kvjax.model.placement import check
from kvjax.sharding import make_mesh
from kvjax.training import run_folder
from kvjax.training.loop import Diverged, train
from kvjax.training.metrics import check_wandb, is_reported
from kvjax.training.optimizer import make_optimizer
from kvjax.training.report import has_readable_text
from kvjax.training.state import init_state

SHARED_BY_MODELS = ("model.vocab_size", "model.context_length")
"""The settings of a model that all configurations must agree in; every setting outside the model is another."""


@dataclass(frozen=True)
class Arguments:
    """Trains configurations on the same batches with the same schedule, and writes OUT/report.md, .json and .html.

    The configurations may differ in their models only, apart from vocabulary and context length. The same command
    goes on where it was stopped, and runs that are finished are not repeated.
    """

    configs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="CONFIG ...")]
    """Names in configs/, or paths of Python files."""
    out: Path
    """Folder of the report and of the runs, OUT/NAME_seedSEED."""
    seeds: tuple[int, ...] = (0,)
    """One run of every configuration for each. A seed decides the initial weights and the order of the batches."""
    steps: int | None = None
    """Training steps; None: what the configurations say."""
    tokens: int | None = None
    """Instead of steps: as many as read so many tokens at most, padding included, and at least one."""
    warmup_steps: int | None = None
    """Steps until the learning rate is at its peak; None: what the configurations say."""
    batch_size: int | None = None
    """Sequences per step; None: what the configurations say."""
    context_length: int | None = None
    """Tokens per sequence; None: what the configurations say."""
    decode_batch: int = Decoding.batch
    """Sequences that decoding is timed with."""
    contexts: tuple[int, ...] = Decoding.contexts
    """Tokens of context that decoding is timed at."""
    plots: bool = True
    """Draw plots, which needs matplotlib."""
    allow_cpu: bool = False
    """Run configurations that are meant for a TPU or GPU on the CPU."""


class Stopped(Exception):
    """A run was asked to stop, and saved."""


@dataclass(frozen=True)
class Trial:
    """One run of a comparison."""

    name: str
    config: Config
    folder: Path

    @property
    def scored(self) -> int | None:
        """Batches of held-out text that a run is scored on at its end; None: all of it."""
        return None if has_readable_text(self.config.data) else self.config.train.eval_batches

    def finished(self) -> bool:
        """Whether the run is done and has reported its loss."""
        return is_reported(self.folder, self.config.train.steps)


def compare(configs: dict[str, Config], out: Path, seeds: Sequence[int] = (0,), decoding: Decoding = Decoding(),  # noqa: B008
            plots: bool = True) -> list[ConfigResult]:
    """Trains every configuration once per seed, times decoding, and writes report.md, .json and .html into `out`.

    Args:
      configs: by name; they may differ in their models only, and there not in vocabulary or context length.
      out: receives the runs as NAME_seedSEED: finished ones are not repeated, unfinished ones go on.
      seeds: of initial values and data order, the same for every configuration; the configurations' own don't count.
      decoding: how decoding is timed.
      plots: whether plots are drawn.

    Returns: the results, in the order of `configs`. A run that diverges doesn't keep the others from training.
    Raises ConfigError on settings that differ or can't work and on folders that hold other runs, before anything is
      trained; Stopped if a run was stopped by a signal.
    """
    if plots:
        check_plotting()
    decoding.check({name: config.model for name, config in configs.items()})
    trials = plan(configs, out, seeds)
    results = {name: [] for name in configs}
    for number, trial in enumerate(trials, start=1):
        state = "finished before" if trial.finished() else trial.folder
        print(f"\nrun {number} of {len(trials)}: {trial.name}, seed {trial.config.train.seed} ({state})", flush=True)
        results[trial.name].append(result(trial))
    speeds = measure(configs, out, decoding)
    found = [ConfigResult(name, config.model, cache_report.report(config.model), tuple(results[name]), speeds[name])
             for name, config in configs.items()]
    print(f"\n{write(out, trials[0].config, found, plots)}\nwritten to {', '.join(str(out / name) for name in FILES)}")
    return found


def plan(configs: dict[str, Config], out: Path, seeds: Sequence[int]) -> list[Trial]:
    """The runs of a comparison, seed by seed so that every configuration has one early. Checks all that can be."""
    require(bool(configs), "there is nothing to compare: name one or more configurations")
    twice = [str(seed) for seed, count in Counter(seeds).items() if count > 1]
    require(bool(seeds) and not twice, f"seeds are {list(seeds)}: give one or more, each once")
    require(min(seeds) >= 0, f"seeds are {list(seeds)}: they must be 0 or more")
    plain = {name: _changed(config, train=dict(sample_tokens=0, seed=seeds[0])) for name, config in configs.items()}
    refuse_differences(plain)
    for name, config in plain.items():
        require(config.train.init_from is None, f"train.init_from is {config.train.init_from!r} in {name}: a "
                "comparison starts every run from random weights; set it to None")
        check(config, make_mesh(config.mesh))
        make_optimizer(config)
        check_wandb(config.train)
    trials = [Trial(name, _changed(config, train=dict(seed=seed)), out / f"{name}_seed{seed}")
              for seed in seeds for name, config in plain.items()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {out} cannot be made: {error}; choose another --out") from error
    for trial in trials:
        check_folder(trial)
    return trials


def refuse_differences(configs: dict[str, Config]) -> None:
    """Raises ConfigError with the settings that differ, other than those of models, checkpoints and reports."""
    first, *others = configs
    lines, without_effect = [], (
        "checkpoint.", "train.log_every", "train.eval_every", "train.sample_", "train.wandb")
    for other in others:
        found = differences(configs[first], configs[other])
        lines += [f"  {setting}: {a!r} in {first}, {b!r} in {other}" for setting, (a, b) in found.items()
                  if setting in SHARED_BY_MODELS or not setting.startswith(("model.", *without_effect))]
    require(not lines, "these configurations would not train under the same conditions:\n" + "\n".join(lines)
            + "\nmake them agree in all but their models")


def check_folder(trial: Trial) -> None:
    """Raises ConfigError if the folder holds another run, one that is scored on other text, or things that are none."""
    saved = trial.folder / run_folder.CONFIG
    free = set(run_folder.FREE) - {"train.eval_batches"}
    found = differences(load(Config, saved), trial.config) if saved.exists() else {}
    lines = [f"  {setting}: {old!r} in the folder, {new!r} now" for setting, (old, new) in found.items()
             if setting not in free and setting.partition(".")[0] not in free]
    require(not lines, f"{trial.folder} holds another run:\n" + "\n".join(lines)
            + "\nchoose another --out, or move that folder away")
    run_folder.resumes(trial.config, trial.folder)


def result(trial: Trial) -> RunResult:
    """Trains what is left of a run and reads what it reported. Raises Stopped."""
    diverged, steps = None, trial.config.train.steps
    try:
        done = trial.finished() or int(train(trial.config, trial.folder).step) == steps
    except Diverged as error:
        done, diverged = True, str(error)
        print(f"diverged: {error}", file=sys.stderr, flush=True)
    if not done:
        raise Stopped
    start = start_results(trial)
    end = {} if diverged else _reported(trial.folder, steps)
    return RunResult(trial.config.train.seed, trial.folder.name, start["loss"], start["tokens"],
                     end.get("validation_loss"), end.get("validation_nats_per_byte"), diverged,
                     None if diverged else curves.read(trial.folder).speed)


def start_results(trial: Trial) -> dict[str, Any]:
    """Results of the untrained model, on the text that the trained one is scored on; kept with the run's evaluations.

    The initial values are a function of configuration and seed, so they can be had after the run as well.
    """
    try:
        found = json.loads(run.results_path(trial.folder, 0, trial.scored).read_text())
        return {name: found[name] for name in ("loss", "tokens")}
    except (OSError, ValueError, KeyError, TypeError):  # not evaluated yet, or cut off
        pass
    config, mesh = trial.config, make_mesh(trial.config.mesh)
    model = build_model(config.model)
    params = init_state(model, make_optimizer(config), config, mesh).params
    tokenizer = load_tokenizer(trial.folder / run_folder.TOKENIZER)
    results = run.validation_loss(run.Restored(config, model, params, tokenizer, 0, mesh), trial.scored)
    run.write(trial.folder, 0, trial.scored, results, cache_report.report(config.model), overwrite=True)
    return results


def _reported(folder: Path, step: int) -> dict[str, float]:
    """What a finished run wrote last about the held-out text."""
    found = [line for line in curves.metrics(folder) if line["step"] == step and "validation_loss" in line]
    require(bool(found), f"{folder / run_folder.METRICS} tells no final loss: move the folder away, to train again")
    return found[-1]


def _changed(config: Config, **sections: dict[str, Any]) -> Config:
    """A copy with some settings of its sections changed; None leaves a setting as it is."""
    def given(settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if value is not None}
    return dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **given(settings))
                                          for name, settings in sections.items()})


def _with_arguments(config: Config, args: Arguments) -> Config:
    """A configuration with the command line's settings."""
    config = _changed(config, train=dict(batch_size=args.batch_size), model=dict(context_length=args.context_length))
    steps = args.steps if args.tokens is None else \
        max(args.tokens // (config.train.batch_size * config.model.context_length), 1)
    return _changed(config, train=dict(steps=steps), optimizer=dict(warmup_steps=args.warmup_steps))


def load_configs(args: Arguments) -> dict[str, Config]:
    """The configurations by name, with the command line's settings. Raises ConfigError if two have one name."""
    names = [Path(name).stem if name.endswith(".py") else name for name in args.configs]
    twice = [name for name, count in Counter(names).items() if count > 1]
    require(not twice, f"{', '.join(twice)} is given more than once: the runs would share a folder; rename the files")
    require(args.steps is None or args.tokens is None, f"--steps {args.steps} and --tokens {args.tokens} are both "
            "given: tokens are turned into steps, give one of them")
    require(args.tokens is None or args.tokens > 0, f"--tokens is {args.tokens}: it must be above 0")
    configs = {name: _with_arguments(load_config(path), args) for name, path in zip(names, args.configs, strict=True)}
    meant = [name for name, config in configs.items() if config.train.accelerator]
    require(args.allow_cpu or not meant or jax.default_backend() != "cpu",
            f"{', '.join(meant)}: meant for a TPU or GPU, and JAX found none: install jax[tpu] or jax[cuda13], or add "
            "--allow-cpu to train on the CPU all the same")
    return configs


def main(command_line: Sequence[str]) -> None:
    """Parses the command line, compares, and reports runs that diverged as an error."""
    args = tyro.cli(Arguments, args=command_line, prog="python -m kvjax.evaluation.compare",
                    config=(tyro.conf.FlagCreatePairsOff,))
    decoding = Decoding(args.decode_batch, args.contexts)
    found = compare(load_configs(args), args.out, args.seeds, decoding, args.plots)
    diverged = [f"{one.folder}: {one.diverged}" for entry in found for one in entry.runs if one.diverged]
    if diverged:
        raise Diverged("\n".join(diverged))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except Stopped:
        sys.exit("stopped: the same command goes on")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")

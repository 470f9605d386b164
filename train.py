"""Trains a language model:  python train.py [NAME_OR_PATH] [--section.setting VALUE ...]"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import jax
import tyro

from kvjax.config import Config, ConfigError, ModelConfig, require
from kvjax.config_files import listed_names, load_config


@dataclass(frozen=True)
class Arguments:
    """Trains the configuration NAME (a file in configs/, or a path to one), in a new folder or where it stopped."""

    name: tyro.conf.Positional[str]
    """Configuration; the other options override its settings, so it comes first."""
    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    run_dir: Path | None = None
    """Folder of the run: what it holds is resumed. None: runs/NAME."""
    overwrite: bool = False
    """Start afresh: delete what an earlier run left in the folder."""
    dry_run: bool = False
    """Compile one step, print parameters, memory and FLOPs, and stop."""
    topology: str | None = None
    """With --dry-run: TPUs to compile for that need not be here, such as v5e:4x4."""
    init_from: Path | None = None
    """Trained model to start from: a run's folder, a converted model, a Hugging Face folder or a .gguf file."""
    allow_cpu: bool = False
    """Run a configuration that is meant for a TPU or GPU on the CPU."""
    distributed: bool = False
    """Be one of several processes; on clusters that JAX knows, the next three are found out."""
    coordinator: str | None = None
    """HOST:PORT of process 0."""
    process_id: int | None = None
    process_count: int | None = None


def option(arguments: list[str], name: str) -> str | None:
    """The value of an option that is needed before the others can be understood."""
    for i, argument in enumerate(arguments):
        given, equals, value = argument.partition("=")
        if given.replace("_", "-") == name:
            return value if equals else next(iter(arguments[i + 1:]), None)
    return None


def trained_model(arguments: list[str]):
    """What `--init-from` names; None without it."""
    path = option(arguments, "--init-from")
    if path is None:
        return None
    from kvjax.training.start import Source

    return Source(path, option(arguments, "--run-dir") or run_dir(config_name(arguments)))


def config_name(arguments: list[str]) -> str:
    """The configuration's name or path, which comes first."""
    return arguments[0] if arguments and not arguments[0].startswith("-") else "quickstart"


def run_dir(name: str) -> Path:
    """Where a configuration trains unless told otherwise."""
    return Path("runs") / Path(name).stem


def parse(arguments: list[str], source: ModelConfig | None = None) -> Arguments:
    """Typed arguments; ends the program with a message and the nearest names if they can't be understood."""
    name = config_name(arguments)
    config = load_config(name, source)
    if source:
        config = replace(config, train=replace(config.train, init_from=str(Path(option(arguments, "--init-from")))))
    default = Arguments(name, config)
    parsed = tyro.cli(Arguments, default=default, args=arguments, prog="train.py",
                      description=f"{Arguments.__doc__}\n\nNames:\n{listed_names()}",
                      config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff))
    require(parsed.config.train.init_from == config.train.init_from,
            "say --init-from MODEL, and not --train.init-from, to start from a trained model")
    require(parsed.name == name, f"put the configuration's name first: train.py {parsed.name} ...")
    return parsed


def main(arguments: list[str]) -> None:
    source = trained_model(arguments)
    args = parse(arguments, source and source.model)
    processes = (args.coordinator, args.process_id, args.process_count)
    require(args.distributed or processes == (None, None, None),
            "--coordinator, --process-id and --process-count mean something only with --distributed")
    require(args.dry_run or args.topology is None, "--topology means something only with --dry-run")
    if args.distributed:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(args.coordinator, args.process_count, args.process_id)
        except ValueError as error:
            raise ConfigError(f"--distributed: {error}; give --coordinator HOST:PORT, --process-id and "
                              "--process-count where JAX does not know the cluster") from error
    if args.dry_run:
        if source:
            from kvjax.convert.uptrain import check_conversion
            check_conversion(source.model, args.config.model)
        from kvjax.ahead_of_time import report
        print(report(args.config, args.topology))
        return
    require(args.allow_cpu or not args.config.train.accelerator or jax.default_backend() != "cpu",
            f"configuration {args.name!r} is meant for a TPU or GPU, and JAX found none: install jax[tpu] or "
            "jax[cuda13], or add --allow-cpu to run it on the CPU all the same")
    from kvjax.training.loop import train
    from kvjax.training.report import settings
    if jax.process_index() == 0:
        print(settings(args.config))
    train(args.config, args.run_dir or run_dir(args.name), overwrite=args.overwrite, source=source)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit("interrupted")

"""The folder of a run: which configuration it holds, and what may be deleted in it.

    config.json  tokenizer/  checkpoints/  damaged/  metrics.jsonl  tensorboard/  profile/  eval/ (of `eval.py`)
    conversion.json  source.json (of a run that starts from a trained model)
    wandb_id  wandb/ (of a run that reports to Weights & Biases)
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from kvjax.config import Config, ConfigError, differences, load, require, save
from kvjax.data.tokenizers import Tokenizer

CONFIG, METRICS = "config.json", "metrics.jsonl"
TOKENIZER, CHECKPOINTS, DAMAGED, TENSORBOARD, PROFILE = "tokenizer", "checkpoints", "damaged", "tensorboard", "profile"
UNFINISHED = ".partial"
LOCK = "lock"
CONVERSION = "conversion.json"
SOURCE = "source.json"
WANDB_ID, WANDB = "wandb_id", "wandb"
CONTENTS = (TOKENIZER, TOKENIZER + UNFINISHED, CHECKPOINTS, DAMAGED, METRICS, TENSORBOARD, PROFILE, "eval", LOCK,
            CONVERSION, SOURCE, WANDB_ID, WANDB, CONFIG + UNFINISHED, CONFIG)
"""What a run and its evaluation write: nothing else in its folder is ever deleted. The last marks it as a run's."""

FREE = ("mesh", "checkpoint", "data.workers", "model.kernel", "model.remat", "train.accumulation", "train.log_every",
        "train.eval_every", "train.eval_batches", "train.sample_tokens", "train.sample_prompt", "train.accelerator",
        "train.wandb", "train.profile_start", "train.profile_steps")
"""Settings that may change when a run resumes, because its result doesn't depend on them but for rounding."""


def resumes(config: Config, folder: Path, overwrite: bool = False) -> bool:
    """Whether `folder` holds a run of `config` to go on with, rather than room for a new one. Writes nothing.

    Raises ConfigError if the folder holds another configuration, or things that are no run.
    """
    if not _is_run(folder):
        require(not folder.exists() or folder.is_dir() and not any(folder.iterdir()),
                f"{folder} is not the folder of a run, and not empty: choose another with --run-dir")
        return False
    if not overwrite:
        refuse_differences(load(Config, folder / CONFIG), config, folder)
    return not overwrite and (folder / TOKENIZER).exists()


def open_folder(config: Config, tokenizer: Tokenizer, folder: Path, overwrite: bool = False) -> None:
    """Makes `folder` the folder of a run; with `overwrite`, what an earlier run wrote there is deleted first."""
    if overwrite:
        _delete(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made: {error}; choose another --run-dir") from error
    # Moved into place, so that an interruption can't leave half of one.
    partial = folder / (CONFIG + UNFINISHED)
    save(config, partial)
    partial.replace(folder / CONFIG)
    if not (folder / TOKENIZER).exists():
        partial = folder / (TOKENIZER + UNFINISHED)
        tokenizer.save(partial)
        partial.rename(folder / TOKENIZER)


def refuse_differences(saved: Config, config: Config, folder: Path) -> None:
    """Raises ConfigError that lists the settings of a run that can't change, and would."""
    changed = {name: values for name, values in differences(saved, config).items()
               if not any(name == free or name.startswith(f"{free}.") for free in FREE)}
    if changed:
        lines = "\n".join(f"  {name}: {old} in the folder, {new} now" for name, (old, new) in changed.items())
        raise ConfigError(f"{folder} holds a run of another configuration:\n{lines}\n"
                          "choose another --run-dir, or start afresh with --overwrite")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second run out of the folder. Raises ConfigError if another process trains there."""
    if jax.process_index() != 0:
        yield
        return
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process trains in {folder}: wait for it, or choose another --run-dir") from None
        yield


def wait_for_all(name: str) -> None:
    """Waits until every process got here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"kvjax {name}")


def _is_run(folder: Path) -> bool:
    try:
        saved = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        require(not (folder / CHECKPOINTS).exists(), f"{folder} holds checkpoints, but its {CONFIG} is missing or "
                "damaged: put the configuration back (a run prints it as it starts), or choose another --run-dir")
        return False
    return isinstance(saved, dict) and {"model", "train"} <= saved.keys()


def _delete(folder: Path) -> None:
    for name in CONTENTS:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

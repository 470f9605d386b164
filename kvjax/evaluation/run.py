"""Evaluation of a trained model from its folder alone: that of a run, or a converted or imported model's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import flax.linen as nn
import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track

from kvjax.config import Config, ConfigError, MeshConfig, OptimizerConfig, TrainConfig, load, require
from kvjax.convert.folder import load_model
from kvjax.data.tokenizers import Tokenizer, load_tokenizer
from kvjax.evaluation.cache_report import CacheReport
from kvjax.evaluation.held_out import HeldOut
from kvjax.evaluation.perplexity import evaluate
from kvjax.model import build_model
from kvjax.model.placement import check, parameter_shardings
from kvjax.sharding import make_mesh
from kvjax.training.checkpoint import restore_params

T = TypeVar("T")
FOLDER = "eval"
"""Folder in the run's folder that receives results."""


@dataclass(frozen=True)
class Restored:
    """A trained model as its folder holds it."""

    config: Config
    model: nn.Module
    params: Any
    tokenizer: Tokenizer
    step: int
    mesh: Mesh


def restore(run_dir: Path | str, step: int | None = None) -> Restored:
    """Restores a trained model with its tokenizer.

    Args:
        run_dir: folder of a run; or whatever else `kvjax.convert.folder.load_model` reads, which says nothing of text:
            its `config.data` is that of the quick start.
        step: which checkpoint of a run; None: the newest.
    Raises:
        ConfigError: it is none of these, there is no such checkpoint, or no tokenizer.
    """
    run_dir = Path(run_dir)
    require(not run_dir.is_file() or run_dir.suffix == ".gguf", f"{run_dir} is a file: name a folder, of a run or of a "
            "model, or a .gguf file")
    if not is_run(run_dir):
        return _restore_model(run_dir, step)
    mesh = _mesh(load(Config, run_dir / "config.json"))
    config, params, step = restore_params(run_dir, step, mesh)
    return Restored(config, build_model(config.model), params, load_tokenizer(run_dir / "tokenizer"), step, mesh)


def is_run(folder: Path) -> bool:
    """Whether `folder` is that of a run, which keeps its results, or should be one (it holds nothing else)."""
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return folder.suffix != ".gguf"
    return not isinstance(settings, dict) or not {"attention", "model_type"} & settings.keys()


def _restore_model(path: Path, step: int | None) -> Restored:
    require(step is None, f"step {step}: {path} is a single model, not a run with checkpoints")
    model, params, tokenizer = load_model(path)
    require(tokenizer is not None, f"{path} brings no tokenizer: put its tokenizer.json beside the weights")
    config = Config(model=model, train=TrainConfig(steps=1, batch_size=8), optimizer=OptimizerConfig(warmup_steps=0))
    mesh = make_mesh(MeshConfig())
    params = jax.device_put(params, parameter_shardings(model, mesh))
    return Restored(config, build_model(model), params, tokenizer, 0, mesh)


def adjusted(restored: Restored, data: dict[str, Any], **model: Any) -> Restored:
    """The same weights with other settings of the text to evaluate on, and of the model; None changes nothing."""
    given = lambda settings: {name: value for name, value in settings.items() if value is not None}
    data, changes = dataclasses.replace(restored.config.data, **given(data)), given(model)
    require("context_length" not in changes or restored.config.model.positions != "learned",
            "context_length: a model of learned positions has a table of just one length")
    changed = dataclasses.replace(restored.config.model, **changes)
    config = dataclasses.replace(restored.config, data=data, model=changed)
    return dataclasses.replace(restored, config=config, model=build_model(config.model))


def _mesh(config: Config) -> Mesh:
    """The run's mesh where the devices make one up that fits, else all devices along the batch."""
    try:
        mesh = make_mesh(config.mesh)
        check(config, mesh)
    except ConfigError:
        mesh = make_mesh(MeshConfig())
    return mesh


def validation_loss(restored: Restored, limit: int | None = None) -> dict[str, float]:
    """Results of `perplexity.evaluate` on the held-out split, or on `limit` batches spread evenly over it."""
    text = HeldOut(restored.config, restored.tokenizer, restored.mesh, limit)
    with text.batches() as batches:
        return evaluate(restored.model, restored.params, progress(batches, "validation"), mesh=restored.mesh,
                        text_bytes=text.size())


def progress(items: Iterable[T], title: str) -> Iterable[T]:
    """The same items, with a bar on a terminal."""
    console = Console(stderr=True)
    return track(items, title, console=console, transient=True, disable=not console.is_terminal)


def results_path(run_dir: Path | str, step: int, limit: int | None, cache: str | None = None, of: str = "") -> Path:
    """File of the results of a step, on `limit` batches (None: all), through a cache of some type (None: none), `of`
    something else than the validation loss."""
    what = f"_{of}" if of else ""
    some = "" if limit is None else f"_of_{limit}_batches"
    through = "" if cache is None else f"_{cache}_cache"
    return Path(run_dir) / FOLDER / f"{step}{what}{some}{through}.json"


def write(run_dir: Path | str, step: int, limit: int | None, results: dict[str, float], cache: CacheReport,
          overwrite: bool = False) -> str:
    """Writes results as eval/STEP.json in the run's folder; says what it did.

    The name goes on with _of_N_batches if not all were evaluated, and _TYPE_cache if the loss through one was measured.
    """
    path = results_path(run_dir, step, limit, cache.dtype if "cache_loss" in results else None)
    factors = {"factor": cache.factor, "read_factor": cache.read_factor}
    return keep(path, {"step": step, **results, "cache": dataclasses.asdict(cache) | factors}, overwrite)


def keep(path: Path, content: dict[str, Any], overwrite: bool = False) -> str:
    """Writes results as JSON; says what it did.

    A file that holds other results (of another machine, say) is left as it is, unless `overwrite`.
    """
    text = json.dumps(content, indent=2) + "\n"
    if path.exists() and path.read_text() != text and not overwrite:
        return f"{path} holds other results and was left as it is: --overwrite replaces it"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"written to {path}"

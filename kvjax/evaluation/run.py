"""Evaluation of a training run from its folder alone."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track

from kvjax.config import Config, ConfigError, MeshConfig, load
from kvjax.data.pipeline import validation_batches, validation_bytes
from kvjax.data.tokenizers import Tokenizer, load_tokenizer
from kvjax.evaluation.cache_report import CacheReport
from kvjax.evaluation.perplexity import evaluate
from kvjax.model import build_model
from kvjax.model.placement import check
from kvjax.sharding import make_mesh
from kvjax.training.checkpoint import restore_params

FOLDER = "eval"
"""Folder in the run's folder that receives results."""


@dataclass(frozen=True)
class Restored:
    """A trained model as its run's folder holds it."""

    config: Config
    model: nn.Module
    params: Any
    tokenizer: Tokenizer
    step: int
    mesh: Mesh


def restore(run_dir: Path | str, step: int | None = None) -> Restored:
    """Restores a run: configuration, tokenizer, and the parameters of `step` (None: of the newest checkpoint).

    Raises ConfigError if the folder is not that of a run, or holds no such checkpoint.
    """
    run_dir = Path(run_dir)
    mesh = _mesh(load(Config, run_dir / "config.json"))
    config, params, step = restore_params(run_dir, step, mesh)
    return Restored(config, build_model(config.model), params, load_tokenizer(run_dir / "tokenizer"), step, mesh)


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
    config = restored.config
    ways = restored.mesh.shape["data"] * restored.mesh.shape["fsdp"]
    rows = -(-config.train.batch_size // config.train.accumulation // ways) * ways
    scope = config.data, restored.tokenizer, rows, config.model.context_length, limit
    console = Console(stderr=True)
    with closing(validation_batches(*scope)) as batches:
        shown = track(batches, "validation", console=console, transient=True, disable=not console.is_terminal)
        return evaluate(restored.model, restored.params, shown, mesh=restored.mesh, text_bytes=validation_bytes(*scope))


def write(run_dir: Path | str, step: int, limit: int | None, results: dict[str, float], cache: CacheReport,
          overwrite: bool = False) -> str:
    """Writes results as eval/STEP.json, or eval/STEP_of_N_batches.json, in the run's folder; says what it did.

    A file that holds other results (of another machine, say) is left as it is, unless `overwrite`.
    """
    name = f"{step}.json" if limit is None else f"{step}_of_{limit}_batches.json"
    path = Path(run_dir) / FOLDER / name
    content = {"step": step, **results, "cache": dataclasses.asdict(cache) | {"factor": cache.factor}}
    text = json.dumps(content, indent=2) + "\n"
    if path.exists() and path.read_text() != text and not overwrite:
        return f"{path} holds other results and was left as it is: --overwrite replaces it"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return f"written to {path}"

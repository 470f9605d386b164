"""Starting a run from a trained model instead of random weights, converted where attention or sharing differ."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.table import Table

from kvjax.config import Config, MeshConfig, ModelConfig, load, require, save
from kvjax.convert.folder import load_model, load_model_config, load_model_tokenizer
from kvjax.convert.uptrain import Conversion, check_conversion, convert, needs_text
from kvjax.convert.uptrain.calibration import calibrate
from kvjax.data.pipeline import training_iterator
from kvjax.data.tokenizers import Tokenizer
from kvjax.evaluation.held_out import HeldOut
from kvjax.evaluation.perplexity import evaluate
from kvjax.model import build_model
from kvjax.model.placement import check, place_parameters
from kvjax.sharding import make_mesh
from kvjax.training.run_folder import CONVERSION, SOURCE

CALIBRATION_TOKENS = 16_384


class Source:
    """A trained model that a run starts from. Its weights are read when they are needed, and let go after that.

    With several processes each reads the whole model, into its host's memory.
    """

    def __init__(self, path: Path | str, run_dir: Path | str | None = None):
        """Reads the configuration only: if the model is gone, that which the run in `run_dir` kept when it started.

        Raises ConfigError if `path` is no model that `load_model` reads.
        """
        self.path, kept = Path(path), run_dir and Path(run_dir) / SOURCE
        resuming = kept and kept.exists() and not self.path.exists()
        self.model = load(ModelConfig, kept) if resuming else load_model_config(path)

    @cached_property
    def params(self) -> dict[str, Any]:
        """The weights, in the host's memory."""
        with _on_the_host():
            return jax.device_get(load_model(self.path)[1])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError if the model brings none: text of another tokenizer would mean nothing to it."""
        tokenizer = load_model_tokenizer(self.path)
        require(tokenizer is not None, f"{self.path} brings no tokenizer: put its tokenizer.json beside the weights")
        return tokenizer

    def release(self) -> None:
        """Lets go of the weights."""
        self.__dict__.pop("params", None)


@dataclass(frozen=True)
class Start:
    """A converted model, and the validation loss before and after the conversion."""

    conversion: Conversion
    params: Any
    """Its weights, placed on the run's mesh."""
    source_loss: float
    converted_loss: float


def convert_source(source: Source, config: Config, tokenizer: Tokenizer, mesh: Mesh) -> Start:
    """Converts `source` to the run's model and measures both on the run's held-out text.

    Raises ConfigError if there is no such conversion.
    """
    before = dataclasses.replace(source.model, dtype=config.model.dtype)
    placed = place_parameters(before, source.params, mesh)
    text = HeldOut(config, tokenizer, mesh, config.train.eval_batches)
    source_loss = _loss(before, placed, text)
    calibration = None
    if needs_text(config.model):
        rows = config.train.batch_size // config.train.accumulation
        with closing(training_iterator(config.data, tokenizer, rows, config.model.context_length,
                                       config.train.seed)) as batches:
            calibration = calibrate(source.model, placed, batches, CALIBRATION_TOKENS)
    del placed
    with _on_the_host():
        conversion = convert(source.model, source.params, config.model, calibration)
    params = jax.device_get(conversion.params)
    _require_same(params)
    params = place_parameters(config.model, params, mesh)
    return Start(conversion, params, source_loss, _loss(config.model, params, text))


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Computes with the CPU and its memory: a whole model need not fit on one accelerator."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        cpu = jax.local_devices()[0]
    with jax.set_mesh(make_mesh(MeshConfig(), [cpu])), jax.default_device(cpu):
        yield


def _require_same(params: Any) -> None:
    """Raises ConfigError if processes whose machines compute differently made different weights."""
    digest = functools.reduce(lambda crc, x: zlib.crc32(np.ascontiguousarray(x), crc), jax.tree.leaves(params), 0)
    found = multihost_utils.process_allgather(np.uint32(digest))
    require(bool(np.all(found == digest)), "the processes have not made the same weights of the source: start the run "
            "with one process, stop it after its first checkpoint, and resume it with all")


def check_source(source: Source, config: Config, mesh: Mesh, folder: Path) -> None:
    """Raises ConfigError if the source cannot become the run's model, does not split over the mesh, or lies in the run.

    `folder` is the run's: what lies there `--overwrite` may delete.
    """
    own, other = folder.resolve(), source.path.resolve()
    require(own != other and own not in other.parents,
            f"the trained model {source.path} lies in the run's folder {folder}: choose another --run-dir")
    check_conversion(source.model, config.model)
    check(dataclasses.replace(config, model=dataclasses.replace(config.model, attention=source.model.attention,
                                                                sharing=None)), mesh)


def _loss(model: ModelConfig, params: Any, text: HeldOut) -> float:
    with text.batches() as batches:
        return evaluate(build_model(model), params, batches, mesh=text.mesh)["loss"]


def write_report(source: Source, start: Start, folder: Path) -> None:
    """Writes what is known of the conversion as JSON, and the source's configuration; layers count from 1."""
    save(source.model, folder / SOURCE)
    content = {"source_loss": start.source_loss, "converted_loss": start.converted_loss,
               "surviving_pairs": start.conversion.surviving_pairs,
               "fits": [dataclasses.asdict(fit) | {"layer": fit.layer + 1} for fit in start.conversion.fits]}
    (folder / CONVERSION).write_text(json.dumps(content, indent=2) + "\n")


def described(start: Start) -> Table | str:
    """Both losses, and the R² of every layer that was fitted, for the terminal."""
    losses = f"validation loss: source {start.source_loss:.4f}, converted {start.converted_loss:.4f} before training"
    if not start.conversion.fits:
        return f"{losses} (nothing was fitted: heads were pooled, or kept)"
    out = Table("layer", "R² of keys", "R² of values", title=losses,
                caption="a layer that is not listed kept its keys and values")
    fits = {(fit.layer, fit.state): f"{fit.r_squared:.4f}" for fit in start.conversion.fits}
    for layer in sorted({layer for layer, _ in fits}):
        out.add_row(str(layer + 1), fits.get((layer, "k"), ""), fits.get((layer, "v"), ""))
    if start.conversion.surviving_pairs is not None:
        out.caption += "\nrotary pairs that survive: " + ", ".join(map(str, start.conversion.surviving_pairs))
    return out

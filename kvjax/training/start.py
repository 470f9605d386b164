"""Starting a run from a trained model instead of random weights, converted where attention or sharing differ."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.table import Table

from kvjax.config import Config, ModelConfig, require
from kvjax.convert.folder import load_model, load_model_config
from kvjax.convert.uptrain import Conversion, check_conversion, convert, needs_text
from kvjax.convert.uptrain.calibration import calibrate
from kvjax.data.pipeline import training_iterator, validation_batches
from kvjax.data.tokenizers import Tokenizer
from kvjax.evaluation.perplexity import evaluate
from kvjax.model import build_model
from kvjax.model.placement import check, parameter_shardings
from kvjax.training.run_folder import CONVERSION

CALIBRATION_TOKENS = 16_384


class Source:
    """A trained model that a run starts from. Its weights are read when they are needed, and let go after that."""

    def __init__(self, path: Path | str):
        """Reads the configuration only. Raises ConfigError if `path` is no model that `load_model` reads."""
        self.path, self.model = Path(path), load_model_config(path)

    @cached_property
    def _loaded(self) -> tuple[dict[str, Any], Tokenizer | None]:
        _, params, tokenizer = load_model(self.path)
        return jax.device_get(params), tokenizer

    @property
    def params(self) -> dict[str, Any]:
        """The weights, in the host's memory."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError if the model brings none: text of another tokenizer would mean nothing to it."""
        tokenizer = self._loaded[1]
        require(tokenizer is not None, f"{self.path} brings no tokenizer: put its tokenizer.json beside the weights")
        return tokenizer

    def release(self) -> None:
        """Lets go of the weights."""
        self.__dict__.pop("_loaded", None)


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
    placed = jax.device_put(source.params, parameter_shardings(source.model, mesh))
    before = dataclasses.replace(source.model, dtype=config.model.dtype)
    source_loss = _loss(before, placed, config, tokenizer, mesh)
    calibration = None
    if needs_text(config.model):
        rows = config.train.batch_size // config.train.accumulation
        with closing(training_iterator(config.data, tokenizer, rows, config.model.context_length,
                                       config.train.seed)) as batches:
            calibration = calibrate(source.model, placed, batches, CALIBRATION_TOKENS)
    del placed
    conversion = convert(source.model, source.params, config.model, calibration)
    params = jax.device_put(jax.device_get(conversion.params), parameter_shardings(config.model, mesh))
    return Start(conversion, params, source_loss, _loss(config.model, params, config, tokenizer, mesh))


def check_source(source: Source, config: Config, mesh: Mesh) -> None:
    """Raises ConfigError if the source cannot become the run's model, or does not split over the mesh."""
    check_conversion(source.model, config.model)
    check(dataclasses.replace(config, model=dataclasses.replace(config.model, attention=source.model.attention,
                                                                sharing=None)), mesh)


def _loss(model: ModelConfig, params: Any, config: Config, tokenizer: Tokenizer, mesh: Mesh) -> float:
    rows = config.train.batch_size // config.train.accumulation
    batches = validation_batches(config.data, tokenizer, rows, config.model.context_length, config.train.eval_batches)
    with closing(batches):
        return evaluate(build_model(model), params, batches, mesh=mesh)["loss"]


def write_report(start: Start, folder: Path) -> None:
    """Writes what is known of the conversion as JSON."""
    content = {"source_loss": start.source_loss, "converted_loss": start.converted_loss,
               "surviving_pairs": start.conversion.surviving_pairs,
               "fits": [dataclasses.asdict(fit) for fit in start.conversion.fits]}
    (folder / CONVERSION).write_text(json.dumps(content, indent=2) + "\n")


def table(start: Start) -> Table:
    """R² of every converted layer, and both losses, for the terminal."""
    title = f"validation loss: source {start.source_loss:.4f}, converted {start.converted_loss:.4f} before training"
    out = Table("layer", "R² of keys", "R² of values", title=title)
    fits = {(fit.layer, fit.state): f"{fit.r_squared:.4f}" for fit in start.conversion.fits}
    for layer in sorted({layer for layer, _ in fits}):
        out.add_row(str(layer), fits.get((layer, "k"), ""), fits.get((layer, "v"), ""))
    if start.conversion.surviving_pairs is not None:
        out.caption = "rotary pairs that survive: " + ", ".join(map(str, start.conversion.surviving_pairs))
    return out

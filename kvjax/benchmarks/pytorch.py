"""Times attention on the CPU beside the same maths in eager PyTorch, in one run.

    python -m kvjax.benchmarks.pytorch

One layer, or one group of layers that share, of every variant: outputs and all gradients of a whole sequence, and one
token decoded behind a cache. Both sides have the same weights, and are first checked to give the same; then they take
turns. Needs torch (`pip install -r requirements-torch.txt`), which nothing else of kvjax does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array
from rich.console import Console
from rich.table import Table

from kvjax.attention import CrossLayer, GroupedQuery, Kronecker, Latent, PathConcat, PathResidual, SkipV1
from kvjax.attention.sharing import make_plan
from kvjax.benchmarks.device import command
from kvjax.cache import Cache, init_cache
from kvjax.config import ModelConfig, require
from kvjax.decoding import written_after
from kvjax.model import abstract_parameters
from kvjax.model.decoder import Context, GroupAttention

GQA = GroupedQuery(heads=16, kv_heads=4, head_dim=64)
CASES = {
    "MHA": (GroupedQuery(heads=16, kv_heads=16, head_dim=64), None), "GQA": (GQA, None),
    "MQA": (GroupedQuery(heads=16, kv_heads=1, head_dim=64), None),
    "MLA": (Latent(heads=16, latent_dim=256, rope_dim=32, nope_dim=64, value_dim=64), None),
    "KPA 8x2": (Kronecker(8, 2), None), "TPA": (Kronecker(16, 1, 1, 64), None),
    "KVPath-Concat": (GQA, PathConcat(layers=2, delta=32)), "KVPath-Residual": (GQA, PathResidual(layers=2, delta=16)),
    "SkipV1": (GQA, SkipV1()), "CLA": (GQA, CrossLayer(2)),
}
"""Layers with 16 heads of 64 features; schemes of sharing in groups of two layers."""
Weights = list[dict[str, Array]]
"""Of each layer, by name."""


@dataclass(frozen=True)
class Options:
    """What is timed."""

    variants: tuple[str, ...] = tuple(CASES)
    width: int = 768
    batch: int = 2
    length: int = 512
    decode_batch: int = 8
    decode_length: int = 2048
    threads: int = 2
    """Of PyTorch; JAX takes all processors of the process."""
    rounds: int = 15
    out: Path | None = None
    """A file for the figures, as JSON."""


def config_of(name: str, width: int) -> ModelConfig:
    """A model whose layers are those that are timed."""
    attention, sharing = CASES[name]
    layers = 1 if sharing is None else 2
    return ModelConfig(attention=attention, sharing=sharing, layers=layers, width=width, vocab_size=8,
                       feed_forward_width=8, dtype="float32")


def drawn_weights(config: ModelConfig) -> Weights:
    """Random weights of each layer's attention, norms near one."""
    random = np.random.default_rng(0)
    def draw(x: jax.ShapeDtypeStruct) -> Array:
        shape = x.shape[1:]  # the first axis is that of groups, of which there is one
        value = random.standard_normal(shape, np.float32)
        return jnp.asarray(1 + 0.1 * value if len(shape) == 1 else value * config.width**-0.5)
    params, plan = abstract_parameters(config), make_plan(config)
    return [jax.tree.map(draw, params[f"segment_{number}"][f"layer_{index}"]["attention"])
            for number, segment in enumerate(plan.segments) for index in range(len(segment.layers))]


def attended(config: ModelConfig, weights: Weights, x: Array, cache: Cache | None = None) -> tuple[Array, dict]:
    """The stream x [B, T, D] plus the attention of all layers, and the rows that they made."""
    start = 0 if cache is None else cache.lengths[:, None]
    context = Context(jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2]), cache=cache)
    rows: dict[str, list[Array]] = {}
    following = iter(weights)
    for number, segment in enumerate(make_plan(config).segments):
        handed = {name: rows[name][-1] for name in segment.needs if name in rows}
        group = GroupAttention(config, number, jnp.int32(0), context, handed)
        for _ in segment.layers:
            x = x + group.step(next(following), x)
        for name, made in group.made.items():
            rows.setdefault(name, []).extend(made)
    return x, {name: jnp.stack(made) for name, made in rows.items()}


def training(config: ModelConfig, weights: Weights, x: np.ndarray, cotangent: np.ndarray) -> Callable:
    """Runs outputs, and gradients of weights and inputs."""
    def run(weights: Weights, x: Array, cotangent: Array) -> tuple:
        y, pull_back = jax.vjp(lambda weights, x: attended(config, weights, x)[0], weights, x)
        return y, *pull_back(cotangent)
    arguments, compiled = (weights, jnp.asarray(x), jnp.asarray(cotangent)), jax.jit(run)
    return lambda: jax.block_until_ready(compiled(*arguments))


def decoding(config: ModelConfig, weights: Weights, x: np.ndarray, new: np.ndarray) -> Callable:
    """Runs one step behind the tokens x [B, S - 1, D]; always the same one, and the cache stays in place."""
    @partial(jax.jit, donate_argnums=2)
    def run(weights: Weights, x: Array, cache: Cache) -> tuple[Array, Cache]:
        y, rows = attended(config, weights, x, cache)
        return y, written_after(y, cache).append({c.name: rows[c.name] for c in cache.table})
    _, cache = run(weights, jnp.asarray(x), init_cache(config, len(x), x.shape[1] + 1))
    held, new = np.asarray(cache.lengths), jnp.asarray(new)
    def step() -> Array:
        nonlocal cache
        y, cache = run(weights, new, cache.replace(lengths=jnp.asarray(held)))
        return jax.block_until_ready(y)
    return step


def torch_training(layers: Any, x: np.ndarray, cotangent: np.ndarray) -> Callable:
    """The same by torch: (outputs, gradients of weights by layer and name, of inputs)."""
    import torch
    x, cotangent = torch.tensor(x, requires_grad=True), torch.tensor(cotangent)
    def run() -> tuple:
        layers.zero_grad()
        x.grad = None
        y = layers(x)
        y.backward(cotangent)
        return y, [{name: w.grad for name, w in layer.items()} for layer in layers.layers], x.grad
    return run


def torch_decoding(layers: Any, x: np.ndarray, new: np.ndarray) -> Callable:
    """The same by torch."""
    import torch
    layers.prefill(torch.tensor(x))
    return partial(layers.step, torch.tensor(new))


def check_training(name: str, found: tuple, wanted: tuple) -> None:
    """Raises AssertionError where outputs or gradients differ."""
    from kvjax.benchmarks.pytorch_attention import matrix
    as_torch = [{key: matrix(key, gradient) for key, gradient in layer.items()} for layer in found[1]]
    check(name, (found[0], as_torch, found[2]), wanted)


def check(name: str, found: Any, wanted: Any) -> None:
    """Raises AssertionError where two trees of arrays differ by more than float32's sums do."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), y.detach().numpy()
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * np.abs(y).max(), err_msg=name)


def turns(runs: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, run after run. Each runs once untimed first, so that the other's threads are at rest."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _, (name, run) in product(range(rounds), runs.items()):
        run()
        start = time.perf_counter()
        run()
        times[name].append(time.perf_counter() - start)
    return times


def measure(name: str, what: str, options: Options) -> list[dict]:
    """One row of the table for each way of writing a variant in torch; `what` is training or decoding."""
    from kvjax.benchmarks.pytorch_attention import written
    config, random = config_of(name, options.width), np.random.default_rng(1)
    weights, train = drawn_weights(config), what == "training"
    batch, length = (options.batch, options.length) if train else (options.decode_batch, options.decode_length)
    draw = lambda length: random.standard_normal((batch, length, options.width), np.float32)
    inputs = (draw(length), draw(length)) if train else (draw(length - 1), draw(1))
    ours, theirs, compare = (training, torch_training, check_training) if train else (decoding, torch_decoding, check)
    runs = {"kvjax": ours(config, weights, *inputs)}
    for way in written(*CASES[name]):
        if not train or way.trains:
            runs[way.__name__] = theirs(way(*CASES[name], weights, length), *inputs)
            compare(f"{name}, {what}", runs["kvjax"](), runs[way.__name__]())
    times = turns(runs, options.rounds)
    return [row(name, what, way, times) for way in times if way != "kvjax"]


def row(name: str, what: str, way: str, times: dict[str, list[float]]) -> dict:
    """Medians in milliseconds, and the median of the ratios of neighbouring runs."""
    ours, theirs = np.asarray(times["kvjax"]), np.asarray(times[way])
    return {"variant": name, "what": what, "written in torch as": way, "kvjax ms": 1e3 * float(np.median(ours)),
            "torch ms": 1e3 * float(np.median(theirs)), "kvjax / torch": float(np.median(ours / theirs))}


def show(rows: list[dict], options: Options, version: str) -> None:
    """Prints the table, and writes JSON where that is asked for."""
    table = Table(*rows[0], title=f"D={options.width}; training B={options.batch} T={options.length}; decoding "
                                  f"B={options.decode_batch} S={options.decode_length}; float32")
    for one in rows:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else x for x in one.values()))
    Console().print(table)
    if options.out:
        figures = {"options": asdict(options), "jax": jax.__version__, "torch": version, "rows": rows}
        options.out.write_text(json.dumps(figures, indent=1, default=str))


def main(options: Options) -> None:
    """Raises ConfigError where torch is missing, or a variant is unknown."""
    require(find_spec("torch") is not None, "torch is not installed: this compares with PyTorch, install it by "
                                            "`pip install -r requirements-torch.txt`")
    unknown = [name for name in options.variants if name not in CASES]
    require(not unknown, f"variants {unknown} are unknown: choose of {', '.join(CASES)}")
    import torch
    torch.set_num_threads(options.threads)
    rows = [one for what in ("training", "decoding") for name in options.variants
            for one in measure(name, what, options)]
    show(rows, options, torch.__version__)


if __name__ == "__main__":
    command(main, lambda: tyro.cli(Options, description=__doc__))

"""Training speed and memory of every variant beside multi-head attention's, in one run.

    python -m kvjax.benchmarks.train_step

Steps of all variants take turns, so that whatever else the machine does meets them alike; figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from kvjax.ahead_of_time import single_device_mesh
from kvjax.attention import Attention, GroupedQuery, Kronecker
from kvjax.config import Config, ModelConfig, TrainConfig
from kvjax.model import build_model, parameter_count
from kvjax.training.optimizer import make_optimizer
from kvjax.training.state import init_state
from kvjax.training.step import make_train_step

HEAD_DIM = 64


@dataclass(frozen=True)
class Options:
    """What is measured."""

    shapes: tuple[tuple[int, int, int, int], ...] = ((256, 4, 8, 256), (768, 2, 2, 512))
    """(width, layers, batch, sequence length)."""
    vocab_size: int = 1024
    dtype: str = field(default_factory=lambda: "float32" if jax.default_backend() == "cpu" else "bfloat16")
    runs: int = 11


def variants(heads: int) -> dict[str, Attention]:
    """Every variant with `heads` query heads of width 64."""
    return {
        "mha": GroupedQuery(heads=heads, kv_heads=heads, head_dim=HEAD_DIM),
        "gqa": GroupedQuery(heads=heads, kv_heads=2, head_dim=HEAD_DIM),
        "mqa": GroupedQuery(heads=heads, kv_heads=1, head_dim=HEAD_DIM),
        "kpa": Kronecker(h1=heads // 2, h2=2, d1=8, d2=8),
        "kpa dense query": Kronecker(h1=heads // 2, h2=2, d1=8, d2=8, dense_query=True),
        "tpa": Kronecker(h1=heads, h2=1, d1=1, d2=HEAD_DIM),
    }


@dataclass
class Trial:
    """One variant, ready to step."""

    parameters: int
    memory: int
    """Bytes of temporaries in the compiled step."""
    step: Callable[[], None]
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Takes one step and keeps its time."""
        start = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - start)


def prepare(attention: Attention, shape: tuple[int, int, int, int], options: Options) -> Trial:
    """Compiles a variant's training step, and runs it once."""
    width, layers, batch_size, length = shape
    model_config = ModelConfig(attention=attention, vocab_size=options.vocab_size, layers=layers, width=width,
                               feed_forward_width=round(8 * width / 3 / 16) * 16, context_length=length,
                               dtype=options.dtype)
    config = Config(model=model_config, train=TrainConfig(steps=10_000, batch_size=batch_size))
    mesh, model, optimizer = single_device_mesh(jax.devices()[0]), build_model(model_config), make_optimizer(config)
    state = init_state(model, optimizer, config, mesh)
    tokens = jax.random.randint(jax.random.key(0), (batch_size, length + 1), 0, options.vocab_size)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    with jax.set_mesh(mesh):
        compiled = make_train_step(model, optimizer, config, mesh).lower(state, batch).compile()

    def step():
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
    step()
    return Trial(parameter_count(model_config), compiled.memory_analysis().temp_size_in_bytes, step)


def measure(shape: tuple[int, int, int, int], options: Options) -> Table:
    """Times all variants at one shape."""
    width, layers, batch_size, length = shape
    trials = {name: prepare(a, shape, options) for name, a in variants(width // HEAD_DIM).items()}
    for _ in range(options.runs):
        for trial in trials.values():
            trial.run()
    table = Table("variant", "parameters", "step ms", "tokens/s", "time / MHA", "temporaries MiB",
                  title=f"D={width} L={layers} B={batch_size} T={length} {options.dtype}")
    base = jnp.asarray(trials["mha"].seconds)
    for name, trial in trials.items():
        seconds = float(np.median(trial.seconds))
        ratio = float(np.median(np.asarray(trial.seconds) / base))
        table.add_row(name, f"{trial.parameters:,}", f"{seconds * 1e3:.0f}", f"{batch_size * length / seconds:,.0f}",
                      f"{ratio:.2f}", f"{trial.memory / 2**20:.0f}")
    return table


def main(options: Options) -> None:
    """Prints one table per shape."""
    for shape in options.shapes:
        Console().print(measure(shape, options))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""What benchmarks of kernels share: which kernel is for the device that is here, times of things that take turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from kvjax.config import ConfigError, require


def kernel_here() -> str:
    """The kernels of the device that is here. Raises ConfigError on one that has none."""
    device = jax.devices()[0]
    hopper = device.platform == "gpu" and str(getattr(device, "compute_capability", "")) == "9.0"
    kernel = "tpu" if device.platform == "tpu" else "gpu" if hopper else None
    require(kernel is not None, f"the device here is a {device.device_kind} ({device.platform}): kernels are for TPUs "
                                "and Hopper GPUs, run this on one")
    return kernel


def medians(runs: dict[str, Callable], rounds: int, at_once: int = 10) -> dict[str, float]:
    """Median seconds of each; they take turns, so that whatever else the machine does meets them alike."""
    def seconds(run: Callable) -> float:
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(at_once)])
        return (time.perf_counter() - start) / at_once
    for run in runs.values():
        jax.block_until_ready(run())  # compiled before anything is timed
    times = [{name: seconds(run) for name, run in runs.items()} for _ in range(rounds)]
    return {name: float(np.median([t[name] for t in times])) for name in runs}


def copy_run(size: int = 2**29) -> tuple[Callable, int]:
    """Something that reads and writes so many bytes, and how many it moves."""
    x = jnp.zeros((size // 4,), jnp.int32)
    copy = jax.jit(lambda x: x + 1)
    return lambda: copy(x), 2 * size


def show(title: str, rows: list[dict]) -> None:
    """A table of rows with the same keys, and the same as one line of JSON."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()))
    Console().print(table)
    print(json.dumps({"title": title, "device": jax.devices()[0].device_kind, "rows": rows}))


def command(main: Callable, arguments: Callable) -> None:
    """Runs a benchmark; what it refuses is one line, and exit status 2."""
    try:
        main(arguments())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

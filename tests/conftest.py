"""The whole suite runs on eight pretended CPU devices; set before jax is imported."""

import gc
import itertools
import os
from pathlib import Path

import pytest
from programs import xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(devices=8)}"
MAPS = Path("/proc/self/maps")
MOST_MAPS = 40_000
"""Every compiled program takes some of the memory maps of a process, of which Linux allows 65 530."""
finished = itertools.count(1)


@pytest.fixture(autouse=True)
def few_enough_programs():
    yield
    if next(finished) % 25 == 0 and MAPS.exists() and MAPS.read_text().count("\n") > MOST_MAPS:
        import jax
        jax.clear_caches()
        gc.collect()

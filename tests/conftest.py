"""The whole suite runs on eight pretended CPU devices; set before jax is imported."""

import gc
import itertools
import os
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile far more than they compute: without the expensive passes and with the older, simpler code for fused
# operations, programs are compiled in a fifth of the time.
FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0",
         "--xla_llvm_disable_expensive_passes=true",
         "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
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

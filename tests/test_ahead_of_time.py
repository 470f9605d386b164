"""What the compiler says about hardware that is not here."""

from dataclasses import replace

import jax
import pytest
from variants import CASES, model_config

import kvjax
from kvjax.ahead_of_time import compile_train_step, report, tpu_devices
from kvjax.benchmarks.decode_memory import VARIANTS, Shape, compiled_memory
from kvjax.config import Config, MeshConfig, TrainConfig
from kvjax.sharding import make_mesh

QUICK = ("gqa", "mla", "kpa", "gqa concat m=4", "gqa residual m=4", "gqa yoco")
"""One of each way of reading a cache; the others read as one of these does, and a loop of steps holds a step."""


@pytest.mark.parametrize(("name", "count"), [
    pytest.param(name, count, marks=() if name in QUICK and count > 1 else pytest.mark.full)
    for name in VARIANTS for count in (1, 16)])
def test_decode_step_on_a_tpu_keeps_no_copy_of_the_cache(name, count):
    cache, temporaries = compiled_memory(*VARIANTS[name], Shape(), count)
    assert temporaries < 0.05 * cache


RUN = Config(model=model_config(CASES["kpa"].attention, vocab_size=64), mesh=MeshConfig(data=2, fsdp=2, tensor=2),
             train=TrainConfig(steps=3000, batch_size=8))


def test_dry_run_reports_a_compiled_step():
    lines = report(RUN)
    assert f"parameters: {kvjax.parameter_count(RUN.model):,}" in lines
    assert "compiled for 8 x cpu" in lines and "memory per device" in lines and "for 512 tokens" in lines


def test_dry_run_compiles_for_a_tpu_pod_slice():
    assert "compiled for 16 x TPU v5" in report(replace(RUN, mesh=MeshConfig(data=2, fsdp=4, tensor=2)), "v5e:4x4")
    with pytest.raises(kvjax.ConfigError, match="'v5e:banana'"):
        tpu_devices("v5e:banana")


def test_training_memory_of_long_sequences_grows_with_their_length_only():
    def temporaries(length):
        config = replace(RUN, mesh=MeshConfig(data=1, fsdp=-1), train=TrainConfig(steps=3000, batch_size=1),
                         model=replace(RUN.model, context_length=length, layers=1))
        compiled = compile_train_step(config, make_mesh(config.mesh, jax.devices()[:1]))
        return compiled.memory_analysis().temp_size_in_bytes
    short, long = temporaries(4096), temporaries(8192)
    assert long < 2.2 * short, "twice the tokens, twice the memory"
    assert long < RUN.model.attention.heads * 8192**2 * 4 / 3, "far below all scores of one layer"

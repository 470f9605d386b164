"""The decode kernel for Hopper GPUs: the contract by the interpreter, and what is compiled for an H200."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding
from test_decode import PROGRAMS, SEEN, Contract
from test_decode import factors as drawn_factors
from test_decode import parts as drawn_parts

from kvjax.ahead_of_time import gpu_devices
from kvjax.config import ConfigError
from kvjax.kernels.decode import api, gpu
from kvjax.kernels.decode.gpu_programs import spans
from kvjax.kernels.decode.heads import HeadParts, RebuiltHeads
from kvjax.kernels.decode.kronecker import KroneckerFactors
from kvjax.kernels.decode.program import Entry, Past

NO_INTERPRETER = None if hasattr(plgpu, "InterpretGPUParams") else (
    f"jax {jax.__version__} interprets no transposed references: its successor 0.11 does")


def interpreted():
    if NO_INTERPRETER:
        pytest.skip(NO_INTERPRETER)
    # Copies that reach over the end of an array bring zeros on a GPU.
    return plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")


OWN = {
    "tpa_8": partial(drawn_factors, h1=8, h2=1, d1=1, d2=16, k_ranks=(2,), v_ranks=(2,)),
    "mla_of_32_heads": partial(drawn_parts, heads=1, shared=32, key_sizes=(512, 64), value_parts=((1, 512),),
                               latent=True),
    "concat_24_8": partial(drawn_parts, heads=2, shared=2, key_sizes=(24, 8), value_parts=((2, 24), (2, 8))),
}
"""Of real size, and in place of those of the contract whose features are no multiples of 8."""
REFUSED = ("tpa", "concat")
QUICK = ("kpa_5x5_rank_3_and_1", "kpa_d2_6", "kpa_parts_of_ranks", "skip_v1", *OWN)
"""Beside those of the contract that are in bfloat16 anyway."""
PROBLEMS = [pytest.param(name, view, marks=() if name in QUICK else pytest.mark.full)
            for name, view in (*SEEN, *((name, "all") for name in OWN)) if name not in REFUSED]


class TestGpu(Contract):
    types = ("bfloat16",)
    refused = (RebuiltHeads,)
    quantised = False
    test_its_gradient_is_the_references = None
    """Whose tolerances are those of equal results; it does not depend on the kernel."""

    @staticmethod
    def run(*arguments):
        return api.run("gpu", *arguments, interpret=interpreted())

    def made(self, *arguments):
        draw, problem, solve = super().made(*arguments)
        if isinstance(problem.program, KroneckerFactors):  # terms of their scores are rounded, and added in float32
            problem = replace(problem, error=1)
        return draw, problem, solve

    @pytest.mark.parametrize(("name", "view"), PROBLEMS)
    def test_equals_the_loops(self, name, view, monkeypatch):
        for own in OWN.items():
            monkeypatch.setitem(PROGRAMS, *own)
        draw, problem, solve = self.made(name, view, "bfloat16")
        self.compare(draw, problem, *solve(), rounding=2**-9)

    @pytest.mark.parametrize(("name", "view"), [("gqa_three_tokens", "ring"), ("kpa_two_tokens", "all")])
    def test_splits_are_put_together(self, name, view):
        """Four blocks in three splits, of which one holds none, through one buffer."""
        self.run = partial(gpu.decode, interpret=interpreted(), tiles=gpu.Tiles(splits=3, stages=1))
        draw, problem, solve = self.made(name, view, "bfloat16")
        self.compare(draw, problem, *solve(), rounding=2**-9)


# --- what is compiled -------------------------------------------------------------------------------------------------

BATCH, SIZE = 32, 4096


def heads(queries, groups, keys, values):
    """A program of heads, the shapes of its queries, and features of its entries; values as `HeadParts` has them."""
    program = HeadParts(1, queries // groups, groups, tuple(enumerate(keys)), values)
    features = {number: groups * d for number, d in enumerate(keys)} | {number: n * d for number, n, d in values}
    return program, [(BATCH, groups, queries // groups, d) for d in keys], [features[n] for n in sorted(features)]


def factors(h1, h2, d1, d2, ranks):
    program = KroneckerFactors(1, h1, h2, d1, d2, ((0, 1, ranks),), ((2, 3, ranks),))
    return program, [(BATCH, program.rows * d2, d1)], [h1 * ranks * d1, ranks * h2 * d2] * 2


COMPILED = {
    "gqa": heads(32, 8, (128,), ((1, 8, 128),)), "mla": heads(32, 1, (512, 64), ((0, 1, 512),)),
    "kpa_8x2": factors(8, 2, 8, 8, 2), "tpa": factors(16, 1, 1, 64, 2),
}


def compiled(program, queries, features, past, dtype=jnp.bfloat16):
    """The kernel for an H200, of the second of two slots."""
    try:
        here = SingleDeviceSharding(gpu_devices()[0])
    except ConfigError as why:
        pytest.skip(str(why))
    spec = lambda shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    def run(queries, stored, slot, lengths):
        return gpu.decode(program, past, queries, (), tuple(Entry(x, slot) for x in stored), lengths)
    return jax.jit(run).lower(tuple(map(spec, queries)), tuple(spec((2, BATCH, f, past.size)) for f in features),
                              spec((), jnp.int32), spec((BATCH,), jnp.int32)).compile()


@pytest.mark.parametrize("name", COMPILED)
def test_is_compiled_for_an_h200_without_spills_or_copies_of_the_cache(name, capfd, monkeypatch):
    for dump in ("PTXAS", "SASS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{dump}", "1")
    program, queries, features = COMPILED[name]
    made = compiled(program, queries, features, Past(SIZE, 128, 0.1))
    machine = capfd.readouterr().out
    assert set(re.findall(r"(\d+) bytes spill", machine)) == {"0"}
    assert made.memory_analysis().temp_size_in_bytes < 0.03 * (2 * 2 * BATCH * SIZE * sum(features))
    if "nvdisasm invocation failed" in machine:
        pytest.skip("machine code is read by `pip install nvidia-cuda-nvdisasm`")
    assert "HGMMA" in machine and "UTMALDG" in machine


# --- sizes and refusals -----------------------------------------------------------------------------------------------


TILES = gpu.Tiles()


def decoded(program, size=256, dtype=jnp.bfloat16, features=(64, 64), tiles=TILES):
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    queries = (spec(1, 1, program.rows, 64),)
    return jax.eval_shape(
        lambda q, stored, lengths: gpu.decode(program, Past(size, 128, 1.0), q, (), tuple(Entry(x, 0) for x in stored),
                                              lengths, tiles=tiles),
        queries, tuple(spec(1, 1, f, size) for f in features), jax.ShapeDtypeStruct((1,), jnp.int32))


MQA = HeadParts(1, 4, 1, ((0, 64),), ((1, 1, 64),))


def test_refusals_say_why():
    rebuilt = RebuiltHeads(1, 4, 1, ((0, 64),), ((1, 1, 64),))
    with pytest.raises(ValueError, match="KVPath-Residual are rebuilt and rotated, which the GPU kernel does not"):
        decoded(rebuilt)
    for dtype in (jnp.float32, jnp.int8):
        with pytest.raises(ValueError, match="bfloat16 or float16 alone, since tensor cores take no other type"):
            decoded(MQA, dtype=dtype)
    with pytest.raises(ValueError, match="12 features of entry 0: the GPU kernel copies them by 8"):
        decoded(HeadParts(1, 4, 2, ((0, 12),), ((1, 2, 12),)), features=(24, 24))
    with pytest.raises(ValueError, match="192 tokens is no whole number of blocks of 128"):
        decoded(MQA, size=192, tiles=gpu.Tiles(block=128))
    with pytest.raises(ValueError, match="take 256 registers of every thread, and the GPU kernel has 128"):
        decoded(KroneckerFactors(1, 1, 8, 8, 64, ((0, 1, 1),), ((2, 3, 1),)), features=(8, 512, 8, 512))
    with pytest.raises(ValueError, match="more than the 232448 of a multiprocessor"):
        decoded(HeadParts(1, 1, 1, ((0, 2048),), ((1, 1, 2048),)), features=(2048, 2048))


def test_work_fills_the_multiprocessors_once():
    tiles = gpu.Tiles()
    assert tiles.splits_of(4096, warpgroups=32, at_once=1, token_bytes=1152, result_bytes=65_792) == 4
    assert tiles.splits_of(4096, warpgroups=256, at_once=2, token_bytes=512, result_bytes=4160) == 1
    assert tiles.splits_of(131_072, warpgroups=1, at_once=1, token_bytes=1152, result_bytes=65_792) == 132
    assert [tiles.stages_of(x, 0) for x in (32 * 1024, 80 * 1024, 200 * 1024)] == [3, 2, 1]


def test_spans_hold_what_is_needed():
    assert spans((8, 9, 24, 31), 8, 32) == ((8, 8), (24, 8))
    assert spans((8, 15, 24, 31), 16, 32) == ((8, 16), (16, 16))
    assert spans(tuple(range(40)), 8, 40) == ((0, 40),)

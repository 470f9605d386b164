"""Kronecker attention for Hopper GPUs: its numbers by the interpreter, and what is compiled for an H200."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

from kvjax.ahead_of_time import compile_train_step, gpu_devices
from kvjax.attention import Kronecker
from kvjax.benchmarks import decode_memory
from kvjax.config import Config, ConfigError, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from kvjax.kernels.attention import api, gpu
from kvjax.kernels.attention.gpu import Sizes, Tiles
from kvjax.sharding import make_mesh

NEW = hasattr(plgpu, "InterpretGPUParams")
SMALL = Tiles(strips=1, key_groups=1, splits=2)


def sizes(h1=8, h2=2, d1=8, d2=8, k_rank=2, v_rank=2, window=None):
    return Sizes(h1, h2, d1, d2, k_rank, v_rank, (d1 * d2) ** -0.5, window)


def interpreted():
    if NEW:
        return plgpu.InterpretGPUParams(uninitialized_memory="nan")
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    return InterpretGPUParams()


def drawn(sizes, batch, time, documents, seed=0):
    """Queries, factors, segments, and cotangents of both outputs."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape).astype(jnp.bfloat16)
    heads, width = sizes.h1 * sizes.h2, sizes.d1 * sizes.d2
    of = lambda rank: (normal(batch, time, rank, sizes.h1, sizes.d1), normal(batch, time, rank, sizes.h2, sizes.d2))
    arrays = normal(batch, time, heads, width), *of(sizes.k_rank), *of(sizes.v_rank)
    segments = jnp.sort(jax.random.randint(next(keys), (batch, time), 0, documents), axis=1) if documents else None
    return arrays, segments, (normal(batch, time, heads, width), normal(batch, time, heads).astype(jnp.float32))


def dense(sizes, arrays, segments, cotangents):
    """Outputs, log-sum-exps and the five gradients, in float64."""
    q, *factors = (np.asarray(x, np.float64) for x in arrays)
    d_out, d_lse = (np.asarray(x, np.float64) for x in cotangents)
    batch, time, heads, width = q.shape
    ranks = sizes.k_rank, sizes.v_rank
    k, v = (np.einsum("btrij,btrkl->btikjl", *factors[2 * n:2 * n + 2]).reshape(q.shape) / ranks[n] for n in (0, 1))
    back = np.arange(time)[:, None] - np.arange(time)
    seen = np.broadcast_to((back >= 0) & (back < (sizes.window or time)), (batch, 1, time, time))
    if segments is not None:
        seen = seen & (np.asarray(segments)[:, None, :, None] == np.asarray(segments)[:, None, None])
    scores = np.where(seen, np.einsum("bthd,bshd->bhts", q, k) * sizes.scale, -np.inf)
    lse = np.log(np.exp(scores).sum(axis=-1))
    p = np.exp(scores - lse[..., None])
    d_p = np.einsum("bthd,bshd->bhts", d_out, v)
    d_s = p * (d_p - (p * d_p).sum(axis=-1, keepdims=True) + d_lse.swapaxes(1, 2)[..., None]) * sizes.scale
    gradients = [np.einsum("bhts,bshd->bthd", d_s, k)]
    for n, whole in enumerate((np.einsum("bhts,bthd->bshd", d_s, q), np.einsum("bhts,bthd->bshd", p, d_out))):
        whole = whole.reshape(batch, time, sizes.h1, sizes.h2, sizes.d1, sizes.d2) / ranks[n]
        gradients += [np.einsum("btikjl,btrkl->btrij", whole, factors[2 * n + 1]),
                      np.einsum("btikjl,btrij->btrkl", whole, factors[2 * n])]
    return [np.einsum("bhts,bshd->bthd", p, v), lse.swapaxes(1, 2), *gradients]


def compare(got, wanted):
    """Each within 1 % of the largest number: bfloat16 has 0.4 %, and what is summed here was rounded twice."""
    for name, one, other in zip(("out", "lse", "q", "k_a", "k_b", "v_a", "v_b"), got, wanted, strict=False):
        off = np.abs(np.asarray(one, np.float64) - other).max() / np.abs(other).max()
        assert off < 0.01, f"{name} is off by {off:.4f} of its largest"


CASES = {
    "8x2": (sizes(), 1, 20, 0, None),
    "5x5_segments": (sizes(5, 5, 8, 8, 1, 2), 1, 20, 3, SMALL),
    "2x2": (sizes(2, 2), 1, 20, 0, SMALL),
    "d2_6_ranks_3_and_1_window": (sizes(1, 1, 8, 6, 3, 1, window=70), 1, 200, 0, SMALL),
    "tpa": (sizes(2, 1, 1, 64), 1, 70, 0, replace(SMALL, splits=1)),
    "segments_two_rows": (sizes(1, 1), 2, 100, 3, Tiles()),
    "two_blocks_of_two_strips": (sizes(1, 2, v_rank=1), 1, 300, 2, Tiles()),
}
SLOW = ("8x2", "5x5_segments", "two_blocks_of_two_strips")
"""Their blocks take a second each, whatever is in them."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.full if x in SLOW else ()) for x in CASES])
def test_equals_dense_attention(name):
    if not NEW:
        pytest.skip(f"jax {jax.__version__} interprets no transposed references, which gradients need, and compiles "
                    "a kernel of several warpgroups anew for each block: its successor 0.11 does and does not")
    sizes, batch, time, documents, tiles = CASES[name]
    arrays, segments, cotangents = drawn(sizes, batch, time, documents)

    @jax.jit
    def run(arrays, cotangents):
        made, back = jax.vjp(lambda *x: api.on_gpu(sizes, tiles, interpreted(), *x, segments), *arrays)
        return *made, *back(cotangents)
    compare(run(arrays, cotangents), dense(sizes, arrays, segments, cotangents))


def test_one_head_forward():
    """What also the interpreter of jax 0.10 runs: one block, and no transposed references."""
    small = sizes(1, 1)
    arrays, _, cotangents = drawn(small, 1, 70, 0)
    got = jax.jit(partial(gpu.forward, small, tiles=SMALL, interpret=interpreted(), segments=None))(*arrays)
    compare(got, dense(small, arrays, None, cotangents))


# --- what is compiled -------------------------------------------------------------------------------------------------

TIME = 2048


def compiled(sizes, direction):
    try:
        here = SingleDeviceSharding(gpu_devices()[0])
    except ConfigError as why:
        pytest.skip(str(why))
    spec = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, TIME, *shape), dtype, sharding=here)
    heads, of = sizes.h1 * sizes.h2, lambda rank: (spec(rank, sizes.h1, sizes.d1), spec(rank, sizes.h2, sizes.d2))
    q = spec(heads, sizes.d1 * sizes.d2)
    arrays = q, *of(sizes.k_rank), *of(sizes.v_rank)
    if direction == "forward":
        run, given = lambda arrays: gpu.forward(sizes, *arrays, None), (arrays,)
    else:
        run = lambda arrays, *rest: gpu.backward(sizes, *arrays, None, *rest)
        given = arrays, q, spec(heads, dtype=jnp.float32), q
    return jax.jit(run).lower(*given).compile()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("split", [(8, 2), pytest.param((12, 2), marks=pytest.mark.full)])
def test_is_compiled_for_an_h200_without_spills_or_keys_in_memory(split, direction, capfd, monkeypatch):
    for dump in ("PTXAS", "SASS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{dump}", "1")
    made = compiled(sizes(*split), direction)
    machine = capfd.readouterr().out
    assert set(re.findall(r"(\d+) bytes spill", machine)) == {"0"} and "serialized" not in machine
    assert made.memory_analysis().temp_size_in_bytes < TIME * split[0] * split[1] * 64 * 2  # keys alone
    if "nvdisasm invocation failed" in machine:
        pytest.skip("machine code is read by `pip install nvidia-cuda-nvdisasm`")
    kernels = 1 if direction == "forward" else 2
    assert machine.count(".section\t.text.") == kernels and "UTMALDG" in machine
    assert all("HGMMA" in code for code in machine.split(".section\t.text.")[1:])


def four_h200s():
    try:
        return make_mesh(MeshConfig(data=2, tensor=2), gpu_devices("1x4x1"))
    except ConfigError as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("h1", [4, pytest.param(8, marks=pytest.mark.full)])
def test_training_steps_compile_for_four_h200s(h1):
    """Rows over two, heads over two: forward, and twice backward."""
    model = ModelConfig(attention=Kronecker(h1, 2), vocab_size=512, layers=1, width=256, feed_forward_width=256,
                        context_length=256, kernel="gpu")
    config = Config(model=model, train=TrainConfig(steps=2, batch_size=4), optimizer=OptimizerConfig(warmup_steps=1),
                    mesh=MeshConfig(data=2, tensor=2))
    assert compile_train_step(config, four_h200s()).as_text().count('custom_call_target="mosaic_gpu') == 3


@pytest.mark.parametrize("name", ["kpa", *(pytest.param(x, marks=pytest.mark.full) for x in ("gqa", "mla"))])
def test_decode_steps_compile_for_four_h200s(name):
    shape, mesh = decode_memory.Shape(layers=4, kernel="gpu"), four_h200s()
    cache, compiled = decode_memory.compiled_step(*decode_memory.VARIANTS[name], shape, 1, mesh)
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 1, "one in the loop over layers"
    assert not re.findall(rf"= \w+\[[\d,]*,{shape.length}\]\S* (?:copy|transpose|all-gather)\(", text)
    assert compiled.memory_analysis().temp_size_in_bytes < cache.nbytes / mesh.size


# --- sizes and refusals -----------------------------------------------------------------------------------------------


def attended(sizes, dtype=jnp.bfloat16, heads=16, width=None):
    spec = lambda *shape: jax.ShapeDtypeStruct((1, 8, *shape), dtype)
    factors = [spec(r, h, d) for r in (sizes.k_rank, sizes.v_rank) for h, d in ((sizes.h1, sizes.d1),
                                                                               (sizes.h2, sizes.d2))]
    return jax.eval_shape(lambda *x: gpu.forward(sizes, *x, None), spec(heads, width or sizes.d1 * sizes.d2), *factors)


def test_refusals_say_why():
    with pytest.raises(ValueError, match="float32: the GPU kernel takes bfloat16 or float16"):
        attended(sizes(), dtype=jnp.float32)
    with pytest.raises(ValueError, match="256 features of a head: the GPU kernel takes at most 128"):
        attended(sizes(d1=16, d2=16))
    with pytest.raises(ValueError, match="queries of 15 heads and 64 features are not of Sizes"):
        attended(sizes(), heads=15)
    with pytest.raises(ValueError, match="h2 = 32 rows of B of 8 features"):
        attended(sizes(1, 32), heads=32)


def test_factors_are_packed_and_unpacked():
    for rank, size in ((2, 8), (3, 8), (3, 6), (2, 64), (6, 1), (1, 5)):
        columns, factor = gpu.Columns(rank, size), jax.random.normal(jax.random.key(0), (2, 5, rank, 3, size))
        packed = columns.packed(factor)
        assert packed.shape == (2, 3, columns.groups, 5, columns.count) and columns.count % 16 == 0
        np.testing.assert_array_equal(columns.unpacked(packed), factor)

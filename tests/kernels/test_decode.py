"""Decode kernels: every program against float64 loops, by every implementation, and compiled for TPUs."""

from dataclasses import replace

import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from variants import CASES, FULL_GQA, MLA, model_config

import kvjax
from kvjax.attention import GroupedQuery, Kronecker, PathConcat, PathResidual, SkipV1, Yoco
from kvjax.benchmarks import decode_memory
from kvjax.benchmarks.decode_traffic import count
from kvjax.config import ModelConfig
from kvjax.kernels.decode import api
from kvjax.kernels.decode.heads import HeadParts
from kvjax.kernels.decode.kronecker import KroneckerFactors
from kvjax.kernels.decode.program import MASKED, Entry, Past
from kvjax.model.placement import parameter_shardings
from kvjax.sharding import make_mesh, named

SIZE, BLOCK, SCALE = 256, 128, 0.3
LENGTHS = (0, 1, 130, 256)
RUN = {"reference": lambda *arguments: api.run("reference", *arguments),
       "tpu": lambda *arguments: api.run("tpu", *arguments, interpret=pltpu.InterpretParams())}


def drawn(random, *shape):
    return random.normal(size=shape)


def softmax_means(scores, values, seen):
    """(means, log-sum-exp) of values [S, d] under scores [S] where seen, in float64; nothing seen: zeros."""
    if not seen.any():
        return np.zeros(values.shape[1]), MASKED
    weights = np.exp(scores[seen] - scores[seen].max())
    return weights @ values[seen] / weights.sum(), np.log(weights.sum()) + scores[seen].max()


def seen_by(past, length, token):
    """Which slots hold a token that a new one sees, told token by token."""
    seen = np.zeros(past.size, bool)
    for position in range(length):
        if past.ring and length - position > past.size:
            continue
        near = past.window is None or length + token - position < past.window
        seen[position % past.size] = near
    return seen


def factors(h1, h2, d1, d2, k_ranks, v_ranks, new=1):
    """A Kronecker program with parts of ranks, its inputs, and what it should give [B, T, H, d] and [B, T, H]."""
    random, batch = np.random.default_rng(0), len(LENGTHS)
    query = drawn(random, batch, new, h1, h2, d1, d2)
    a = [[drawn(random, batch, h1, r, d1, SIZE) for r in ranks] for ranks in (k_ranks, v_ranks)]
    b = [[drawn(random, batch, r, h2, d2, SIZE) for r in ranks] for ranks in (k_ranks, v_ranks)]
    keys, values = (sum(np.einsum("zhris,zrkjs->zshkij", x, y) for x, y in zip(a[n], b[n], strict=True)) / sum(ranks)
                    for n, ranks in ((0, k_ranks), (1, v_ranks)))
    stored = [x for n in (0, 1) for pair in zip(a[n], b[n], strict=True) for x in pair]
    numbers = iter(range(len(stored)))
    pairs = [tuple((next(numbers), next(numbers), r) for r in ranks) for ranks in (k_ranks, v_ranks)]
    rows = query.transpose(0, 2, 1, 3, 5, 4).reshape(batch, -1, d1)
    flat = lambda x: x.reshape(*x.shape[:-4], h1 * h2, d1 * d2)
    return KroneckerFactors(new, h1, h2, d1, d2, *pairs), (rows,), stored, flat(query), flat(keys), flat(values)


def parts(heads, shared, key_sizes, value_parts, new=1):
    """A program over parts of heads, likewise."""
    random, batch = np.random.default_rng(1), len(LENGTHS)
    queries = [drawn(random, batch, heads, shared, new, d) for d in key_sizes]
    keys = [drawn(random, batch, heads, d, SIZE) for d in key_sizes]
    values = [drawn(random, batch, *part, SIZE) for part in value_parts]
    by_features = all(h == heads for h, _ in value_parts)
    whole = np.concatenate(values, axis=2 if by_features else 1)
    program = HeadParts(new, shared, heads, tuple(enumerate(key_sizes)),
                        tuple((i, *part) for i, part in enumerate(value_parts, len(key_sizes))))
    rows = tuple(q.reshape(batch, heads, -1, q.shape[-1]) for q in queries)
    query = np.concatenate(queries, axis=-1).transpose(0, 3, 1, 2, 4).reshape(batch, new, heads * shared, -1)
    repeated = lambda x: np.repeat(x.transpose(0, 3, 1, 2), shared, axis=2)
    return program, rows, [*keys, *values], query, repeated(np.concatenate(keys, axis=2)), repeated(whole)


PROGRAMS = {
    "kpa_8x2": lambda: factors(8, 2, 8, 8, (2,), (2,)),
    "kpa_two_tokens": lambda: factors(4, 2, 4, 8, (2,), (2,), new=2),
    "kpa_5x5_rank_3_and_1": lambda: factors(5, 5, 8, 8, (3,), (1,)),
    "kpa_d2_6": lambda: factors(4, 4, 8, 6, (1,), (2,)),
    "kpa_parts_of_ranks": lambda: factors(2, 2, 4, 4, (2, 1), (1, 2)),
    "tpa": lambda: factors(6, 1, 1, 16, (2,), (2,)),
    "mha": lambda: parts(3, 1, (16,), ((3, 16),)),
    "gqa_three_tokens": lambda: parts(2, 3, (16,), ((2, 16),), new=3),
    "concat": lambda: parts(2, 2, (12, 4), ((2, 12), (2, 4))),
    "skip_v1": lambda: parts(4, 1, (16,), ((3, 16), (1, 16))),
}
VIEWS = {"all": {}, "window": {"window": 100}, "ring": {"window": 200, "ring": True}}


def result(name, outputs, lse, program, shape):
    """Outputs of a program as [B, T, H, d] and [B, T, H]."""
    batch, new, heads, _ = shape
    if isinstance(program, KroneckerFactors):
        h1, h2, d1, d2 = program.h1, program.h2, program.d1, program.d2
        means = np.asarray(outputs[0]).reshape(batch, h1, new, h2, d2, d1).transpose(0, 2, 1, 3, 5, 4)
        return means.reshape(shape), np.asarray(lse).reshape(batch, h1, new, h2).swapaxes(1, 2).reshape(batch, new, -1)
    by_token = lambda x: np.asarray(x).reshape(batch, -1, new, x.shape[-1]).swapaxes(1, 2)
    axis = -1 if name == "concat" else 2
    return np.concatenate([by_token(x) for x in outputs], axis=axis), by_token(lse)[..., 0]


@pytest.mark.parametrize("implementation", RUN)
@pytest.mark.parametrize(("name", "view"), [(name, "all") for name in PROGRAMS] + [
    (name, view) for name in ("kpa_two_tokens", "gqa_three_tokens") for view in ("window", "ring")])
def test_programs_equal_the_loops(name, view, implementation):
    program, rows, stored, query, keys, values = PROGRAMS[name]()
    past = Past(SIZE, BLOCK if implementation == "tpu" else SIZE, SCALE, **VIEWS[view])
    lengths = np.array(LENGTHS if not past.ring else (0, 1, 300, 777))
    entries = tuple(Entry(jnp.asarray(x.reshape(1, len(lengths), -1, SIZE), jnp.float32), 0) for x in stored)
    outputs, lse = RUN[implementation](program, past, tuple(jnp.asarray(r, jnp.float32) for r in rows), (), entries,
                                       jnp.asarray(lengths, jnp.int32))
    found, found_lse = result(name, outputs, lse, program, query.shape)
    for b, length in enumerate(lengths):
        for t in range(query.shape[1]):
            seen = seen_by(past, length, t)
            for h in range(query.shape[2]):
                means, wanted = softmax_means(SCALE * keys[b, :, h] @ query[b, t, h], values[b, :, h], seen)
                np.testing.assert_allclose(found[b, t, h], means, atol=2e-5)
                np.testing.assert_allclose(found_lse[b, t, h], wanted, rtol=1e-5, atol=2e-5)


MODELS = {
    "mha": model_config(CASES["mha"].attention), "gqa": model_config(CASES["gqa"].attention),
    "mqa": model_config(CASES["mqa"].attention), "kpa": model_config(CASES["kpa"].attention),
    "tpa": model_config(CASES["tpa"].attention), "mla": model_config(MLA),
    "gqa_window": model_config(CASES["gqa"].attention, window=6),
    "concat": model_config(CASES["gqa"].attention, layers=2, sharing=PathConcat(2, 2)),
    "residual_norm": model_config(FULL_GQA, layers=3, sharing=PathResidual(3, 3)),
    "skip_v1": model_config(CASES["mha"].attention, layers=2, sharing=SkipV1()),
    "kpa_skip_v1": model_config(CASES["kpa"].attention, layers=2, sharing=SkipV1()),
    "yoco": model_config(CASES["gqa"].attention, layers=4, sharing=Yoco(8)),
}


def decoded(config, kernel, dtype=None):
    """Logits of ragged chunks and single tokens, through a cache."""
    model, params = kvjax.build_model(replace(config, kernel=kernel)), invariants.random_params(config)
    tokens, cache = invariants.tokens_of(config, shape=(3, 17)), kvjax.init_cache(config, 3, 40, dtype)
    step, made = jax.jit(lambda t, cache, n: kvjax.decode(model, params, t, cache, counts=n)), []
    for first, last, counts in ((0, 8, (8, 5, 0)), (8, 11, (3, 2, 1)), (11, 14, (3, 3, 3)), (14, 17, (3, 1, 2))):
        logits, cache = step(tokens[:, first:last], cache, jnp.array(counts))
        made += [logits[row, :n] for row, n in enumerate(counts)]
    return np.concatenate(made)


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_models_decode_alike_by_kernels_and_without(name, dtype):
    by_kernel, without = (decoded(MODELS[name], kernel, dtype) for kernel in ("reference", "xla"))
    np.testing.assert_allclose(by_kernel, without, atol=1e-4)


@pytest.mark.parametrize(("name", "dtype"), [("kpa", "int8"), ("residual_norm", None)])
def test_models_decode_by_the_tpu_kernel(name, dtype):
    with pltpu.force_tpu_interpret_mode():
        found = decoded(MODELS[name], "tpu", dtype)
    np.testing.assert_allclose(found, decoded(MODELS[name], "xla", dtype), atol=1e-4)


@pytest.mark.parametrize("name", ["gqa", "mqa", "kpa", "mla", "residual"])
def test_devices_attend_to_their_own_sequences_and_heads(name):
    attention = {"mla": replace(MLA, heads=4), "residual": CASES["gqa"].attention}.get(name) or CASES[name].attention
    sharing = PathResidual(2, 3) if name == "residual" else None
    config = model_config(attention, vocab_size=64, layers=2, sharing=sharing, kernel="reference")
    model, tokens = kvjax.build_model(config), invariants.tokens_of(config, shape=(4, 9))
    params, mesh = invariants.random_params(config), make_mesh(kvjax.config.MeshConfig(data=2, fsdp=2, tensor=2))
    full = jax.jit(model.apply)({"params": params}, tokens)
    placed = jax.device_put((params, tokens), (parameter_shardings(config, mesh), named(mesh, "batch", None)))
    with jax.set_mesh(mesh):
        cache = jax.jit(lambda: kvjax.init_cache(config, 4, 12))()
        step = jax.jit(lambda p, t, c: kvjax.decode(model, p, t, c))
        _, cache = step(placed[0], placed[1][:, :8], cache)
        logits, _ = step(placed[0], placed[1][:, 8:], cache)
    np.testing.assert_allclose(logits[:, 0], full[:, 8], atol=1e-4)


def test_value_heads_in_parts_are_not_split_over_devices():
    config = model_config(CASES["mha"].attention, vocab_size=64, layers=2, sharing=SkipV1(), kernel="reference")
    model, params = kvjax.build_model(config), invariants.random_params(config)
    with (jax.set_mesh(make_mesh(kvjax.config.MeshConfig(data=4, tensor=2))),
          pytest.raises(ValueError, match="cannot split value heads .* over 2 devices: choose kernel xla")):
        jax.eval_shape(lambda: kvjax.decode(model, params, jnp.ones((4, 1), int), kvjax.init_cache(config, 4, 8)))


def test_a_kernel_that_is_named_is_not_replaced():
    config = model_config(CASES["gqa"].attention, layers=2, window=8, sharing=PathResidual(2, 3), kernel="tpu")
    model, params = kvjax.build_model(config), invariants.random_params(config)
    with pytest.raises(ValueError, match="'tpu' cannot attend .*: keys that are rotated .* choose auto or xla"):
        kvjax.decode(model, params, jnp.ones((1, 1), int), kvjax.init_cache(config, 1, 8))
    with pytest.raises(kvjax.ConfigError, match="kernel is 'gpu': choose one of auto"):
        model_config(CASES["gqa"].attention, kernel="gpu")


ALL = ("mha", "mla", "kpa", "tpa", "gqa residual m=4", "gqa concat m=4", "gqa skip v1")
ON_CHIPS = [(name, "v5e:2x2") for name in ALL]
ON_CHIPS += [(name, chip) for name in ("kpa", "gqa residual m=4") for chip in ("v5p:2x2x1", "v6e:2x2")]


@pytest.mark.parametrize(("name", "topology"), ON_CHIPS)
def test_decode_steps_compile_for_tpus_and_copy_no_cache(name, topology):
    shape = decode_memory.Shape(topology=topology, kernel="tpu")
    cache, temporaries = decode_memory.compiled_memory(*decode_memory.VARIANTS[name], shape, 1)
    # On v5p and v6e the bound is that of any decode step; it is not known yet what takes 2 % there.
    assert temporaries < (0.01 if topology.startswith("v5e") else 0.05) * cache


@pytest.mark.parametrize("name", list(decode_memory.VARIANTS))
def test_kernels_read_the_past_once(name):
    attention, sharing = decode_memory.VARIANTS[name]
    config = ModelConfig(attention=attention, sharing=sharing, vocab_size=64, layers=4, width=1024,
                         feed_forward_width=64, kernel="tpu")
    traffic = count(config, 2, 1024, "bfloat16")
    assert 1 <= traffic.moved / traffic.floor < 1.15


def test_kronecker_factors_move_a_sixth_of_what_heads_move():
    def moved(attention):
        return count(ModelConfig(attention=attention, vocab_size=64, layers=1, width=1024, feed_forward_width=64,
                                 kernel="tpu"), 32, 4096, "bfloat16").moved
    assert moved(GroupedQuery(16, 16, 64)) / moved(Kronecker(8, 2)) == pytest.approx(6.39, abs=0.01)

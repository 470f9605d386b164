"""Attention of tokens to themselves: every kernel, forward and backward, against float64 sums; and whole models."""

import itertools
import re
from dataclasses import dataclass, replace

import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from variants import CASES, FULL_GQA, MLA, model_config

import kvjax
from kvjax.ahead_of_time import compile_train_step, single_device_mesh, tpu_devices
from kvjax.attention import GroupedQuery, Kronecker, Latent, PathConcat, PathResidual, SkipV1, Yoco
from kvjax.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from kvjax.kernels.attention import api
from kvjax.model.placement import parameter_shardings
from kvjax.sharding import make_mesh, named

BATCH, SCALE = 1, 0.3
INTERPRET = {"reference": False, "tpu": pltpu.InterpretParams()}


@dataclass(frozen=True)
class Split:
    """Heads as Kronecker factors."""

    h1: int
    h2: int
    d1: int
    d2: int
    k_rank: int = 2
    v_rank: int = 2

    def draw(self, random, length):
        def pair(rank):
            sizes = (self.h1, self.d1), (self.h2, self.d2)
            return [random.normal(size=(BATCH, length, rank, *size)) for size in sizes]
        query = random.normal(size=(BATCH, length, self.h1 * self.h2, self.d1 * self.d2))
        return query, pair(self.k_rank), pair(self.v_rank)

    def whole(self, factors):
        a, b = factors
        product = np.einsum("btrhi,btrkj->bthkij", a, b) / a.shape[2]
        return product.reshape(*product.shape[:2], self.h1 * self.h2, -1)

    def pulled_back(self, gradient, factors):
        a, b = factors
        gradient = gradient.reshape(*gradient.shape[:2], self.h1, self.h2, self.d1, self.d2) / a.shape[2]
        return [np.einsum("bthkij,btrkj->btrhi", gradient, b), np.einsum("bthkij,btrhi->btrkj", gradient, a)]

    attend = staticmethod(api.attend_factors)


@dataclass(frozen=True)
class Parts:
    """Heads in parts of their features: (heads, features) of each."""

    heads: int
    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]

    def draw(self, random, length):
        parts = [[random.normal(size=(BATCH, length, *size)) for size in sizes] for sizes in (self.keys, self.values)]
        return random.normal(size=(BATCH, length, self.heads, sum(d for _, d in self.keys))), *parts

    def whole(self, parts):
        return np.concatenate([np.repeat(x, self.heads // x.shape[2], axis=2) for x in parts], axis=-1)

    def pulled_back(self, gradient, parts):
        pieces = np.split(gradient, np.cumsum([x.shape[-1] for x in parts])[:-1], axis=-1)
        by_head = lambda piece, x: piece.reshape(*x.shape[:3], -1, x.shape[-1]).sum(axis=3)
        return [by_head(piece, x) for piece, x in zip(pieces, parts, strict=True)]

    attend = staticmethod(api.attend_heads)


KINDS = {
    "kpa_8x2": Split(8, 2, 8, 8), "kpa_4x4": Split(4, 4, 8, 8), "kpa_2x3": Split(2, 3, 4, 8),
    "kpa_5x5_ranks_3_1": Split(5, 5, 8, 8, 3, 1),
    "kpa_d2_6": Split(4, 2, 8, 6, 1, 2), "tpa": Split(6, 1, 1, 16),
    "mha": Parts(3, ((3, 16),), ((3, 16),)), "gqa": Parts(6, ((2, 16),), ((2, 16),)),
    "mqa_of_16_heads": Parts(16, ((1, 16),), ((1, 16),)), "latent": Parts(3, ((3, 12), (1, 4)), ((3, 10),)),
    "concat": Parts(4, ((2, 12), (2, 4)), ((2, 12), (2, 4))),
}
VIEWS = {"all": {}, "window": {"window": 130}, "packed": {}, "packed window": {"window": 9}}
QUICK = (*((name, "all") for name in ("kpa_5x5_ranks_3_1", "kpa_d2_6", "tpa", "gqa", "mqa_of_16_heads", "latent",
                                      "concat")), ("kpa_2x3", "packed window"), ("gqa", "window"))
"""Every kind of tiles, odd splits and ranks, windows and documents: what is done without `-m full`."""
LENGTHS = {"all": 200, "window": 300, "packed": 200, "packed window": 300}
"""Two or three blocks of 128, the last with some left over: with a window the third does not see the first."""


def documents(view):
    """Ids of documents from one token to more than a block long; an id may come again."""
    if "packed" not in view:
        return None
    return np.repeat([1, 2, 1, 5], [1, 150, 1, LENGTHS[view] - 152])[None]


def sums(kind, view, query, keys, values, d_out, d_lse):
    """(out, lse) and the gradients of queries, keys and values, dense in float64."""
    k, v, at, ids = kind.whole(keys), kind.whole(values), np.arange(LENGTHS[view]), documents(view)
    seen = (at[:, None] >= at) & (at[:, None] - at < VIEWS[view].get("window", len(at)))
    seen = seen & (ids[:, :, None] == ids[:, None]) if ids is not None else seen[None]
    scores = np.where(seen[:, None], SCALE * np.einsum("bthd,bshd->bhts", query, k), -np.inf)
    lse = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    weights = np.exp(scores - lse[..., None])
    out = np.einsum("bhts,bshd->bthd", weights, v)
    d_weights = np.einsum("bthd,bshd->bhts", d_out, v)
    mean = (weights * d_weights).sum(-1, keepdims=True)
    d_scores = SCALE * weights * (d_weights - mean + d_lse.swapaxes(1, 2)[..., None])
    gradients = (np.einsum("bhts,bshd->bthd", d_scores, k),
                 kind.pulled_back(np.einsum("bhts,bthd->bshd", d_scores, query), keys),
                 kind.pulled_back(np.einsum("bhts,bthd->bshd", weights, d_out), values))
    return (out, lse.swapaxes(1, 2)), gradients


def runs_of(implementation, kind, view, dtype, *given):
    """A function without arguments that gives the same by a kernel, with inputs in `dtype`."""
    cast = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
    segments = None if documents(view) is None else jnp.asarray(documents(view))

    def attend(query, keys, values):
        return kind.attend(implementation, query, keys, values, segments, VIEWS[view].get("window"), SCALE,
                           INTERPRET[implementation])

    @jax.jit
    def run(query, keys, values, d_out, d_lse):
        result, pull_back = jax.vjp(attend, query, keys, values)
        return result, pull_back((d_out.astype(dtype), d_lse))
    *inputs, d_out, d_lse = given
    arrays = *map(cast, inputs), jnp.asarray(d_out, jnp.float32), jnp.asarray(d_lse, jnp.float32)
    return lambda: run(*arrays)


def found_by(*arguments):
    """What `runs_of` gives, once."""
    return runs_of(*arguments)()


def drawn(kind, view):
    random = np.random.default_rng(0)
    query, keys, values = kind.draw(random, LENGTHS[view])
    out = random.normal(size=(*query.shape[:3], kind.whole(values).shape[-1]))
    return query, keys, values, out, random.normal(size=query.shape[:3])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(api, "BLOCKS", (128,))


@pytest.mark.parametrize("implementation", INTERPRET)
class TestContract:
    """What every implementation keeps."""

    @pytest.mark.parametrize(("name", "view"), [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in (
            *((name, "all") for name in KINDS), *itertools.product(("kpa_2x3", "gqa"), list(VIEWS)[1:]))])
    def test_it_equals_the_sums_forward_and_backward(self, name, view, implementation):
        kind, given = KINDS[name], drawn(KINDS[name], view)
        found = found_by(implementation, kind, view, jnp.float32, *given)
        # Gradients of B are sums over h1 d1 products of numbers of about 10.
        for x, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(sums(kind, view, *given)), strict=True):
            np.testing.assert_allclose(x, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())

    @pytest.mark.parametrize("name", ["kpa_2x3", pytest.param("gqa", marks=pytest.mark.full)])
    def test_bfloat16_rounds_tiles_and_weights_once(self, name, implementation):
        kind, given = KINDS[name], drawn(KINDS[name], "all")
        rounded = [jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64), x) for x in given]
        found = found_by(implementation, kind, "all", jnp.bfloat16, *given)
        wanted = sums(kind, "all", *rounded[:3], rounded[3], given[4])
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            # Keys, values, weights and the result are each rounded to 8 bits: a few times 2^-8 of typical numbers.
            error = np.abs(np.asarray(x, np.float64) - y)
            assert error.max() < 2**-4 * y.std() + 2**-7 * np.abs(y).max() and error.mean() < 2**-7 * np.abs(y).mean()

    def test_two_runs_are_the_same_bit_for_bit(self, implementation):
        kind, given = KINDS["kpa_2x3"], drawn(KINDS["kpa_2x3"], "packed")
        run = runs_of(implementation, kind, "packed", jnp.float32, *given)
        first, second = jax.tree.leaves(run()), jax.tree.leaves(run())
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(first, second, strict=True))


def test_larger_blocks_equal_the_sums_too(monkeypatch):
    monkeypatch.setattr(api, "BLOCKS", (256,))
    kind, given = KINDS["gqa"], drawn(KINDS["gqa"], "window")
    found = found_by("tpu", kind, "window", jnp.float32, *given)
    for x, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(sums(kind, "window", *given)), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


def test_blocks_are_as_large_as_padding_allows(monkeypatch):
    monkeypatch.undo()
    assert {n: api.block_of(n, api.BLOCKS) for n in (128, 129, 300, 512, 600, 1025, 2000, 2176)} == {
        128: (128, 128), 129: (256, 256), 300: (128, 384), 512: (512, 512), 600: (256, 768), 1025: (256, 1280),
        2000: (512, 2048), 2176: (512, 2560)}
    assert api.block_of(2000, (256, 128)) == (256, 2048)


MODELS = {
    "gqa": model_config(CASES["gqa"].attention), "mqa_window": model_config(CASES["mqa"].attention, window=40),
    "kpa": model_config(CASES["kpa"].attention), "tpa": model_config(CASES["tpa"].attention),
    "mla": model_config(MLA), "concat": model_config(CASES["gqa"].attention, layers=2, sharing=PathConcat(2, 2)),
    "residual": model_config(FULL_GQA, layers=2, sharing=PathResidual(2, 3)),
    "skip_v1": model_config(CASES["mha"].attention, layers=2, sharing=SkipV1()),
    "kpa_skip_v1": model_config(CASES["kpa"].attention, layers=2, sharing=SkipV1()),
    "yoco": model_config(CASES["gqa"].attention, layers=4, sharing=Yoco(8)),
}


def loss_and_gradients(config, params, shape=(2, 150), mesh=None):
    tokens = invariants.tokens_of(config, shape=shape)
    ids = jnp.asarray(np.repeat([[1, 2], [3, 3]], [60, shape[1] - 60], axis=1)).repeat(shape[0] // 2, axis=0)
    model = kvjax.build_model(config)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(*shape, config.vocab_size)), jnp.float32) / shape[1]
    loss = lambda params, tokens, ids: (model.apply({"params": params}, tokens, segment_ids=ids) * weights).sum()
    if mesh is None:
        return jax.jit(jax.value_and_grad(loss))(params, tokens, ids)
    place = parameter_shardings(config, mesh), *[named(mesh, "batch", None)] * 2
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss))(*jax.device_put((params, tokens, ids), place))


def assert_alike(found, wanted):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.full if name in ("tpa", "kpa_skip_v1") else ()) for name in MODELS])
def test_models_train_alike_by_kernels_and_without(name):
    params = invariants.random_params(MODELS[name])
    by_kernel, without = (loss_and_gradients(replace(MODELS[name], kernel=kernel, remat="dots"), params)
                          for kernel in ("reference", "xla"))
    assert_alike(by_kernel, without)


@pytest.mark.parametrize("name", ["kpa", pytest.param("mla", marks=pytest.mark.full)])
def test_models_train_by_the_tpu_kernel(name):
    config = replace(MODELS[name], layers=1, kernel="tpu")
    params = invariants.random_params(config)
    with pltpu.force_tpu_interpret_mode():
        found = loss_and_gradients(config, params)
    assert_alike(found, loss_and_gradients(replace(config, kernel="xla"), params))


@pytest.mark.parametrize("name", ["gqa", "mqa", "kpa", "mla"])
def test_devices_attend_in_their_own_rows_and_heads(name):
    attention = {"mla": replace(MLA, heads=4), "mqa": CASES["mqa"].attention}.get(name) or MODELS[name].attention
    config = model_config(attention, vocab_size=64, layers=1, kernel="reference")
    params, mesh = invariants.random_params(config), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert_alike(loss_and_gradients(config, params, (4, 150), mesh), loss_and_gradients(config, params, (4, 150)))


@pytest.mark.full
@pytest.mark.parametrize("name", ["kpa", "mla"])
def test_devices_attend_by_the_tpu_kernel(name):
    attention = replace(MLA, heads=4) if name == "mla" else MODELS[name].attention
    config = model_config(attention, vocab_size=64, layers=1, kernel="tpu")
    params, mesh = invariants.random_params(config), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with pltpu.force_tpu_interpret_mode():
        found = loss_and_gradients(config, params, (4, 150), mesh)
    assert_alike(found, loss_and_gradients(replace(config, kernel="xla"), params, (4, 150)))


def test_a_sequence_in_parts_is_refused():
    config = model_config(CASES["gqa"].attention, vocab_size=64, layers=1, kernel="reference")
    with pytest.raises(ValueError, match="'reference' does not attend over 2 parts of a sequence: choose kernel x"):
        loss_and_gradients(config, invariants.random_params(config), (4, 150), make_mesh(MeshConfig(4, sequence=2)))


def test_prefill_attends_by_the_kernel_and_fills_the_cache():
    config = MODELS["kpa"]
    params, tokens = invariants.random_params(config), invariants.tokens_of(config, shape=(2, 140))
    def logits(kernel):
        model, cache = kvjax.build_model(replace(config, kernel=kernel)), kvjax.init_cache(config, 2, 160)
        step = jax.jit(lambda t, c: kvjax.decode(model, params, t, c))
        first, cache = step(tokens[:, :130], cache)
        second, _ = step(tokens[:, 130:], cache)
        return np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(logits("reference"), logits("xla"), atol=1e-4)


def shapes(kind, length, dtype):
    """Queries, keys and values of a kind, as shapes on a v5e."""
    place = named(single_device_mesh(tpu_devices("v5e:2x2")[0]))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, length, *x.shape[2:]), dtype, sharding=place),
                        kind.draw(np.random.default_rng(0), 1))


@pytest.mark.parametrize(("kind", "dtype"), [
    (Parts(8, ((1, 256),), ((1, 256),)), "bfloat16"),
    pytest.param(Split(2, 16, 8, 8), "bfloat16", marks=pytest.mark.full),
    pytest.param(Parts(32, ((4, 128),), ((4, 128),)), "float32", marks=pytest.mark.full)])
def test_what_does_not_fit_fast_memory_at_once_is_done_in_smaller_parts(kind, dtype, monkeypatch):
    """Compiled for a v5e, forward and backward: with 8 heads at once, and 512 tokens, none of these would be."""
    monkeypatch.setattr(api, "BLOCKS", (512, 256, 128))
    def run(*given):
        return jax.grad(lambda *x: kind.attend("tpu", *x, None, None, SCALE)[0].astype(jnp.float32).sum(), (0, 1, 2))(
            *given)
    text = jax.jit(run).lower(*shapes(kind, 1024, dtype)).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.parametrize(("kind", "implementation", "dtype", "why"), [
    (KINDS["kpa_8x2"], "tpu", "float16", "it takes bfloat16 or float32, and this is float16"),
    (KINDS["gqa"], "gpu", "bfloat16", "it attends with Kronecker factors only"),
    (Split(1, 64, 8, 16), "tpu", "float32", "64 heads at once of 128 features do not fit a TPU's fast memory")])
def test_refusals_say_why(kind, implementation, dtype, why):
    given = jax.tree.map(lambda x: jnp.asarray(x, dtype), kind.draw(np.random.default_rng(0), 128))
    with pytest.raises(ValueError, match=f"'{implementation}' cannot attend to these tokens: {why}; choose auto or"):
        jax.eval_shape(lambda given: kind.attend(implementation, *given, None, None, SCALE), given)


ATTENTIONS = {"kpa": Kronecker(8, 2), "kpa_4x2": Kronecker(4, 2), "kpa_5x5": Kronecker(5, 5, k_rank=3, v_rank=1),
              "tpa": Kronecker(16, 1, 1, 64), "gqa": GroupedQuery(16, 4, 64),
              "mla": Latent(heads=16, latent_dim=256, rope_dim=32, nope_dim=64, value_dim=64)}


@pytest.mark.parametrize(("name", "topology"), [("kpa_4x2", "v5e:2x2"), ("mla", "v6e:2x2"), ("gqa", "v5p:2x2x1"), *(
    pytest.param(*case, marks=pytest.mark.full) for case in [
        ("kpa", "v5p:2x2x1"), ("kpa", "v6e:2x2"), *((name, "v5e:2x2") for name in ATTENTIONS if name != "kpa_4x2")])])
def test_training_steps_compile_for_tpus(name, topology):
    """Over two rows and two parts of the heads where these divide; the kernel calls are in the program."""
    model = ModelConfig(attention=ATTENTIONS[name], vocab_size=512, layers=1, width=256, feed_forward_width=256,
                        context_length=256, kernel="tpu")
    config = Config(model=model, train=TrainConfig(steps=2, batch_size=4),
                    optimizer=OptimizerConfig(warmup_steps=1), mesh=MeshConfig(data=2, tensor=2))
    if name == "kpa_5x5":
        config, mesh = replace(config, mesh=MeshConfig(data=1)), single_device_mesh(tpu_devices(topology)[0])
    else:
        mesh = make_mesh(config.mesh, tpu_devices(topology))
    program = compile_train_step(config, mesh).as_text()
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', program)) >= 3, "forward, and twice backward"

"""Eight devices give what one gives."""

import re
from dataclasses import replace
from math import prod

import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import CASES, FULL_GQA, GQA, MLA, NEAR, model_config

import kvjax
from kvjax.attention import CrossLayer, DenseFormer, PathResidual, ResFormer, SkipV1, SkipV1Yoco, Yoco
from kvjax.config import Config, MeshConfig, TrainConfig
from kvjax.model.placement import check, parameter_shardings
from kvjax.sharding import constrain, make_mesh, named

MESH = MeshConfig(data=2, fsdp=2, tensor=2)
DIVISIBLE = {name: model_config(CASES[name].attention, vocab_size=64)
             for name in ("gqa", "mqa", "kpa", "tpa", "kpa_dense_query")} | {
    "mla": model_config(replace(MLA, heads=4), vocab_size=64),
    "mla_query_latent": model_config(replace(MLA, heads=4, query_latent_dim=10), vocab_size=64),
    "gpt2": model_config(FULL_GQA, vocab_size=64, positions="learned", norm="layer", feed_forward="gelu",
                         feed_forward_bias=True, tie_embeddings=False),
    "resformer": model_config(GQA, vocab_size=64, sharing=ResFormer()),
    "denseformer": model_config(GQA, vocab_size=64, sharing=DenseFormer()),
    "cla": model_config(GQA, vocab_size=64, layers=2, sharing=CrossLayer(2)),
    "skip_v1_yoco": model_config(CASES["mha"].attention, vocab_size=64, layers=4, sharing=SkipV1Yoco()),
    "skip_v1": model_config(CASES["mha"].attention, vocab_size=64, sharing=SkipV1()),
    "residual": model_config(GQA, vocab_size=64, layers=2, sharing=PathResidual(layers=2, delta=3)),
    "yoco": model_config(GQA, vocab_size=64, layers=4, sharing=Yoco(NEAR)),
}
"""Models whose sizes the mesh divides."""


def sharded(config):
    model, tokens = kvjax.build_model(config), invariants.tokens_of(config, shape=(4, 12))
    params = invariants.random_params(config)
    mesh = make_mesh(MESH)
    placed = jax.device_put((params, tokens), (parameter_shardings(config, mesh), named(mesh, "batch", "length")))
    return model, params, tokens, mesh, placed


ALIKE = ("gqa", "mla", "kpa_dense_query", "skip_v1")
"""Whose training others go through as well: gpt2, mla_query_latent, kpa, skip_v1_yoco."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in ALIKE else ())
                                  for name in DIVISIBLE if name != "yoco"])
def test_sharded_training_gradient_equals_single(name):
    config = DIVISIBLE[name]
    model, params, tokens, mesh, placed = sharded(config)
    def loss(params, tokens):
        return jax.nn.log_softmax(model.apply({"params": params}, tokens))[..., 5].mean()
    single = jax.jit(jax.value_and_grad(loss))(params, tokens)
    with jax.set_mesh(mesh):
        value, grads = jax.jit(jax.value_and_grad(loss))(*placed)
    np.testing.assert_allclose(value, single[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, single[1])


@pytest.mark.parametrize("name", ["gqa", "mqa", "kpa", "mla", "skip_v1", "residual", "cla", "yoco"])
def test_sharded_decoding_equals_single_and_moves_no_cache(name):
    config = DIVISIBLE[name]
    model, params, tokens, mesh, placed = sharded(config)
    full = jax.jit(model.apply)({"params": params}, tokens)
    step = jax.jit(lambda p, t, c: kvjax.decode(model, p, t, c), donate_argnums=2)
    with jax.set_mesh(mesh):
        cache = jax.jit(lambda: kvjax.init_cache(config, 4, 12))()
        logits, cache = step(placed[0], placed[1][:, :6], cache)
        np.testing.assert_allclose(logits, full[:, :6], atol=1e-4)
        compiled = step.lower(placed[0], placed[1][:, 6:7], cache).compile()
        for at in range(6, 9):
            logits, cache = step(placed[0], placed[1][:, at:at + 1], cache)
            np.testing.assert_allclose(logits[:, 0], full[:, at], atol=1e-4)
    for component in cache.components.values():
        assert component.sharding.spec[1] == ("data", "fsdp"), "rows stay on their devices"
    moved = re.findall(r"= (.*) (?:all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\(",
                       compiled.as_text())
    assert moved, "weights are gathered"
    per_token = [prod(map(int, sizes.split(","))) for sizes in re.findall(r"\[([\d,]+),128\]", " ".join(moved))]
    # Of SkipV1 the halves of the value heads do not lie where their queries do: attention weights move, one number for
    # each token and head, and no values.
    assert max(per_token, default=0) <= (name == "skip_v1"), "no stored token leaves its device"


def test_heads_are_split_over_the_tensor_axis():
    config = DIVISIBLE["gqa"]
    shardings = parameter_shardings(config, make_mesh(MESH))
    q = shardings["segment_0"]["layer_0"]["attention"]["q_proj"].spec
    assert tuple(q) == (None, "fsdp", "tensor", None)
    assert tuple(shardings["embedding"].spec) == ("tensor", "fsdp")


def run_config(mesh=MESH, batch_size=4, **model):
    return Config(model=model_config(CASES["kpa"].attention, **({"vocab_size": 64} | model)), mesh=mesh,
                  train=TrainConfig(steps=3000, batch_size=batch_size))


@pytest.mark.parametrize(("config", "message"), [
    (run_config(vocab_size=61), "embedding.*vocab axis of 61 does not split 2 ways.*mesh.tensor=2"),
    (run_config(batch_size=6), r"batch_size 6.*does not split 4 ways.*multiple of 4"),
    (run_config(mesh=MeshConfig(tensor=8)), "attention/k_a.*heads axis of 4 does not split 8 ways"),
    (run_config(mesh=MeshConfig(sequence=8), context_length=30), "context_length.*30 does not split 8 ways"),
])
def test_sizes_that_do_not_divide_are_named(config, message):
    with pytest.raises(kvjax.ConfigError, match=message):
        check(config, make_mesh(config.mesh))


def test_sizes_that_divide_pass():
    check(run_config(), make_mesh(MESH))


@pytest.mark.parametrize(("mesh", "message"), [(MeshConfig(data=3), "multiply to 3, but there are 8"),
                                               (MeshConfig(fsdp=3), "multiply to 3, which does not divide the 8")])
def test_meshes_that_do_not_fit_the_devices_are_refused(mesh, message):
    with pytest.raises(kvjax.ConfigError, match=message):
        make_mesh(mesh)


def test_sequence_axis_splits_long_sequences():
    config = DIVISIBLE["kpa"]
    model, params, tokens, _, _ = sharded(config)
    mesh = make_mesh(replace(MESH, data=2, fsdp=1, tensor=1, sequence=4))
    placed = jax.device_put((params, tokens), (parameter_shardings(config, mesh), named(mesh, "batch", "length")))
    with jax.set_mesh(mesh):
        logits = jax.jit(model.apply)({"params": placed[0]}, placed[1])
    np.testing.assert_allclose(logits, jax.jit(model.apply)({"params": params}, tokens), atol=1e-4)


def test_constrain_without_a_mesh_does_nothing():
    x = jnp.ones((3, 5))
    assert constrain(x, "batch", None) is x

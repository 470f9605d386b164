"""Held-out loss against sums made by hand from the model's logits, on one device and on a mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ModelConfig, build_model
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.config import ConfigError, MeshConfig
from kvjax.evaluation.perplexity import evaluate
from kvjax.model.placement import parameter_shardings
from kvjax.sharding import make_mesh

ROWS, LENGTH, VOCAB = 4, 12, 24


@pytest.fixture(scope="module")
def model():
    return build_model(ModelConfig(GroupedQuery(2, 2, 8), vocab_size=VOCAB, layers=1, width=16, feed_forward_width=24,
                                   context_length=LENGTH, dtype="float32", dropout=0.5, output_init=1.0))


@pytest.fixture(scope="module")
def params(model):
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]


@pytest.fixture(scope="module")
def batches():
    """Three packed batches of two documents a row; about a third of the targets do not count."""
    rng = np.random.default_rng(0)
    segment_ids = np.repeat([[1] * 5 + [2] * 7], ROWS, axis=0).astype(np.int32)
    positions = np.repeat([[*range(5), *range(7)]], ROWS, axis=0).astype(np.int32)
    return [{"tokens": rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32),
             "targets": rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32),
             "loss_mask": (rng.random((ROWS, LENGTH)) < 0.7).astype(np.float32),
             "segment_ids": segment_ids, "positions": positions} for _ in range(3)]


def by_hand(model, params, batches):
    """Nats and number of the counted targets."""
    nats, tokens, apply = 0.0, 0, jax.jit(model.apply)
    for batch in batches:
        logits = apply({"params": params}, batch["tokens"], batch.get("positions"), batch.get("segment_ids"))
        logits = np.asarray(logits, np.float64)
        log_partition = np.log(np.exp(logits).sum(-1))
        chosen = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        counts = batch.get("loss_mask", np.ones(batch["tokens"].shape))
        nats, tokens = nats + ((log_partition - chosen) * counts).sum(), tokens + int(counts.sum())
    return nats, tokens


def test_counted_targets_only_each_once(model, params, batches):
    nats, tokens = by_hand(model, params, batches)
    results = evaluate(model, params, iter(batches), text_bytes=500.0)
    assert results["tokens"] == tokens and results["bytes"] == 500.0
    assert results["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert results["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert results["nats_per_byte"] == pytest.approx(nats / 500, rel=1e-5)
    assert results["bits_per_byte"] == pytest.approx(nats / 500 / math.log(2), rel=1e-5)


def test_batches_of_a_running_stream(model, params, batches):
    plain = [{name: batch[name] for name in ("tokens", "targets")} for batch in batches]
    nats, tokens = by_hand(model, params, plain)
    results = evaluate(model, params, plain)
    assert results["tokens"] == tokens == 3 * ROWS * LENGTH and "bits_per_byte" not in results
    assert results["loss"] == pytest.approx(nats / tokens, rel=1e-5)


def test_a_mesh_changes_nothing(model, params, batches):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(params, parameter_shardings(model.config, mesh))
    on_mesh, alone = evaluate(model, placed, batches, mesh=mesh), evaluate(model, params, batches)
    assert on_mesh["tokens"] == alone["tokens"]
    assert on_mesh["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_nothing_to_score_is_an_error(model, params, batches):
    blank = batches[0] | {"loss_mask": np.zeros((ROWS, LENGTH), np.float32)}
    for nothing in ([], [blank]):
        with pytest.raises(ConfigError, match="no tokens to evaluate"):
            evaluate(model, params, nothing)

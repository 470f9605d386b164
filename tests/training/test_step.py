import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.model import build_model
from kvjax.sharding import make_mesh
from kvjax.training.optimizer import make_optimizer
from kvjax.training.state import abstract_state, init_state
from kvjax.training.step import gradient_sums, make_eval_step, make_train_step, place, process_part


@pytest.fixture
def batch():
    """Packed rows of which very different numbers of tokens count."""
    chooser = np.random.default_rng(0)
    counted = np.array([32, 31, 30, 29, 2, 1, 0, 1])
    mask = np.arange(32) < counted[:, None]
    return {"tokens": chooser.integers(0, 256, (8, 32), dtype=np.int32),
            "targets": chooser.integers(0, 256, (8, 32), dtype=np.int32),
            "loss_mask": mask.astype(np.float32), "segment_ids": mask.astype(np.int32),
            "positions": np.broadcast_to(np.arange(32, dtype=np.int32), (8, 32))}


def build(config, devices):
    mesh = make_mesh(config.mesh, devices)
    model, optimizer = build_model(config.model), make_optimizer(config)
    return model, optimizer, mesh


def run(config, devices, batch, steps):
    model, optimizer, mesh = build(config, devices)
    with jax.set_mesh(mesh):
        state = init_state(model, optimizer, config, mesh)
        step = make_train_step(model, optimizer, config, mesh)
        for _ in range(steps):
            state, metrics = step(state, place(batch, mesh, 8))
    return jax.device_get((state.params, state.opt_state, metrics))


def test_accumulated_gradient_equals_the_whole_batch_with_unequal_masks(config, changed, batch):
    config = changed(config, model=dict(dropout=0.0), train=dict(z_loss=1e-2))
    model = build_model(config.model)
    params = model.init(jax.random.key(0), batch["tokens"])["params"]
    whole, parts = (jax.jit(lambda p, b, c=c: gradient_sums(model, c, p, b, jax.random.key(1)))(params, batch)
                    for c in (config, changed(config, train=dict(accumulation=4))))
    chex.assert_trees_all_close(whole, parts, rtol=1e-4, atol=1e-4)
    assert whole[1]["tokens"] == batch["loss_mask"].sum()
    # Means of parts would weigh row 5's one token as much as row 0's 32: the test would see it.
    assert len(set(batch["loss_mask"].reshape(2, 4, 32).swapaxes(0, 1).sum((1, 2)))) > 1


def test_metrics_and_update(config, changed, batch, one_device):
    config = changed(config, model=dict(dropout=0.0), train=dict(z_loss=0.1), optimizer=dict(clip_norm=1e-3))
    model, optimizer, mesh = build(config, one_device)
    state = init_state(model, optimizer, config, mesh)
    chex.assert_trees_all_equal_dtypes(state.params, jax.tree.map(lambda x: jnp.zeros(x.shape), state.params))
    grads, sums = jax.jit(lambda p: gradient_sums(model, config, p, batch, state.key))(state.params)
    tokens = float(sums["tokens"])
    old = jnp.copy(state.params["embedding"])
    new, metrics = make_train_step(model, optimizer, config, mesh)(state, place(batch, mesh, 8))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))  # its memory was reused
    np.testing.assert_allclose(metrics["loss"], sums["loss"] / tokens, rtol=1e-5)
    np.testing.assert_allclose(metrics["z_loss"], 0.1 * sums["z"] / tokens, rtol=1e-5)
    norm = np.sqrt(sum(float(jnp.sum((g / tokens) ** 2)) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["learning_rate"], 0.5e-2, rtol=1e-5)
    first = new.opt_state[1][0].mu["embedding"]  # 0.1 of the clipped gradient
    np.testing.assert_allclose(first, 0.1 * grads["embedding"] / tokens * 1e-3 / norm, rtol=1e-3, atol=1e-9)
    assert int(new.step) == 1 and float(jnp.abs(new.params["embedding"] - old).max()) > 1e-3


def test_dropout_differs_from_step_to_step_and_is_off_in_evaluation(config, changed, batch, one_device):
    config = changed(config, optimizer=dict(peak_lr=1e-30))
    model, optimizer, mesh = build(config, one_device)
    state = init_state(model, optimizer, config, mesh)
    params, placed = jax.device_get(state.params), place(batch, mesh, 8)
    step, losses = make_train_step(model, optimizer, config, mesh), []
    for _ in range(2):
        state, metrics = step(state, placed)
        losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1]
    without = build_model(changed(config, model=dict(dropout=0.0)).model)
    chex.assert_trees_all_equal(*(make_eval_step(m, mesh)(params, placed) for m in (model, without)))


def test_mesh_of_eight_devices_equals_one(config, changed, batch, one_device):
    # A large epsilon: Adam's first steps would blow up rounding in gradients near zero.
    config = changed(config, model=dict(dropout=0.0), optimizer=dict(eps=1e-3), train=dict(accumulation=2))
    sharded = changed(config, mesh=dict(data=2, fsdp=2, tensor=2))
    chex.assert_trees_all_close(run(sharded, jax.devices(), batch, 3), run(config, one_device, batch, 3),
                                rtol=1e-4, atol=1e-5)


def test_state_is_created_split_and_the_optimizer_follows_the_weights(config, changed):
    config = changed(config, mesh=dict(data=2, fsdp=2, tensor=2))
    model, optimizer, mesh = build(config, jax.devices())
    abstract = abstract_state(model, optimizer, config, mesh)
    state = init_state(model, optimizer, config, mesh)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding, state), jax.tree.map(lambda x: x.sharding, abstract))
    adam = state.opt_state[1][0]
    for moments in (adam.mu, adam.nu):
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding, moments),
                                    jax.tree.map(lambda x: x.sharding, state.params))
    gate = state.params["segment_0"]["layer_0"]["feed_forward"]["gate"]
    assert gate.shape == (2, 32, 48) and gate.addressable_shards[0].data.shape == (2, 16, 24)


def test_one_process_feeds_all_rows(config, changed):
    assert process_part(make_mesh(config.mesh), 8) == (0, 1)
    assert process_part(make_mesh(changed(config, mesh=dict(data=2, sequence=4)).mesh), 8) == (0, 1)

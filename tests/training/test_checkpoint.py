import gc
import shutil

import chex
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CheckpointConfig, ConfigError, save
from kvjax.model import build_model
from kvjax.sharding import make_mesh
from kvjax.training.checkpoint import Checkpoints, restore_params
from kvjax.training.optimizer import make_optimizer
from kvjax.training.state import abstract_state, init_state

# TensorStore's reads that were under way when one failed are never awaited.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
KEEP = CheckpointConfig(every_steps=1, keep_latest=2)


@pytest.fixture(autouse=True)
def collect_abandoned_reads():
    yield
    gc.collect()


@pytest.fixture
def built(config, one_device):
    """(state, abstract state) on one device."""
    mesh = make_mesh(config.mesh, one_device)
    model, optimizer = build_model(config.model), make_optimizer(config)
    return init_state(model, optimizer, config, mesh), abstract_state(model, optimizer, config, mesh)


def numbers():
    """A data iterator with a position to save."""
    return iter(grain.MapDataset.range(1000).repeat().to_iter_dataset())


def plain(state):
    return jax.tree.map(np.asarray, state.replace(key=jax.random.key_data(state.key)))


def biggest_file(folder):
    return max((p for p in folder.glob("state/**/d/*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_bytes(path):
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle:middle + 64] = bytes(b ^ 0xFF for b in data[middle:middle + 64])
    path.write_bytes(data)


def test_round_trip_and_policies(tmp_path, built):
    state, abstract = built
    data = numbers()
    with Checkpoints(tmp_path, CheckpointConfig(every_steps=1, keep_latest=2, keep_every=3)) as checkpoints:
        assert checkpoints.restore(abstract, data) is None
        for step in range(1, 9):
            next(data)
            checkpoints.save(step, state.replace(step=jnp.int32(step)), data)
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        assert checkpoints.steps == [3, 6, 7, 8]
        fresh = numbers()
        restored = checkpoints.restore(abstract, fresh)
    chex.assert_trees_all_equal(plain(restored), plain(state.replace(step=jnp.int32(8))))
    assert next(fresh) == 8


@pytest.mark.parametrize("damage", [
    lambda folder: flip_bytes(biggest_file(folder)),
    lambda folder: biggest_file(folder).write_bytes(biggest_file(folder).read_bytes()[:50]),
    lambda folder: (folder / "state" / "_METADATA").write_text("{"),
    lambda folder: shutil.rmtree(folder / "state"),
    lambda folder: shutil.rmtree(folder / "data"),
], ids=["flipped", "cut", "metadata", "no state", "no data"])
def test_damaged_newest_checkpoint_falls_back_with_a_warning(tmp_path, built, damage):
    state, abstract = built
    data = numbers()
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        for step in (1, 2):
            next(data)
            checkpoints.save(step, state.replace(step=jnp.int32(step)), data)
    damage(tmp_path / "checkpoints" / "2")
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        fresh = numbers()
        with pytest.warns(UserWarning, match="checkpoint of step 2 .* is damaged"):
            restored = checkpoints.restore(abstract, fresh)
        assert int(restored.step) == 1 and next(fresh) == 1
        assert checkpoints.steps == [1] and (tmp_path / "damaged" / "2.0").is_dir()
        checkpoints.save(2, restored, fresh)  # its step is done and saved again
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        assert checkpoints.steps == [1, 2]


def test_nothing_is_moved_when_no_checkpoint_is_intact(tmp_path, built):
    state, abstract = built
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        checkpoints.save(1, state, numbers())
    flip_bytes(biggest_file(tmp_path / "checkpoints" / "1"))
    with (Checkpoints(tmp_path, KEEP) as checkpoints, pytest.warns(UserWarning),
          pytest.raises(ConfigError, match="no checkpoint .* can be read: .*params are not what was saved")):
        checkpoints.restore(abstract, numbers())
    assert (tmp_path / "checkpoints" / "1").is_dir()


def test_another_architecture_is_refused_with_the_list_of_weights(tmp_path, built, config, changed, one_device):
    state, _ = built
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        checkpoints.save(1, state, numbers())
    other = changed(config, model=dict(layers=1, tie_embeddings=False))
    mesh = make_mesh(other.mesh, one_device)
    abstract = abstract_state(build_model(other.model), make_optimizer(other), other, mesh)
    with Checkpoints(tmp_path, KEEP) as checkpoints, pytest.raises(ConfigError) as caught:
        checkpoints.restore(abstract, numbers())
    message = str(caught.value)
    assert "missing: params/unembedding [32, 256]" in message
    assert "misshapen: params/segment_0/layer_0/feed_forward/gate is [2, 32, 48], should be [1, 32, 48]" in message
    assert "opt_state" not in message

    save(changed(config, model=dict(tie_embeddings=False)), tmp_path / "config.json")
    with pytest.raises(ConfigError, match="missing: params/unembedding"):
        restore_params(tmp_path)


def test_weights_alone_restore_on_other_devices(tmp_path, config, changed):
    split = changed(config, mesh=dict(data=2, fsdp=2, tensor=2))
    mesh = make_mesh(split.mesh)
    model, optimizer = build_model(config.model), make_optimizer(config)
    state = init_state(model, optimizer, split, mesh)
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, numbers())
    save(split, tmp_path / "config.json")

    saved_config, params, step = restore_params(tmp_path)
    assert (saved_config, step) == (split, 2)
    chex.assert_trees_all_equal(jax.device_get(params), jax.device_get(state.params))
    assert all(x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(params))

    _, params, step = restore_params(tmp_path, step=1, mesh=make_mesh(changed(config, mesh=dict(fsdp=8, data=1)).mesh))
    chex.assert_trees_all_equal(jax.device_get(params), jax.device_get(state.params))
    assert step == 1 and len(params["embedding"].devices()) == 8

    biggest_file(tmp_path / "checkpoints" / "2").write_bytes(b"")
    with pytest.warns(UserWarning, match="step 2"):
        assert restore_params(tmp_path)[2] == 1
    with pytest.raises(ConfigError, match=r"no checkpoint of step 5: there are \[1, 2\]"):
        restore_params(tmp_path, step=5)


def test_weights_of_a_folder_without_checkpoints(tmp_path, config):
    with pytest.raises(ConfigError, match="is this the folder of a run"):
        restore_params(tmp_path / "nothing")
    save(config, tmp_path / "config.json")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        restore_params(tmp_path)

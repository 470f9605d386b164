import json
import shutil

import chex
import jax
import numpy as np
import pytest

from kvjax.config import ConfigError
from kvjax.training import loop, run_folder
from kvjax.training.checkpoint import Checkpoints, restore_params
from kvjax.training.loop import Diverged, train


def plain(state):
    return jax.tree.map(np.asarray, state.replace(key=jax.random.key_data(state.key)))


def metrics(folder, name="loss"):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.fixture
def straight(tmp_path, config, one_device):
    """(folder, state) of a run that was never interrupted."""
    folder = tmp_path / "straight"
    return folder, train(config, folder, devices=one_device)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_is_exact_bit_for_bit(tmp_path, straight, config, changed, one_device, workers, capsys):
    config = changed(config, data=dict(workers=workers))
    folder = tmp_path / "interrupted"
    half = train(config, folder, devices=one_device, stop_after=5)  # after a checkpoint of step 4, amid data read ahead
    assert int(half.step) == 5 and "stopped and saved after step 5" in capsys.readouterr().out
    whole = train(config, folder, devices=one_device)
    chex.assert_trees_all_equal(plain(whole), plain(straight[1]))
    assert metrics(folder) == metrics(straight[0])

    again = train(config, folder, devices=one_device)
    assert "is complete, all 8 steps are done" in capsys.readouterr().out
    chex.assert_trees_all_equal(plain(again), plain(whole))


def test_steps_after_the_last_checkpoint_are_done_again(tmp_path, straight, config, one_device):
    folder = tmp_path / "killed"
    train(config, folder, devices=one_device, stop_after=5)
    shutil.rmtree(folder / "checkpoints" / "5")  # as if killed before it was saved
    chex.assert_trees_all_equal(plain(train(config, folder, devices=one_device)), plain(straight[1]))
    assert metrics(folder) == metrics(straight[0])


def test_a_run_on_one_device_resumes_on_eight_and_back(tmp_path, straight, config, changed, one_device):
    train(config, tmp_path / "run", devices=one_device, stop_after=3)
    state = train(changed(config, mesh=dict(data=4, fsdp=2)), tmp_path / "run", stop_after=6)
    assert len(state.params["embedding"].devices()) == 8
    state = train(config, tmp_path / "run", devices=one_device)
    chex.assert_trees_all_close(state.params, straight[1].params, atol=2e-3)
    np.testing.assert_allclose(metrics(tmp_path / "run")[8], metrics(straight[0])[8], atol=1e-3)


def test_what_a_run_writes_and_says(tmp_path, config, changed, one_device, capsys):
    config = changed(config, train=dict(sample_tokens=3, profile_start=3, profile_steps=2))
    (tmp_path / "run").mkdir()
    train(config, tmp_path / "run", devices=one_device)
    out = capsys.readouterr().out
    for text in ("parameters: ", "cache: 512 bytes per token in float32; multi-head attention of this width: 512 (1.00",
                 "text: ", " held out: ",
                 "devices: 1 (cpu); processes: 1; mesh: data 1 x fsdp 1 x tensor 1 x sequence 1",
                 "step 8/8  loss ", " tokens/s  ETA 0:00:00", "step 4: validation loss", "final validation loss",
                 " bits) per byte", "order-1 byte model ", "order-2 byte model ", "sample:\n\n",
                 "8 steps of 256 tokens in 0:0", " tokens/s of training\nlast losses: training ",
                 "run: checkpoints/, "):
        assert text in out, text
    steps = metrics(tmp_path / "run")
    assert list(steps) == [2, 4, 6, 8] and steps[8] < steps[2]
    assert list(metrics(tmp_path / "run", "validation_loss")) == [4, 8]
    assert metrics(tmp_path / "run", "tokens")[2] <= 8 * 32 and metrics(tmp_path / "run", "learning_rate")[2] > 0
    per_byte = metrics(tmp_path / "run", "validation_nats_per_byte")[8]
    assert 0.5 < per_byte / metrics(tmp_path / "run", "validation_loss")[8] < 1.5
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    with Checkpoints(tmp_path / "run", config.checkpoint) as checkpoints:
        assert checkpoints.steps == [6, 8]
    assert restore_params(tmp_path / "run")[2] == 8


def test_divergence_stops_the_run_names_the_step_and_is_not_saved(tmp_path, config, changed, one_device):
    config = changed(config, optimizer=dict(peak_lr=1e30, warmup_steps=0),
                     checkpoint=dict(every_steps=1, keep_latest=9))
    with pytest.raises(Diverged, match=r"^step \d: .*(nan|inf)") as caught:
        train(config, tmp_path / "run", devices=one_device)
    step = int(str(caught.value)[len("step ")])
    with Checkpoints(tmp_path / "run", config.checkpoint) as checkpoints:
        assert checkpoints.steps == list(range(1, step))


def test_another_configuration_is_refused_listing_what_differs(tmp_path, config, changed, one_device):
    folder = tmp_path / "run"
    train(config, folder, devices=one_device, stop_after=2)
    other = changed(config, optimizer=dict(peak_lr=3e-3), train=dict(seed=1, log_every=5))
    with pytest.raises(ConfigError) as caught:
        train(other, folder, devices=one_device)
    message = str(caught.value)
    assert "optimizer.peak_lr: 0.01 in the folder, 0.003 now" in message and "train.seed: 0 in the folder, 1" in message
    assert "log_every" not in message
    with pytest.raises(ConfigError, match="model.attention.kv_heads"):
        train(changed(config, model=dict(attention=type(config.model.attention)(2, 1, 16))), folder, devices=one_device)

    (folder / "notes.txt").write_text("mine")
    state = train(other, folder, devices=one_device, overwrite=True, stop_after=1)
    assert int(state.step) == 1 and (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path, config, one_device, overwrite):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"something": "else"}')
    with pytest.raises(ConfigError, match="is not the folder of a run, and not empty"):
        train(config, tmp_path, devices=one_device, overwrite=overwrite)
    assert (tmp_path / "checkpoints").is_dir() and "else" in (tmp_path / "config.json").read_text()


def test_settings_that_cannot_work_leave_no_folder(tmp_path, config, changed, one_device):
    for broken, message in ((changed(config, train=dict(batch_size=9)), "batch_size 9"),
                            (changed(config, mesh=dict(data=3)), "8 devices"),
                            (changed(config, model=dict(vocab_size=100)), "vocab_size is 100"),
                            (changed(config, model=dict(context_length=2**16), data=dict(pack=False)), "too few"),
                            (changed(config, data=dict(source="text:nowhere")), "nowhere")):
        with pytest.raises(ConfigError, match=message):
            train(broken, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, config, one_device):
    train(config, tmp_path / "run", devices=one_device, stop_after=2)
    with run_folder.locked(tmp_path / "run"), pytest.raises(ConfigError, match="another process trains in"):
        train(config, tmp_path / "run", devices=one_device)


@pytest.mark.parametrize("damage", [b"{", b"", b"\xff\xfe", None])
def test_a_damaged_configuration_beside_checkpoints_is_named(tmp_path, config, one_device, damage):
    train(config, tmp_path / "run", devices=one_device, stop_after=2)
    path = tmp_path / "run" / "config.json"
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(ConfigError, match="holds checkpoints, but its config.json is missing or damaged"):
        train(config, tmp_path / "run", devices=one_device, overwrite=True)
    assert (tmp_path / "run" / "checkpoints" / "2").exists()


def test_damaged_lines_of_metrics_do_not_stop_a_run(tmp_path, config, one_device):
    train(config, tmp_path / "run", devices=one_device, stop_after=2)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": "a"}\n\xff\xfe\n[]\n{"st')
    train(config, tmp_path / "run", devices=one_device, stop_after=4)
    assert {json.loads(line)["step"] for line in path.read_text().splitlines()} <= {1, 2, 3, 4}


def test_a_run_killed_after_its_last_step_still_gets_its_report(tmp_path, config, one_device, monkeypatch, capsys):
    def killed(*_):
        raise RuntimeError("killed")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(loop, "finish", killed)
        train(config, tmp_path / "run", devices=one_device)
    for said in ("final validation loss", "is complete"):
        train(config, tmp_path / "run", devices=one_device)
        assert said in capsys.readouterr().out

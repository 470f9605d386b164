"""Curves of runs: what is read, what is drawn, and what is refused."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from kvjax.config import ConfigError, save
from kvjax.config_files import load_config
from kvjax.evaluation.curves import mean, read, smoothed
from kvjax.evaluation.plot import main


@pytest.fixture
def make_run(tmp_path):
    """make_run(name, lines) -> the folder of a run of 16 x 128 tokens a step with these metrics."""
    def make(name, lines):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        save(load_config("quickstart"), folder / "config.json")
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return folder
    return make


def lines(offset=0.0):
    """Reports of 30 steps: the first is slow, and one line was cut off."""
    reports = [{"step": step, "loss": 5 - step / 10 + offset, "tokens_per_second": speed}
               for step, speed in ((10, 1.0), (20, 300.0), (30, 100.0))]
    return [*map(json.dumps, reports), '{"step": 40, "lo', json.dumps({"step": 20, "validation_loss": 3.1 + offset}),
            json.dumps({"step": 30, "validation_loss": 3.2 + offset})]


def test_what_is_read(make_run):
    run = read(make_run("a", lines()))
    assert run.losses == {10: 4, 20: 3, 30: 2} and run.validation == {20: 3.1, 30: 3.2}
    assert run.tokens_per_step == 2048 and run.speed == 200
    assert dataclasses.replace(run, speeds=(1.0,)).speed is None


def test_means_are_of_steps_that_all_runs_have_and_smoothing_keeps_straight_lines():
    assert mean([{10: 1.0, 20: 2.0}, {20: 4.0, 30: 5.0}]) == {20: 3.0}
    np.testing.assert_allclose(smoothed([1, 2, 6, 4], 3), [1.5, 3, 4, 5])
    np.testing.assert_allclose(smoothed([7.0]), [7])


def test_the_command_prints_how_runs_ended_and_draws_them(make_run, tmp_path, capsys):
    folders = [make_run("one/kpa", lines()), make_run("two/kpa", lines(1.0)), make_run("one/three", [lines()[0]])]
    main([*map(str, folders), "--out", str(tmp_path / "curves.png")])
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for line in capsys.readouterr().out.splitlines()
            if len(cells := line.split("│")) > 3}
    assert rows["one/kpa"] == ["30", "61,440", "2.0000", "3.1000", "200"]
    assert rows["two/kpa"][2:4] == ["3.0000", "4.1000"] and rows["one/three"][3:] == ["–", "–"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_run_is_refused(make_run, tmp_path, monkeypatch):
    good, picture = str(make_run("good", lines())), str(tmp_path / "curves.png")
    with pytest.raises(ConfigError, match="there are no runs"):
        main(["--out", picture])
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        main([good, str(tmp_path / "nowhere"), "--out", picture])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is this the folder of a run"):
        main([good, str(tmp_path / "empty"), "--out", picture])
    with pytest.raises(ConfigError, match="tells no loss yet"):
        main([str(make_run("new", [])), "--out", picture])
    (make_run("lost", []) / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="lost has no metrics.jsonl"):
        main([str(tmp_path / "lost"), "--out", picture])
    with pytest.raises(ConfigError, match="given more than once"):
        main([good, good, "--out", picture])
    with pytest.raises(ConfigError, match="name a .png"):
        main([good, "--out", str(tmp_path / "curves")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        main([good, "--out", picture])
    assert not (tmp_path / "curves.png").exists()

import json
from types import SimpleNamespace

import jax
import pytest

from kvjax.config import TrainConfig
from kvjax.training import metrics
from kvjax.training.hooks import Every, Profiler
from kvjax.training.metrics import Meter, MetricsFiles, peak_flops


def device(kind):
    return SimpleNamespace(device_kind=kind)


@pytest.mark.parametrize("kind, peak", [
    ("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12),
    ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("TPU v6 lite", 918e12), ("cpu", None),
])
def test_peak_flops_by_the_most_specific_name(kind, peak):
    assert peak_flops(device(kind)) == peak


def test_speed_leaves_out_compilation_and_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    meter = Meter(tokens_per_step=100, flops_per_token=989e9, devices=[device("NVIDIA H100"), device("NVIDIA H100")])
    now[0] = 60.0
    meter.finished_step()  # compiled
    assert meter.rates() == {}
    for _ in range(4):
        now[0] += 0.5
        meter.finished_step()
    assert meter.rates() == {"tokens_per_second": 200.0, "mfu": 200 * 989e9 / (2 * 989e12)}
    now[0] += 100
    meter.restart()  # after an evaluation
    now[0] += 1
    meter.finished_step()
    assert meter.rates()["tokens_per_second"] == 100
    assert "mfu" not in Meter(1, 1.0, [device("cpu")]).rates()


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path):
    with MetricsFiles(tmp_path, 0) as files:
        for step in (1, 2, 3):
            files.write(step, {"loss": step / 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut off
    with MetricsFiles(tmp_path, 2) as files:
        files.write(3, {"loss": 9.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 9.0}]


def test_every():
    often, at_end = Every(3, print, at_end=False), Every(3, print, at_end=True)
    assert [often.due(n, ending=False) for n in (1, 3, 6)] == [False, True, True]
    assert [hook.due(6, ending=True) for hook in (often, at_end)] == [False, True]
    assert at_end.due(7, ending=True)


@pytest.mark.parametrize("start, last, expected", [
    (0, 9, ["start 2", "stop 4"]),  # steps 3 and 4
    (2, 9, ["start 2", "stop 4"]),  # resumed right before them
    (3, 9, []),  # resumed amid them: too late
    (0, 3, ["start 2", "stop 3"]),  # the run ends amid them
    (0, 2, []),
])
def test_profiler_traces_its_window(monkeypatch, tmp_path, start, last, expected):
    seen, step = [], start
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: seen.append(f"start {step}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append(f"stop {step}"))
    config = TrainConfig(steps=9, batch_size=1, profile_start=3, profile_steps=2)
    profiler = Profiler(config, start, tmp_path)
    for step in range(start + 1, last + 1):
        if profiler.due(step, ending=step == last):
            profiler.run(step, SimpleNamespace(params=()))
    assert seen == expected

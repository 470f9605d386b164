"""The kernels' benchmarks, as far as they go without a device: what they time is computed, and nothing is timed."""

import itertools
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from kvjax.benchmarks import attention, decode, device, pytorch
from kvjax.config import ConfigError


@pytest.mark.parametrize("name", ["kvjax.benchmarks.decode", "kvjax.benchmarks.attention", "kvjax.benchmarks.tune"])
def test_a_cpu_is_refused_in_one_line(name):
    ran = subprocess.run([sys.executable, "-m", name], capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1, ran.stderr
    assert "the device here is a cpu (cpu)" in ran.stderr


def test_decoding_is_measured_case_by_case(monkeypatch):
    monkeypatch.setattr(device, "copy_run", lambda: (lambda: np.zeros(1), 8))
    monkeypatch.setattr(decode, "copy_run", device.copy_run)
    rows = decode.measure("reference", decode.Shape(batch=1, length=128, rounds=1))
    assert [row["what"] for row in rows] == ["copy", decode.OWN, *decode.CASES]
    assert all(row["us"] > 0 and row["GB/s"] > 0 for row in rows)


def test_kernel_and_materialised_attention_are_the_same():
    inputs = attention.drawn((2, 2), 1, 130)
    found = attention.forward_and_backward(lambda *x: attention.by_kernel("reference", *x, 0.125), inputs)()
    wanted = attention.forward_and_backward(lambda *x: attention.materialised(*x, 0.125), inputs)()
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() < 2**-5 * np.abs(y).max()
    row = attention.measure("reference", (2, 2), 130, attention.Shape(batch=1, rounds=1))
    assert row["kernel ms"] > 0 and row["split"] == "2x2"


def test_without_torch_the_comparison_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as stopped:
        device.command(pytorch.main, pytorch.Options)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == ("error: torch is not installed: this compares with PyTorch, install it by "
                                       "`pip install -r requirements-torch.txt`\n")


@pytest.mark.torch
def test_what_is_timed_beside_torch_gives_the_same(tmp_path):
    """Outputs, gradients and decoding of every variant: the benchmark refuses to time what differs."""
    pytest.importorskip("torch")
    small = dict(width=48, batch=2, length=20, decode_batch=2, decode_length=128, rounds=1, threads=1)
    pytorch.main(pytorch.Options(**small, out=tmp_path / "figures.json"))
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert {(row["variant"], row["what"]) for row in rows} == set(itertools.product(
        pytorch.CASES, ("training", "decoding")))
    with pytest.raises(ConfigError, match="variants .*'GQB'.* are unknown: choose of MHA, GQA"):
        pytorch.main(pytorch.Options(variants=("GQB",)))

"""A variant of one's own, in files of one's own: trained and evaluated by the two programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import xla_flags

ROOT = Path(__file__).parents[1]

VARIANT = '''
from __future__ import annotations
from dataclasses import dataclass
import kvjax
from kvjax.attention import GroupedQuery

@kvjax.register("halved_scores")
@dataclass(frozen=True)
class Halved(GroupedQuery):
    """Scores at half their size."""
    def queries(self, layer, weights, x, positions):
        return tuple(part / 2 for part in super().queries(layer, weights, x, positions))
'''
CONFIG = '''
from kvjax.config import *

config = Config(
    model=ModelConfig(attention=Halved(2, 1, 8), vocab_size=256, layers=1, width=16, feed_forward_width=16,
                      context_length=32, dtype="float32"),
    data=DataConfig(source="text:TEXT", tokenizer="bytes", validation_fraction=0.3),
    optimizer=OptimizerConfig(warmup_steps=1),
    train=TrainConfig(steps=2, batch_size=2, eval_every=2, eval_batches=1, sample_tokens=0))
'''


def program(name, folder, *arguments):
    environment = os.environ | {"XLA_FLAGS": xla_flags(1)}
    done = subprocess.run([sys.executable, str(ROOT / name), *arguments], cwd=folder, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("files", [
    {"mine.py": VARIANT + CONFIG},
    {"halved.py": VARIANT, "mine.py": "from halved import Halved" + CONFIG},
])
def test_variant_in_or_beside_the_configuration_trains_and_evaluates(tmp_path, files):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(9):
        (text / f"{i}.txt").write_text(f"{i} bottles of beer on the wall, take one down " * 5)
    (tmp_path / "configs").mkdir()
    for name, content in files.items():
        (tmp_path / "configs" / name).write_text(content.replace("TEXT", str(text)))
    assert "halved_scores" in program("train.py", tmp_path, "configs/mine.py")
    assert "times smaller" in program("eval.py", tmp_path, "runs/mine", "--batches", "1")

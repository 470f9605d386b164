"""A tiny run: text, configuration and devices that the training tests share."""

import dataclasses
import random

import jax
import pytest

from kvjax.attention import GroupedQuery
from kvjax.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards mix jugs of liquid".split()


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Equal programs of different tests, and of processes that tests start, are compiled once."""
    settings = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
                "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield settings
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """40 short documents."""
    folder = tmp_path_factory.mktemp("text")
    chooser = random.Random(0)
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(" ".join(chooser.choices(WORDS, k=chooser.randint(5, 80))) + "\n")
    return folder


@pytest.fixture
def config(text_folder):
    """Width 32, 2 layers, T 32; eight steps on one device."""
    return Config(
        model=ModelConfig(GroupedQuery(heads=2, kv_heads=2, head_dim=16), vocab_size=256, layers=2, width=32,
                          feed_forward_width=48, context_length=32, dtype="float32", dropout=0.1, output_init=1.0),
        train=TrainConfig(steps=8, batch_size=8, log_every=2, eval_every=4, eval_batches=1, sample_tokens=0,
                          accelerator=False),
        data=DataConfig(source=f"text:{text_folder}", validation_fraction=0.1),
        optimizer=OptimizerConfig(peak_lr=1e-2, warmup_steps=2),
        checkpoint=CheckpointConfig(every_steps=2, keep_latest=2),
        mesh=MeshConfig(),
    )


@pytest.fixture
def one_device():
    return jax.devices()[:1]


@pytest.fixture
def changed():
    """changed(config, train=dict(steps=3), ...) -> a copy with some settings changed."""
    def change(config, **sections):
        return dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **settings)
                                              for name, settings in sections.items()})
    return change

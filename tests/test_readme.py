"""The README's code runs, and its toy variant keeps the invariants."""

import importlib
import re
import sys
from pathlib import Path

import invariants
import jax.numpy as jnp
import pytest
from variants import model_config

import kvjax

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(mark: str) -> str:
    """The Python block behind a comment."""
    return re.search(rf"<!-- {mark} -->\n```python\n(.*?)```", README, re.DOTALL)[1]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A model of the README's variant, whose module lies outside the package."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_variant.py").write_text(block("tested: variant"))
    sys.path.insert(0, str(folder))
    yield model_config(importlib.import_module("my_variant").TiedKeyValue(heads=4, head_dim=8))
    sys.path.remove(str(folder))


@pytest.mark.parametrize("mark", ["tested", "tested: compaction"])
def test_library_examples_run(mark):
    exec(block(mark), {})


def test_a_variant_from_outside_keeps_the_invariants(toy):
    invariants.check_decoding(toy)
    invariants.check_bytes(toy, 8)
    invariants.check_gradients(toy)


def test_a_variant_from_outside_generates(toy):
    model, params, prompt = kvjax.build_model(toy), invariants.random_params(toy), [3, 1, 4]
    (drawn,) = kvjax.generate(model, params, [prompt], max_new_tokens=5, temperature=0)
    for i, token in enumerate(drawn):
        logits = model.apply({"params": params}, jnp.asarray([prompt + drawn[:i]]))
        assert token == int(logits[0, -1].argmax())


def test_a_variant_from_outside_is_found_again_from_a_saved_configuration(toy, monkeypatch):
    saved = kvjax.config.to_dict(toy)
    assert saved["attention"]["module"] == "my_variant"
    assert kvjax.config.from_dict(kvjax.ModelConfig, saved) == toy
    monkeypatch.delitem(kvjax.config._VARIANTS, "tied_key_value")
    monkeypatch.delitem(sys.modules, "my_variant")
    again = kvjax.config.from_dict(kvjax.ModelConfig, saved)
    assert kvjax.config.to_dict(again) == saved

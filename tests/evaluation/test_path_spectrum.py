"""Spectra of states and of their changes, on models for which the truth is known."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from invariants import random_params, tokens_of
from variants import model_config

from kvjax import ConfigError
from kvjax.attention import GroupedQuery, Kronecker, SkipV1
from kvjax.convert.folder import save_model
from kvjax.data.tokenizers import ByteTokenizer
from kvjax.evaluation.path_spectrum import main, measure
from kvjax.evaluation.spectrum_report import content, kept, markdown
from kvjax.model.activations import layer_inputs

GQA = GroupedQuery(heads=4, kv_heads=2, head_dim=8)
CONFIG = model_config(GQA)
BATCH = {"tokens": np.asarray(tokens_of(CONFIG))}


def attention_of(params, **changed):
    """The parameters with some attention weights replaced."""
    layer = params["segment_0"]["layer_0"]
    layer = layer | {"attention": layer["attention"] | changed}
    return params | {"segment_0": {"layer_0": layer}}


def still(params):
    """The parameters of a model whose layers all see the same input: nothing is added to the stream."""
    layer = params["segment_0"]["layer_0"]
    norm = jnp.ones_like(layer["attention_norm"])
    down = layer["feed_forward"] | {"down": jnp.zeros_like(layer["feed_forward"]["down"])}
    silent = attention_of(params, o_proj=jnp.zeros_like(layer["attention"]["o_proj"]))["segment_0"]["layer_0"]
    return params | {"segment_0": {"layer_0": silent | {"feed_forward": down, "attention_norm": norm}}}


def test_energies_are_those_of_the_projected_inputs_token_by_token():
    config = model_config(GroupedQuery(heads=4, kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True))
    params, mask = random_params(config), np.ones(BATCH["tokens"].shape, np.float32)
    mask[1, 5:] = 0
    spectra = measure(config, params, [BATCH | {"loss_mask": mask}])
    inputs = np.asarray(layer_inputs(config, params, BATCH["tokens"]), np.float64)[:, mask > 0]
    weights = params["segment_0"]["layer_0"]["attention"]
    for name in ("k", "v"):
        states = np.einsum("lnd,ldgh->lgnh", inputs, weights[f"{name}_proj"]) + weights[f"{name}_bias"][:, :, None]
        for found, rows in ((spectra[name].states, states), (spectra[name].changes, np.diff(states, axis=0))):
            np.testing.assert_allclose(found, np.linalg.svd(rows, compute_uv=False)**2, rtol=1e-4, atol=1e-3)


def test_batches_add_up():
    params = random_params(CONFIG)
    whole = measure(CONFIG, params, [BATCH])
    parts = measure(CONFIG, params, [{"tokens": BATCH["tokens"][i:i + 1]} for i in range(len(BATCH["tokens"]))])
    np.testing.assert_allclose(parts["k"].changes, whole["k"].changes, rtol=1e-4, atol=1e-3)


def test_layers_alike_with_inputs_alike_do_not_change():
    params = still(random_params(CONFIG))
    weights = params["segment_0"]["layer_0"]["attention"]
    alike = {name: jnp.broadcast_to(weights[name][:1], weights[name].shape) for name in ("k_proj", "v_proj")}
    for spectrum in measure(CONFIG, attention_of(params, **alike), [BATCH]).values():
        assert spectrum.states.sum() > 100
        assert not spectrum.changes.any() and not spectrum.ratio.any() and (kept(spectrum.changes) == 1).all()
        assert not spectrum.lost()[1].any()


def test_a_projection_of_rank_r_has_all_its_energy_in_r_directions():
    params, rank = random_params(CONFIG), 3
    left = jax.random.normal(jax.random.key(3), (3, 32, 2, rank))
    right = jax.random.normal(jax.random.key(4), (2, rank, 8))
    k_proj = jnp.einsum("ldgr,grh->ldgh", left, right)  # the same directions in all layers: changes lie in them too
    spectrum = measure(CONFIG, attention_of(params, k_proj=k_proj), [BATCH])["k"]
    for energies in (spectrum.states, spectrum.changes):
        shares = kept(energies)
        np.testing.assert_allclose(shares[..., rank - 1:], 1, atol=1e-6)
        assert (shares[..., rank - 2] < 0.999).all()


def test_an_opposite_state_changes_by_four_times_its_energy():
    params = still(random_params(CONFIG))
    weights = params["segment_0"]["layer_0"]["attention"]
    sign = jnp.array([1.0, -1.0, 1.0])[:, None, None, None]
    opposite = {name: weights[name][:1] * sign for name in ("k_proj", "v_proj")}
    for spectrum in measure(CONFIG, attention_of(params, **opposite), [BATCH]).values():
        np.testing.assert_allclose(spectrum.ratio, 4, rtol=1e-5)
        own, as_change = spectrum.lost()
        np.testing.assert_allclose(as_change, 4 * own, atol=1e-5)


def test_shares_grow_from_0_to_1():
    for spectrum in measure(CONFIG, random_params(CONFIG), [BATCH]).values():
        assert spectrum.states.shape == (3, 2, 8) and spectrum.changes.shape == (2, 2, 8)
        for shares in (kept(spectrum.states), kept(spectrum.changes)):
            assert (shares > 0).all() and (np.diff(shares) >= 0).all()
            np.testing.assert_allclose(shares[..., -1], 1, atol=1e-12)


def test_tables_hold_the_means():
    spectra = measure(CONFIG, random_params(CONFIG), [BATCH])
    lines, figures = markdown(spectra).splitlines(), content(spectra)
    first = kept(spectra["k"].states)[0, :, [0, 1, 3]].mean(1)
    row = f"| 1 | {' | '.join(f'{x:.3f}' for x in first)} | "
    assert sum(line.startswith(row) for line in lines) == 1
    assert sum(line.startswith("| 3 | ") and line.endswith(" | – | – | – | – |") for line in lines) == 2
    assert lines[0] == "| share of energy, r = | 1 | 2 | 4 |"
    assert np.shape(figures["values"]["changes_kept"]["4"]) == (2, 2)
    assert figures["keys"]["change_over_state"] == np.round(spectra["k"].ratio, 6).tolist()


@pytest.mark.parametrize(("config", "message"), [
    (model_config(Kronecker(h1=4, h2=2, d1=2, d2=4)), "attention is Kronecker"),
    (model_config(GQA, sharing=SkipV1()), "sharing is SkipV1"),
    (model_config(GQA, layers=1), "has 1 layer"),
])
def test_models_without_such_states_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        measure(config, {}, [])


@pytest.fixture
def folder(tmp_path):
    """A converted model of bytes, and a text."""
    config = model_config(GQA, vocab_size=256, context_length=32)
    save_model(tmp_path / "model", config, random_params(config), ByteTokenizer())
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"Document {i} says nothing of note, {i} times over. " * 5)
    return tmp_path


def test_command_writes_tables_figures_and_plot(folder, capsys):
    main([str(folder / "model"), "--text", f"text:{folder}/*.txt", "--tokens", "70", "--out", str(folder / "out")])
    table = (folder / "out/path_spectrum.md").read_text()
    assert table in capsys.readouterr().out and table.startswith("model, 96 tokens of text:")
    figures = json.loads((folder / "out/path_spectrum.json").read_text())
    assert figures["tokens"] == 96 and len(figures["keys"]["mean_states_kept"]) == 8
    assert (folder / "out/path_spectrum.png").read_bytes().startswith(b"\x89PNG")


def test_command_refuses_what_it_cannot_do(folder, monkeypatch):
    model, text = str(folder / "model"), f"text:{folder}/*.txt"
    with pytest.raises(ConfigError, match=r"has \d+ tokens, and 9000 are wanted"):
        main([model, "--text", text, "--tokens", "9000"])
    with pytest.raises(ConfigError, match="tokens is 0"):
        main([model, "--tokens", "0"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        main([model, "--text", text, "--out", str(folder / "out")])

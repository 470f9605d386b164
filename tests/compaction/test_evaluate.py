"""Figures of compaction on a small random model: against plain NumPy, at the ends of their range, and as files."""

import dataclasses
import json
import sys
from functools import lru_cache

import numpy as np
import pytest
import references as loops
from invariants import random_params
from variants import KPA, model_config

from kvjax import ConfigError
from kvjax.attention import CrossLayer, GroupedQuery
from kvjax.compaction import evaluate, measures
from kvjax.compaction.compacting import compact
from kvjax.compaction.evaluate import Arguments, Place, main, measure
from kvjax.convert.folder import save_model
from kvjax.data.tokenizers import ByteTokenizer

CONFIG = model_config(GroupedQuery(heads=4, kv_heads=2, head_dim=8), layers=2, vocab_size=256, context_length=64)
CONTEXT, FOLLOW = 16, 5
BASE = Arguments("model", context_tokens=CONTEXT, continuation_tokens=FOLLOW)
BOTH = dict(methods=("recent", "am_highest"), ratios=(1.0, 4.0))
PLACE = Place("text", 0, np.random.default_rng(5).integers(0, 255, CONTEXT + FOLLOW + 1).astype(np.int32))


@lru_cache
def figures(config=CONFIG, **changed):
    """What is measured of one context, by (method, reading, ratio), and the rest."""
    (result,) = measure(dataclasses.replace(BASE, **changed), config, random_params(config), [PLACE])
    return {(m.method, m.reading, m.ratio): m for m in result.measured}, result


@lru_cache
def prepared():
    """A context read by the command's own steps, and how."""
    model = evaluate.build_model(CONFIG)
    how = measures.How(model, random_params(CONFIG), CONTEXT, "repeated", 1024, 0, "float32", 0)
    return how, measures.prepare(how, PLACE.tokens, ("am_highest",), warm=True)


def through(monkeypatch, left):
    """Log-probabilities [5, V] of the continuation in float64, which sees the last `left` tokens of the context; and
    what the first layer's heads get of these alone."""
    length, recorded, attend = CONTEXT + FOLLOW, [], loops.attend
    seen = np.tril(np.ones((length, length), bool))
    seen[CONTEXT:, :CONTEXT - left] = False
    def recording(queries, keys, values, visible, scale):
        recorded.append(attend(queries, keys, values, visible & (np.arange(length) < CONTEXT), scale))
        return attend(queries, keys, values, visible, scale)
    monkeypatch.setattr(loops, "visible_tokens", lambda *_: seen)
    monkeypatch.setattr(loops, "attend", recording)
    logits = loops.logits(CONFIG, random_params(CONFIG), PLACE.tokens[:-1])[CONTEXT:]
    heads = np.stack([head[CONTEXT:] for head in recorded[0]], axis=1)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), heads


def test_figures_are_those_of_plain_numpy(monkeypatch):
    full, of_all = through(monkeypatch, CONTEXT)
    monkeypatch.undo()
    short, of_some = through(monkeypatch, 4)
    found, result = figures(**BOTH)
    found = found["recent", "copied", 4.0]
    perplexity = lambda logprobs: np.exp(-logprobs[np.arange(FOLLOW), PLACE.tokens[CONTEXT + 1:]].mean())
    assert result.perplexity == pytest.approx(perplexity(full), rel=1e-4)
    assert found.perplexity == pytest.approx(perplexity(short), rel=1e-4)
    assert found.kl == pytest.approx((np.exp(full) * (full - short)).sum(-1).mean(), rel=1e-3)
    error = np.sqrt(((of_some - of_all)**2).sum(-1).mean() / (of_all**2).sum(-1).mean())
    assert found.far_error[0] == pytest.approx(error, rel=1e-3)
    assert (found.left, len(found.far_error), found.bound) == (4, 2, None)
    assert found.bytes_per_slot == 2 * 2 * 2 * 8 * 4, "layers, keys and values, heads, their width, bytes"
    assert (result.nbytes, found.nbytes) == (128 * 256, 256 * 256), "in tiles of 128 tokens"


def test_little_is_lost_at_ratio_1():
    found, result = figures(**BOTH)
    for reading, most in ((("recent", "copied"), 1e-5), (("am_highest", "biased"), 1e-3)):
        one, four = found[*reading, 1.0], found[*reading, 4.0]
        assert one.left == CONTEXT and abs(one.kl) < most < 1e-2 < four.kl
        assert one.perplexity == pytest.approx(result.perplexity, rel=1e-2)
        assert max(one.near_error + one.far_error) < 0.05 < min(four.far_error)


def test_readings_are_of_one_fit_and_differ():
    how, made = prepared()
    caches = {reading: cache for reading, (cache, _) in measures.compacted(how, made, "am_highest", 4, True).items()}
    for reading, fold in (("biased", False), ("folded", True)):
        expected = compact(how.model, how.params, made.cache, 4, made.references["repeated"], fold=fold)
        held = caches[reading].prefix.cache.components
        assert held.keys() == expected.prefix.cache.components.keys() and ("bias" in held) == (not fold)
        for name, x in expected.prefix.cache.components.items():
            np.testing.assert_allclose(held[name], x, rtol=1e-4, atol=1e-4)
    biased, dropped = (caches[reading].prefix.cache.components for reading in ("biased", "dropped"))
    assert dropped.keys() == {"k", "v"} and all((dropped[name] == biased[name]).all() for name in dropped)
    assert np.abs(biased["bias"]).max() > 0.1
    found, _ = figures(**BOTH)
    kls = {found["am_highest", reading, 4.0].kl for reading in ("biased", "folded", "refitted", "dropped")}
    assert len(kls) == 4


def test_folding_stays_within_its_bound():
    found, result = figures(**BOTH)
    bound = found["am_highest", "folded", 4.0].bound
    assert found["am_highest", "biased", 4.0].bound is None
    for name in ("near", "far"):
        actual, most = (np.asarray(getattr(bound, f"{name}_{what}")) for what in ("actual", "bound"))
        assert (0 < actual).all() and (actual < most).all() and max(getattr(bound, f"{name}_excess")) < 1e-5
    np.testing.assert_allclose(result.drift.near_mean, 1, atol=1e-4)
    assert np.shape(result.drift.far_sd) == (2, 2) and np.min(result.drift.means_apart) > 0


def test_drift_is_that_of_the_means():
    _, made = prepared()
    near, far = (np.asarray(queries[0, 0]) for queries in made.queries[1])
    drift = measures.drift_of(made)
    apart = np.linalg.norm(far.mean(0) - near.mean(0)) / np.sqrt(((near - near.mean(0))**2).sum(-1).mean())
    assert drift.means_apart[1][0] == pytest.approx(apart, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("config", [model_config(KPA, layers=1, vocab_size=256),
                                    dataclasses.replace(CONFIG, sharing=CrossLayer())], ids=["kpa", "cla"])
def test_other_variants_are_measured_by_layer(config):
    found, result = figures(config, methods=("am_highest",), ratios=(4.0,), references="context")
    assert all(len(m.far_error) == config.layers and 0 < m.kl < 10 for m in found.values())
    folds = config.attention is not KPA
    assert (result.drift is not None) == folds == (("am_highest", "folded", 4.0) in found)
    assert ("am_highest", "dropped", 4.0) in found


@pytest.mark.parametrize("changed", [
    pytest.param(dict(references="generated", cache_dtype="bfloat16"), marks=pytest.mark.full),
    dict(keep=3, methods=("snapkv", "random"))])
def test_other_settings(changed):
    found, _ = figures(**dict(methods=("am_highest",), ratios=(4.0,)) | changed)
    assert all(m.left == 4 and 0 < m.kl < 10 for m in found.values())


@pytest.fixture
def folder(tmp_path):
    """A model of bytes, and a text."""
    save_model(tmp_path / "model", CONFIG, random_params(CONFIG), ByteTokenizer())
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"Document {i} says nothing of note, {i} times over.")
    return tmp_path


def arguments(folder, *more):
    return [str(folder / "model"), "--text", f"text:{folder}/*.txt", "--contexts", "2", "--context-tokens", "16",
            "--continuation-tokens", "5", *more]


def test_command_writes_tables_figures_and_plot(folder, capsys, monkeypatch):
    more = ["--methods", "recent", "am_highest", "--ratios", "4", "--out", str(folder / "out")]
    main(arguments(folder, *more))
    table, printed = (folder / "out/compaction.md").read_text(), capsys.readouterr().out
    assert table in printed and table.startswith("model: 2 contexts of 16 tokens of text:")
    assert "1 of 2: text:" in printed and "KL at 4x: recent " in printed
    figures = json.loads((folder / "out/compaction.json").read_text())
    kls = [m["kl"] for context in figures["contexts"] for m in context["measured"]
           if (m["method"], m["ratio"]) == ("recent", 4)]
    mean, error = np.mean(kls), abs(kls[0] - kls[1]) / 2
    assert f"| recent | {mean:.3g} ± {error:.1g} |" in table
    assert figures["summary"][0]["kl"] == pytest.approx({"mean": mean, "standard_error": error})
    seconds = [m["seconds"] for context in figures["contexts"] for m in context["measured"]]
    assert seconds[:5] == [None] * 5 and min(seconds[5:]) > 0
    assert len(figures["summary"]) == 1 + 4 and figures["settings"]["ratios"] == [4]
    assert (folder / "out/compaction.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(evaluate, "measure", lambda args, config, params, places: iter(places))  # nothing is left to do
    main(arguments(folder, *more))
    assert table in capsys.readouterr().out
    with pytest.raises(ConfigError, match="was made with other keep: choose another --out"):
        main(arguments(folder, *more, "--keep", "1"))


@pytest.mark.parametrize(("more", "message"), [
    (["--methods", "am_hihgest"], "did you mean 'am_highest'"),
    (["--methods", "recent", "recent"], "give at least one, and each once"),
    (["--ratios", "0.5"], "ratio 0.5 would need more tokens than there are"),
    (["--ratios", "50"], "ratio 50 leaves 0 of 16 tokens"),
    (["--keep", "4", "--ratios", "4"], "leaves 4 of 16 tokens, and 4 are kept"),
    (["--context-tokens", "60"], "the model's context length is 64"),
    (["--context-tokens", "33", "--ratios", "2"], "once more.* reach position 66"),
    (["--contexts", "9"], r"has \d places of 22 tokens inside of a document, and 9 are wanted"),
    (["--continuation-tokens", "0"], "continuation-tokens is 0"),
    (["--cache-dtype", "float31"], "float31"),
])
def test_command_refuses_what_it_cannot_do(folder, more, message):
    with pytest.raises(ConfigError, match=message):
        main(arguments(folder, *([] if "--ratios" in more else ["--ratios", "2"]), *more))


def test_command_needs_a_tokenizer_heads_and_a_plotting_library(folder, monkeypatch):
    save_model(folder / "mute", CONFIG, random_params(CONFIG))
    with pytest.raises(ConfigError, match="brings no tokenizer"):
        main([str(folder / "mute"), "--context-tokens", "16", "--continuation-tokens", "5", "--ratios", "2"])
    windowed = dataclasses.replace(CONFIG, window=4)
    save_model(folder / "windowed", windowed, random_params(windowed), ByteTokenizer())
    with pytest.raises(ConfigError, match="nothing to compact"):
        main([str(folder / "windowed"), "--context-tokens", "16", "--continuation-tokens", "5", "--ratios", "2"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        main(arguments(folder, "--ratios", "2", "--out", str(folder / "out")))

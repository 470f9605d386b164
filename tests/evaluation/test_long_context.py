"""Loss by position and retrieval of a pass key: what is measured, what is written, and what is refused."""

import json
import random

import jax
import numpy as np
import pytest
from tiny_models import restored_model

from kvjax.attention import Kronecker
from kvjax.config import ConfigError, MeshConfig
from kvjax.convert.folder import save_model
from kvjax.data.tokenizers import ByteTokenizer
from kvjax.evaluation import passkey
from kvjax.evaluation.continuations import Score, score_continuations
from kvjax.evaluation.long_context import Arguments, buckets, losses_of, main
from kvjax.evaluation.run import adjusted
from kvjax.sharding import make_mesh


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder, words = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(40):
        (folder / f"{i}.txt").write_text(" ".join(words.choices(["ant", "bee", "fox", "owl"], k=200)))
    return folder


def test_the_key_is_said_where_it_should_be_and_asked_for_at_the_end():
    filler = list(b"0123456789abcdefghijklmnopqrstuvwxyz" * 9)
    said = (passkey.SAID + " 54321" + passkey.AFTER).encode()
    for depth in (0, 0.25, 0.5, 1, None):
        context, key = passkey.trial(ByteTokenizer(), filler, 300, depth, 54321)
        whole = bytes(context + key)
        assert len(whole) == 300 and whole.endswith(passkey.ASKED.encode() + b" 54321")
        rest = whole.removesuffix(passkey.ASKED.encode() + b" 54321")
        assert rest.count(said) == (depth is not None)
        assert rest.replace(said, b"") == bytes(filler[:len(rest) - (0 if depth is None else len(said))])
        if depth is not None:
            assert rest.index(said) == round(depth * (len(rest) - len(said)))


def test_a_reader_that_looks_the_key_up_finds_it_everywhere_but_nowhere(monkeypatch):
    def look_up(model, params, pairs, **_):
        found = [bytes(key) in bytes(context) for context, key in pairs]
        return [Score(-1.5 * len(key) if seen else -9.0 * len(key), seen)
                for seen, (_, key) in zip(found, pairs, strict=True)]
    monkeypatch.setattr(passkey, "score_continuations", look_up)
    fillers = [np.frombuffer(b"some text " * 30, np.uint8)] * 3
    found = passkey.retrieve(None, None, ByteTokenizer(), fillers, (150, 200), (0.0, 1.0))
    assert found == [passkey.Retrieval(length, depth, *((0.0, 9.0) if depth is None else (1.0, 1.5)), 3)
                     for length in (150, 200) for depth in (0.0, 1.0, None)]


def test_keys_are_scored_by_the_model_behind_their_own_text():
    restored = restored_model(context_length=160)
    filler = np.frombuffer(b"the quick brown fox " * 20, np.uint8).astype(np.int32)
    found, = passkey.retrieve(restored.model, restored.params, restored.tokenizer, [filler], (150,), ())
    key = np.random.default_rng(0).integers(10_000, 100_000, 1)[0]
    pair = passkey.trial(restored.tokenizer, filler.tolist(), 150, None, int(key))
    score, = score_continuations(restored.model, restored.params, [pair])
    assert found.nats == pytest.approx(-score.logprob / 6) and found.depth is None


@pytest.mark.parametrize("changes", [{}, {"attention": Kronecker(2, 2, 2, 4), "window": 20}])
def test_losses_by_position_are_those_of_a_plain_pass_beyond_the_context_length_too(changes):
    restored = adjusted(restored_model(**changes), {}, context_length=150)
    tokens = np.random.default_rng(0).integers(0, 256, (3, 151)).astype(np.int32)
    found = losses_of(Arguments((), batch_size=2), "", restored, tokens)
    logits = restored.model.apply({"params": restored.params}, tokens[:, :-1])
    nats = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[:, 1:, None], -1)[..., 0]
    assert [bucket[:2] for bucket in found] == [(1, 32), (33, 64), (65, 128), (129, 150)]
    for bucket in found:
        part = nats[:, bucket.first - 1:bucket.last].mean(1)
        np.testing.assert_allclose(bucket[2:], (part.mean(), part.std(ddof=1) / 3**0.5), rtol=1e-4)


def test_a_mesh_changes_no_loss():
    tokens = np.random.default_rng(1).integers(0, 256, (3, 65)).astype(np.int32)
    alone = losses_of(Arguments((), batch_size=2), "", restored_model(), tokens)
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2), jax.devices())
    with jax.set_mesh(mesh):
        spread = losses_of(Arguments((), batch_size=2), "", restored_model(mesh), tokens)
    np.testing.assert_allclose(alone, spread, rtol=1e-5)


def test_a_single_row_has_no_standard_error():
    assert buckets(np.ones((1, 40))) == [(1, 32, 1.0, None), (33, 40, 1.0, None)]


def test_models_are_measured_and_written(text, tmp_path, capsys):
    for name, length in (("short", 128), ("long", 256)):
        restored = restored_model(context_length=length)
        save_model(tmp_path / name, restored.config.model, restored.params, restored.tokenizer)
    main([str(tmp_path / "short"), str(tmp_path / "long"), "--text", f"text:{text}", "--places", "2", "--depths", "0.5",
          "--out", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out" / "long_context.json").read_text())
    assert written["settings"]["lengths"] == [128, 256]
    short, long = written["models"]
    assert [row["last"] for row in short["losses"]] == [32, 64, 128, 256] and short["losses"] == long["losses"]
    table = (tmp_path / "out" / "long_context.md").read_text()
    assert table in capsys.readouterr().out
    rows = {line.split(" (")[0]: line for line in table.splitlines() if line.startswith(("| short", "| long"))}
    assert rows["| short"].count("*") == 1 and rows["| long"].count("*") == 0
    assert (tmp_path / "out" / "long_context.png").stat().st_size > 10_000


@pytest.mark.parametrize(("more", "told"), [
    (["--lengths", "60", "--places", "2"], "a text of 60 tokens has -"),
    (["--lengths", "128", "128"], "each once"),
    (["--lengths", "100000"], "places of 100001 tokens"),
    (["--depths", "1.5"], r"depths are \[1.5\]: they go from 0"),
    (["--places", "0"], "places is 0"),
    (["--cache-dtype", "int3"], "int3"),
    (["--out", "{file}"], "is a file"),
])
def test_bad_arguments_are_refused(text, tmp_path, more, told):
    restored = restored_model()
    save_model(tmp_path / "model", restored.config.model, restored.params, restored.tokenizer)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=told):
        main([str(tmp_path / "model"), "--text", f"text:{text}",
              *(part.format(file=tmp_path / "file") for part in more)])


def test_learned_positions_end_with_their_table(text, tmp_path):
    restored = restored_model(positions="learned", context_length=128)
    save_model(tmp_path / "model", restored.config.model, restored.params, restored.tokenizer)
    with pytest.raises(ConfigError, match="model has a table of 128 learned positions, and lengths are"):
        main([str(tmp_path / "model"), "--text", f"text:{text}", "--lengths", "256"])

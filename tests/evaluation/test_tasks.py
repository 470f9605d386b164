"""Scores of continuations against plain forward passes, and lm-eval's tasks on local questions."""

import dataclasses
import importlib
import json

import jax
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from tiny_models import CONTEXT, restored_model

from kvjax.attention import Kronecker
from kvjax.config import ConfigError, MeshConfig
from kvjax.data.tokenizers import ByteTokenizer
from kvjax.evaluation import tasks
from kvjax.evaluation.continuations import Line, batches_of, rounded, score_continuations
from kvjax.evaluation.lm_eval import LanguageModel, before_stop
from kvjax.sharding import make_mesh

evaluation = importlib.import_module("eval")


@pytest.fixture(scope="module")
def restored():
    return restored_model()


@pytest.fixture(scope="module")
def logprobs(restored):
    """Log-probabilities [T, V] of the token behind each of T tokens, by one plain pass of fixed shape."""
    apply = jax.jit(lambda tokens: jax.nn.log_softmax(restored.model.apply({"params": restored.params}, tokens)))
    def run(tokens):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, :len(tokens)] = tokens
        return np.asarray(apply(padded)[0, :len(tokens)], np.float64)
    return run


@pytest.fixture(scope="module")
def by_hand(logprobs):
    """(sum of log-probabilities, all greedy) of a continuation, by a pass over as many tokens as fit."""
    def run(context, continuation):
        tokens = [*context, *continuation][-CONTEXT - 1:]
        found = logprobs(tokens[:-1])[-len(continuation):]
        return (found[np.arange(len(continuation)), continuation].sum(),
                bool((found.argmax(-1) == continuation).all()))
    return run


@pytest.fixture(scope="module")
def pairs(logprobs):
    """Questions of two to four choices, contexts up to longer than the model reads; one choice is the greedy one."""
    random, found = np.random.default_rng(0), []
    for length, choices in ((1, 2), (5, 3), (20, 3), (70, 3), (30, 1)):
        context = random.integers(0, 256, length).tolist()
        found += [(context, random.integers(0, 256, random.integers(1, 9)).tolist()) for _ in range(choices)]
        found.append((context, [int(logprobs(context[-CONTEXT:])[-1].argmax())]))
    return found


@pytest.mark.parametrize("batch_size", [2, 32])
def test_scores_are_those_of_a_plain_pass_whatever_the_batch_size(restored, pairs, by_hand, batch_size):
    scores = score_continuations(restored.model, restored.params, pairs, batch_size=batch_size)
    wanted = [by_hand(*pair) for pair in pairs]
    np.testing.assert_allclose([s.logprob for s in scores], [logprob for logprob, _ in wanted], rtol=0, atol=3e-5)
    assert [s.greedy for s in scores] == [greedy for _, greedy in wanted]
    assert 5 <= sum(s.greedy for s in scores) < len(scores)


def test_scores_are_the_same_over_a_mesh(pairs, by_hand):
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices())
    spread = restored_model(mesh)
    with jax.set_mesh(mesh):
        scores = score_continuations(spread.model, spread.params, pairs)
    np.testing.assert_allclose([s.logprob for s in scores], [by_hand(*pair)[0] for pair in pairs], rtol=0, atol=3e-5)


@pytest.mark.parametrize("changes", [
    dict(attention=Kronecker(2, 2), sharing=None), dict(sharing=None, window=12),
    dict(sharing=None, positions="learned")], ids=["kronecker", "window", "learned positions"])
def test_other_models_score_alike(pairs, changes):
    restored = restored_model(**changes)
    scores = score_continuations(restored.model, restored.params, pairs)
    apply = jax.jit(lambda tokens: jax.nn.log_softmax(restored.model.apply({"params": restored.params}, tokens)))
    for (context, continuation), score in zip(pairs, scores, strict=True):
        tokens = np.zeros((1, CONTEXT), np.int32)
        kept = [*context, *continuation][-CONTEXT - 1:]
        tokens[0, :len(kept) - 1] = kept[:-1]
        found = np.asarray(apply(tokens)[0])[len(kept) - 1 - len(continuation):len(kept) - 1]
        assert abs(found[np.arange(len(continuation)), continuation].sum() - score.logprob) < 3e-5


def test_what_choices_share_is_read_once():
    lines = [Line(i, tuple(range(20)), (7, i)) for i in range(4)] + [Line(4, (1,), (2, 3))]
    batches = batches_of(lines, batch_size=8)
    assert [(b.shared_length, b.each, len(b.questions)) for b in batches] == [(32, 4, 1), (32, 1, 1)]
    assert [line.index for batch in batches for lines in batch.questions for line in lines] == [0, 1, 2, 3, 4]


def test_more_choices_than_a_batch_holds_make_several_batches():
    batches = batches_of([Line(i, (5,), (7, i)) for i in range(7)], batch_size=3)
    assert [len(lines) for batch in batches for lines in batch.questions] == [3, 3, 1]
    assert all(batch.rows <= 3 for batch in batches)


def test_lengths_are_rounded_up_to_few_sizes():
    assert {rounded(n, 8) for n in range(1, 129)} == {8, 16, 32, 64, 128}
    assert [rounded(n, 8) for n in (0, 129, 192, 193, 257, 400)] == [0, 192, 192, 256, 384, 512]


@pytest.mark.parametrize(("pair", "message"), [
    (([], [1]), "0 tokens of context"), (([1], []), "0 of continuation"),
    (([1], [2] * (CONTEXT + 1)), f"continuation of {CONTEXT + 1} tokens")])
def test_what_cannot_be_scored_is_refused(restored, pair, message):
    with pytest.raises(ConfigError, match=message):
        score_continuations(restored.model, restored.params, [pair])


def instances(kind, *arguments):
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def test_log_likelihoods_of_texts(restored, by_hand):
    texts = [("Question: is it?\nAnswer:", " yes"), ("", "alone"), ("  ", "after spaces"), ("a" * 60, "bc")]
    found = LanguageModel(restored).loglikelihood(instances("loglikelihood", *texts))
    eos = [ByteTokenizer.eos_id]
    encoded = [(list(texts[0][0].encode()), list(b" yes")), (eos, list(b"alone")), (eos, list(b"  after spaces")),
               (list(texts[3][0].encode()), list(b"bc"))]
    np.testing.assert_allclose([logprob for logprob, _ in found], [by_hand(*pair)[0] for pair in encoded], atol=3e-5)


def test_a_choice_without_text_is_refused(restored):
    with pytest.raises(ConfigError, match="choice without text, after 'Which\\?'"):
        LanguageModel(restored).loglikelihood(instances("loglikelihood", ("Which?", "")))


@pytest.mark.parametrize("length", [0, 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT - 5])
def test_whole_texts_count_every_token_once(restored, logprobs, length):
    """The first window begins with end-of-text; each later token is predicted from as many before it as fit."""
    text = "".join(map(chr, np.random.default_rng(length).integers(97, 122, length)))
    (found,) = LanguageModel(restored).loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    tokens, wanted = [ByteTokenizer.eos_id, *text.encode()], 0.0
    for start in range(0, length, CONTEXT):
        end = min(start + CONTEXT, length)  # tokens start .. end - 1 of the text, whose window ends with them
        seen = tokens[max(0, end - CONTEXT):end]
        wanted += logprobs(seen)[np.arange(len(seen)), tokens[max(0, end - CONTEXT) + 1:end + 1]][start - end:].sum()
    assert found == pytest.approx(wanted, abs=1e-4)


def test_generated_texts_end_at_the_first_stop(restored):
    model, context = LanguageModel(restored, batch_size=2), "Once upon a time, " * 5
    ask = lambda **settings: model.generate_until(instances("generate_until", *[(c, settings) for c in
                                                                               (context, "b", "cc")]))
    whole = ask(max_gen_toks=12, until=[])
    assert whole == LanguageModel(restored, batch_size=3).generate_until(
        instances("generate_until", *[(c, {"max_gen_toks": 12, "until": []}) for c in (context, "b", "cc")]))
    stop = whole[1][2:4]
    assert ask(max_gen_toks=12, until=[stop, ""]) == [before_stop(text, [stop]) for text in whole]
    assert stop not in ask(max_gen_toks=12, until=stop)[1]
    with pytest.raises(ConfigError, match=f"max_gen_toks is {CONTEXT}"):
        ask(max_gen_toks=CONTEXT, until=[])


ROWS = {"arc_easy": [{"query": "Question: One?", "choices": ["it", "is not"], "gold": 0},
                     {"query": "Question: Two?", "choices": ["a", "bb", "ccc"], "gold": 2}],
        "winogrande": [{"context_options": ["He so he", "He so she"], "continuation": "ran.", "gold": 1}],
        "openbook_qa": [{"query": "Cows eat", "choices": ["grass", "stones"], "gold": 0},
                          {"query": "Cats eat", "choices": ["mice", "trees"], "gold": 0}] * 2}


@pytest.fixture
def folder(tmp_path):
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_accuracies_are_those_of_scores_by_hand(restored, folder, by_hand):
    score = lambda context, continuation: by_hand(list(context.encode()), list(continuation.encode()))[0]
    scores = tasks.evaluate(restored, tasks.How(("arc_easy", "winogrande", "openbookqa"), folder))
    right, normed = [], []
    for row in ROWS["arc_easy"]:
        found = [score(f"{row['query']}\nAnswer:", f" {choice}") for choice in row["choices"]]
        right.append(np.argmax(found) == row["gold"])
        normed.append(np.argmax([x / len(c) for x, c in zip(found, row["choices"], strict=True)]) == row["gold"])
    (options,) = ROWS["winogrande"]
    winner = np.argmax([score(text, " ran.") for text in options["context_options"]]) == 1
    firsts, normed_firsts = [], []
    for row in ROWS["openbook_qa"]:
        first, second = (score(row["query"], f" {choice}") for choice in row["choices"])
        firsts.append(first > second)
        normed_firsts.append(first / len(row["choices"][0]) > second / len(row["choices"][1]))
    assert {(s.task, s.metric): (s.value, s.rows, s.counts) for s in scores} == {
        ("arc_easy", "acc"): (np.mean(right), 2, False), ("arc_easy", "acc_norm"): (np.mean(normed), 2, True),
        ("winogrande", "acc"): (winner, 1, True), ("openbookqa", "acc"): (np.mean(firsts), 4, False),
        ("openbookqa", "acc_norm"): (np.mean(normed_firsts), 4, True)}
    assert tasks.average(scores) == pytest.approx(np.mean([np.mean(normed), winner, np.mean(normed_firsts)]))
    assert "lacks arc_challenge, boolq" in tasks.said_of(scores)


def test_examples_and_limits(restored, folder):
    found = tasks.evaluate(restored, tasks.How(("openbookqa",), folder, limit=2, fewshot=1))
    assert {score.rows for score in found} == {2}


@pytest.mark.parametrize(("line", "message"), [
    ("{", "line 2 is no JSON"), ('{"query": "a", "gold": 0}', "line 2 has no choices"),
    ('{"query": "a", "choices": [], "gold": 0}', r"line 2: choices is \[\]: give two"),
    ('{"query": "a", "choices": ["b", " "], "gold": 0}', "line 2: choices holds ' ': give it some text"),
    ('{"query": "", "choices": ["b", "c"], "gold": 0}', "line 2: query holds ''"),
    ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "line 2: gold is 2"),
    ('{"query": "a", "choices": ["b", "c"], "gold": "0"}', "line 2: gold is '0'"),
    ('{"context_options": ["b", "c"], "continuation": "d", "gold": 0}', "make them two files")])
def test_damaged_questions_are_refused(tmp_path, line, message):
    path = tmp_path / "piqa.jsonl"
    path.write_text('{"query": "a", "choices": ["b", "c"], "gold": 0}\n' + line)
    with pytest.raises(ConfigError, match=message):
        tasks.check(tasks.How(("piqa",), tmp_path))


@pytest.mark.parametrize(("change", "message"), [
    (dict(tasks=("arc_easy", "arc_easy")), "each once"), (dict(tasks=("",)), "each once"),
    (dict(limit=0), "task limit is 0"), (dict(fewshot=-1), "fewshot is -1"),
    (dict(fewshot=2), "fewshot is 2: .*arc_easy.jsonl has 2 questions"), (dict(batch_size=0), "batch size is 0"),
    (dict(tasks=("arc_esy",)), "no arc_esy.jsonl: did you mean arc_easy"),
    (dict(data=None, tasks=("arc_esy",)), "unknown to lm-eval: did you mean")])
def test_settings_that_make_no_sense_are_refused(folder, change, message):
    how = dataclasses.replace(tasks.How(("arc_easy",), folder), **change)
    with pytest.raises(ConfigError, match=message):
        tasks.check(how)


def test_missing_folders_and_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        tasks.check(tasks.How(("piqa",), tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="holds no .jsonl files"):
        tasks.check(tasks.How(("piqa",), tmp_path))
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install lm-eval"):
        tasks.check(tasks.How(("piqa",), tmp_path))


@pytest.mark.parametrize(("options", "message"), [
    (["--task-limit", "3"], "task_limit: say which --tasks"),
    (["--tasks", "piqa", "--batches", "1"], "leave out --data"),
    (["--tasks", "piqa", "--task-results", "."], "is a folder: --task-results names a file")])
def test_the_command_refuses_options_that_change_nothing(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        evaluation.main([str(tmp_path), *options])

"""Comparing two tiny configurations over two seeds."""

import base64
import dataclasses
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import jax
import pytest

from kvjax import cache_bytes_per_token
from kvjax.attention import GroupedQuery, Kronecker
from kvjax.config import Config, ConfigError, DataConfig, ModelConfig, OptimizerConfig, TrainConfig, load, save
from kvjax.data.pipeline import training_iterator
from kvjax.data.tokenizers import ByteTokenizer
from kvjax.evaluation import compare as command
from kvjax.evaluation import compare_speed, run
from kvjax.evaluation.compare import Stopped, compare, load_configs, main
from kvjax.evaluation.compare_caption import distinguishable, front, matching
from kvjax.evaluation.compare_plots import TITLES
from kvjax.evaluation.compare_report import markdown, write
from kvjax.evaluation.compare_speed import Decoding, measure
from kvjax.evaluation.compare_table import ConfigResult, RunResult
from kvjax.training import loop
from kvjax.training.loop import Diverged, train

STEPS, SEEDS = 6, (3, 5)
DECODING = Decoding(batch=2, contexts=(32, 128), rounds=1)


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """The runs of one configuration are the same programs."""
    settings = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
                "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Multi-head attention and KPA, one layer each, on a small text."""
    text = tmp_path_factory.mktemp("text") / "words.txt"
    chooser = random.Random(0)
    text.write_text(" ".join(chooser.choices("the quick brown fox naïve 🦜".split(), k=900)), encoding="utf-8")
    model = ModelConfig(GroupedQuery(heads=2, kv_heads=2, head_dim=8), vocab_size=256, layers=1, width=16,
                        feed_forward_width=24, context_length=32, dtype="float32")
    mha = Config(model=model, train=TrainConfig(steps=STEPS, batch_size=8, log_every=1, sample_tokens=5, seed=99),
                 data=DataConfig(source=f"text:{text}", validation_fraction=0.3),
                 optimizer=OptimizerConfig(peak_lr=3e-2, warmup_steps=1))
    kpa = dataclasses.replace(model, attention=Kronecker(2, 2, 2, 4, q_rank=2), feed_forward_width=32)
    return {"mha": mha, "kpa": dataclasses.replace(mha, model=kpa, train=dataclasses.replace(mha.train, seed=7))}


@pytest.fixture(scope="module")
def compared(configs, tmp_path_factory):
    """(folder, results) of a whole comparison."""
    out = tmp_path_factory.mktemp("compared")
    return out, compare(configs, out, SEEDS, DECODING)


@pytest.fixture
def calls(monkeypatch):
    """Names of the folders that are trained in."""
    names = []

    def counted(config, folder):
        names.append(Path(folder).name)
        return train(config, folder)
    monkeypatch.setattr(command, "train", counted)
    return names


@pytest.fixture
def changed():
    """changed(config, section, ...) -> a copy with some settings of a section changed."""
    return lambda config, section, **settings: dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **settings)})


def cells(text):
    """The rows of the first Markdown table, by the first cell."""
    lines = text.partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_the_table_holds_what_evaluating_the_runs_gives(compared, configs):
    out, results = compared
    rows, saved = cells((out / "report.md").read_text(encoding="utf-8")), json.loads((out / "report.json").read_text())
    assert list(rows) == list(configs) == [entry["name"] for entry in saved["configs"]]
    for name, result, entry in zip(configs, results, saved["configs"], strict=True):
        restored = [run.restore(out / f"{name}_seed{seed}") for seed in SEEDS]
        evaluated = [run.validation_loss(one) for one in restored]
        losses = [one["loss"] for one in evaluated]
        assert [one.loss for one in result.runs] == pytest.approx(losses, rel=1e-6)
        assert entry["loss"] == pytest.approx(
            {"mean": statistics.mean(losses), "sd": abs(losses[0] - losses[1]) / 2**0.5, "n": 2}, rel=1e-4)
        assert entry["nats_per_byte"]["mean"] == pytest.approx(statistics.mean(e["nats_per_byte"] for e in evaluated))
        assert {one.tokens for one in result.runs} == {evaluated[0]["tokens"]}
        assert entry["cache"]["measured"] == cache_bytes_per_token(configs[name].model, "float32")

        parameters, start, loss, per_byte, held, factor, read, _ = rows[name]
        assert loss == f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"
        assert per_byte.startswith(f"{entry['nats_per_byte']['mean']:.4f} ± ")
        assert int(parameters.replace(",", "")) == sum(x.size for x in jax.tree.leaves(restored[0].params))
        assert float(start.split(" ± ")[0]) > float(loss.split(" ± ")[0]) + 0.1
        assert (held, factor) == {"mha": ("128", "1.00"), "kpa": ("192", "0.67")}[name] and read == held


def test_the_start_is_the_untrained_model_on_the_same_text(compared, configs, changed, tmp_path):
    _, results = compared
    config = changed(configs["kpa"], "train", seed=SEEDS[1])
    opened = loop.open_run(config, tmp_path / "run")
    params = loop.init_state(opened.model, opened.optimizer, config, opened.mesh).params
    measured = opened.validation(params, None)
    assert results[1].runs[1].start_loss == pytest.approx(measured["loss"], rel=1e-6)
    assert results[1].runs[1].tokens == measured["tokens"]


def test_the_table_says_under_which_conditions(compared):
    out, results = compared
    saved = json.loads((out / "report.json").read_text())
    assert saved["tokens_per_run"] == STEPS * 8 * 32 and saved["seeds"] == list(SEEDS)
    assert saved["shared"]["train"]["steps"] == STEPS and "seed" not in saved["shared"]["train"]
    assert saved["configs"][1]["runs"][0] == dataclasses.asdict(results[1].runs[0])
    text = (out / "report.md").read_text(encoding="utf-8")
    for told in ("6 steps of 8 x 32 tokens", "1,536 in all", "Seeds: 3, 5; ±", "deviation over n = 2 seeds",
                 f"same {results[0].runs[0].tokens:,} held-out tokens", "(float32)"):
        assert told in text, told


def test_all_runs_of_a_seed_read_the_same_batches_and_draw_no_sample(compared, configs):
    out, _ = compared
    saved = {folder.name: load(Config, folder / "config.json") for folder in out.glob("*_seed*")}
    assert len(saved) == 4 and all(config.train.sample_tokens == 0 for config in saved.values())
    first = {}
    for name, config in saved.items():
        assert config.train.seed == int(name[-1])
        batches = training_iterator(config.data, ByteTokenizer(), 8, 32, config.train.seed)
        first[name] = next(batches)["tokens"].tobytes()
        batches.close()
    assert first["mha_seed3"] == first["kpa_seed3"] != first["mha_seed5"] == first["kpa_seed5"]


def test_finished_runs_are_not_repeated_and_others_are_added(compared, configs, calls, capsys, tmp_path):
    results, out = compared[1], shutil.copytree(compared[0], tmp_path / "copy")
    before = (out / "report.json").read_text()
    assert compare(configs, out, SEEDS, DECODING) == results and calls == []
    assert capsys.readouterr().out.count("(finished before)") == 4
    assert (out / "report.json").read_text() == before
    wider = compare(configs | {"gqa": configs["mha"]}, out, SEEDS[:1], DECODING)
    assert calls == ["gqa_seed3"] and [result.name for result in wider] == ["mha", "kpa", "gqa"]
    assert wider[2].runs[0].loss == pytest.approx(results[0].runs[0].loss, abs=1e-6)
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "±" not in text and "n = 1 seed, which shows no spread" in text
    assert json.loads((out / "report.json").read_text())["configs"][0]["loss"]["sd"] is None


def test_speeds_are_measured_once_and_again_for_all_when_one_is_added(compared, configs, tmp_path, monkeypatch):
    out, results = compared
    speeds = {result.name: result.speed for result in results}
    for one in speeds.values():
        assert list(one.decode_seconds) == [32, 128] and min(one.decode_seconds.values()) > 0
    state = 3 * 4 * results[0].parameters  # weights and two moments, float32
    assert speeds["mha"].step_bytes > state / jax.device_count() and speeds["mha"].batch == 2
    shutil.copy(out / "speed.json", tmp_path)
    timed = []
    monkeypatch.setattr(compare_speed, "_decode_seconds",
                        lambda models, _: timed.append(list(models)) or dict.fromkeys(models, {32: 1.0, 128: 2.0}))
    monkeypatch.setattr(compare_speed, "step_bytes", lambda config: 7)
    assert measure(configs, tmp_path, DECODING)["mha"] == speeds["mha"] and not timed
    more = measure(configs | {"gqa": configs["mha"]}, tmp_path, DECODING)
    assert timed == [["mha", "kpa", "gqa"]] and more["mha"].decode_seconds == {32: 1.0, 128: 2.0}
    assert (more["mha"].step_bytes, more["gqa"].step_bytes) == (speeds["mha"].step_bytes, 7)
    measure(configs, tmp_path, dataclasses.replace(DECODING, batch=3))
    assert timed[1:] == [["mha", "kpa"]]
    (tmp_path / "speed.json").write_text("{")
    measure(configs, tmp_path, DECODING)
    assert len(timed) == 3


def test_the_page_needs_nothing_else(compared):
    out, results = compared
    text = (out / "report.html").read_text(encoding="utf-8")
    seen = Seen()
    seen.feed(text)
    assert not seen.open and not re.search(r"https?://|<script|<link", text)
    shown = " ".join(seen.text)
    for told in ("decode tokens / s (ms a step) at 128", *results[0].shown("loss").split(" ± "), "1,536 in all"):
        assert told in shown, told
    pictures = [(out / name).read_bytes() for name in TITLES]
    assert [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in seen.sources] == pictures
    linked = re.findall(r"!\[.*\]\((.*)\)", (out / "report.md").read_text(encoding="utf-8"))
    assert linked == list(TITLES)


class Seen(HTMLParser):
    """Text and pictures of a page, and elements that were never closed."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.sources = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.sources.append(dict(attributes)["src"])
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def lost(compared):
    """lost(name=losses, ...) -> results of configurations with these losses after training, one for each seed."""
    _, (mha, _) = compared
    return lambda **losses: [dataclasses.replace(mha, name=name, runs=tuple(
        dataclasses.replace(mha.runs[0], seed=seed, loss=loss) for seed, loss in enumerate(found)))
        for name, found in losses.items()]


def test_what_seeds_do_not_tell_apart_is_said(lost):
    said = distinguishable(lost(a=[1.0, 1.2], b=[1.15, 1.25], c=[2.0, 2.1], d=[1.26, 1.3]))
    assert "(2 of 6 pairs): a and b; b and d. From 2 seeds" in said
    assert "no two of the 1 pairs overlap" in distinguishable(lost(a=[1.0, 1.2], c=[2.0, 2.1]))
    assert distinguishable(lost(a=[1.0], c=[2.0])).startswith("One seed says nothing about chance")
    assert distinguishable(lost(a=[1.0, None], c=[2.0, 2.1])).startswith("There are no two")


def test_how_sizes_match_is_computed(compared, lost):
    _, (mha, kpa) = compared
    def said(**changes):
        other = dataclasses.replace(mha, model=dataclasses.replace(mha.model, **changes))
        return matching([mha, other])
    counts = sorted((mha.parameters, kpa.parameters))
    apart = f"{counts[1] / counts[0] - 1:.1%} ({counts[0]:,} to {counts[1]:,})"
    assert matching([mha, kpa]) == ("Width-matched, not parameter-matched: the same width (16) and depth (1 layers), "
                                    f"feed-forward widths differ; parameters differ by up to {apart}.")
    assert said().startswith("Parameter-matched: within 0.0% ") and "at the same width (16)" in said()
    assert said(width=32).startswith("Neither") and "16 x 1, 32 x 1" in said(width=32)


def test_the_front_is_of_the_least_bytes_and_losses(lost):
    results = [dataclasses.replace(result, cache=dataclasses.replace(result.cache, measured=held)) for result, held in
               zip(lost(a=[2.0], b=[1.0], c=[1.5], d=[3.0], e=[None]), (10, 20, 30, 10, 5), strict=True)]
    assert front(results) == ["a", "b"]


@pytest.fixture
def unfinished(compared, tmp_path):
    """unfinished(path) -> a copy of the comparison's folder without this path in it, and without tables."""
    def copy(path):
        out = shutil.copytree(compared[0], tmp_path / "copy")
        for table in out.glob("report.*"):
            table.unlink()
        shutil.rmtree(out / path) if (out / path).is_dir() else (out / path).unlink()
        return out
    return copy


def test_an_interrupted_comparison_goes_on(compared, configs, calls, monkeypatch, unfinished):
    out = unfinished("kpa_seed3")
    with monkeypatch.context() as signal, pytest.raises(Stopped):
        signal.setattr(command, "train", lambda config, folder: train(config, folder, stop_after=4))
        compare(configs, out, SEEDS, DECODING)
    assert (out / "kpa_seed3" / "checkpoints" / "4").exists() and not (out / "report.md").exists()
    assert compare(configs, out, SEEDS, DECODING) == compared[1] and calls == ["kpa_seed3"]


def test_a_run_that_diverges_gets_no_mean_and_the_others_count(compared, configs, monkeypatch, unfinished):
    def diverging(config, folder):
        raise Diverged(f"step 2 of {folder.name}: the loss is nan")
    out = unfinished("mha_seed5/metrics.jsonl")
    monkeypatch.setattr(command, "train", diverging)
    mha, kpa = compare(configs, out, SEEDS, DECODING)
    row = cells((out / "report.md").read_text(encoding="utf-8"))["mha"]
    assert row[2] == row[3] == "diverged: seed 5" and " ± " in row[1]
    assert mha.runs[1].loss is None and mha.runs[1].diverged == "step 2 of mha_seed5: the loss is nan"
    assert mha.runs[0] == compared[1][0].runs[0] and mha.spread("loss") is None
    assert kpa == compared[1][1]


@pytest.mark.parametrize(("section", "settings", "told"), [
    ("data", dict(validation_fraction=0.2), "data.validation_fraction: 0.3 in mha, 0.2 in kpa"),
    ("optimizer", dict(peak_lr=1e-3), "optimizer.peak_lr: 0.03 in mha, 0.001 in kpa"),
    ("train", dict(steps=9), "train.steps: 6 in mha, 9 in kpa"),
    ("model", dict(vocab_size=300), "model.vocab_size: 256 in mha, 300 in kpa"),
    ("model", dict(context_length=16), "model.context_length: 32 in mha, 16 in kpa"),
])
def test_other_conditions_are_refused(configs, changed, calls, tmp_path, section, settings, told):
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        compare(configs | {"kpa": changed(configs["kpa"], section, **settings)}, tmp_path / "out", SEEDS)
    assert str(caught.value).count(" in mha, ") == 1 and not (tmp_path / "out").exists()


def test_what_cannot_work_is_refused_before_anything_is_trained(compared, configs, changed, calls, tmp_path,
                                                                monkeypatch):
    out, _ = compared
    with pytest.raises(ConfigError, match=r"seeds are \[1, 1\]"):
        compare(configs, tmp_path, (1, 1))
    with pytest.raises(ConfigError, match=r"seeds are \[-1\]"):
        compare(configs, tmp_path, (-1,))
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare({}, tmp_path)
    longer = {name: changed(config, "train", steps=9) for name, config in configs.items()}
    with pytest.raises(ConfigError, match="(?s)mha_seed3 holds another run:\n  train.steps: 6 .* 9 now.*another --out"):
        compare(longer, out, (4, *SEEDS))
    fewer = {name: changed(config, "train", eval_batches=2, log_every=3) for name, config in configs.items()}
    with pytest.raises(ConfigError, match="eval_batches: 20 in the folder, 2 now\nchoose"):
        compare(fewer, out, SEEDS)
    tuned = {name: changed(config, "train", init_from="runs/mha") for name, config in configs.items()}
    with pytest.raises(ConfigError, match="init_from is 'runs/mha' in mha"):
        compare(tuned, tmp_path)
    late = {name: changed(config, "optimizer", warmup_steps=6) for name, config in configs.items()}
    with pytest.raises(ConfigError, match="warmup_steps 6"):
        compare(late, tmp_path)
    (tmp_path / "kpa_seed0").mkdir()
    (tmp_path / "kpa_seed0" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="kpa_seed0 is not the folder of a run"):
        compare(configs, tmp_path)
    with pytest.raises(ConfigError, match="cannot be made.*another --out"):
        compare(configs, tmp_path / "kpa_seed0" / "notes.txt")
    with pytest.raises(ConfigError, match=r"contexts are \[8\]"):
        compare(configs, tmp_path, decoding=Decoding(contexts=(8,)))
    learned = {name: changed(config, "model", positions="learned") for name, config in configs.items()}
    with pytest.raises(ConfigError, match="table of learned positions ends at 32"):
        compare(learned, tmp_path, decoding=DECODING)
    with monkeypatch.context() as missing, pytest.raises(ConfigError, match="pip install matplotlib"):
        missing.setitem(sys.modules, "matplotlib", None)
        compare(configs, tmp_path)
    assert calls == []


def test_runs_scored_on_different_text_are_not_put_into_one_table(compared, configs, tmp_path):
    _, (mha, kpa) = compared
    other = dataclasses.replace(kpa, runs=(dataclasses.replace(kpa.runs[0], tokens=17), *kpa.runs[1:]))
    with pytest.raises(ConfigError, match="kpa_seed3 was scored on 17 tokens"):
        write(tmp_path, configs["mha"], [mha, other])
    assert not list(tmp_path.iterdir())


def test_cache_types_that_differ_are_told(compared, configs):
    _, (mha, kpa) = compared
    half = dataclasses.replace(kpa, name="half", cache=dataclasses.replace(kpa.cache, dtype="bfloat16"))
    assert "(mha float32, half bfloat16)" in markdown(configs["mha"], [mha, half])


@pytest.fixture
def files(tmp_path, configs):
    """Paths of Python files that hold the two configurations."""
    for name, config in configs.items():
        save(config, tmp_path / f"{name}.json")
        (tmp_path / f"{name}.py").write_text("from kvjax.config import Config, load\n"
                                             f"config = load(Config, {str(tmp_path / name) + '.json'!r})\n")
    return [str(tmp_path / f"{name}.py") for name in configs]


def test_the_command_line(files, configs, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(command, "compare", lambda *arguments: given.append(arguments) or [])
    main([*files, "--out", str(tmp_path), "--seeds", "0", "1", "2", "--steps", "9", "--batch-size", "16",
          "--context-length", "64", "--warmup-steps", "2", "--decode-batch", "4", "--contexts", "64", "128",
          "--no-plots"])
    (configs_given, out, seeds, decoding, plots), = given
    assert list(configs_given) == list(configs) and (out, seeds, decoding, plots) == (
        tmp_path, (0, 1, 2), Decoding(4, (64, 128)), False)
    for name, config in configs_given.items():
        assert (config.train.steps, config.train.batch_size, config.optimizer.warmup_steps) == (9, 16, 2)
        assert config.model == dataclasses.replace(configs[name].model, context_length=64)
        assert config.data == configs[name].data


def test_the_command_line_refuses(files, configs, changed, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([*files, "--out", str(tmp_path), "--stepss", "9"])
    assert "--steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(files)
    assert "--out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="mha is given more than once"):
        main([files[0], files[0], "--out", str(tmp_path)])
    save(changed(configs["mha"], "train", accelerator=True), Path(files[0]).with_suffix(".json"))
    args = command.Arguments((files[0],), tmp_path)
    with pytest.raises(ConfigError, match="mha: meant for a TPU or GPU.*--allow-cpu"):
        load_configs(args)
    assert list(load_configs(dataclasses.replace(args, allow_cpu=True))) == ["mha"]


@pytest.mark.parametrize(("tokens", "steps"), [(4000, 15), (100, 1), (256, 1), (512, 2)])
def test_tokens_become_steps(files, tokens, steps):
    config, _ = load_configs(command.Arguments(tuple(files), Path("out"), tokens=tokens)).values()
    assert config.train.steps == steps  # of 8 x 32 tokens


def test_tokens_and_steps_do_not_go_together(files):
    with pytest.raises(ConfigError, match="--steps 3 and --tokens 9 are both given"):
        load_configs(command.Arguments(tuple(files), Path("out"), steps=3, tokens=9))
    with pytest.raises(ConfigError, match="--tokens is 0"):
        load_configs(command.Arguments(tuple(files), Path("out"), tokens=0))


def test_divergence_is_an_error_of_the_command(files, monkeypatch, tmp_path):
    diverged = RunResult(0, "mha_seed0", 5.5, 9, diverged="step 2: the loss is nan")
    monkeypatch.setattr(command, "compare", lambda *_: [ConfigResult("mha", None, None, (diverged,))])
    with pytest.raises(Diverged, match="mha_seed0: step 2"):
        main([*files, "--out", str(tmp_path)])


def test_errors_are_one_line_and_exit_with_two(tmp_path):
    done = subprocess.run([sys.executable, "-m", "kvjax.evaluation.compare", "quikstart", "--out", tmp_path],
                          capture_output=True, encoding="utf-8", cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no configuration 'quikstart'") and done.stderr.count("\n") == 1

"""Tasks of lm-eval: accuracies of a model on questions with choices, from the hub or from local files.

The nine zero-shot tasks that the papers of KPA and TPA average, by the metric that they report of each, are `NINE`.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from kvjax.config import ConfigError, require
from kvjax.evaluation.run import Restored

NINE = {"arc_easy": "acc_norm", "arc_challenge": "acc_norm", "boolq": "acc", "hellaswag": "acc_norm",
        "openbookqa": "acc_norm", "piqa": "acc_norm", "winogrande": "acc", "mmlu": "acc", "sciq": "acc_norm"}
"""acc: the choice of the highest log-likelihood is right; acc_norm: that of the highest per character."""
PLAIN = ("openbookqa", "hellaswag")
"""Of the nine, those whose choices go on with the text of the question; the others' follow a line "Answer:"."""
Row = dict[str, Any]


@dataclass(frozen=True)
class TaskScore:
    """One figure of one task."""

    task: str
    metric: str
    value: float
    standard_error: float | None
    rows: int | None
    """Questions; None: not told (groups of tasks)."""
    counts: bool
    """Whether the mean over tasks takes this one."""


@dataclass(frozen=True)
class How:
    """What scores depend on beside the model."""

    tasks: tuple[str, ...]
    data: Path | None = None
    """Folder with NAME.jsonl for each task; None: lm-eval's own tasks, whose data come from the hub."""
    limit: int | None = None
    """Of each task the first so many questions only."""
    fewshot: int = 0
    """Answered questions shown before each."""
    batch_size: int = 32


def evaluate(restored: Restored, how: How, cache_dtype: str | None = None) -> list[TaskScore]:
    """Scores a model on tasks.

    Raises ConfigError if lm-eval is not installed, a task is unknown, its data is missing or a question is damaged,
    before anything is computed.
    """
    check(how)
    tasks = load_tasks(how)
    from lm_eval import simple_evaluate

    from kvjax.evaluation.lm_eval import LanguageModel
    with _quiet():
        found = simple_evaluate(LanguageModel(restored, how.batch_size, cache_dtype), tasks=tasks, limit=how.limit,
                                num_fewshot=how.fewshot, log_samples=False, bootstrap_iters=1000)
    return [score for name in how.tasks for score in _scores(name, found)]


def check(how: How) -> None:
    """Raises ConfigError on settings that make no sense, unknown tasks, and local questions that are damaged."""
    require(find_spec("lm_eval") is not None, "tasks need lm-eval: pip install lm-eval")
    require(len(set(how.tasks)) == len(how.tasks) > 0 and all(how.tasks),
            f"tasks are {','.join(how.tasks)!r}: give names, each once, with commas between them")
    require(how.limit is None or how.limit > 0, f"task limit is {how.limit}: it must be 1 or more")
    require(how.fewshot >= 0, f"fewshot is {how.fewshot}: it must be 0 or more")
    require(how.batch_size > 0, f"task batch size is {how.batch_size}: it must be 1 or more")
    if how.data is None:
        _check_known(how.tasks)
    for path in [] if how.data is None else [find_file(name, how.data) for name in how.tasks]:
        rows = len(read_rows(path))
        require(how.fewshot < rows, f"fewshot is {how.fewshot}: {path} has {rows} questions, one of which is asked")


def _check_known(names: Sequence[str]) -> None:
    from lm_eval.tasks import TaskManager
    known = TaskManager().all_tasks
    for name in names:
        require(name in known, f"task {name!r} is unknown to lm-eval: {_nearest(name, known)}")


def load_tasks(how: How) -> list:
    """lm-eval's tasks, from the hub or made of files. Raises ConfigError."""
    if how.data is not None:
        return [local_task(name, read_rows(find_file(name, how.data)), how) for name in how.tasks]
    from lm_eval.tasks import TaskManager
    try:
        TaskManager().load(list(how.tasks))
    except Exception as error:  # of many libraries: no network, no such data, a changed format
        raise ConfigError(f"the data of {', '.join(how.tasks)} cannot be got from the hub ({type(error).__name__}: "
                          f"{str(error)[:200]}): give a folder of local files with --task-data") from error
    return list(how.tasks)


def find_file(name: str, folder: Path) -> Path:
    """`folder`/NAME.jsonl, underscores aside. Raises ConfigError."""
    require(folder.is_dir(), f"{folder} is no folder: --task-data names one that holds TASK.jsonl files")
    files = {_plain(path.stem): path for path in sorted(folder.glob("*.jsonl"))}
    require(bool(files), f"{folder} holds no .jsonl files: --task-data names a folder with one for each task")
    names = [path.stem for path in files.values()]
    require(_plain(name) in files, f"{folder} holds no {name}.jsonl: {_nearest(name, names)}")
    return files[_plain(name)]


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 3)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}"


def read_rows(path: Path) -> list[Row]:
    """Questions of a file, a JSON object a line, each of one of two kinds:

        {"query": text, "choices": [texts], "gold": index of the right one}
        {"context_options": [texts], "continuation": text, "gold": index of the text that goes on so}
    """
    rows = [_checked(line, f"{path}, line {number}")
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1) if line.strip()]
    require(bool(rows), f"{path} holds no questions")
    kinds = {options_of(row) for row in rows}
    require(len(kinds) == 1, f"{path} holds questions with choices and with context_options: make them two files")
    return rows


def options_of(row: Row) -> str:
    """The field that holds a question's options."""
    return "context_options" if "context_options" in row else "choices"


def _checked(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is no JSON: {error}") from error
    options, text = ("context_options", "continuation") if "context_options" in row else ("choices", "query")
    missing = [name for name in (options, text, "gold") if name not in row]
    require(not missing, f"{place} has no {' and no '.join(missing)}: a question has {options}, {text} and gold")
    texts = row[options]
    require(isinstance(texts, list) and len(texts) > 1, f"{place}: {options} is {texts!r}: give two texts or more")
    for name, value in [(text, row[text]), *((options, one) for one in texts)]:
        require(isinstance(value, str) and value.strip() != "", f"{place}: {name} holds {value!r}: give it some text")
    gold = row["gold"]
    require(type(gold) is int and 0 <= gold < len(texts), f"{place}: gold is {gold!r}: it is the number of the right "
                                                          f"one of {options}, 0 to {len(texts) - 1}")
    return row


def local_task(name: str, rows: list[Row], how: How) -> Any:
    """A task of lm-eval over rows, with the prompt that its own task of that name has."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    with _quiet():
        return ConfigurableTask(config={
            "task": name, "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)}, "test_split": "test",
            "fewshot_split": "test", "output_type": "multiple_choice", "doc_to_choice": options_of(rows[0]),
            **_parts(name, rows[0]), "num_fewshot": how.fewshot,
            "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}
                            for metric in _metrics(name, rows[0])]})


def _metrics(name: str, row: Row) -> tuple[str, ...]:
    """Both accuracies, but where choices are not of different lengths: yes and no, and a continuation they share."""
    one = options_of(row) == "context_options" or _plain(name) == "boolq"
    return ("acc",) if one else ("acc", "acc_norm")


def _parts(name: str, row: Row) -> dict[str, Any]:
    """What stands before a choice, and which is right."""
    if options_of(row) == "context_options":  # lm-eval's way of saying that the contexts differ and not what follows
        return {"doc_to_text": lambda row: row["gold"], "doc_to_target": lambda row: row["continuation"]}
    return {"doc_to_text": lambda row: question(name, row["query"]), "doc_to_target": "gold"}


def question(name: str, query: str) -> str:
    """The text before the choices, which follow it behind a space."""
    query, named = query.rstrip(), _plain(name) in {_plain(known) for known in NINE if known not in PLAIN}
    return f"{query}\nAnswer:" if named and not query.endswith("Answer:") else query


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps lm-eval's notes on what it loads and which seeds it sets from the terminal."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _scores(name: str, found: dict[str, Any]) -> Iterator[TaskScore]:
    """Figures of one task or group of tasks in lm-eval's results."""
    values = found["results"].get(name) or found.get("groups", {}).get(name)
    require(values is not None, f"lm-eval gave no results for {name}")
    rows = found.get("n-samples", {}).get(name, {}).get("effective")
    metrics = {key: value for key, value in values.items() if "," in key and "_stderr," not in key}
    taken = f"{metric_of(name)},none"
    for key, value in metrics.items():
        metric, _, kind = key.partition(",")
        error = values.get(f"{metric}_stderr,{kind}")
        yield TaskScore(name, metric if kind == "none" else f"{metric} ({kind})", value,
                        error if isinstance(error, float) else None, rows, key == taken)


def metric_of(name: str) -> str:
    """The metric of a task that its mean takes: for a task that is not one of the nine, plain accuracy."""
    return {_plain(known): metric for known, metric in NINE.items()}.get(_plain(name), "acc")


def table(scores: Sequence[TaskScore]) -> Table:
    """Scores in percent, with their standard errors; the one of each task that the mean takes is marked."""
    shown = Table("task", "questions", "metric", "%", "± standard error", "in the mean", title="zero-shot tasks")
    for column in (1, 3, 4):
        shown.columns[column].justify = "right"
    for score in scores:
        error = "" if score.standard_error is None else f"{score.standard_error:.2%}".rstrip("%")
        shown.add_row(score.task, "" if score.rows is None else f"{score.rows:,}", score.metric,
                      f"{score.value:.2%}".rstrip("%"), error, "*" if score.counts else "")
    return shown


def average(scores: Sequence[TaskScore]) -> float | None:
    """Unweighted mean over tasks, of the metric that each is reported by; None if a task lacks it."""
    counted = [score.value for score in scores if score.counts]
    return mean(counted) if counted and len(counted) == len({score.task for score in scores}) else None


def said_of(scores: Sequence[TaskScore]) -> str:
    """The mean in words: over which tasks and of which metric."""
    value = average(scores)
    if value is None:
        return "no mean: a task has no accuracy"
    by = "; ".join(f"{score.task} {score.metric}" for score in scores if score.counts)
    rest = [name for name in NINE if _plain(name) not in {_plain(score.task) for score in scores}]
    missing = f"; of the nine of the KPA and TPA papers it lacks {', '.join(rest)}" if rest else ""
    return f"unweighted mean: {value:.2%} ({by}{missing})"


def file_part(how: How) -> str:
    """What a file of such scores is called by: tasks, and what was not as usual."""
    some = "" if how.limit is None else f"_first_{how.limit}"
    shots = f"_{how.fewshot}_shot" if how.fewshot else ""
    return f"{'+'.join(how.tasks)[:150]}{some}{shots}"


def content(scores: Sequence[TaskScore], how: How) -> dict[str, Any]:
    """Scores and settings, for JSON. The batch size is none of them: it changes nothing."""
    settings = {"tasks": list(how.tasks), "data": None if how.data is None else str(how.data), "limit": how.limit,
                "fewshot": how.fewshot}
    return {"settings": settings, "mean": average(scores), "scores": [asdict(score) for score in scores]}

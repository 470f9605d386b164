"""Times decoding with a trained model: caches of several types, and compacted ones, against batch and context.

    python -m kvjax.benchmarks.decode_model runs/kpa_125m --caches bfloat16 int8 compacted:10 --out decode.json

Everything that is compared takes its turn in one process; medians count.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from jax import Array

from kvjax.benchmarks.device import command, show
from kvjax.cache import Cache, init_cache
from kvjax.compaction import compact, references
from kvjax.compaction.entries import entries_of
from kvjax.config import ModelConfig, require
from kvjax.decoding import decode
from kvjax.evaluation import run
from kvjax.evaluation.decode_speed import STEPS, DecodeLoop, check_contexts, in_turns, pretended
from kvjax.model.decoder import Decoder
from kvjax.quantisation import storage_type

COMPACTED = "compacted:"


@dataclass(frozen=True)
class Arguments:
    """What is timed."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run's folder, a converted model's, a Hugging Face folder or a .gguf file."""
    caches: tuple[str, ...] = ()
    """Element types (bfloat16, int8 …), and compacted:N for a cache of the compute type in which 1 token of N is left
    of the context. None given: the compute type, int8 and compacted:10."""
    batches: tuple[int, ...] = (1, 8)
    """Sequences."""
    contexts: tuple[int, ...] = (256, 1024)
    """Tokens of context."""
    dtype: str | None = None
    """Compute type instead of the model's."""
    rounds: int = 5
    """Times that each has its turn."""
    out: Path | None = None
    """A file for the figures, JSON."""


def main(args: Arguments) -> None:
    """Raises ConfigError on what can't be done, before anything is timed."""
    restored = run.adjusted(run.restore(args.model), {}, dtype=args.dtype)
    config = restored.config.model
    args = dataclasses.replace(args, caches=args.caches or (config.dtype, "int8", f"{COMPACTED}10"))
    check(args, config)
    with jax.set_mesh(restored.mesh):
        rows = measure(args, restored.model, restored.params)
    title = f"{args.model}, one token for every row, {config.dtype}, {STEPS} steps at once"
    show(title, rows)
    if args.out is not None:
        device = jax.devices()[0].device_kind
        args.out.write_text(json.dumps({"title": title, "device": device, "rows": rows}, indent=1) + "\n")


def check(args: Arguments, config: ModelConfig) -> None:
    """Raises ConfigError on settings that make no sense with this model."""
    check_contexts(config, args.contexts)
    require(bool(args.batches) and min(args.batches) > 0 and args.rounds > 0,
            f"batches are {list(args.batches)} and rounds {args.rounds}: each must be 1 or more")
    require(len(set(args.caches)) == len(args.caches) and len(set(args.batches)) == len(args.batches),
            f"caches are {list(args.caches)} and batches {list(args.batches)}: give each once")
    for cache in args.caches:
        if cache.startswith(COMPACTED):
            entries_of(config)
            slots_of(cache, min(args.contexts))
        else:
            storage_type(cache)


def slots_of(cache: str, context: int) -> int:
    """What `compacted:N` leaves of a context. Raises ConfigError if that is nothing, or N is no such number."""
    ratio = cache.removeprefix(COMPACTED)
    require(ratio.isdigit() and 1 <= int(ratio) <= context - STEPS, f"{cache} of {context} tokens of context: after "
            f"{COMPACTED} comes a whole number, from 1 to the {context - STEPS} tokens that are compacted")
    return (context - STEPS) // int(ratio)


def measure(args: Arguments, model: Decoder, params: Any) -> list[dict[str, Any]]:
    """The rows of the table; those of one batch and context stand together."""
    makers = {(cache, batch): maker_of(model, params, cache, batch, args.contexts)
              for cache, batch in product(args.caches, args.batches)}
    loops = {key: DecodeLoop(model, params, make) for key, make in makers.items()}
    times = in_turns(loops, args.contexts, args.rounds)
    rows = []
    for batch, context, cache in product(args.batches, args.contexts, args.caches):
        seconds, first = times[cache, batch][context], times[args.caches[0], batch][context]
        held = jax.eval_shape(lambda key=(cache, batch), length=context - STEPS: makers[key](length)).nbytes
        rows.append({"batch": batch, "context": context, "cache": cache, "ms a step": 1e3 * seconds,
                     "tokens/s": batch / seconds, f"speed / {args.caches[0]}": first / seconds,
                     "MiB held": held / 2**20})
    return rows


def maker_of(model: Decoder, params: Any, cache: str, batch: int, contexts: tuple[int, ...]) -> Callable[[int], Cache]:
    """Makes caches of a kind for `DecodeLoop`."""
    if not cache.startswith(COMPACTED):
        return pretended(model.config, batch, dtype=cache)
    small = {context - STEPS: compacted(model, params, context - STEPS, slots_of(cache, context))
             for context in contexts}
    return lambda length: jax.tree.map(jnp.copy, small[length].repeated(batch))  # copies: decoding takes its memory


def compacted(model: Decoder, params: Any, length: int, slots: int) -> Cache:
    """A compacted cache of one row of drawn tokens: which tokens they are takes no part in speed."""
    tokens = jax.random.randint(jax.random.key(0), (1, length), 0, model.config.vocab_size)
    cache = jax.jit(_prefilled, static_argnums=0)(model, params, tokens)
    return compact(model, params, cache, slots, references.of_context(model, params, tokens), room=STEPS)


def _prefilled(model: Decoder, params: Any, tokens: Array) -> Cache:
    empty = init_cache(model.config, *tokens.shape)
    return decode(model, params, tokens, empty, last_only=True)[1]


if __name__ == "__main__":
    command(main, lambda: tyro.cli(Arguments, description=__doc__))

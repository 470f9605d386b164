"""What the figures of a comparison mean, how they were got, and what they can't say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from kvjax.config import Config
from kvjax.evaluation.compare_speed import Speed
from kvjax.evaluation.compare_table import ConfigResult, tokens_per_run

MATCHED = 0.02
"""Largest difference in parameters, as a share of the fewest, of models that are called parameter-matched."""


def caption(config: Config, results: Sequence[ConfigResult]) -> list[str]:
    """Paragraphs about losses and bytes, for any reader. `config`: any of those compared."""
    return [conditions(config, results), matching(results), distinguishable(results), limits(config, results)]


def conditions(config: Config, results: Sequence[ConfigResult]) -> str:
    """Steps, tokens, seeds, and how losses and bytes were got."""
    train, length, runs = config.train, config.model.context_length, results[0].runs
    spread = f"± is the sample standard deviation over n = {len(runs)} seeds" if len(runs) > 1 else \
        "n = 1 seed, which shows no spread"
    types = {r.name: r.cache.dtype for r in results}
    cache = ", ".join(f"{name} {kept}" for name, kept in types.items()) if len(set(types.values())) > 1 else \
        results[0].cache.dtype
    return (f"Every run: {train.steps:,} steps of {train.batch_size} x {length:,} tokens (padding included), "
            f"{tokens_per_run(config):,} in all, in an order that depends on the seed alone. "
            f"Seeds: {', '.join(str(run.seed) for run in runs)}; {spread}. "
            f"Losses: nats per token on the same {runs[0].tokens:,} held-out tokens, before the first step and after "
            f"the last. Bytes: of all layers, measured on a cache with room for {results[0].cache.length:,} "
            f"tokens ({cache}); held, and read in every decode step; MHA is multi-head attention of the same width and "
            "depth.")


def matching(results: Sequence[ConfigResult]) -> str:
    """Which sizes the models agree in, and how far the others are apart."""
    if len(results) == 1:
        return "One configuration: there is nothing to match."
    counts = [result.parameters for result in results]
    apart = max(counts) / min(counts) - 1
    shapes = {(result.model.width, result.model.layers) for result in results}
    same = f"the same width ({results[0].model.width}) and depth ({results[0].model.layers} layers)"
    by = f"{apart:.1%} ({min(counts):,} to {max(counts):,})"
    if apart <= MATCHED:
        return f"Parameter-matched: within {by} of each other" + (f", at {same}." if len(shapes) == 1 else ".")
    feed_forward = {result.model.feed_forward_width for result in results}
    if len(shapes) == 1:
        wide = "" if len(feed_forward) == 1 else ", feed-forward widths differ"
        return f"Width-matched, not parameter-matched: {same}{wide}; parameters differ by up to {by}."
    return (f"Neither parameter-matched nor width-matched: parameters differ by up to {by}, and width x depth is "
            + ", ".join(f"{width} x {layers}" for width, layers in sorted(shapes)) + ".")


def distinguishable(results: Sequence[ConfigResult]) -> str:
    """Which pairs of configurations the spread over seeds keeps from being ordered."""
    found = {r.name: spread for r in results if (spread := r.spread("loss"))}
    if len(found) < 2:
        return "There are no two configurations whose losses could be compared."
    n = next(iter(found.values())).n
    if n == 1:
        return "One seed says nothing about chance: no difference between these losses is shown to be more than that."
    pairs = [(a, b) for a, b in combinations(found, 2)
             if abs(found[a].mean - found[b].mean) <= found[a].sd + found[b].sd]
    total = len(found) * (len(found) - 1) // 2
    doubt = f"From {n} seeds the deviation itself is known to about ± {(2 * (n - 1)) ** -0.5:.0%}."
    if not pairs:
        return f"The intervals mean ± deviation of no two of the {total} pairs overlap. {doubt}"
    by_first = {a: [other for first, other in pairs if first == a] for a, _ in pairs}
    named = "; ".join(f"{a} and {', '.join(others)}" for a, others in by_first.items())
    return (f"Not to be told apart, because the intervals mean ± deviation of their losses overlap ({len(pairs)} of "
            f"{total} pairs): {named}. {doubt}")


def limits(config: Config, results: Sequence[ConfigResult]) -> str:
    """How small the runs are."""
    counts = [result.parameters for result in results]
    share = [tokens_per_run(config) / count for count in (max(counts), min(counts))]
    of = " to ".join(dict.fromkeys(f"{x:.2g}" for x in share))
    return (f"What this says: how these models of {min(counts):,} to {max(counts):,} parameters do "
            f"after {of} tokens of text per parameter, with one learning rate and schedule for all. It can't say "
            "whether the same order holds for larger models, longer training, other text or settings tuned for each.")


def speeds(taken: Speed) -> str:
    """How speed and memory were measured."""
    return (f"Speed, on {taken.device}: training is the median of what the runs reported, the first report of each "
            "left out; runs came one after another, so that whatever else the machine did met them unequally. Decoding "
            f"is of {taken.batch} sequences at once, each token the most likely one, on one device; a step gives every "
            "sequence a token. All configurations took turns in one process; medians. The weights were random, on "
            "which speed does not depend. Memory: arguments (state, batch) and temporaries of the compiled training "
            "step, per device.")


def front(results: Sequence[ConfigResult]) -> list[str]:
    """Names on the trade-off front, by bytes: no other configuration holds as little and has as low a mean loss."""
    found = [(r.cache.measured, spread.mean, r.name) for r in results if (spread := r.spread("loss"))]
    best, names = float("inf"), []
    for _, loss, name in sorted(found):
        if loss < best:
            best = loss
            names.append(name)
    return names

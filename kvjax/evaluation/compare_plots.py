"""Plots of a comparison: loss against cache, loss while training, and decode speed against context."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvjax.config import Config
from kvjax.evaluation import curves
from kvjax.evaluation.compare_caption import front
from kvjax.evaluation.compare_table import ConfigResult
from kvjax.evaluation.curves import Curves, smoothed
from kvjax.evaluation.plotting import (
    label_ends,
    label_points,
    new_figure,
    plain,
    powers_of_two,
    save,
    styles,
    thousands,
)

BY_CACHE, CURVES, DECODING = "loss_by_cache.png", "loss_curves.png", "decode_speed.png"
TITLES = {BY_CACHE: "Loss against bytes held", CURVES: "Loss while training", DECODING: "Decode speed against context"}


def draw(results: Sequence[ConfigResult], config: Config, out: Path) -> list[str]:
    """Writes the plots that there are figures for into `out`; returns their names. Diverged runs are left out."""
    complete, drawn = [result for result in results if result.spread("loss")], []
    looks = styles(result.name for result in results)
    if complete:
        plot_by_cache(complete, looks, out / BY_CACHE)
        drawn += [BY_CACHE]
    if found := reported(complete, out):
        plot_curves(found, config, looks, out / CURVES)
        drawn += [CURVES]
    if results[0].speed is not None:
        plot_decoding(results, looks, out / DECODING)
        drawn += [DECODING]
    return drawn


def plot_by_cache(results: Sequence[ConfigResult], looks: dict[str, dict[str, Any]], path: Path) -> None:
    """Mean held-out loss and its deviation against bytes held per token, and the front of the best trade-offs."""
    figure = new_figure(9, 5.6)
    axes, points = figure.subplots(), {r.name: (r.cache.measured, r.spread("loss").mean) for r in results}
    bars = []
    for result in results:
        (held, loss), sd = points[result.name], result.spread("loss").sd or 0
        bars.append(((held, loss - sd), (held, loss + sd)))
        axes.errorbar(held, loss, sd, capsize=3, markersize=7, **looks[result.name] | {"linestyle": "none"})
    best = [points[name] for name in front(results)]
    axes.plot(*zip(*best, strict=True), drawstyle="steps-post", color="grey", linewidth=1, zorder=0, linestyle="--")
    n = results[0].spread("loss").n
    spread = f"bars: ± standard deviation over {n} seeds" if n > 1 else "one seed: no spread is known"
    plain(axes, f"The best trade-offs lie to the left and below, along the dashed front; {spread}",
          "bytes of cache held per token, all layers", "held-out loss, nats per token")
    powers_of_two(axes, [held for held, _ in points.values()])
    axes.margins(y=0.12)
    corners = [(right[0], left[1]) for left, right in pairwise(best)]
    stairs = list(pairwise(x for corner in zip(best, corners, strict=False) for x in corner)) if corners else []
    label_points(axes, points, bars + stairs)
    save(figure, path)


def reported(results: Sequence[ConfigResult], out: Path) -> dict[str, list[Curves]]:
    """The curves of all runs by configuration; one whose runs have lost their reports is left out."""
    found = {r.name: [curves.read(out / run.folder) for run in r.runs] for r in results}
    return {name: runs for name, runs in found.items() if curves.mean([run.losses for run in runs])}


def plot_curves(found: dict[str, list[Curves]], config: Config, looks: dict[str, dict[str, Any]], path: Path) -> None:
    """Training and held-out loss against tokens, and training loss less that of the first configuration."""
    first, figure = next(iter(found)), new_figure(9, 9.5)
    above, below = figure.subplots(2, 1, sharex=True)
    base = curves.mean([run.losses for run in found[first]])
    above_ends, below_ends = {}, {}
    for name, runs in found.items():
        losses = curves.mean([run.losses for run in runs])
        above_ends[name] = _line(above, losses, runs[0], looks[name])
        less = {step: loss - base[step] for step, loss in losses.items() if step in base}
        below_ends[name] = _line(below, less, runs[0], looks[name])
        held_out = curves.mean([run.validation for run in runs])
        above.plot(_tokens(held_out, runs[0]), list(held_out.values()), **looks[name] | {"linestyle": "none"})
    means = f"means over {len(found[first])} seeds, " if len(found[first]) > 1 else ""
    plain(above, f"Lines: training loss ({means}smoothed over {curves.SMOOTHED} reports of {config.train.log_every} "
          "steps); markers: held-out", "", "nats per token")
    plain(below, f"Training loss less that of {first} on the same batches (smoothed alike)",
          "tokens trained on", "nats per token")
    _zoom(above, found)
    thousands(below.xaxis)
    label_ends(above, above_ends, looks)
    label_ends(below, below_ends, looks)
    save(figure, path)


def _line(axes: Any, losses: dict[int, float], run: Curves, look: dict[str, Any]) -> tuple[float, float]:
    """Draws a smoothed curve; returns its end."""
    tokens, values = _tokens(losses, run), smoothed(list(losses.values()))
    axes.plot(tokens, values, linewidth=1.6, **look | {"marker": None})
    return tokens[-1], float(values[-1])


def _tokens(losses: dict[int, float], run: Curves) -> list[int]:
    return [step * run.tokens_per_step for step in losses]


def _zoom(axes: Any, found: dict[str, list[Curves]]) -> None:
    """Leaves out the steep first fall, in which curves can't be told apart."""
    values = [loss for runs in found.values() for run in runs
              for loss in list(run.losses.values())[len(run.losses) // 10:]]
    margin = 0.06 * (max(values) - min(values))
    axes.set_ylim(min(values) - margin, max(values) + margin)


def plot_decoding(results: Sequence[ConfigResult], looks: dict[str, dict[str, Any]], path: Path) -> None:
    """Tokens decoded per second against tokens of context."""
    from matplotlib.ticker import LogLocator
    figure = new_figure(9, 5.6)
    axes, ends = figure.subplots(), {}
    for result in results:
        contexts, seconds = zip(*sorted(result.speed.decode_seconds.items()), strict=True)
        rates = [result.speed.batch / s for s in seconds]
        axes.plot(contexts, rates, markersize=5, linewidth=1.6, **looks[result.name])
        ends[result.name] = contexts[-1], rates[-1]
    taken = results[0].speed
    plain(axes, f"Decoding {taken.batch} sequences at once, on {taken.device}", "tokens of context",
          "tokens per second, all sequences")
    axes.set_yscale("log")
    powers_of_two(axes, taken.decode_seconds)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    label_ends(axes, ends, looks)
    save(figure, path)

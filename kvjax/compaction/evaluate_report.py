"""What `evaluate` found: figures, tables and plots."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.config import ConfigError, require

READINGS = {"copied": "", "biased": "", "folded": ", folded", "refitted": ", dropped, refitted", "dropped": ", dropped"}
"""What a row's label adds to the name of its method: values are copied; or fitted with biases that are kept, folded
into keys and values fitted to those, dropped and values fitted to what is left, or dropped without more."""


@dataclass(frozen=True)
class Bound:
    """What folding changes in outputs, and FoldBias's bound on it, by entry: RMS over queries and heads, relative to
    outputs with biases. Near: of calibration queries; far: of those of the continuation."""

    near_bound: list[float]
    near_actual: list[float]
    near_excess: list[float]
    """The most that a single output is changed beyond its bound; below 0 where the bound holds."""
    far_bound: list[float]
    far_actual: list[float]
    far_excess: list[float]


@dataclass(frozen=True)
class Drift:
    """How far queries are from those that folding was fitted to; every figure by entry and head.

    A folded bias is right for a query q if q u = 1, u the direction of FoldBias."""

    near_mean: list[list[float]]
    """Of q u over calibration queries: 1 by the choice of u."""
    near_sd: list[list[float]]
    far_mean: list[list[float]]
    far_sd: list[list[float]]
    means_apart: list[list[float]]
    """Distance of the mean queries, in root mean square distances of a calibration query from its mean."""


@dataclass(frozen=True)
class Measured:
    """One compaction of one context, read in one way."""

    method: str
    reading: str
    """One of `READINGS`."""
    ratio: float
    left: int
    """Tokens that are left."""
    kl: float
    """Mean KL divergence of next-token predictions from those of the full cache, nats."""
    perplexity: float
    """Of the continuation."""
    near_error: list[float]
    """Relative RMS error of attention to the context by layer: for the calibration queries."""
    far_error: list[float]
    """The same for the queries of the continuation."""
    seconds: float | None
    """Of compaction, without prefill and without making references; None of a first context: programs are compiled."""
    nbytes: int
    """Of the cache as allocated."""
    bytes_per_slot: float
    """Of each fitted token, over all layers."""
    bound: Bound | None = None

    @property
    def label(self) -> str:
        return self.method + READINGS[self.reading]


@dataclass(frozen=True)
class ContextResult:
    """One context with all of its compactions."""

    text: str
    start: int
    """Of its first token in the held-out part of the text."""
    perplexity: float
    """Of the continuation, with all tokens in the cache."""
    nbytes: int
    """Of that cache as allocated."""
    bytes_per_token: float
    layers: list[int]
    """Those that are compacted, in the order of errors."""
    seconds: dict[str, float | None]
    """Of prefill, and of making the reference queries; None of a first context."""
    drift: Drift | None
    measured: list[Measured]

    def __str__(self) -> str:
        middle = sorted({m.ratio for m in self.measured})[len({m.ratio for m in self.measured}) // 2]
        found = ", ".join(f"{m.label} {m.kl:.3g}" for m in self.measured if m.ratio == middle)
        return f"{self.text} at {self.start}: perplexity {self.perplexity:.4g}; KL at {middle:g}x: {found}"


def content(settings: dict[str, Any], results: Sequence[ContextResult]) -> dict[str, Any]:
    """All figures for JSON."""
    summary = [{"method": method, "reading": reading, "ratio": ratio,
                **{name: _spread(quantity, found) for name, quantity in QUANTITIES.items()}}
               for (method, reading, ratio), found in grouped(results).items()]
    return {"settings": settings, "summary": summary, "contexts": [dataclasses.asdict(r) for r in results]}


def restored(folder: Path, settings: dict[str, Any]) -> list[ContextResult]:
    """The results that a run with the same settings wrote to a folder before it was stopped; none if there is no file.

    Raises ConfigError if they were made with other settings.
    """
    path = folder / "compaction.json"
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        results = [_restored(context) for context in found["contexts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no results of this command: choose another --out") from error
    differing = [name for name in settings if settings[name] != found["settings"].get(name)]
    require(not differing, f"{path} was made with other {', '.join(differing)}: choose another --out")
    return results


def _restored(context: dict[str, Any]) -> ContextResult:
    measured = [Measured(**m | {"bound": m["bound"] and Bound(**m["bound"])}) for m in context["measured"]]
    return ContextResult(**context | {"drift": context["drift"] and Drift(**context["drift"]), "measured": measured})


QUANTITIES: dict[str, Callable[[Measured], float | None]] = {
    "kl": lambda m: m.kl, "perplexity": lambda m: m.perplexity, "far_error": lambda m: float(np.mean(m.far_error)),
    "near_error": lambda m: float(np.mean(m.near_error)), "seconds": lambda m: m.seconds,
    "nbytes": lambda m: m.nbytes, "bytes_per_slot": lambda m: m.bytes_per_slot}


def grouped(results: Sequence[ContextResult]) -> dict[tuple[str, str, float], list[Measured]]:
    """The measurements of all contexts by method, reading and ratio, in the order in which they were made."""
    found: dict[tuple[str, str, float], list[Measured]] = {}
    for measured in (m for result in results for m in result.measured):
        found.setdefault((measured.method, measured.reading, measured.ratio), []).append(measured)
    return found


def _spread(quantity: Callable[[Any], float | None], items: Sequence[Any]) -> dict[str, float | None]:
    """Mean over the contexts that have a quantity, and its standard error; None for want of contexts."""
    values = [value for item in items if (value := quantity(item)) is not None]
    error = float(np.std(values, ddof=1) / len(values)**0.5) if len(values) > 1 else None
    return {"mean": float(np.mean(values)) if values else None, "standard_error": error}


def _cell(spread: dict[str, float | None]) -> str:
    mean, error = spread["mean"], spread["standard_error"]
    if mean is None:
        return "–"
    return f"{mean:.3g}" if error is None else f"{mean:.3g} ± {error:.1g}"


def markdown(settings: dict[str, Any], results: Sequence[ContextResult]) -> str:
    """What was measured, and one table for each quantity."""
    full = _cell(_spread(lambda result: result.perplexity, results))
    parts = [_caption(settings, results), "KL divergence of next-token predictions from those of the full cache, nats "
             "(mean over tokens):", _by_ratio(results, "kl"),
             f"Perplexity of the continuations; with the full cache {full}:", _by_ratio(results, "perplexity"),
             "Relative error of attention outputs for the queries of the continuations (RMS, mean over layers):",
             _by_ratio(results, "far_error"), "The same for the calibration queries, which fits are made for; less "
             "here than above is what a fit learned of these queries alone:", _by_ratio(results, "near_error"),
             _times(results), _by_ratio(results, "seconds"), _bytes(results)]
    if any(m.bound for m in results[0].measured):
        parts += [_drift(results), "Folding's change of attention outputs with the same values and keys not rounded, "
                  "and its bound (RMS relative to the outputs with biases, mean over layers; near: calibration "
                  "queries, far: the continuations'). Above its bound is the most that any output lies beyond its own, "
                  "rounding errors included:", _bounds(results)]
    return "\n\n".join(parts) + "\n"


def _caption(settings: dict[str, Any], results: Sequence[ContextResult]) -> str:
    kept = f", the newest {settings['keep']} as they were" if settings["keep"] else ""
    spread = "± is the standard error of the mean over contexts" if len(results) > 1 else "one context shows no spread"
    return (f"{Path(settings['model']).name}: {len(results)} contexts of {settings['context_tokens']:,} tokens of "
            f"{', '.join(settings['text'])}, each continued by {settings['continuation_tokens']:,} tokens that were "
            f"read through what compaction left{kept}. Reference queries: {settings['references']}. Caches: "
            f"{settings['cache_dtype']}. {spread[0].upper()}{spread[1:]}.")


def _by_ratio(results: Sequence[ContextResult], name: str) -> str:
    found = grouped(results)
    left = {ratio: measured[0].left for (_, _, ratio), measured in found.items()}
    lines = ["| method | " + " | ".join(f"{ratio:g}x ({count:,} left)" for ratio, count in left.items()) + " |",
             "|---|" + "--:|" * len(left)]
    for method, reading in dict.fromkeys((method, reading) for method, reading, _ in found):
        cells = [_cell(_spread(QUANTITIES[name], found[method, reading, ratio])) for ratio in left]
        lines.append(f"| {method}{READINGS[reading]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(results: Sequence[ContextResult]) -> str:
    taken = lambda name: _cell(_spread(lambda result: result.seconds[name], results))
    return (f"Seconds of compaction, the first context left out (programs are compiled); prefill of a context took "
            f"{taken('prefill')}, reference queries {taken('references')}:")


def _bytes(results: Sequence[ContextResult]) -> str:
    found = grouped(results)
    left = {ratio: measured[0].left for (_, _, ratio), measured in found.items()}
    some = {reading: method for method, reading, _ in reversed(found)}
    lines = [f"Bytes of caches as allocated, with room for the continuation; with all tokens {results[0].nbytes:,} "
             f"({results[0].bytes_per_token:,.0f} a token):\n",
             "| values | a fitted token | " + " | ".join(f"{ratio:g}x" for ratio in left) + " |",
             "|---|--:|" + "--:|" * len(left)]
    names = {"copied": "copied", "biased": "with biases", "folded": "folded, or biases dropped"}
    for reading in (reading for reading in names if reading in some):
        rows = [found[some[reading], reading, ratio][0] for ratio in left]
        lines.append(f"| {names[reading]} | {rows[0].bytes_per_slot:,.0f} | "
                     f"{' | '.join(f'{row.nbytes:,}' for row in rows)} |")
    return "\n".join(lines)


def _drift(results: Sequence[ContextResult]) -> str:
    mean = lambda name: np.mean([getattr(result.drift, name) for result in results])
    return (f"Query drift, means over heads, layers and contexts: q u is {mean('near_mean'):.3f} with standard "
            f"deviation {mean('near_sd'):.3f} over calibration queries, {mean('far_mean'):.3f} with "
            f"{mean('far_sd'):.3f} over those of the continuations; their mean queries are {mean('means_apart'):.3f} "
            "standard deviations apart.")


def _bounds(results: Sequence[ContextResult]) -> str:
    lines = ["| method | ratio | change, near | bound, near | change, far | bound, far | above its bound |",
             "|---|--:|--:|--:|--:|--:|--:|"]
    for (method, _, ratio), measured in grouped(results).items():
        if not (bounds := [m.bound for m in measured if m.bound]):
            continue
        cells = [_cell(_spread(lambda b, name=name: float(np.mean(getattr(b, name))), bounds))
                 for name in ("near_actual", "near_bound", "far_actual", "far_bound")]
        excess = max(0.0, *(max(*b.near_excess, *b.far_excess) for b in bounds))
        lines.append(f"| {method} | {ratio:g}x | {' | '.join(cells)} | {excess:.1g} |")
    return "\n".join(lines)


STYLES = {"copied": ":", "biased": "-", "folded": "--", "refitted": "-.", "dropped": (0, (1, 3))}


def plot(results: Sequence[ContextResult], path: Path) -> None:
    """Draws KL against ratio, that of all readings, errors by layer at the middle ratio, and bounds."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(19, 11), layout="constrained")
    found = grouped(results)
    colours = {method: f"C{i}" for i, method in enumerate(dict.fromkeys(method for method, _, _ in found))}
    ratios = sorted({ratio for _, _, ratio in found})
    ((methods, readings), (layers, bounds)) = figure.subplots(2, 2)
    _plot_kl(methods, found, colours, ("copied", "biased"), "Methods (those that fit biases: with them)")
    _plot_kl(readings, found, colours, ("biased", "folded", "refitted", "dropped"),
             "Biases kept, folded into keys, or dropped")
    _plot_layers(layers, results, found, colours, ratios[len(ratios) // 2])
    _plot_bounds(bounds, found, colours)
    figure.savefig(path, dpi=110)


def _plot_kl(axes: Any, found: dict, colours: dict[str, str], readings: tuple[str, ...], title: str) -> None:
    for method, reading in dict.fromkeys((m, r) for m, r, _ in found if r in readings):
        ratios = sorted(ratio for m, r, ratio in found if (m, r) == (method, reading))
        spreads = [_spread(QUANTITIES["kl"], found[method, reading, ratio]) for ratio in ratios]
        axes.errorbar(ratios, [s["mean"] for s in spreads], [s["standard_error"] or 0 for s in spreads], marker="o",
                      linestyle=STYLES[reading], color=colours[method], capsize=3, label=method + READINGS[reading])
    axes.set(title=title, xlabel="tokens for each one left", ylabel="KL from the full cache, nats", xscale="log",
             yscale="log")
    _ticks(axes, sorted({ratio for _, _, ratio in found}))
    _legend(axes)


def _ticks(axes: Any, ratios: list[float]) -> None:
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _plot_layers(axes: Any, results: Sequence[ContextResult], found: dict, colours: dict[str, str],
                 ratio: float) -> None:
    layers = np.asarray(results[0].layers)
    order = np.argsort(layers)
    for (method, reading, at), measured in found.items():
        if at == ratio and reading in ("copied", "biased", "folded"):
            errors = np.mean([m.far_error for m in measured], axis=0)
            axes.plot(layers[order] + 1, errors[order], linestyle=STYLES[reading], marker=".", color=colours[method],
                      label=method + READINGS[reading])
    axes.set(title=f"Error of attention outputs at {ratio:g}x, queries of the continuations", yscale="log",
             xlabel="layer", ylabel="relative RMS error")
    axes.grid(alpha=0.3)
    _legend(axes)


def _plot_bounds(axes: Any, found: dict, colours: dict[str, str]) -> None:
    drawn = [(method, m.bound) for (method, _, _), measured in found.items() for m in measured if m.bound]
    axes.set(xscale="log", yscale="log")
    for method in dict.fromkeys(method for method, _ in drawn):
        for name, marker, title in (("near", "o", "calibration queries"), ("far", "x", "the continuations' queries")):
            bound, actual = (np.concatenate([getattr(b, f"{name}_{what}") for m, b in drawn if m == method])
                             for what in ("bound", "actual"))
            shown = (bound > 0) & (actual > 0)
            axes.scatter(bound[shown], actual[shown], s=12, alpha=0.4, marker=marker, color=colours[method],
                         label=f"{method}, {title}")
    if drawn:
        ends = np.array([min(axes.get_ylim()[0], axes.get_xlim()[0]), axes.get_xlim()[1]])
        axes.plot(ends, ends, color="black", linestyle="--", label="the bound")
    axes.set(title="What folding changes against its bound (dots: layers, ratios, contexts)",
             xlabel="bound, relative to outputs", ylabel="change, relative to outputs")
    axes.grid(alpha=0.3)
    _legend(axes)

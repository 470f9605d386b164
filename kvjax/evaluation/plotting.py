"""What plots share: the check for the library, colours that colour-blind readers tell apart, labels beside the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.config import ConfigError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, without yellow, which is hard to see on white."""
DASHES, MARKERS = ("-", "--", ":", "-."), "osD^vPX"
DPI, SMALL = 160, 8.5
DISTANCES = (10, 18, 30, 44, 60)
WAYS = [np.array([np.cos(angle), np.sin(angle)]) for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False)]
"""Where a point's label may be: how far from it in font points, and in which direction."""


def check_plotting() -> None:
    """Raises ConfigError if the plotting library is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the plot needs a package: pip install matplotlib") from error


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each name, together different for 28 of them."""
    return {name: {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
                   "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]} for i, name in enumerate(names)}


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches; nothing is shown on a screen."""
    from matplotlib.figure import Figure
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def plain(axes: Any, title: str, x: str, y: str) -> None:
    """Titles, a faint grid, and no frame to the right and above."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def thousands(axis: Any) -> None:
    """Numbers as 1,024."""
    axis.set_major_formatter("{x:,.0f}")


def powers_of_two(axes: Any, values: Iterable[float]) -> None:
    """A logarithmic x axis with some room around the values, and ticks at powers of two and half way between."""
    low, high = min(values) / 1.2, max(values) * 1.2
    ticks = [part * 2**n for n in range(1, 40) for part in (1, 1.5) if low <= part * 2**n <= high]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.set_xlim(low, high)


def label_ends(axes: Any, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, dict[str, Any]]) -> None:
    """Names to the right of the axes, each joined to its end (x, y) of a curve, and none over another."""
    axes.figure.draw_without_rendering()
    to_axes = axes.transData + axes.transAxes.inverted()
    names, heights = zip(*sorted(((name, to_axes.transform(end)[1]) for name, end in ends.items()),
                                 key=lambda item: item[1]), strict=True)
    gap = 1.25 * SMALL / 72 * DPI / axes.get_window_extent().height
    for name, height in zip(names, spread(np.array(heights), gap), strict=True):
        axes.annotate(name, ends[name], xytext=(1.03, height), textcoords="axes fraction", va="center",
                      fontsize=SMALL, annotation_clip=False,
                      arrowprops=dict(arrowstyle="-", color=looks[name]["color"], linewidth=0.8, shrinkA=0, shrinkB=2,
                                      relpos=(0, 0.5)))


def spread(wanted: np.ndarray, gap: float) -> np.ndarray:
    """Ascending positions in 0 .. 1 that are `gap` apart and, by least squares, nearest to the ascending wanted ones.

    Where there is no room for that they are as far apart as there is.
    """
    from scipy.optimize import isotonic_regression
    steps = min(gap, 1 / max(len(wanted) - 1, 1)) * np.arange(len(wanted))
    return np.clip(isotonic_regression(wanted - steps).x, 0, 1 - steps[-1]) + steps


def label_points(axes: Any, points: Mapping[str, tuple[float, float]],
                 lines: Iterable[tuple[tuple[float, float], tuple[float, float]]] = ()) -> None:
    """Names beside points (x, y), where they cover least of other names, of points and of lines that run along an axis.

    They are joined to points that are far.
    """
    from matplotlib.text import Text
    axes.figure.draw_without_rendering()
    dots, pixels = axes.transData.transform(list(points.values())), DPI / 72
    taken = [np.concatenate([dot - 5 * pixels, dot + 5 * pixels]) for dot in dots]
    ends = [np.sort(axes.transData.transform(line), axis=0) for line in lines]
    taken += [np.concatenate([low - pixels, high + pixels]) for low, high in ends]
    for (name, point), dot in zip(points.items(), dots, strict=True):
        text = axes.annotate(name, point, (0, 0), textcoords="offset points", ha="center", va="center", fontsize=SMALL,
                             arrowprops=dict(arrowstyle="-", color="grey", linewidth=0.6, shrinkA=0, shrinkB=4))
        half = Text.get_window_extent(text).size / 2
        offsets = [distance * pixels * way + half * [np.sign(round(way[0], 3)), 0]
                   for distance, way in product(DISTANCES, WAYS)]
        boxes = [np.concatenate([dot + offset - half, dot + offset + half]) for offset in offsets]
        best = int(np.argmin([round(_covered(box, taken, axes.get_window_extent().extents)) for box in boxes]))
        text.set_position(offsets[best] / pixels)
        text.arrow_patch.set_visible(best >= len(WAYS))
        taken.append(boxes[best])


def _covered(box: np.ndarray, taken: list[np.ndarray], inside: np.ndarray) -> float:
    """Pixels of a box (left, bottom, right, top) that others cover or that lie outside."""
    def common(other: np.ndarray) -> float:
        return float(np.prod(np.maximum(np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2]), 0)))
    return sum(map(common, taken)) + float(np.prod(box[2:] - box[:2])) - common(inside)


def save(figure: Any, path: Path) -> None:
    """Writes the figure as PNG."""
    figure.savefig(path)

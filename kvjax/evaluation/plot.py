"""Draws the loss curves of runs beside each other, and prints how they ended.

    python -m kvjax.evaluation.plot runs/* --out curves.png
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from kvjax.config import ConfigError, require
from kvjax.evaluation.curves import SMOOTHED, Curves, read, smoothed
from kvjax.evaluation.plotting import check_plotting, label_ends, new_figure, plain, save, styles, thousands


@dataclass(frozen=True)
class Arguments:
    """Draws training and held-out loss of runs against steps and tokens, and prints a table."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...")]
    """Folders of runs."""
    out: Path = Path("curves.png")
    """The picture to write."""


def table(runs: Sequence[Curves]) -> Table:
    """How the runs ended, for the terminal."""
    out = Table("run", "steps", "tokens", "final loss", "best validation", "tokens/s",
                caption="losses in nats per token (a validation at the end of a run may be of more text than those "
                        "before); tokens/s: the median of all reports but the first")
    out.columns[0].overflow = "fold"
    for column in out.columns[1:]:
        column.justify = "right"
    for run in runs:
        last = max(run.losses)
        out.add_row(run.name, f"{last:,}", f"{last * run.tokens_per_step:,}", f"{run.losses[last]:.4f}",
                    f"{min(run.validation.values()):.4f}" if run.validation else "–",
                    f"{run.speed:,.0f}" if run.speed else "–")
    return out


def draw(runs: Sequence[Curves], path: Path) -> None:
    """Training loss above and held-out loss below, against steps on the left and tokens on the right."""
    figure, looks = new_figure(13, 8.5), styles(run.name for run in runs)
    losses, held_out = figure.subplots(2, 2, sharey="row")
    for left, right, quantity in ((*losses, "losses"), (*held_out, "validation")):
        _plot(left, {run.name: (getattr(run, quantity), 1) for run in runs}, looks, quantity)
        ends = _plot(right, {run.name: (getattr(run, quantity), run.tokens_per_step) for run in runs}, looks, quantity)
        if ends:
            label_ends(right, ends, looks)
    reports = f"training loss, mean of {SMOOTHED} reports"
    for axes, title, x in zip(figure.axes, (reports, reports, "held-out loss", "held-out loss"),
                              ("steps", "tokens (padding included)") * 2, strict=True):
        plain(axes, title, x, "nats per token")
    save(figure, path)


def _plot(axes: Any, curves: Mapping[str, tuple[Mapping[int, float], int]], looks: Mapping[str, dict[str, Any]],
          quantity: str) -> dict[str, tuple[float, float]]:
    """Draws curves by step, each step of so many units; returns the ends of those that have points."""
    ends = {}
    for name, (curve, units) in curves.items():
        if not curve:
            continue
        steps = sorted(curve)
        values = [curve[step] for step in steps]
        values = smoothed(values) if quantity == "losses" else values
        look = looks[name] | ({"marker": None} if quantity == "losses" else {})
        axes.plot([step * units for step in steps], values, linewidth=1.5, markersize=5, **look)
        ends[name] = steps[-1] * units, float(values[-1])
    thousands(axes.xaxis)
    return ends


def main(command_line: Sequence[str]) -> None:
    """Reads the runs, prints the table and writes the picture. Raises ConfigError on what is no run."""
    args = tyro.cli(Arguments, args=command_line, prog="python -m kvjax.evaluation.plot")
    require(bool(args.runs), "there are no runs to draw: name the folders of one or more")
    require(args.out.suffix in (".png", ".svg", ".pdf"), f"--out is {args.out}: name a .png, .svg or .pdf file")
    require(args.out.parent.is_dir(), f"--out is {args.out}: there is no folder {args.out.parent}, make it first")
    check_plotting()
    names = named_runs(args.runs)
    runs = [read(folder, name) for folder, name in zip(args.runs, names, strict=True)]
    for folder, run in zip(args.runs, runs, strict=True):
        require(bool(run.losses), f"{folder} tells no loss yet: wait for its first report")
    Console().print(table(runs))
    draw(runs, args.out)
    print(f"written to {args.out}")


def named_runs(folders: Sequence[Path]) -> list[str]:
    """The folders' names; with those of the folders that they are in if two are the same."""
    resolved = [folder.resolve() for folder in folders]
    twice = [str(folder) for folder, count in Counter(resolved).items() if count > 1]
    require(not twice, f"{', '.join(twice)} is given more than once: name each run once")
    names = [folder.name for folder in resolved]
    return names if len(set(names)) == len(names) else [f"{folder.parent.name}/{folder.name}" for folder in resolved]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

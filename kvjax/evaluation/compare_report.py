"""The files of a comparison: report.md and report.json, and report.html, which is readable anywhere by itself."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from kvjax.config import Config, require
from kvjax.evaluation.compare_caption import caption, speeds
from kvjax.evaluation.compare_plots import TITLES, draw
from kvjax.evaluation.compare_table import ConfigResult, Table, content, quality, speed

FILES = ("report.md", "report.json", "report.html")
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --faint: #59636e; --back: #ffffff; --line: #d1d9e0; --row: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --faint: #9198a1; --back: #0d1117; --line: #3d444d; --row: #151b23 }
}
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.55 system-ui, sans-serif;
       color: var(--text); background: var(--back) }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
p { max-width: 48rem } .faint { color: var(--faint) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th { white-space: normal; vertical-align: bottom; border-bottom-width: 2px }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace }
tbody tr:hover { background: var(--row) }
figure { margin: 1rem 0 } img { max-width: 100%; background: #fff; border-radius: 6px; border: 1px solid var(--line) }
"""


def write(folder: Path, config: Config, results: Sequence[ConfigResult], plots: bool = True) -> str:
    """Writes the files of a comparison, with plots if wanted; returns the Markdown. `config`: any of those compared.

    Raises ConfigError if the runs were not scored on the same number of tokens: their text changed in between.
    """
    scored = {run.folder: run.tokens for result in results for run in result.runs}
    require(len(set(scored.values())) == 1, "the held-out text changed between these runs, so their losses can't be "
            "compared: " + ", ".join(f"{path} was scored on {n:,} tokens" for path, n in scored.items())
            + "; choose another --out")
    drawn = draw(results, config, folder) if plots else []
    text = markdown(config, results, drawn)
    (folder / "report.json").write_text(json.dumps(content(config, results), indent=2) + "\n")
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(page(config, results, folder, drawn), encoding="utf-8")
    return text


def markdown(config: Config, results: Sequence[ConfigResult], plots: Sequence[str] = ()) -> str:
    """Tables, what their figures mean, and links to plots."""
    parts = [quality(results).markdown(), *caption(config, results)]
    if results[0].speed:
        parts += [speed(results).markdown(), speeds(results[0].speed)]
    return "\n\n".join([*parts, *(f"![{TITLES[name]}]({name})" for name in plots)]) + "\n"


def page(config: Config, results: Sequence[ConfigResult], folder: Path, plots: Sequence[str] = ()) -> str:
    """One HTML page that needs nothing else: plots are part of it. It follows the reader's choice of light or dark."""
    title = f"{len(results)} configurations compared"
    parts = [f"<h1>{escape(title)}</h1>", _table(quality(results)), *map(_paragraph, caption(config, results))]
    if results[0].speed:
        parts += ["<h2>Speed and memory</h2>", _table(speed(results)), _paragraph(speeds(results[0].speed))]
    for name in plots:
        image = base64.b64encode((folder / name).read_bytes()).decode()
        parts += [f'<h2>{escape(TITLES[name])}</h2>',
                  f'<figure><img alt="{escape(TITLES[name])}" src="data:image/png;base64,{image}"></figure>']
    return ('<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n")


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
    rows = "\n".join(row(cells, "td") for cells in table.rows)
    return (f'<div class="wide"><table>\n<thead>{row(table.header, "th")}</thead>\n<tbody>\n{rows}\n</tbody>\n'
            "</table></div>")


def _paragraph(text: str) -> str:
    return f'<p class="faint">{escape(text)}</p>'

"""Markdown tables of configurations: parameters, and what their caches hold and a decode step reads.

    python -m kvjax.evaluation.config_table NAME ...              a table of these
    python -m kvjax.evaluation.config_table > docs/configurations.md      a page of all of them
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from kvjax.config import ConfigError, ModelConfig
from kvjax.config_files import config_names, load_config
from kvjax.evaluation.cache_report import report
from kvjax.model import parameter_count

SECTIONS = {
    "KPA and its baselines": ("gqa", "kpa", "mha", "mla", "mqa", "tpa"),
    "Sharing between layers at the same sizes": ("cla2", "kvpath", "yoco"),
    "SkipV1Former and its baselines": ("gpt2", "llama"),
    "Small, for a CPU": ("quickstart", "small"),
    "Others": (),
}
"""First words of names by heading; what no other section has is among the others."""
UPTRAIN, SOURCE = "_uptrain", "mha_125m"
"""The end of names whose models are made from trained ones, and the one that they are shown for."""

INTRODUCTION = """# Configurations

Made by `python -m kvjax.evaluation.config_table > docs/configurations.md`. Every name trains with
`python train.py NAME`.

Bytes are per token of context, of all layers, in the type and for the length of context under "cache". *Held* is
measured on the cache that `init_cache` makes; the tokens of a window are rounded up to a multiple of 128, above 512 to
one of 512.
*Read* is what one decode step reads of a full cache: each layer the entries that it attends to, once. *Less* is how
many times less than multi-head attention of the same width, depth and type without a window, which reads what it holds.
Elements are held ones per layer, on average."""


class Printed(NamedTuple):
    """A size of a cache as a paper prints it."""

    paper: str
    name: str
    dtype: str
    bytes: int
    note: str = ""
    """Why the true figure is another."""


PRINTED = (
    *(Printed("KPA", f"kpa_{scale}", "bfloat16", 2 * layers * elements) for scale, layers, elements in (
        ("125m", 12, 256), ("125m_4x3", 12, 224), ("353m", 24, 320), ("353m_4x4", 24, 256), ("773m", 36, 384),
        ("773m_5x4", 36, 288), ("1500m", 48, 320))),
    Printed("SkipV1Former", "llama_1b_gqa", "float32", 98_304),
    Printed("SkipV1Former", "llama_1b_gqa_skipv1", "float32", 74_752),
    Printed("SkipV1Former", "llama_1b_mla", "bfloat16", 13_824),
    Printed("SkipV1Former", "llama_1b_mla_skipv1", "bfloat16", 7_680,
            "half of the latent of every layer; layer 1 keeps the whole one"),
)
"""KPA's are printed as elements of one layer."""


def table(names: Iterable[str], source: ModelConfig | None = None) -> str:
    """The table of some configurations; `source` is the trained model of those that start from one.

    Raises ConfigError for one that is unknown or does not load.
    """
    lines = ["| config | parameters | layers x width | cache | elements / token, layer | bytes held | less | "
             "bytes read | less |", "|---|--:|--:|---|--:|--:|--:|--:|--:|"]
    return "\n".join(lines + [row(name, source) for name in names])


def row(name: str, source: ModelConfig | None = None) -> str:
    """One configuration; its cache is measured on one that `init_cache` makes."""
    model = load_config(name, source).model
    cache = report(model)
    elements = cache.measured / model.layers / jnp.dtype(cache.dtype).itemsize
    return (f"| `{name}` | {_millions(parameter_count(model))} | {model.layers} x {model.width} | "
            f"{cache.dtype}, {cache.length:,} | {_figure(elements)} | {_figure(cache.measured)} | {cache.factor:.2f} | "
            f"{_figure(cache.read)} | {cache.read_factor:.2f} |")


def _figure(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _millions(count: int) -> str:
    return f"{count / 1e6:,.{1 if count > 1e7 else 3}f}M"


def page(names: Sequence[str]) -> str:
    """All of `names` under headings, and how papers' figures compare."""
    parts, ordered = [INTRODUCTION], sections(name for name in names if not name.endswith(UPTRAIN))
    for heading, members in ordered.items():
        parts += [f"## {heading}", table(members)]
    parts += ["## From a trained model", f"`python train.py NAME --init-from MODEL`; here the model of `{SOURCE}`.",
              table((name for name in names if name.endswith(UPTRAIN)), load_config(SOURCE).model)]
    parts += ["## Sizes in names", sizes_in_names(name for members in ordered.values() for name in members),
              "## Caches as the papers print them", printed_table()]
    return "\n\n".join(parts)


def sections(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by heading, ordered by first word, size and the rest; headings without names are left out."""
    found: dict[str, list[str]] = {heading: [] for heading in SECTIONS}
    for name in sorted(names, key=lambda name: (name.partition("_")[0], size_in_name(name) or 0, name)):
        word = name.partition("_")[0]
        found[next((heading for heading, words in SECTIONS.items() if word in words), "Others")].append(name)
    return {heading: members for heading, members in found.items() if members}


def size_in_name(name: str) -> float | None:
    """Parameters that a name promises: 125e6 for kpa_125m."""
    match = re.search(r"_(\d+)([mb])(?:_|$)", name)
    return float(match[1]) * {"m": 1e6, "b": 1e9}[match[2]] if match else None


def sizes_in_names(names: Iterable[str]) -> str:
    """Which configurations are more than 10 % from the size that their name says."""
    off = []
    for name in names:
        size, count = size_in_name(name), parameter_count(load_config(name).model)
        if size and abs(count / size - 1) > 0.1:
            off.append(f"- `{name}`: {count / 1e6:,.1f}M, {count / size - 1:+.0%}")
    return ("Names carry the sizes that papers give to a scale. At the published settings, or at those chosen here, "
            "these models\nare more than 10 % from theirs:\n\n" + "\n".join(off))


def printed_table() -> str:
    """The bytes that papers print (KPA's: elements of a layer, in bfloat16) beside the true ones."""
    lines = ["| paper | config | type | printed bytes | bytes here | note |", "|---|---|---|--:|--:|---|"]
    for entry in PRINTED:
        held = report(load_config(entry.name).model, dtype=entry.dtype).measured
        lines.append(f"| {entry.paper} | `{entry.name}` | {entry.dtype} | {entry.bytes:,} | {_figure(held)} | "
                     f"{'agrees' if held == entry.bytes else entry.note} |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> None:
    """Prints a table of the configurations named, or the page of all."""
    print(table(names) if names else page(config_names()))


if __name__ == "__main__":
    try:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(__doc__)
            sys.exit()
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

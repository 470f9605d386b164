"""Tables, JSON and plot of long-context measurements."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.evaluation.passkey import Retrieval
from kvjax.evaluation.plotting import new_figure, plain, powers_of_two, save, styles


class Bucket(NamedTuple):
    """The mean loss of tokens with so many before them."""

    first: int
    last: int
    loss: float
    """Nats per token."""
    error: float | None
    """Standard error of the mean over places; None: of a single place there is none."""


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """What one model does."""

    name: str
    trained_length: int
    """Tokens of context that the model was made for."""
    text: str
    losses: list[Bucket]
    passkey: list[Retrieval]


def markdown(settings: dict[str, Any], results: Sequence[ModelResult]) -> str:
    """All tables, and what their figures mean."""
    texts = sorted({result.text for result in results})
    return "\n\n".join([
        "## Loss by position",
        f"Nats per token (± standard error over {settings['places']} places of the held-out part of "
        f"{', '.join(texts)}), by how many tokens were read before a token. * beyond the context length of the model. "
        "Losses per token of models with different tokenizers can't be compared.",
        _losses(results),
        "## Pass key",
        "A number of five digits is said once in running text and asked for at its end: share of "
        f"{settings['places']} trials in which greedy decoding says it and, in brackets, nats per token of it, by "
        "tokens of context and by depth (0: said at the beginning, 1: right before the question). Nowhere: the same "
        "question where it was never said.",
        *(_passkey(result) for result in results)]) + "\n"


def _losses(results: Sequence[ModelResult]) -> str:
    columns = [(bucket.first, bucket.last) for bucket in results[0].losses]
    rows = [[f"{result.name} ({result.trained_length:,})", *(_loss(result, bucket) for bucket in result.losses)]
            for result in results]
    return _table(["model (context length)", *(f"{first:,} – {last:,}" for first, last in columns)], rows)


def _loss(result: ModelResult, bucket: Bucket) -> str:
    error = "" if bucket.error is None else f" ± {bucket.error:.3f}"
    return f"{bucket.loss:.3f}{error}{' *' if bucket.last > result.trained_length else ''}"


def _passkey(result: ModelResult) -> str:
    depths = list(dict.fromkeys(found.depth for found in result.passkey))
    by_case = {(found.length, found.depth): found for found in result.passkey}
    rows = [[f"{length:,}{' *' if length > result.trained_length else ''}",
             *(f"{by_case[length, depth].found:.0%} ({by_case[length, depth].nats:.2f})" for depth in depths)]
            for length in dict.fromkeys(found.length for found in result.passkey)]
    heads = ["nowhere" if depth is None else f"depth {depth:g}" for depth in depths]
    return f"**{result.name}**\n\n" + _table(["tokens", *heads], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(folder: Path, settings: dict[str, Any], results: Sequence[ModelResult]) -> str:
    """Writes tables, figures and plot; says so."""
    folder.mkdir(parents=True, exist_ok=True)
    models = [dataclasses.asdict(result) | {"losses": [bucket._asdict() for bucket in result.losses],
                                            "passkey": [found._asdict() for found in result.passkey]}
              for result in results]
    (folder / "long_context.json").write_text(json.dumps({"settings": settings, "models": models}, indent=1) + "\n")
    (folder / "long_context.md").write_text(markdown(settings, results), encoding="utf-8")
    plot(results, folder / "long_context.png")
    return f"written to {folder / 'long_context.md'}, .json and .png"


def plot(results: Sequence[ModelResult], path: Path) -> None:
    """Loss by position, and by length of context what the pass key costs, beside its cost where it was never said."""
    figure, looks = new_figure(13, 5), styles(result.name for result in results)
    left, right = figure.subplots(1, 2)
    for result in results:
        look = looks[result.name] | {"markersize": 5, "linewidth": 1.5}
        left.plot([bucket.last for bucket in result.losses], [bucket.loss for bucket in result.losses], **look,
                  label=result.name)
        lengths = list(dict.fromkeys(found.length for found in result.passkey))
        for said, style in ((True, {}), (False, {"alpha": 0.35})):
            right.plot(lengths, [_mean_nats(result, length, said) for length in lengths], **look | style)
    for length in {result.trained_length for result in results}:
        for axes in (left, right):
            axes.axvline(length, color="grey", linewidth=0.8, linestyle="--")
    powers_of_two(left, [bucket.last for bucket in results[0].losses])
    powers_of_two(right, [found.length for found in results[0].passkey])
    plain(left, "loss by position (dashed: context length)", "tokens read before, up to", "nats per token")
    plain(right, "pass key, mean over depths (pale: never said)", "tokens of context", "nats per token of the key")
    figure.legend(loc="outside lower center", ncols=min(len(results), 4), frameon=False)
    save(figure, path)


def _mean_nats(result: ModelResult, length: int, said: bool) -> float:
    nats = [found.nats for found in result.passkey if found.length == length and (found.depth is not None) == said]
    return sum(nats) / len(nats) if nats else float("nan")

"""Which attention works with which sharing of components between layers, found by trying, as a Markdown table.

    python -m kvjax.evaluation.combinations
"""

from __future__ import annotations

from kvjax.attention import (
    Attention,
    CrossLayer,
    CrossLayerValues,
    DenseFormer,
    GroupedQuery,
    Kronecker,
    Latent,
    PathConcat,
    PathResidual,
    ResFormer,
    Sharing,
    SkipV1,
    SkipV1Yoco,
    Yoco,
    YocoValues,
    make_plan,
)
from kvjax.config import ConfigError, ModelConfig

LAYERS, WIDTH, WINDOW = 4, 64, 16

ATTENTION: dict[str, Attention] = {
    "MHA": GroupedQuery(heads=4, kv_heads=4, head_dim=16),
    "GQA": GroupedQuery(heads=4, kv_heads=2, head_dim=16),
    "MQA": GroupedQuery(heads=4, kv_heads=1, head_dim=16),
    "MLA": Latent(heads=4, latent_dim=32, rope_dim=8, nope_dim=16, value_dim=16),
    "KPA": Kronecker(h1=2, h2=2, d1=2, d2=8, k_rank=4, v_rank=4),
    "TPA": Kronecker(h1=4, h2=1, d1=1, d2=16, k_rank=4, v_rank=4),
}
SHARING: dict[str, Sharing | None] = {
    "none": None,
    "KVPath-Concat": PathConcat(layers=2, delta=2),
    "KVPath-Residual": PathResidual(layers=2, delta=2),
    "SkipV1": SkipV1(),
    "CLA": CrossLayer(),
    "YOCO": Yoco(window=WINDOW),
    "CLA-V": CrossLayerValues(),
    "YOCO-V": YocoValues(),
    "SkipV1-YOCO": SkipV1Yoco(),
    "ResFormer": ResFormer(),
    "DenseFormer": DenseFormer(),
}
"""Sizes suit every attention: a refusal is one of principle, as far as the message does not name a size."""


def model(attention: str, sharing: str, window: int | None = None) -> ModelConfig:
    """A small model of one combination."""
    return ModelConfig(ATTENTION[attention], vocab_size=64, layers=LAYERS, width=WIDTH, feed_forward_width=64,
                       context_length=64, sharing=SHARING[sharing], window=window, dtype="float32")


def refusal(attention: str, sharing: str, window: int | None = None) -> str | None:
    """Why a combination is refused; None: it is not."""
    config = model(attention, sharing, window)
    try:
        make_plan(config)
    except ConfigError as error:
        return str(error).replace(str(config.attention), "this attention")
    return None


def cell(attention: str, sharing: str, notes: list[str]) -> str:
    """What the table shows for one combination; reasons that are new are added to `notes`."""
    def one(window: int | None) -> str:
        reason = refusal(attention, sharing, window)
        if reason is None:
            return "yes"
        if reason not in notes:
            notes.append(reason)
        return f"no ({notes.index(reason) + 1})"
    full, windowed = one(None), one(WINDOW)
    return full if full == windowed else f"{full}; with a window {windowed}"


def table() -> str:
    """The table, with reasons below it."""
    notes: list[str] = []
    lines = [f"| | {' | '.join(ATTENTION)} |", f"|---|{'---|' * len(ATTENTION)}"]
    for sharing in SHARING:
        lines.append(f"| {sharing} | {' | '.join(cell(attention, sharing, notes) for attention in ATTENTION)} |")
    lines += ["", "With and without a sliding window, unless a cell says otherwise. Why not:", ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

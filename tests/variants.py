"""What every invariant is tested on: attention variants, sharing schemes, pairs of them, and the formula of each size.

Sizes are written as the methods define them, in elements per token; none is asked of the code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvjax import ModelConfig
from kvjax.attention import (
    Attention,
    CrossLayer,
    CrossLayerValues,
    DenseFormer,
    GroupedQuery,
    Kronecker,
    Latent,
    LinearScaling,
    Llama3Scaling,
    PathConcat,
    PathResidual,
    ResFormer,
    Sharing,
    SkipV1,
    SkipV1Yoco,
    YarnScaling,
    Yoco,
    YocoValues,
)

LAYERS, WIDTH, VOCAB = 3, 32, 61
NEAR = 3
"""Sliding window of the tests: fewer tokens than any chunk."""


def model_config(attention: Attention, **changes) -> ModelConfig:
    """A tiny model whose attention does something from the start."""
    sizes = dict(vocab_size=VOCAB, layers=LAYERS, width=WIDTH, feed_forward_width=48, context_length=64,
                 dtype="float32", output_init=1.0)
    return ModelConfig(attention=attention, **(sizes | changes))


@dataclass(frozen=True)
class Case:
    attention: Attention
    elements: int
    """Cached elements per token and layer, as the method's definition counts them."""


GQA = GroupedQuery(heads=4, kv_heads=2, head_dim=8)
FULL_GQA = replace(GQA, qk_norm=True, qkv_bias=True, output_bias=True)
MLA = Latent(heads=3, latent_dim=8, rope_dim=4, nope_dim=6, value_dim=5)
KPA = Kronecker(h1=4, h2=2, d1=2, d2=4, q_rank=3)

CASES = {
    "mha": Case(GroupedQuery(heads=4, kv_heads=4, head_dim=8), 2 * 4 * 8),
    "gqa": Case(GQA, 2 * 2 * 8),
    "gqa_qk_norm": Case(replace(GQA, qk_norm=True), 2 * 2 * 8),
    "gqa_bias": Case(replace(GQA, qkv_bias=True), 2 * 2 * 8),
    "gqa_norm_and_biases": Case(FULL_GQA, 2 * 2 * 8),
    "mqa": Case(GroupedQuery(heads=4, kv_heads=1, head_dim=8), 2 * 8),
    "mla": Case(MLA, 8 + 4),
    "mla_query_latent": Case(replace(MLA, query_latent_dim=10, interleaved=True), 8 + 4),
    "mla_wide_latent": Case(Latent(heads=4, latent_dim=12, rope_dim=2, nope_dim=3, value_dim=3), 12 + 2),
    "kpa": Case(KPA, (2 + 2) * (4 * 2 + 2 * 4)),
    "kpa_uneven": Case(Kronecker(h1=3, h2=5, d1=3, d2=2, q_rank=2, k_rank=1, v_rank=3), (1 + 3) * (3 * 3 + 5 * 2)),
    "kpa_dense_query": Case(Kronecker(h1=2, h2=3, d1=2, d2=4, dense_query=True), (2 + 2) * (2 * 2 + 3 * 4)),
    "tpa": Case(Kronecker(h1=4, h2=1, d1=1, d2=8), (2 + 2) * (4 + 8)),
}
"""Attention variants, in which every layer keeps its own components. Of `mla_wide_latent` chunks expand the latent."""


@dataclass(frozen=True)
class Shared:
    """A sharing scheme, and a number of layers in which each of its rules is seen."""

    sharing: Sharing
    layers: int


SHARINGS = {
    "cla2": Shared(CrossLayer(2), 4),
    "cla_v": Shared(CrossLayerValues(), 4),
    "skip_v1": Shared(SkipV1(), 3),
    "skip_v1_yoco": Shared(SkipV1Yoco(), 6),
    "yoco": Shared(Yoco(window=NEAR), 4),
    "yoco_v": Shared(YocoValues(), 4),
    "concat2": Shared(PathConcat(layers=2, delta=2), 4),
    "residual2": Shared(PathResidual(layers=2, delta=3), 4),
    "resformer": Shared(ResFormer(), 3),
    "denseformer": Shared(DenseFormer(), 3),
}
"""Every scheme once, as its method has it."""

MORE_SHARINGS = {
    "cla3": Shared(CrossLayer(3), 6),
    "skip_v1_quarter": Shared(SkipV1(share=0.25), 3),
    "skip_v1_three_quarters": Shared(SkipV1(share=0.75), 3),
    "skip_v1_yoco_quarter": Shared(SkipV1Yoco(share=0.25), 4),
    "concat1": Shared(PathConcat(layers=1, delta=6), 2),
    "concat4": Shared(PathConcat(layers=4, delta=4), 8),
    "concat_whole": Shared(PathConcat(layers=2, delta=8), 4),
    "residual1": Shared(PathResidual(layers=1, delta=2), 2),
    "residual4": Shared(PathResidual(layers=4, delta=2), 8),
    "residual_whole": Shared(PathResidual(layers=2, delta=8), 4),
}
"""Other sizes of them."""


# --- sizes ------------------------------------------------------------------------------------------------------------


def states(a: Attention) -> tuple[int, int]:
    """Elements of one layer's keys and of its values; of a latent, of the rotated key and of the latent."""
    if isinstance(a, Latent):
        return a.rope_dim, a.latent_dim
    if isinstance(a, Kronecker):
        return tuple(rank * (a.h1 * a.d1 + a.h2 * a.d2) for rank in (a.k_rank, a.v_rank))
    return a.kv_heads * a.head_dim, a.kv_heads * a.head_dim


def own_every_layer(a: Attention, scheme: Sharing, n: int) -> float:
    return n * sum(states(a))


def one_of_s(a: Attention, scheme: CrossLayer, n: int) -> float:
    return n / scheme.layers * sum(states(a))


def half_the_values(a: Attention, scheme: Sharing, n: int) -> float:
    keys, values = states(a)
    return n * keys + n / 2 * values


def skipped(a: Attention, scheme: SkipV1, n: int) -> float:
    keys, values = states(a)
    return n * keys + values * (1 + (n - 1) * (1 - scheme.share))


def skipped_with_half_the_keys(a: Attention, scheme: SkipV1Yoco, n: int) -> float:
    keys, values = states(a)
    return n / 2 * keys + values * (1 + (n - 1) * (1 - scheme.share))


def concatenated(a: Attention, scheme: PathConcat, n: int) -> float:
    paths, m, delta = n / scheme.layers, scheme.layers, scheme.delta
    if isinstance(a, Latent):
        return paths * (a.latent_dim - delta + m * (delta + a.rope_dim))
    if isinstance(a, Kronecker):
        return paths * (a.k_rank + a.v_rank - 2 * delta + 2 * m * delta) * (a.h1 * a.d1 + a.h2 * a.d2)
    return paths * a.kv_heads * (2 * (a.head_dim - delta) + 2 * m * delta)


def corrected(a: GroupedQuery, scheme: PathResidual, n: int) -> float:
    return n / scheme.layers * a.kv_heads * (2 * a.head_dim + 2 * (scheme.layers - 1) * scheme.delta)


FORMULAS: dict[type | None, Callable[[Attention, Sharing, int], float]] = {
    type(None): own_every_layer, CrossLayer: one_of_s, CrossLayerValues: half_the_values, SkipV1: skipped,
    SkipV1Yoco: skipped_with_half_the_keys, YocoValues: half_the_values, PathConcat: concatenated,
    PathResidual: corrected, ResFormer: own_every_layer, DenseFormer: own_every_layer,
}
"""Elements per token of a whole model of n layers; YOCO's are of two kinds (`sizes`)."""


def sizes(config: ModelConfig) -> list[tuple[float, int | None]]:
    """Elements per token of a whole model, with the window that they are kept for (None: all tokens)."""
    a, scheme, n = config.attention, config.sharing, config.layers
    if isinstance(scheme, Yoco):
        return [(n / 2 * sum(states(a)), scheme.window), (sum(states(a)), config.window)]
    return [(FORMULAS[type(scheme)](a, scheme, n), config.window)]


# --- combinations -----------------------------------------------------------------------------------------------------


def allowed(a: Attention, scheme: Sharing) -> bool:
    """Whether a method is defined for an attention variant of these sizes."""
    latent, kronecker = isinstance(a, Latent), isinstance(a, Kronecker)
    if isinstance(scheme, PathResidual):
        return not latent and not kronecker and scheme.delta <= a.head_dim
    if isinstance(scheme, ResFormer):
        return not latent and not kronecker
    if isinstance(scheme, (CrossLayerValues, YocoValues)):
        return not latent
    if isinstance(scheme, SkipV1):
        split = a.latent_dim if latent else a.v_rank if kronecker else a.kv_heads
        return (scheme.share * split).is_integer() and not (latent and isinstance(scheme, SkipV1Yoco))
    if isinstance(scheme, PathConcat):
        sizes = (a.latent_dim,) if latent else (a.k_rank, a.v_rank) if kronecker else (a.head_dim,)
        return scheme.delta <= min(sizes) and (latent or kronecker or scheme.delta % 2 == 0)
    return True


def fitting(a: Attention, scheme: Sharing) -> Sharing:
    """A Kronecker variant has two ranks to split, where heads have eight features."""
    return replace(scheme, delta=1) if isinstance(scheme, PathConcat) and isinstance(a, Kronecker) else scheme


def pairs(attentions: dict[str, Attention], sharings: dict[str, Shared]) -> dict[str, ModelConfig]:
    """All allowed pairs, by name."""
    return {f"{a}-{s}": model_config(attention, sharing=scheme, layers=shared.layers)
            for a, attention in attentions.items() for s, shared in sharings.items()
            if allowed(attention, scheme := fitting(attention, shared.sharing))}


def with_windows(configs: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
    """Each without and with a sliding window; YOCO's own stays the shorter one."""
    near = {f"{name}-window": replace(c, window=NEAR + isinstance(c.sharing, Yoco)) for name, c in configs.items()}
    return configs | near


PLAIN = {name: model_config(case.attention) for name, case in CASES.items()}
BY_SHARING = pairs({"gqa": GQA}, SHARINGS)
MORE_BY_SHARING = pairs({"mha": CASES["mha"].attention}, MORE_SHARINGS)

REPRESENTATIONS = {name: CASES[name].attention for name in ("gqa_norm_and_biases", "mla_query_latent", "kpa")}
COMBINATIONS = with_windows({name: PLAIN[name] for name in REPRESENTATIONS} | pairs(REPRESENTATIONS, SHARINGS))
MORE_COMBINATIONS = pairs({name: case.attention for name, case in CASES.items()}, SHARINGS | MORE_SHARINGS)
"""Every attention variant with every scheme of every size."""

STRETCHED = dict(original_context=64, factor=8.0)
YARN = YarnScaling(beta_fast=4.0, **STRETCHED)
OPTIONS = {
    "gpt2": model_config(replace(CASES["mha"].attention, qkv_bias=True, output_bias=True), positions="learned",
                         norm="layer", feed_forward="gelu", feed_forward_bias=True),
    "no_positions": model_config(GQA, positions="none", logit_softcap=2.0, tie_embeddings=False),
    "mla_no_positions": model_config(MLA, positions="none", norm="layer", feed_forward_bias=True),
    "kpa_learned_positions": model_config(KPA, positions="learned", feed_forward="gelu"),
    "base": model_config(GQA, rope_base=100.0, norm_eps=0.1),
    "linear": model_config(GQA, rope_scaling=LinearScaling(4.0)),
    "llama3": model_config(GQA, rope_scaling=Llama3Scaling(**STRETCHED)),
    "yarn": model_config(GQA, rope_scaling=YARN),
    "yarn_attention_factor": model_config(GQA, rope_scaling=replace(YARN, attention_factor=1.5, truncate=False)),
    "yarn_mla": model_config(MLA, rope_scaling=replace(YARN, mscale=0.7, mscale_all_dim=1.3)),
    "yarn_mla_all_dim": model_config(replace(MLA, interleaved=True), rope_scaling=replace(YARN, mscale_all_dim=1.0)),
    "yarn_kpa": model_config(KPA, rope_scaling=YARN),
    "yarn_concat": model_config(GQA, sharing=PathConcat(2, delta=4), layers=2, rope_scaling=YARN),
    "yarn_residual": model_config(GQA, sharing=PathResidual(2, delta=4), layers=2, rope_scaling=YARN),
    "yoco_layer_norm": model_config(FULL_GQA, sharing=Yoco(NEAR), layers=2, norm="layer", feed_forward="gelu"),
    "denseformer_learned": model_config(GQA, sharing=DenseFormer(), layers=2, positions="learned", norm="layer"),
    "yoco_learned": model_config(MLA, sharing=Yoco(NEAR), layers=2, positions="learned"),
}
"""Options of the model that change its mathematics."""

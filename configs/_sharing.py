"""Sharing between layers at the scales of the KPA comparison (`_published`): sizes are this project's choice.

KVPath comes without experiments: paths of four layers, with a quarter or half of a head's features as delta, over
multi-head attention, or over the latent of latent attention with a quarter of it as delta. CLA-2 and YOCO are put on
the same multi-head attention; YOCO's lower half sees a window of 256 of the 1 024 tokens. Layers that share have fewer
projections, so these models have fewer parameters than multi-head attention.
"""

from __future__ import annotations

from configs._published import HEAD_DIM, SCALES, mha, mla
from kvjax.attention import CrossLayer, PathConcat, PathResidual, Yoco
from kvjax.config import Config

LAYERS_PER_PATH = 4
WINDOW = 256


def kvpath_concat(scale: str, parts: int) -> Config:
    """KVPath-Concat whose deltas are one of `parts` equal parts of a head."""
    return mha(scale, PathConcat(layers=LAYERS_PER_PATH, delta=HEAD_DIM // parts))


def kvpath_residual(scale: str, parts: int) -> Config:
    """KVPath-Residual whose corrections have one of `parts` equal parts of a head's features."""
    return mha(scale, PathResidual(layers=LAYERS_PER_PATH, delta=HEAD_DIM // parts))


def kvpath_mla(scale: str) -> Config:
    """KVPath-Concat over the latent, a quarter of it a layer's own."""
    return mla(scale, PathConcat(layers=LAYERS_PER_PATH, delta=SCALES[scale].latent // 4))


def cla2(scale: str) -> Config:
    """Cross-layer attention in pairs."""
    return mha(scale, CrossLayer(layers=2))


def yoco(scale: str) -> Config:
    """YOCO."""
    return mha(scale, Yoco(window=WINDOW))

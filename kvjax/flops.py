"""Floating-point operations of a model, counted from its configuration."""

from __future__ import annotations

from math import prod

import jax

from kvjax.attention.sharing import make_attention, make_plan
from kvjax.config import ModelConfig
from kvjax.model.parameters import parameters


def multiplied_weights(config: ModelConfig) -> int:
    """Weights that every token is multiplied with: all matrices, the embedding only where it also makes the logits."""
    looked_up = {"position_embedding"} if config.tie_embeddings else {"position_embedding", "embedding"}
    multiplied = {name: weights for name, weights in parameters(config).items() if name not in looked_up}
    return sum(prod(p.shape) for p in jax.tree.leaves(multiplied) if p.is_matrix)


def keys_seen(length: int, window: int | None) -> float:
    """Mean number of keys that a query of a sequence of `length` tokens sees."""
    near = length if window is None else min(window, length)
    return (near * (near + 1) / 2 + (length - near) * near) / length


def training_flops_per_token(config: ModelConfig, length: int) -> float:
    """Operations of one training step per token, for sequences of `length` tokens.

    Forward pass and twice that for the backward pass; a multiply and an add count as two. Counted are weight products
    and the causal attention of one whole sequence (of packed documents less is needed); not counted are norms,
    rotations, recomputation and the rebuilding of keys.
    """
    attention = sum(segment.depth * keys_seen(length, segment.window) for segment in make_plan(config).segments)
    variant = make_attention(config)
    attention *= 2 * variant.heads * (variant.score_dim + variant.head_dim)
    return 3 * (2 * multiplied_weights(config) + attention)

"""Every variant again, the slow way: loops over layers, heads, tokens and ranks, in float64, straight from the papers.

A wrong routing of cached components would be wrong in training and decoding alike; these loops know no routing.
"""

import math

import numpy as np

from kvjax import ModelConfig
from kvjax.attention import GroupedQuery, Kronecker


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotate(x, position, base):
    """One vector of even width: features i and i + width/2 are a pair."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def attend(queries, keys, values, visible, scale):
    """queries, keys, values: lists over heads of [T, d]."""
    heads = []
    for q, k, v in zip(queries, keys, values, strict=True):
        out = np.zeros((len(q), v.shape[1]))
        for t in range(len(q)):
            seen = np.flatnonzero(visible[t])
            scores = np.array([q[t] @ k[s] for s in seen]) * scale
            weights = np.exp(scores - scores.max())
            out[t] = weights / weights.sum() @ v[seen]
        heads.append(out)
    return heads


def project_out(heads, o_proj):
    return sum(head @ o_proj[h] for h, head in enumerate(heads))


def grouped_query(config, weights, x, positions, visible):
    a: GroupedQuery = config.attention
    def heads_of(name, count, norm, turn):
        result = []
        for h in range(count):
            head = x @ weights[name][:, h]
            if norm and a.qk_norm:
                head = rms_norm(head, weights[norm], config.norm_eps)
            if turn:
                head = np.stack([rotate(row, p, config.rope_base) for row, p in zip(head, positions, strict=True)])
            result.append(head)
        return result
    queries = heads_of("q_proj", a.heads, "qk_norm_q", True)
    keys = heads_of("k_proj", a.kv_heads, "qk_norm_k", True)
    values = heads_of("v_proj", a.kv_heads, None, False)
    served = [h // (a.heads // a.kv_heads) for h in range(a.heads)]
    out = attend(queries, [keys[g] for g in served], [values[g] for g in served], visible, a.head_dim**-0.5)
    return project_out(out, weights["o_proj"])


def kronecker(config, weights, x, positions, visible):
    a: Kronecker = config.attention
    def factors(name, rank, turn):
        """[T][rank] -> matrix [rows, width] of one token, its rows rotated if `turn`."""
        made = np.einsum("td,drhk->trhk", x, weights[name])
        if turn:
            for t in range(len(x)):
                for r in range(rank):
                    for row in range(made.shape[2]):
                        made[t, r, row] = rotate(made[t, r, row], positions[t], config.rope_base)
        return made
    def heads_of(prefix, rank, turn):
        first, second = factors(f"{prefix}_a", rank, False), factors(f"{prefix}_b", rank, turn)
        full = np.zeros((len(x), a.heads, a.head_dim))
        for t in range(len(x)):
            for r in range(rank):
                for i1 in range(a.h1):
                    for i2 in range(a.h2):
                        full[t, i1 * a.h2 + i2] += np.kron(first[t, r, i1], second[t, r, i2]) / rank
        return [full[:, h] for h in range(a.heads)]
    if a.dense_query:
        dense = np.einsum("td,dhk->thk", x, weights["q_proj"])
        for t in range(len(x)):
            for h in range(a.heads):
                for j in range(a.d1):
                    row = slice(j * a.d2, (j + 1) * a.d2)
                    dense[t, h, row] = rotate(dense[t, h, row], positions[t], config.rope_base)
        queries = [dense[:, h] for h in range(a.heads)]
    else:
        queries = heads_of("q", a.q_rank, True)
    out = attend(queries, heads_of("k", a.k_rank, True), heads_of("v", a.v_rank, False), visible, a.head_dim**-0.5)
    return project_out(out, weights["o_proj"])


def feed_forward(weights, x):
    gate = x @ weights["gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ weights["up"])) @ weights["down"]


ATTENTION = {"grouped_query": grouped_query, "kronecker": kronecker}
"""Registered name of every variant -> its naive form (config, weights, x [T, D], positions, visible [T, T])."""


def visible_tokens(length, segment_ids=None, window=None):
    """[T, T]: which keys each query sees."""
    seen = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(i + 1):
            near = window is None or i - j < window
            seen[i, j] = near and (segment_ids is None or segment_ids[i] == segment_ids[j])
    return seen


def logits(config: ModelConfig, params, tokens, positions=None, segment_ids=None):
    """[T, V] of one row of tokens, in float64."""
    params = {name: _float64(value) for name, value in params.items()}
    positions = np.arange(len(tokens)) if positions is None else positions
    visible = visible_tokens(len(tokens), segment_ids, config.window)
    x = params["embedding"][np.asarray(tokens)]
    for layer in range(config.layers):
        weights = _take(params["segment_0"]["layer_0"], layer)
        h = rms_norm(x, weights["attention_norm"], config.norm_eps)
        x = x + ATTENTION[config.attention.variant_name](config, weights["attention"], h, positions, visible)
        h = rms_norm(x, weights["feed_forward_norm"], config.norm_eps)
        x = x + feed_forward(weights["feed_forward"], h)
    x = rms_norm(x, params["final_norm"], config.norm_eps)
    return x @ (params["embedding"].T if config.tie_embeddings else params["unembedding"])


def _float64(tree):
    return {k: _float64(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def _take(tree, index):
    return {k: _take(v, index) for k, v in tree.items()} if isinstance(tree, dict) else tree[index]

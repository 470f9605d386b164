"""Every variant and sharing scheme again, the slow way: loops over layers, heads, tokens and ranks, in float64.

Written from the papers. A wrong routing of cached components would be wrong in training and decoding alike; these loops
know no components and no routing: an attention variant says what one layer makes of its weights, and a sharing scheme
says in words which earlier layer's states a layer uses instead. Layers count from 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvjax import ModelConfig
from kvjax.attention import PathConcat

# --- parts of a layer -------------------------------------------------------------------------------------------------


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def normalize(config, weights, name, x):
    if config.norm == "rms":
        return rms_norm(x, weights[name], config.norm_eps)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + config.norm_eps) * weights[name] + weights[f"{name}_bias"]


def feed_forward(config, weights, x):
    def linear(name, x):
        return x @ weights[name] + (weights[f"{name}_bias"] if config.feed_forward_bias else 0)
    up = linear("up", x)
    if config.feed_forward == "swiglu":
        gate = linear("gate", x)
        return linear("down", gate / (1 + np.exp(-gate)) * up)
    return linear("down", up / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))))


def linear_scaling(scaling, base, width, pair, frequency):
    return frequency / scaling.factor


def llama3_scaling(scaling, base, width, pair, frequency):
    wavelength = 2 * math.pi / frequency
    if wavelength > scaling.original_context / scaling.low_frequency_factor:
        return frequency / scaling.factor
    if wavelength < scaling.original_context / scaling.high_frequency_factor:
        return frequency
    smooth = scaling.original_context / wavelength - scaling.low_frequency_factor
    smooth /= scaling.high_frequency_factor - scaling.low_frequency_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def yarn_scaling(scaling, base, width, pair, frequency):
    def pair_that_turns(times):
        return width / 2 * math.log(scaling.original_context / (2 * math.pi * times)) / math.log(base)
    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    stretched = min(max((pair - low) / (high - low), 0), 1)
    return stretched * frequency / scaling.factor + (1 - stretched) * frequency


SCALING = {"linear": linear_scaling, "llama3": llama3_scaling, "yarn": yarn_scaling}
"""Registered name of every RoPE scaling -> (scaling, base, width, pair, its frequency) -> its new frequency."""


def yarn_mscale(scaling, strength):
    return 0.1 * strength * math.log(scaling.factor) + 1


def rotation_factor(scaling):
    if scaling is None or scaling.variant_name != "yarn":
        return 1
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling, scaling.mscale) / yarn_mscale(scaling, scaling.mscale_all_dim)
    return yarn_mscale(scaling, 1)


def rotate(config, x, positions, interleaved=False):
    """[T, width]: features i and i + width/2 are a pair, or 2i and 2i + 1."""
    if config.positions != "rotary":
        return x
    width, scaling, out = x.shape[1], config.rope_scaling, np.empty_like(x)
    for i in range(width // 2):
        frequency = config.rope_base ** (-2 * i / width)
        if scaling is not None:
            frequency = SCALING[scaling.variant_name](scaling, config.rope_base, width, i, frequency)
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        for t, position in enumerate(positions):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            out[t, a], out[t, b] = x[t, a] * cos - x[t, b] * sin, x[t, b] * cos + x[t, a] * sin
    return out * rotation_factor(scaling)


def visible_tokens(length, segment_ids=None, window=None):
    """[T, T]: which keys each query sees."""
    seen = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(i + 1):
            near = window is None or i - j < window
            seen[i, j] = near and (segment_ids is None or segment_ids[i] == segment_ids[j])
    return seen


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


# --- attention variants -----------------------------------------------------------------------------------------------
# `make` gives a layer's states, always as lists, so that a sharing scheme can say "the last half of layer 1's";
# `part` is "_alpha" or "_delta" where a KVPath splits a state's projection in two.


class GroupedQueryLoops:
    """States k, v: lists over key-value heads of [T, d]."""

    kept, values = ("k", "v"), "v"

    def __init__(self, config, positions):
        self.config, self.attention, self.positions = config, config.attention, positions
        self.sizes = {"k": self.attention.head_dim, "v": self.attention.head_dim}  # what a KVPath splits

    def raw(self, state, weights, x, weight, bias):
        heads = [x @ weights[weight][:, g] for g in range(weights[weight].shape[1])]
        return [head + weights[bias][g] for g, head in enumerate(heads)] if self.attention.qkv_bias else heads

    def placed(self, head, weights, norm, turned=True):
        """A query or key head after its norm and its rotation."""
        if self.attention.qk_norm:
            head = rms_norm(head, weights[norm], self.config.norm_eps)
        return rotate(self.config, head, self.positions) if turned else head

    def make(self, state, weights, x, part=""):
        heads = self.raw(state, weights, x, f"{state}{part or '_proj'}", f"{state}_bias{part}")
        if state == "v":
            return heads
        return [self.placed(head, weights, f"qk_norm_k{part}", turned=part != "_alpha") for head in heads]

    def join(self, alpha, delta):
        return [np.concatenate(parts, axis=1) for parts in zip(alpha, delta, strict=True)] if alpha else delta

    def query(self, weights, x, h):
        q = x @ weights["q_proj"][:, h] + (weights["q_bias"][h] if self.attention.qkv_bias else 0)
        if not isinstance(self.config.sharing, PathConcat):
            return self.placed(q, weights, "qk_norm_q")
        alpha = self.attention.head_dim - self.config.sharing.delta  # that many features meet the path's keys
        own = self.placed(q[:, alpha:], weights, "qk_norm_q_delta")
        return np.hstack([self.placed(q[:, :alpha], weights, "qk_norm_q_alpha", turned=False), own]) if alpha else own

    def output(self, weights, x, states, visible):
        a = self.attention
        served = [h // (a.heads // a.kv_heads) for h in range(a.heads)]
        heads = attend([self.query(weights, x, h) for h in range(a.heads)], [states["k"][g] for g in served],
                       [states["v"][g] for g in served], visible, a.head_dim**-0.5)
        return project_out(heads, weights["o_proj"]) + (weights["o_bias"] if a.output_bias else 0)


class LatentLoops:
    """States latent: list over its features of [T]; k_rope: the one key [T, dr]."""

    kept, values = ("latent", "k_rope"), "latent"

    def __init__(self, config, positions):
        self.config, self.attention, self.positions = config, config.attention, positions
        self.sizes = {"latent": self.attention.latent_dim}

    def make(self, state, weights, x, part=""):
        if state == "k_rope":
            return [self.turned(x @ weights["k_rope"])]
        return list(rms_norm(x @ weights[f"kv_down{part}"], weights[f"kv_norm{part}"], self.config.norm_eps).T)

    def join(self, alpha, delta):
        return alpha + delta

    def turned(self, x):
        return rotate(self.config, x, self.positions, self.attention.interleaved)

    def output(self, weights, x, states, visible):
        a, scaling = self.attention, self.config.rope_scaling
        latent, (k_rope,) = np.stack(states["latent"], axis=1), states["k_rope"]
        if a.query_latent_dim is not None:
            x = rms_norm(x @ weights["q_down"], weights["q_norm"], self.config.norm_eps)
        queries, keys, values = [], [], []
        for h in range(a.heads):
            q = x @ weights["q_proj" if a.query_latent_dim is None else "q_up"][:, h]
            queries.append(np.hstack([q[:, :a.nope_dim], self.turned(q[:, a.nope_dim:])]))
            keys.append(np.hstack([latent @ weights["k_up"][:, h], k_rope]))
            values.append(latent @ weights["v_up"][:, h])
        scale = (a.nope_dim + a.rope_dim) ** -0.5
        if scaling is not None and scaling.variant_name == "yarn" and scaling.mscale_all_dim:
            scale *= yarn_mscale(scaling, scaling.mscale_all_dim) ** 2
        return project_out(attend(queries, keys, values, visible, scale), weights["o_proj"])


class KroneckerLoops:
    """States k, v: lists over ranks of A [T, h1, d1] and B [T, h2, d2]."""

    kept, values = ("k", "v"), "v"

    def __init__(self, config, positions):
        self.config, self.attention, self.positions = config, config.attention, positions
        self.sizes = {"k": self.attention.k_rank, "v": self.attention.v_rank}

    def make(self, state, weights, x, part=""):
        a, b = weights[f"{state}_a{part}"], weights[f"{state}_b{part}"]
        pairs = []
        for r in range(a.shape[1]):
            first, second = np.tensordot(x, a[:, r], 1), np.tensordot(x, b[:, r], 1)
            pairs.append((first, second if state == "v" else self.turned(second)))
        return pairs

    def join(self, alpha, delta):
        return alpha + delta

    def turned(self, rows):
        return np.stack([rotate(self.config, rows[:, i], self.positions) for i in range(rows.shape[1])], axis=1)

    def heads(self, pairs):
        a = self.attention
        full = np.zeros((len(self.positions), a.heads, a.head_dim))
        for t in range(len(full)):
            for first, second in pairs:
                for i1 in range(a.h1):
                    for i2 in range(a.h2):
                        full[t, i1 * a.h2 + i2] += np.kron(first[t, i1], second[t, i2]) / len(pairs)
        return [full[:, h] for h in range(a.heads)]

    def queries(self, weights, x):
        a = self.attention
        if not a.dense_query:
            return self.heads(self.make("q", weights, x))
        rows = np.tensordot(x, weights["q_proj"], 1).reshape(len(x), a.heads * a.d1, a.d2)
        dense = self.turned(rows).reshape(len(x), a.heads, a.head_dim)
        return [dense[:, h] for h in range(a.heads)]

    def output(self, weights, x, states, visible):
        heads = attend(self.queries(weights, x), self.heads(states["k"]), self.heads(states["v"]), visible,
                       self.attention.head_dim**-0.5)
        return project_out(heads, weights["o_proj"])


ATTENTION = {"grouped_query": GroupedQueryLoops, "latent": LatentLoops, "kronecker": KroneckerLoops}
"""Registered name of every variant -> its naive form."""


# --- sharing schemes --------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """A layer's turn to say which states it uses."""

    config: ModelConfig
    params: dict
    loops: object
    number: int
    weights: dict
    """Its attention's."""
    x: np.ndarray
    """Its normed input."""
    stream: np.ndarray
    """Its input."""
    used: list
    """The states that earlier layers used."""

    @property
    def scheme(self):
        return self.config.sharing

    @property
    def half(self):
        return self.config.layers // 2

    def make(self, *states, part=""):
        """States of its own, all of them unless named."""
        return {s: self.loops.make(s, self.weights, self.x, part) for s in states or self.loops.kept}


def each_its_own(turn):
    return turn.make()


def cross_layer(turn):
    first = turn.number - turn.number % turn.scheme.layers
    return turn.make() if turn.number == first else turn.used[first]


def cross_layer_values(turn):
    return turn.make() if turn.number % 2 == 0 else turn.make("k") | {"v": turn.used[turn.number - 1]["v"]}


def skip_v1(turn, *states):
    own, values = turn.make(*states), turn.loops.values
    if turn.number == 0:
        return own
    first = turn.used[0][values]
    borrowed = round(turn.scheme.share * len(first))
    return own | {values: own[values] + first[len(first) - borrowed:]}


def skip_v1_yoco(turn):
    if turn.number < turn.half:
        return skip_v1(turn)
    return skip_v1(turn, "v") | {"k": turn.used[turn.half - 1]["k"]}


def yoco(turn):
    if turn.number < turn.half:
        return turn.make()
    if turn.number > turn.half:
        return turn.used[turn.half]
    source = turn.params["segment_1"]["source"]
    x = normalize(turn.config, source, "norm", turn.stream)
    return {state: turn.loops.make(state, source, x) for state in turn.loops.kept}


def yoco_values(turn):
    return turn.make() if turn.number < turn.half else turn.make("k") | {"v": turn.used[turn.half - 1]["v"]}


def path_concat(turn):
    first = turn.number - turn.number % turn.scheme.layers
    sizes = turn.loops.sizes
    if turn.number == first:
        alpha = {s: turn.make(s, part="_alpha")[s] if sizes[s] > turn.scheme.delta else [] for s in sizes}
    else:
        alpha = turn.used[first]["alpha"]
    delta = turn.make(*sizes, part="_delta")
    whole = [s for s in turn.loops.kept if s not in sizes]
    return {s: turn.loops.join(alpha[s], delta[s]) for s in sizes} | {"alpha": alpha} | {
        s: turn.make(s)[s] for s in whole}


def path_residual(turn):
    loops, weights = turn.loops, turn.weights
    if turn.number % turn.scheme.layers == 0:
        raw = {s: loops.raw(s, weights, turn.x, f"{s}_alpha", f"{s}_bias") for s in ("k", "v")}
    else:
        delta = {s: loops.raw(s, weights, turn.x, f"{s}_delta", f"{s}_bias_delta") for s in ("k", "v")}
        raw = {s: [before + delta[s][g] @ weights[f"{s}_expand"][g].T
                   for g, before in enumerate(turn.used[-1]["raw"][s])] for s in ("k", "v")}
    return {"raw": raw, "k": [loops.placed(head, weights, "qk_norm_k") for head in raw["k"]], "v": raw["v"]}


def resformer(turn):
    own = turn.make()
    if turn.number == 0:
        return own
    mix, first = turn.weights["v_mix"], turn.used[0]["v"]
    return own | {"v": [mix * v + (1 - mix) * v1 for v, v1 in zip(own["v"], first, strict=True)]}


SOURCE = (0, 0)


@dataclass
class Scheme:
    states: Callable[[Turn], dict]
    runs: Callable
    """(scheme, L) -> [(layers, layers per group)]: how the layers' weights are stacked. Empty runs do not exist."""


def run_of_groups(scheme, layers):
    return [(layers, scheme.layers)]


SHARING = {
    None: Scheme(each_its_own, lambda scheme, n: [(n, 1)]),
    "cross_layer": Scheme(cross_layer, run_of_groups),
    "cross_layer_values": Scheme(cross_layer_values, lambda scheme, n: [(n, 2)]),
    "skip_v1": Scheme(skip_v1, lambda scheme, n: [(1, 1), (n - 1, 1)]),
    "skip_v1_yoco": Scheme(skip_v1_yoco, lambda scheme, n:
                           [(1, 1), (n // 2 - 2, 1), (1, 1), (n // 2, 1)] if n > 2 else [(1, 1), (1, 1)]),
    "yoco": Scheme(yoco, lambda scheme, n: [(n // 2, 1), SOURCE, (n // 2, 1)]),
    "yoco_values": Scheme(yoco_values, lambda scheme, n: [(n // 2 - 1, 1), (1, 1), (n // 2, 1)]),
    "path_concat": Scheme(path_concat, run_of_groups),
    "path_residual": Scheme(path_residual, run_of_groups),
    "resformer": Scheme(resformer, lambda scheme, n: [(1, 1), (n - 1, 1)]),
    "denseformer": Scheme(each_its_own, lambda scheme, n: [(1, 1)] * n),
}
"""Registered name of every sharing scheme -> its naive form."""


# --- the model --------------------------------------------------------------------------------------------------------


def name_of(config):
    return config.sharing and config.sharing.variant_name


def layer_weights(config, params, number):
    """The weights of one layer, from where its run of layers is stacked."""
    runs = [run for run in SHARING[name_of(config)].runs(config.sharing, config.layers) if run != (0, 1)]
    for segment, (layers, group) in enumerate(runs):
        if number < layers:
            return _take(params[f"segment_{segment}"][f"layer_{number % group}"], number // group)
        number -= layers


def window_of(config, number):
    """YOCO's lower half has a window of its own."""
    return config.sharing.window if name_of(config) == "yoco" and number < config.layers // 2 else config.window


def logits(config: ModelConfig, params, tokens, positions=None, segment_ids=None):
    """[T, V] of one row of tokens, in float64."""
    params = _float64(params)
    positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    loops = ATTENTION[config.attention.variant_name](config, positions)
    x = params["embedding"][np.asarray(tokens)]
    if config.positions == "learned":
        x = x + params["position_embedding"][positions]
    used, streams = [], [x]
    for number in range(config.layers):
        weights = layer_weights(config, params, number)
        h = normalize(config, weights, "attention_norm", x)
        turn = Turn(config, params, loops, number, weights["attention"], h, x, used)
        used.append(SHARING[name_of(config)].states(turn))
        visible = visible_tokens(len(tokens), segment_ids, window_of(config, number))
        x = x + loops.output(weights["attention"], h, used[number], visible)
        x = x + feed_forward(config, weights["feed_forward"], normalize(config, weights, "feed_forward_norm", x))
        if name_of(config) == "denseformer":
            streams.append(x)
            x = sum(w * stream for w, stream in zip(params[f"depth_weights_{number}"], streams, strict=True))
    x = normalize(config, params, "final_norm", x)
    out = x @ (params["embedding"].T if config.tie_embeddings else params["unembedding"])
    return out if config.logit_softcap is None else config.logit_softcap * np.tanh(out / config.logit_softcap)


def _float64(tree):
    return {k: _float64(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def _take(tree, index):
    return {k: _take(v, index) for k, v in tree.items()} if isinstance(tree, dict) else tree[index]

"""Attention of every variant as it is written in eager PyTorch: what `kvjax.benchmarks.pytorch` compares with.

Needs torch. Maths and names of weights are those of the methods' definitions; nothing is shared with kvjax's own code.
Heads come before tokens, and scaled_dot_product_attention attends wherever there are keys and values of heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvjax.attention import CrossLayer, GroupedQuery, Kronecker, Latent, PathConcat, PathResidual, SkipV1

Kept = dict[str, list[Tensor]]
"""By name: the tensors that layers made so far, each with tokens on its last axis but one."""


def matrix(name: str, weight: Any) -> Tensor:
    """A weight [inputs, *features] as F.linear takes it, [features, inputs]; norms and expansions as they are."""
    weight = torch.tensor(np.asarray(weight))
    if weight.ndim == 1 or name.endswith("_expand"):
        return weight
    return (weight.flatten(0, 1) if name == "o_proj" else weight.flatten(1)).T.contiguous()


class Layers(nn.Module):
    """Layers of which each adds its attention to the stream. Subclasses say what is kept, and how it is read."""

    trains = True
    """Whether a whole sequence is attended to in a way of its own."""

    def __init__(self, attention: Any, sharing: Any, weights: list[dict[str, Any]], room: int):
        """`weights` of each layer, by name; rotations are made for `room` tokens."""
        super().__init__()
        self.attention, self.sharing, self.room = attention, sharing, room
        self.layers = nn.ModuleList(nn.ParameterDict({name: nn.Parameter(matrix(name, w)) for name, w in layer.items()})
                                    for layer in weights)
        self.turns: dict[int, tuple[Tensor, Tensor]] = {}
        self.cache: Kept = {}

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D], causal."""
        return self._run(x, 0, {})

    @torch.no_grad()
    def prefill(self, x: Tensor) -> Tensor:
        """`forward` that keeps what was made, in tensors with room for more tokens."""
        made: Kept = {}
        y = self._run(x, 0, made)
        def roomy(kept: Tensor) -> Tensor:
            size = (*kept.shape[:-2], self.room - kept.shape[-2], kept.shape[-1])
            return torch.cat([kept, kept.new_zeros(size)], dim=-2)
        self.cache = {name: [roomy(kept) for kept in tensors] for name, tensors in made.items()}
        return y

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """The last token that there is room for, [B, 1, D] -> [B, 1, D]: writes it, and attends to everything."""
        return self._run(x, self.room - 1, {})

    def _run(self, x: Tensor, at: int, kept: Kept) -> Tensor:
        for number, weights in enumerate(self.layers):
            for name, row in self.rows(number, weights, x, at).items():
                kept.setdefault(name, []).append(self._written(name, len(kept.get(name, [])), row, at))
            out = self.attend(number, weights, self.queries(weights, x, at), kept, causal=at == 0)
            x = x + F.linear(out.transpose(1, 2).flatten(2), weights["o_proj"])
        return x

    def _written(self, name: str, number: int, row: Tensor, at: int) -> Tensor:
        if not at:
            return row
        stored = self.cache[name][number]
        stored[..., at:at + 1, :] = row
        return stored

    def rotate(self, x: Tensor, at: int) -> Tensor:
        """x [..., T, d], whose tokens are those from `at` on."""
        half, length = x.shape[-1] // 2, x.shape[-2]
        if half not in self.turns:
            angles = torch.arange(self.room)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
            self.turns[half] = angles.cos(), angles.sin()
        cos, sin = (table[at:at + length] for table in self.turns[half])
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def rows(self, number: int, weights: nn.ParameterDict, x: Tensor, at: int) -> dict[str, Tensor]:
        """What layer `number` keeps of x."""
        raise NotImplementedError

    def queries(self, weights: nn.ParameterDict, x: Tensor, at: int) -> Tensor:
        """[B, H, T, d]."""
        return self.rotate(heads(F.linear(x, weights["q_proj"]), self.attention.heads), at)

    def attend(self, number: int, weights: nn.ParameterDict, queries: Tensor, kept: Kept, causal: bool) -> Tensor:
        """[B, H, T, d] of heads."""
        keys, values = self.keys_and_values(number, kept)
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal,
                                              enable_gqa=keys.shape[1] < queries.shape[1])

    def keys_and_values(self, number: int, kept: Kept) -> tuple[Tensor, Tensor]:
        """[B, G, S, d] of what layer `number` reads."""
        raise NotImplementedError


def heads(x: Tensor, number: int) -> Tensor:
    """[B, T, number d] -> [B, number, T, d]."""
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


class GroupedHeads(Layers):
    """MHA to MQA, alone or with layers that read others' keys and values (CLA)."""

    def rows(self, number: int, weights: nn.ParameterDict, x: Tensor, at: int) -> dict[str, Tensor]:
        if "k_proj" not in weights:
            return {}
        keys, values = (heads(F.linear(x, weights[name]), self.attention.kv_heads) for name in ("k_proj", "v_proj"))
        return {"k": self.rotate(keys, at), "v": values}

    def keys_and_values(self, number: int, kept: Kept) -> tuple[Tensor, Tensor]:
        return kept["k"][-1], kept["v"][-1]


class FirstValues(GroupedHeads):
    """SkipV1: half of a later layer's value heads are layer 1's."""

    def rows(self, number: int, weights: nn.ParameterDict, x: Tensor, at: int) -> dict[str, Tensor]:
        groups = self.attention.kv_heads
        keys = self.rotate(heads(F.linear(x, weights["k_proj"]), groups), at)
        return {"k": keys, "v": heads(F.linear(x, weights["v_proj"]), groups if number == 0 else groups // 2)}

    def keys_and_values(self, number: int, kept: Kept) -> tuple[Tensor, Tensor]:
        values = kept["v"]
        if number == 0:
            return kept["k"][0], values[0]
        return kept["k"][-1], torch.cat([values[-1], values[0][:, self.attention.kv_heads // 2:]], dim=1)


class Concatenated(Layers):
    """KVPath-Concat."""

    def rows(self, number: int, weights: nn.ParameterDict, x: Tensor, at: int) -> dict[str, Tensor]:
        names = [name for name in ("k_alpha", "v_alpha", "k_delta", "v_delta") if name in weights]
        made = {name: heads(F.linear(x, weights[name]), self.attention.kv_heads) for name in names}
        return made | {"k_delta": self.rotate(made["k_delta"], at)}

    def queries(self, weights: nn.ParameterDict, x: Tensor, at: int) -> Tensor:
        queries, delta = heads(F.linear(x, weights["q_proj"]), self.attention.heads), self.sharing.delta
        return torch.cat([queries[..., :-delta], self.rotate(queries[..., -delta:], at)], dim=-1)

    def keys_and_values(self, number: int, kept: Kept) -> tuple[Tensor, Tensor]:
        keys, values = (torch.cat([kept[f"{s}_alpha"][0], kept[f"{s}_delta"][-1]], dim=-1) for s in "kv")
        return keys, values


class Residual(Layers):
    """KVPath-Residual: keys are rebuilt, and rotated from the first token on."""

    def rows(self, number: int, weights: nn.ParameterDict, x: Tensor, at: int) -> dict[str, Tensor]:
        part = "alpha" if number == 0 else "delta"
        return {f"{s}_{part}": heads(F.linear(x, weights[f"{s}_{part}"]), self.attention.kv_heads) for s in "kv"}

    def keys_and_values(self, number: int, kept: Kept) -> tuple[Tensor, Tensor]:
        states = []
        for s in "kv":
            expansions = [self.layers[n][f"{s}_expand"] for n in range(1, number + 1)]
            states.append(sum((delta @ expand.mT for expand, delta in zip(expansions, kept.get(f"{s}_delta", []),
                                                                          strict=True)), kept[f"{s}_alpha"][0]))
        return self.rotate(states[0], 0), states[1]


class LatentHeads(Layers):
    """MLA: expanded in training, absorbed where one token is decoded."""

    def rows(self, number: int, weights: nn.ParameterDict, x: Tensor, at: int) -> dict[str, Tensor]:
        latent = F.rms_norm(F.linear(x, weights["kv_down"]), weights["kv_norm"].shape, weights["kv_norm"], 1e-6)
        return {"latent": latent, "k_rope": self.rotate(F.linear(x, weights["k_rope"]), at)}

    def queries(self, weights: nn.ParameterDict, x: Tensor, at: int) -> Tensor:
        queries, width = heads(F.linear(x, weights["q_proj"]), self.attention.heads), self.attention.nope_dim
        return torch.cat([queries[..., :width], self.rotate(queries[..., width:], at)], dim=-1)

    def attend(self, number: int, weights: nn.ParameterDict, queries: Tensor, kept: Kept, causal: bool) -> Tensor:
        latent, rope, count = kept["latent"][-1], kept["k_rope"][-1], self.attention.heads
        if not causal:
            return self._absorbed(weights, queries, latent, rope)
        nope, values = (heads(F.linear(latent, weights[name]), count) for name in ("k_up", "v_up"))
        keys = torch.cat([nope, rope[:, None].expand(-1, count, -1, -1)], dim=-1)
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    def _absorbed(self, weights: nn.ParameterDict, queries: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        k_up, v_up = (weights[name].unflatten(0, (self.attention.heads, -1)) for name in ("k_up", "v_up"))
        nope, turned = queries.split([self.attention.nope_dim, self.attention.rope_dim], dim=-1)
        scores = torch.einsum("bhtc,bsc->bhts", nope @ k_up, latent) + torch.einsum("bhtr,bsr->bhts", turned, rope)
        weights = (scores * queries.shape[-1] ** -0.5).softmax(dim=-1)
        return torch.einsum("bhts,bsc->bhtc", weights, latent) @ v_up.mT


class Factors(Layers):
    """KPA and TPA: keys and values are built from their factors, then attended to."""

    def factor(self, weights: nn.ParameterDict, x: Tensor, name: str, at: int) -> Tensor:
        """[B, R, heads, T, features]."""
        count = self.attention.h1 if name.endswith("_a") else self.attention.h2
        rank = getattr(self.attention, f"{name[0]}_rank")
        made = F.linear(x, weights[name]).unflatten(-1, (rank, count, -1)).permute(0, 2, 3, 1, 4)
        return self.rotate(made, at) if name in ("q_b", "k_b") else made

    def rows(self, number: int, weights: nn.ParameterDict, x: Tensor, at: int) -> dict[str, Tensor]:
        return {name: self.factor(weights, x, name, at) for name in ("k_a", "k_b", "v_a", "v_b")}

    def queries(self, weights: nn.ParameterDict, x: Tensor, at: int) -> Tensor:
        return product(self.factor(weights, x, "q_a", at), self.factor(weights, x, "q_b", at))

    def keys_and_values(self, number: int, kept: Kept) -> tuple[Tensor, Tensor]:
        return product(kept["k_a"][-1], kept["k_b"][-1]), product(kept["v_a"][-1], kept["v_b"][-1])


def product(a: Tensor, b: Tensor) -> Tensor:
    """Mean over ranks of Kronecker products: [B, R, h1, T, d1], [B, R, h2, T, d2] -> [B, h1 h2, T, d1 d2]."""
    made = torch.einsum("brhti,brktj->bhktij", a, b) / a.shape[1]
    return made.flatten(4).flatten(1, 2)


class FactorScores(Factors):
    """The same with the sums over factors that the definition writes, where one token is decoded."""

    trains = False

    def attend(self, number: int, weights: nn.ParameterDict, queries: Tensor, kept: Kept, causal: bool) -> Tensor:
        if causal:
            return super().attend(number, weights, queries, kept, causal)
        k_a, k_b, v_a, v_b = (kept[name][-1] for name in ("k_a", "k_b", "v_a", "v_b"))
        own = self.attention
        queries = queries.unflatten(1, (own.h1, own.h2)).unflatten(-1, (own.d1, own.d2)) / own.k_rank
        half = torch.einsum("bhktij,brhsi->bhktjrs", queries, k_a)
        scores = torch.einsum("bhktjrs,brksj->bhkts", half, k_b) * own.head_dim**-0.5
        weighted = torch.einsum("bhkts,brhsi->bhktirs", scores.softmax(dim=-1), v_a)
        return torch.einsum("bhktirs,brksj->bhktij", weighted, v_b).flatten(4).flatten(1, 2) / own.v_rank


WRITTEN = {None: {GroupedQuery: (GroupedHeads,), Latent: (LatentHeads,), Kronecker: (Factors, FactorScores)},
           CrossLayer: {GroupedQuery: (GroupedHeads,)}, SkipV1: {GroupedQuery: (FirstValues,)},
           PathConcat: {GroupedQuery: (Concatenated,)}, PathResidual: {GroupedQuery: (Residual,)}}
"""For a scheme and a variant, the ways of writing it."""


def written(attention: Any, sharing: Any) -> tuple[type[Layers], ...]:
    """The ways in which attention of this kind is written here."""
    return WRITTEN[None if sharing is None else type(sharing)][type(attention)]

"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads from one latent.

    c = norm(x kv_down)     k = [c k_up ; rot(x k_rope)]     v = c v_up

Only the normed latent and the rotated key shared by all heads are cached: dc + dr elements a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.components import Component
from kvjax.attention.partials import (
    Partial,
    attend,
    attend_parts,
    feature_parts_values,
    joined,
    parts_scores,
    separated,
)
from kvjax.attention.variant import Attention, HeadSizes, Layer, Param, View, Weights, fan_in, project, rms_norm
from kvjax.config import register, require
from kvjax.kernels.decode.api import Attending
from kvjax.kernels.decode.heads import HeadParts, by_key_head, put_together


@register("latent")
@dataclass(frozen=True)
class Latent(Attention):
    """H heads whose keys and values are made from a latent of dc features, and a rotated key of dr for all heads.

    The latent may come in parts, as a sharing scheme says.
    """

    heads: int
    latent_dim: int
    """dc, features of the latent."""
    rope_dim: int
    """dr, rotated features of queries and keys; even."""
    nope_dim: int
    """dn, features of queries and keys that are not rotated."""
    value_dim: int
    """dv, features of a value head."""
    query_latent_dim: int | None = None
    """rq, features of a latent that queries are made from; None: they are made from the input."""
    interleaved: bool = False
    """Rotated pairs are neighbours, as DeepSeek's weights have them; False: halves."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("heads", "latent_dim", "rope_dim", "nope_dim", "value_dim"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be above 0")
        require(self.rope_dim % 2 == 0, f"rope_dim {self.rope_dim} is odd: rotary embedding turns pairs of features")
        require(self.query_latent_dim is None or self.query_latent_dim > 0,
                f"query_latent_dim is {self.query_latent_dim}: it must be above 0, or None")

    @property
    def head_dim(self) -> int:
        """dv, width of a value head."""
        return self.value_dim

    @property
    def score_dim(self) -> int:
        """dn + dr, width of a query head."""
        return self.nope_dim + self.rope_dim

    def components(self) -> tuple[Component, ...]:
        return (
            Component("latent", (self.latent_dim,), "latent", "kv_down", head_axis=None, norm="kv_norm"),
            Component("k_rope", (self.rope_dim,), "k_rope", "k_rope", head_axis=None, rotate=True,
                      interleaved=self.interleaved),
        )

    def query_shapes(self, layer: Layer) -> dict[str, Param]:
        """Queries, and what expands the latent: layers that share a latent each expand it their own way."""
        def up(inputs: int, features: int) -> Param:
            return Param((inputs, self.heads, features), ("latent", "heads", None), fan_in(inputs))
        expansions = {"k_up": up(self.latent_dim, self.nope_dim), "v_up": up(self.latent_dim, self.value_dim)}
        if self.query_latent_dim is None:
            query = self.projection(layer.width, (self.heads, self.score_dim), ("heads", None))
            return {"q_proj": query} | expansions
        return {
            "q_down": self.projection(layer.width, (self.query_latent_dim,), (None,)),
            "q_norm": Param((self.query_latent_dim,), (None,), jax.nn.initializers.ones),
            "q_up": up(self.query_latent_dim, self.score_dim),
        } | expansions

    def queries(self, layer: Layer, weights: Weights, x: Array, positions: Array) -> tuple[Array, Array]:
        """Features without and with rotation: [B, T, H, dn], [B, T, H, dr]."""
        if self.query_latent_dim is None:
            queries = project(x, weights["q_proj"])
        else:
            latent = rms_norm(project(x, weights["q_down"]), weights["q_norm"], layer.norm_eps)
            queries = project(latent, weights["q_up"])
        nope, rope = jnp.split(queries, [self.nope_dim], axis=-1)
        return nope, layer.rotate(rope, positions, self.interleaved)

    def partial(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, Array], view: View) -> Partial:
        """Expands the latent to the keys and values of all heads."""
        latent = joined(view.parts(layer.state("latent")), -1)
        (rope,) = view.parts(layer.state("k_rope"))
        nope = project(latent, path[-1]["k_up"])
        return attend_parts(queries, (nope, rope[:, :, None]), (project(latent, path[-1]["v_up"]),), view.mask,
                            self._scale(layer))

    def absorb(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, Array]) -> tuple[Array, ...]:
        """Queries against the parts of the latent, q k_up, and those with rotation."""
        if self._expands(queries[0].shape[1]):
            return queries
        nope, rope = self._in_latent_space(path, *queries)
        return (*separated(nope, [c.size for c in layer.state("latent")], axis=-1), rope)

    def absorbed(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, ...], view: View) -> Partial:
        """Attention in latent space; the output is a mean of latents [B, T, H, dc]."""
        if self._expands(queries[-1].shape[1]):
            return self.partial(layer, path, queries, view)
        keys = tuple(x[:, :, None] for x in view.parts((*layer.state("latent"), *layer.state("k_rope"))))
        return attend(queries, keys, keys[:-1], view.mask, self._scale(layer),
                      scores=parts_scores, combine=feature_parts_values)

    def attending(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, ...],
                  entries: dict[str, int]) -> Attending | None:
        new = queries[-1].shape[1]
        if self._expands(new):
            return None
        keys = (*layer.state("latent"), *layer.state("k_rope"))
        sizes = tuple(enumerate(c.size for c in keys))
        program = HeadParts(new, self.heads, 1, sizes, tuple((i, 1, size) for i, size in sizes[:-1]))
        return Attending(program, tuple(by_key_head(q, 1) for q in queries), tuple((c.name, 0) for c in keys),
                         put_together(new), self._scale(layer), split=2)

    def release(self, layer: Layer, path: tuple[Weights, ...], part: Partial) -> Partial:
        return part if self._expands(part.out.shape[1]) else self.from_heads(layer, path, part)

    def as_heads(self, layer: Layer) -> HeadSizes:
        """One head for all: keys are [latent | rotated key], values latents."""
        return HeadSizes(1, self.latent_dim + self.rope_dim, self.latent_dim, self._scale(layer))

    def head_queries(self, layer: Layer, path: tuple[Weights, ...], queries: tuple[Array, Array]) -> Array:
        return jnp.concatenate(self._in_latent_space(path, *queries), axis=-1)

    def head_states(self, layer: Layer, path: tuple[Weights, ...], view: View) -> tuple[Array, Array]:
        latent = joined(view.parts(layer.state("latent")), -1)
        (rope,) = view.parts(layer.state("k_rope"))
        return jnp.concatenate([latent, rope], axis=-1)[:, :, None], latent[:, :, None]

    def from_heads(self, layer: Layer, path: tuple[Weights, ...], part: Partial) -> Partial:
        """Means of latents times v_up."""
        out = jnp.einsum("bthc,chv->bthv", part.out, path[-1]["v_up"], preferred_element_type=jnp.float32)
        return Partial(out, part.lse)

    def _in_latent_space(self, path: tuple[Weights, ...], nope: Array, rope: Array) -> tuple[Array, Array]:
        return jnp.einsum("bthn,chn->bthc", nope, path[-1]["k_up"]), rope

    def _expands(self, queries: int) -> bool:
        """Whether so many queries are cheaper on expanded blocks of the cache than in latent space.

        Each query and token cost 2 dc in latent space, and dn + dv once the token is expanded.
        """
        dims = self.nope_dim + self.value_dim
        return queries * (2 * self.latent_dim - dims) > self.latent_dim * dims

    def _scale(self, layer: Layer) -> float:
        return layer.rope.score_factor * self.score_dim**-0.5

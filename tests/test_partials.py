"""Softmax attention in parts: masks, blocks of queries, merging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import partials
from kvjax.attention.masks import Mask, own_tokens
from kvjax.attention.partials import attend, merge


def draw(length, keys=None, heads=4, groups=2, width=6):
    shapes = (2, length, heads, width), (2, keys or length, groups, width), (2, keys or length, groups, width)
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def dense_attention(q, k, v, mask, scale):
    k, v = (np.repeat(np.asarray(x, np.float64), q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", np.asarray(q, np.float64), k) * scale
    weights = np.exp(np.where(np.asarray(mask)[:, None], scores, -np.inf))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v), np.log(weights.sum(-1))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block", [512, 4, 1])
def test_attend_equals_dense_attention(monkeypatch, window, packed, block):
    monkeypatch.setattr(partials, "QUERY_BLOCK", block)
    q, k, v = draw(11)
    ids = jnp.asarray([[1] * 5 + [2] * 6, [1] * 11]) if packed else None
    mask = own_tokens(11, ids, window)
    part = attend(q, k, v, mask, 0.7)
    out, lse = dense_attention(q, k, v, mask.dense(), 0.7)
    np.testing.assert_allclose(part.out, out, atol=1e-5)
    np.testing.assert_allclose(part.lse, np.swapaxes(lse, 1, 2), atol=1e-5)


def test_gradients_do_not_depend_on_blocks(monkeypatch):
    q, k, v = draw(11)
    def loss(q, k, v):
        part = attend(q, k, v, own_tokens(11, None, None), 0.7)
        return (part.out ** 2).sum() + part.lse.sum()
    whole = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    monkeypatch.setattr(partials, "QUERY_BLOCK", 4)
    blocks = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(whole, blocks, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_merged_parts_equal_the_whole():
    q, k, v = draw(5, keys=9)
    order = jnp.arange(5) + 4
    parts = [attend(q, k[:, s], v[:, s], Mask(order, jnp.arange(9)[s]), 1.0) for s in (slice(0, 3), slice(3, 9))]
    whole = attend(q, k, v, Mask(order, jnp.arange(9)), 1.0)
    merged = merge(*parts)
    np.testing.assert_allclose(merged.out, whole.out, atol=1e-5)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-5)


def test_a_part_without_visible_keys_vanishes_when_merged():
    q, k, v = draw(5)
    some = attend(q, k, v, own_tokens(5, None, None), 1.0)
    none = attend(q, k, v, Mask(jnp.arange(5), jnp.arange(5), valid=jnp.zeros((2, 5), bool)), 1.0)
    merged = merge(some, none)
    assert np.isfinite(merged.out).all()
    np.testing.assert_array_equal(merged.out, some.out)
    grads = jax.grad(lambda v: merge(some, attend(q, k, v, Mask(jnp.arange(5), jnp.arange(5),
                                                               valid=jnp.zeros((2, 5), bool)), 1.0)).out.sum())(v)
    assert (grads == 0).all()


def test_long_sequences_hold_one_block_of_scores():
    length = 4096
    def loss(q, k, v):
        return attend(q, k, v, own_tokens(length, None, None), 1.0).out.sum()
    shapes = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)] * 3
    compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile()
    all_scores = 2 * length * length * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_scores / 2


@pytest.mark.parametrize("window", [None, 3])
def test_cudnn_is_asked_for_exactly_the_masked_attention(monkeypatch, window):
    """There is no GPU here: the arguments that cuDNN would get go to the same function's other implementation."""
    asked = []
    def stand_in(*arguments, implementation, **settings):
        asked.append(implementation)
        return plain(*arguments, **settings)
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(partials, "has_cudnn_attention", lambda: True)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arguments, cuda, default: cuda(*arguments))
    q, k, v = (x.astype(jnp.bfloat16) for x in draw(11, width=8))
    mask = own_tokens(11, None, window, complete=True)
    out, _ = dense_attention(q, k, v, mask.dense(), 0.7)
    np.testing.assert_allclose(attend(q, k, v, mask, 0.7).out, out, atol=0.05)
    assert asked == ["cudnn"]


def test_cudnn_is_refused_what_it_cannot_honour(monkeypatch):
    q, k, v = (x.astype(jnp.bfloat16) for x in draw(11, width=8))
    mask = own_tokens(11, None, None, complete=True)
    assert not partials.cudnn_honours(q, k, v, mask), "no GPU"
    monkeypatch.setattr(partials, "has_cudnn_attention", lambda: True)
    assert partials.cudnn_honours(q, k, v, mask)
    assert not partials.cudnn_honours(q, k, v, own_tokens(11, jnp.ones((2, 11)), None, complete=True)), "packed"
    assert not partials.cudnn_honours(q, k, v, own_tokens(11, None, None)), "the log-sum-exp is needed"
    assert not partials.cudnn_honours(*(x.astype(jnp.float32) for x in (q, k, v)), mask), "float32"
    assert not partials.cudnn_honours(q[..., :6], k[..., :6], v[..., :6], mask), "width 6"

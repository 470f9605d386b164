"""What must hold for every variant, as functions of a configuration: a variant from outside is tested by them too."""

from functools import lru_cache
from math import prod

import chex
import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import ModelConfig

BATCH, LENGTH = 3, 20
TOLERANCE = 1e-4


def random_params(config: ModelConfig, seed: int = 0):
    """Random values in every leaf, also in those that training starts at zero or one."""
    def draw(path, param):
        key = jax.random.fold_in(jax.random.key(seed), hash_path(path))
        value = jax.random.normal(key, param.shape)
        name = path[-1].key
        if "norm" in name:
            return 1 + 0.2 * value
        shape = param.shape[1:] if param.axes[0] == "layers" else param.shape
        contracted = {"embedding": shape[-1:], "o_proj": shape[:-1]}.get(name, shape[:1])
        return value * prod(contracted) ** -0.5
    return jax.tree.map_with_path(draw, kvjax.model.parameters(config))


def hash_path(path):
    return sum((i + 1) * ord(c) for i, c in enumerate(jax.tree_util.keystr(path)))


def tokens_of(config: ModelConfig, seed: int = 1, shape=(BATCH, LENGTH)):
    return jax.random.randint(jax.random.key(seed), shape, 0, config.vocab_size)


@lru_cache
def full_pass(config: ModelConfig):
    model, tokens = kvjax.build_model(config), tokens_of(config)
    params = random_params(config)
    return model, params, tokens, jax.jit(model.apply)({"params": params}, tokens)


CHUNKS = [(4, 5, 0), (1, 5, 5), (5, 0, 1), (1, 1, 1), (0, 1, 1), (1, 1, 0), (1, 1, 1)]
"""New real tokens of each row in successive calls: rows of different lengths, rows that wait."""


def decoded_in_chunks(config: ModelConfig):
    """Logits of the full pass, and those of ragged, right-padded chunks; where not decoded, NaN."""
    model, params, tokens, full = full_pass(config)
    step = jax.jit(lambda p, t, c, n: kvjax.decode(model, p, t, c, n))
    cache = kvjax.init_cache(config, BATCH, LENGTH)
    done, decoded = np.zeros(BATCH, int), np.full(full.shape, np.nan)
    for counts in CHUNKS:
        size = 5 if max(counts) > 1 else 1
        chunk = np.full((BATCH, size), config.vocab_size - 1)
        for row, n in enumerate(counts):
            chunk[row, :n] = tokens[row, done[row]:done[row] + n]
        logits, cache = step(params, jnp.asarray(chunk), cache, jnp.asarray(counts))
        for row, n in enumerate(counts):
            decoded[row, done[row]:done[row] + n] = logits[row, :n]
        done += counts
    np.testing.assert_array_equal(cache.lengths, done)
    assert not cache.overflowed.any()
    return np.asarray(full), decoded, done


def check_decoding(config: ModelConfig) -> None:
    """Cached decoding gives the logits of the full pass."""
    full, decoded, done = decoded_in_chunks(config)
    assert full.std() > 0.3, "logits of a useful size"
    for row, n in enumerate(done):
        chex.assert_trees_all_close(decoded[row, :n], full[row, :n], atol=TOLERANCE, rtol=0)


def check_bytes(config: ModelConfig, elements: int) -> None:
    """The allocated cache holds exactly the formula's elements, for every dtype and capacity."""
    for dtype, size, length in ((jnp.float32, 4, 20), (jnp.bfloat16, 2, 700)):
        cache = jax.eval_shape(lambda d=dtype, n=length: kvjax.init_cache(config, BATCH, n, d))
        assert cache.capacity == {20: 128, 700: 1024}[length]
        assert cache.nbytes == config.layers * elements * size * BATCH * cache.capacity
        assert kvjax.cache_bytes_per_token(config, dtype, length) == config.layers * elements * size


def check_gradients(config: ModelConfig) -> None:
    """Every weight has a finite gradient that is not zero."""
    model, params, tokens, _ = full_pass(config)
    grads = jax.jit(jax.grad(lambda p: jax.nn.log_softmax(model.apply({"params": p}, tokens))[..., 3].sum()))(params)
    chex.assert_tree_all_finite(grads)
    chex.assert_trees_all_equal_shapes(grads, params)
    idle = [jax.tree_util.keystr(path) for path, g in jax.tree.leaves_with_path(grads) if not jnp.any(g)]
    assert not idle, f"without gradient: {idle}"

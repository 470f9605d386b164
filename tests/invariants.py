"""What must hold for every variant, as functions of a configuration: a variant from outside is tested by them too.

Compiling takes nearly all of a test's time, so what several checks of one configuration need is compiled once.
"""

import zlib
from dataclasses import replace
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
        generator = np.random.default_rng((seed, zlib.crc32(jax.tree_util.keystr(path).encode())))
        value = generator.standard_normal(param.shape, np.float32)
        name = path[-1].key
        if "norm" in name and "bias" not in name:
            return jnp.asarray(1 + 0.2 * value)
        shape = param.shape[1:] if param.axes[:1] == ("layers",) else param.shape
        last = name.startswith("embedding") or name.endswith("expand")
        contracted = shape[-1:] if last else shape[:-1] if name == "o_proj" else shape[:1]
        return jnp.asarray(value * np.float32(prod(contracted) ** -0.5))
    return jax.tree.map_with_path(draw, kvjax.model.parameters(config))


def tokens_of(config: ModelConfig, seed: int = 1, shape=(BATCH, LENGTH)):
    return jnp.asarray(np.random.default_rng(seed).integers(config.vocab_size, size=shape, dtype=np.int32))


@lru_cache
def forward(config: ModelConfig):
    """(params, tokens, segment ids) -> logits, compiled."""
    model = kvjax.build_model(config)
    return jax.jit(lambda params, tokens, ids: model.apply({"params": params}, tokens, segment_ids=ids))


@lru_cache
def full_pass(config: ModelConfig):
    params, tokens = random_params(config), tokens_of(config)
    return kvjax.build_model(config), params, tokens, forward(config)(params, tokens, jnp.ones_like(tokens))


@lru_cache
def step_of(config: ModelConfig):
    """(params, tokens, cache, counts, last_only) -> (logits, cache), compiled."""
    model = kvjax.build_model(config)
    return jax.jit(lambda p, t, c, n, last_only=False: kvjax.decode(model, p, t, c, n, last_only),
                   static_argnames="last_only")


# --- decoding ---------------------------------------------------------------------------------------------------------

CHUNKS = [(4, 5, 0), (1, 5, 5), (5, 0, 1), (1, 1, 1), (0, 1, 1), (1, 1, 0), (1, 1, 1)]
"""New real tokens of each row in successive calls: rows of different lengths, rows that wait."""
SMALL_CHUNKS = [(2, 1, 0), (1, 2, 2), (2, 0, 1), (1, 1, 2), (2, 2, 0)]
"""The same in calls of one shape, of which one program is compiled."""


def ragged_chunks(config: ModelConfig, tokens, chunks):
    """For each call: its tokens, padded on the right, how many are real, and how many of each row came before."""
    done, sizes = np.zeros(len(tokens), int), (1, 5) if chunks is CHUNKS else (2,)
    for counts in chunks:
        size = min(n for n in sizes if n >= max(counts))
        chunk = np.full((len(counts), size), config.vocab_size - 1)
        for row, n in enumerate(counts):
            chunk[row, :n] = np.asarray(tokens)[row, done[row]:done[row] + n]
        yield jnp.asarray(chunk), np.asarray(counts), done
        done = done + counts


def check_decoding(config: ModelConfig, chunks=CHUNKS, expected=None) -> None:
    """Decoding in ragged chunks from the cache gives the `expected` logits, by default those of the full pass."""
    params, tokens, cache = random_params(config), tokens_of(config), kvjax.init_cache(config, BATCH, LENGTH)
    expected = np.asarray(full_pass(config)[3] if expected is None else expected)
    assert expected.std() > 0.3, "logits of a useful size"
    for chunk, counts, done in ragged_chunks(config, tokens, chunks):
        logits, cache = step_of(config)(params, chunk, cache, counts)
        for row, n in enumerate(counts):
            wanted = expected[row, done[row]:done[row] + n]
            np.testing.assert_allclose(np.asarray(logits)[row, :n], wanted, atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(cache.lengths, done + counts)
    assert not np.asarray(cache.overflowed).any()


def check_last_logits(config: ModelConfig, chunks=CHUNKS) -> None:
    """Asked for each row's last logits only, a chunk gives those of the full pass, and the same cache."""
    _, params, tokens, full = full_pass(config)
    step, cache, full = step_of(config), kvjax.init_cache(config, BATCH, LENGTH), np.asarray(full)
    for chunk, counts, done in list(ragged_chunks(config, tokens, chunks))[:2]:
        last, longer = step(params, chunk, cache, counts, last_only=True)
        for row in np.flatnonzero(counts):
            expected = full[row, done[row] + counts[row] - 1]
            np.testing.assert_allclose(np.asarray(last)[row], expected, atol=TOLERANCE, rtol=0)
        _, cache = step(params, chunk, cache, counts)
        chex.assert_trees_all_close(longer, cache, atol=1e-5, rtol=1e-5)


# --- bytes ------------------------------------------------------------------------------------------------------------


def check_bytes(config: ModelConfig, elements: int) -> None:
    """The allocated cache holds exactly `elements` per token in every layer."""
    check_sizes(config, [(config.layers * elements, config.window)])


def check_sizes(config: ModelConfig, sizes) -> None:
    """The allocated cache holds exactly the formula's elements, for every dtype and capacity.

    `sizes`: (elements per token of the whole model, window that they are kept for or None).
    """
    for dtype, size, length in ((jnp.float32, 4, 20), (jnp.bfloat16, 2, 700)):
        cache = jax.eval_shape(lambda d=dtype, n=length: kvjax.init_cache(config, BATCH, n, d))
        assert cache.capacity == {20: 128, 700: 1024}[length]
        held = sum(n * min(cache.capacity, whole_blocks(window or length)) for n, window in sizes) * size
        assert cache.nbytes == sum(x.size * x.dtype.itemsize for x in cache.components.values()) == held * BATCH
        assert kvjax.cache_bytes_per_token(config, dtype, length) * cache.capacity == held


def whole_blocks(tokens: int) -> int:
    """Tokens are kept in blocks of 512, few tokens in blocks of 128."""
    block = 128 if tokens <= 512 else 512
    return -(-tokens // block) * block


# --- gradients --------------------------------------------------------------------------------------------------------


@lru_cache
def influences(config: ModelConfig):
    """Gradient of one output of each of nine tokens, all different, by every weight: leaves [9, ...]; and the tokens.

    The embeddings are not tied here, so that a token acts through its own row of the embedding and nothing else.
    """
    config = replace(config, tie_embeddings=False)
    model, tokens = kvjax.build_model(config), np.random.default_rng(2).permutation(config.vocab_size)[:9]
    def outputs(params):
        return jax.nn.log_softmax(model.apply({"params": params}, tokens[None])[0])[:, 3]
    return jax.tree.map(np.asarray, jax.jit(jax.jacrev(outputs))(random_params(config))), tokens


def check_gradients(config: ModelConfig) -> None:
    """Every weight of every layer has a finite gradient that is not zero."""
    gradients, _ = influences(config)
    chex.assert_tree_all_finite(gradients)
    chex.assert_trees_all_equal_structs(gradients, random_params(replace(config, tie_embeddings=False)))
    for path, g in jax.tree.leaves_with_path(gradients):
        of_layers = g.reshape(len(g), g.shape[1], -1) if "layer_" in str(path) else g.reshape(len(g), 1, -1)
        assert (np.abs(of_layers).max((0, 2)) > 0).all(), f"without gradient: {jax.tree_util.keystr(path)}"


def check_causality(config: ModelConfig) -> None:
    """No output depends on a later token; without a window, each depends on itself and every earlier one."""
    gradients, tokens = influences(config)
    influence = np.abs(gradients["embedding"][:, tokens]).max(-1)
    assert (influence[np.triu_indices(9, 1)] == 0).all(), "no output depends on a later token"
    if config.window is None:
        assert (influence[np.tril_indices(9)] > 0).all(), "every output depends on itself and every earlier token"


# --- positions and types ----------------------------------------------------------------------------------------------


def check_positions(config: ModelConfig) -> None:
    """A constant added to all positions changes nothing, unless they are learned; other differences do."""
    model, params, tokens, full = full_pass(config)
    apply = jax.jit(lambda p, t, positions: model.apply({"params": p}, t, positions))
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    np.testing.assert_allclose(apply(params, tokens, positions), full, atol=TOLERANCE)
    shifted = np.abs(apply(params, tokens, positions + 37) - full).max()
    stretched = np.abs(apply(params, tokens, positions * 2) - full).max()
    assert shifted < TOLERANCE or config.positions == "learned" and shifted > 0.01
    assert stretched > 0.01 or config.positions == "none" and stretched == 0, "positions are used"


def check_packing(config: ModelConfig) -> None:
    """Documents packed in one row do not see each other: each gives what it gives alone, at the start of a row."""
    _, params, tokens, _ = full_pass(config)
    ids = np.broadcast_to(np.repeat(np.arange(3, dtype=np.int32), [7, 9, 4]), tokens.shape)
    packed = np.asarray(forward(config)(params, tokens, ids))
    for start, stop in ((0, 7), (7, 16), (16, 20)):
        alone = forward(config)(params, np.roll(tokens, -start, axis=1), np.ones_like(ids))
        np.testing.assert_allclose(packed[:, start:stop], np.asarray(alone)[:, :stop - start], atol=TOLERANCE)


def check_low_precision(config: ModelConfig) -> None:
    """bfloat16 keeps 8 bits: errors of about 2^-8 of the logits' size, a few times over the layers."""
    _, params, tokens, full = full_pass(config)
    half = kvjax.build_model(replace(config, dtype="bfloat16"))
    logits = jax.jit(half.apply)({"params": params}, tokens)
    assert logits.dtype == jnp.float32
    assert np.abs(logits - full).max() < 0.1 * np.abs(full).max()
    assert np.corrcoef(np.ravel(logits), np.ravel(full))[0, 1] > 0.999


def check_vmap(config: ModelConfig) -> None:
    """Two models at once, each on its own batch, give what each gives alone."""
    params, tokens = random_params(config), tokens_of(config)
    models = jax.tree.map(lambda *x: jnp.stack(x), params, random_params(config, seed=9))
    batches = jnp.stack([tokens, tokens_of(config, seed=8)])
    both = jax.jit(jax.vmap(forward(config), in_axes=(0, 0, None)))(models, batches, jnp.ones_like(tokens))
    for i in range(2):
        alone = forward(config)(jax.tree.map(lambda x, i=i: x[i], models), batches[i], jnp.ones_like(tokens))
        np.testing.assert_allclose(both[i], alone, atol=1e-5)

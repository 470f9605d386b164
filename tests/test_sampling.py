"""Drawing tokens: the distribution, the filters' supports, independence of rows, and no recompilation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import ConfigError
from kvjax.sampling import check_settings, filter_logits, sample

PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.07, 0.03], np.float32)
LOGITS = np.log(PROBABILITIES)[None] + 3.0
DRAWS = 20_000


OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
jitted_sample, jitted_filter = jax.jit(sample), jax.jit(filter_logits)


def draws(seed=0, **settings):
    """DRAWS rows with the same logits, one draw each."""
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (DRAWS, LOGITS.shape[1]))
    return np.asarray(jitted_sample(jax.random.key(seed), logits, **OFF | settings))


def chi_square(tokens, expected):
    """Pearson's statistic of the drawn tokens; the support has to be exact."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any(), f"drew excluded tokens: {counts}"
    support = expected > 0
    return float((((counts - DRAWS * expected) ** 2)[support] / (DRAWS * expected)[support]).sum())


def normalised(weights):
    return weights / weights.sum()


# What each setting leaves of PROBABILITIES, by hand: top-p 0.7 needs 0.4 + 0.25 + 0.15; of top-k 3's distribution
# (0.5, 0.3125, 0.1875) top-p 0.6 needs two tokens; min-p 0.3 keeps what reaches 0.12.
SETTINGS = {
    "plain": (dict(), PROBABILITIES),
    "cold": (dict(temperature=0.5), normalised(PROBABILITIES**2)),
    "hot": (dict(temperature=2.0), normalised(PROBABILITIES**0.5)),
    "top_k": (dict(top_k=3), normalised(PROBABILITIES * [1, 1, 1, 0, 0, 0])),
    "top_p": (dict(top_p=0.7), normalised(PROBABILITIES * [1, 1, 1, 0, 0, 0])),
    "min_p": (dict(min_p=0.3), normalised(PROBABILITIES * [1, 1, 1, 0, 0, 0])),
    "top_k_then_top_p": (dict(top_k=3, top_p=0.6), normalised(PROBABILITIES * [1, 1, 0, 0, 0, 0])),
    "filters_see_the_tempered": (dict(temperature=2.0, min_p=0.5), normalised(PROBABILITIES**0.5 * [1, 1, 1, 1, 0, 0])),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_analytic_distribution(name):
    settings, expected = SETTINGS[name]
    # 5 degrees of freedom: a right sampler exceeds 30 once in 70 000 seeds.
    assert chi_square(draws(**settings), expected) < 30


def test_the_distribution_test_notices_a_small_error():
    assert chi_square(draws(temperature=1.1), PROBABILITIES) > 60


@pytest.mark.parametrize("settings, kept", [
    (dict(top_k=1), 1), (dict(top_k=4), 4), (dict(top_k=99), 6), (dict(top_k=0), 6),
    (dict(top_p=0.39), 1), (dict(top_p=0.41), 2), (dict(top_p=0.66), 3), (dict(top_p=1.0), 6), (dict(top_p=1e-9), 1),
    (dict(min_p=0.0), 6), (dict(min_p=0.24), 4), (dict(min_p=0.26), 3), (dict(min_p=1.0), 1),
    (dict(top_k=5, top_p=0.97, min_p=0.2), 4), (dict(top_k=2, top_p=0.97, min_p=0.01), 2),
])
def test_supports(settings, kept):
    shuffled = np.array([3, 0, 5, 1, 4, 2])
    out = jitted_filter(jnp.asarray(LOGITS[:, shuffled]), **dict(top_k=0, top_p=1.0, min_p=0.0) | settings)
    expected = np.where(shuffled < kept, LOGITS[:, shuffled], -np.inf)
    np.testing.assert_array_equal(out, expected)


def test_top_k_is_exact_among_equals_and_min_p_keeps_them_all():
    equal = jnp.zeros((1, 5))
    assert np.isfinite(filter_logits(equal, top_k=2)).tolist() == [[True, True, False, False, False]]
    assert np.isfinite(filter_logits(equal, min_p=1.0)).all()


def test_top_p_one_keeps_the_last_token_of_a_large_vocabulary():
    logits = jax.random.normal(jax.random.key(0), (2, 50_000))
    chex.assert_trees_all_equal(filter_logits(logits, top_p=1.0, top_k=50_000), logits)


def test_temperature_zero_is_greedy_whatever_the_rest():
    logits = jax.random.normal(jax.random.key(1), (64, 17))
    for seed in range(3):
        tokens = sample(jax.random.key(seed), logits, temperature=0.0, top_k=5, top_p=0.9, min_p=0.01)
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-44])
def test_tiny_temperatures_stay_finite(temperature):
    logits = jax.random.normal(jax.random.key(1), (64, 17)) * 100
    tokens = sample(jax.random.key(0), logits, temperature=temperature)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))


def test_settings_of_each_row():
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (4000, 6))
    even = jnp.arange(4000) % 2 == 0
    settings = dict(temperature=jnp.where(even, 0.0, 1.0), top_k=jnp.where(even, 0, 2))
    tokens = np.asarray(sample(jax.random.key(0), logits, **settings))
    assert set(tokens[::2]) == {0} and set(tokens[1::2]) == {0, 1}


def test_rows_are_independent():
    """Pairs of neighbouring rows with equal logits: the joint distribution is the product."""
    tokens = draws(seed=3).reshape(-1, 2)
    joint = np.bincount(tokens[:, 0] * 6 + tokens[:, 1], minlength=36)
    expected = len(tokens) * np.outer(PROBABILITIES, PROBABILITIES).ravel()
    assert ((joint - expected) ** 2 / expected).sum() < 90  # 35 degrees of freedom, one seed in a million


def test_a_row_draws_the_same_whatever_the_rest_of_the_batch():
    logits = jax.random.normal(jax.random.key(1), (8, 100))
    key = jax.random.key(5)
    whole = sample(key, logits, top_k=50, top_p=0.95)
    np.testing.assert_array_equal(sample(key, logits[:3], top_k=50, top_p=0.95), whole[:3])
    others = logits.at[1:].set(jax.random.normal(jax.random.key(9), (7, 100)))
    assert sample(key, others, top_k=50, top_p=0.95)[0] == whole[0]


def test_new_settings_compile_nothing():
    traced = jax.jit(chex.assert_max_traces(sample, n=1))
    logits = jnp.asarray(LOGITS)
    for settings in [(0.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (0.7, 40, 0.5, 0.1)]:
        traced(jax.random.key(0), logits, *settings)


@pytest.mark.parametrize("name, bad", [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1), ("top_k", 1.5),
    ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 2.0),
])
def test_bad_settings_are_named(name, bad):
    with pytest.raises(ConfigError, match=f"{name} is {bad}: it must be"):
        check_settings(**OFF | {name: bad})

"""Attention Matching: choices, biases and values against reference values and naive loops; baselines; budgets."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kvjax.attention.partials import MASKED
from kvjax.benchmarks import compaction as benchmark
from kvjax.compaction import batching, key_choice
from kvjax.compaction.attention_matching import FITTED, METHODS, Compacted, choose, compact, find_method, fit_bias_of
from kvjax.compaction.budgets import exchange, sensitivity
from kvjax.compaction.fitting import (
    attention_outputs,
    attention_scores,
    biased,
    features,
    fit_bias,
    fit_values,
    least_squares,
)

GOLDEN = Path(__file__).parents[1] / "data" / "attention_matching.npz"
LEAD, N, T, SLOTS, D, V = (2, 3), 72, 40, 13, 8, 5
KEY = jax.random.key(0)
SCHEDULES = {"am_omp": (1, 1), "am_omp_fast": (4, 2)}
"""Tokens a round, and rounds from one fit to the next."""


def heads(seed=0, lead=LEAD, number=N, tokens=T):
    """Queries, keys and values of heads."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal((*lead, *shape)).astype(np.float32)
    return 1.5 * draw(number, D) + draw(1, D), draw(tokens, D), draw(tokens, V)


def ragged(seed=0):
    """Heads with biases from a compaction before, slots without a token, and queries that do not count: NaN."""
    rng = np.random.default_rng(seed)
    queries, keys, values = heads(seed)
    bias = np.where(rng.random((*LEAD, T)) < 0.4, rng.uniform(-3, 3, (*LEAD, T)), 0).astype(np.float32)
    empty = np.arange(T) >= rng.integers(T - 15, T + 1, LEAD)[..., None]
    counted = rng.random((*LEAD, N)) < 0.9
    return (np.where(counted[..., None], queries, np.nan), np.where(empty[..., None], np.nan, keys),
            np.where(empty[..., None], np.nan, values), np.where(empty, np.float32(MASKED), bias), counted)


# Naive: one head, float64, straight from METHODS §4.

def naive_weights(columns, target, low, high, steps=0):
    weights = np.clip(np.linalg.lstsq(columns, target, rcond=None)[0], low, high)
    for _ in range(steps):
        gradient = columns.T @ (columns @ weights - target)
        weights = np.clip(weights - gradient / np.linalg.norm(columns, 2) ** 2, low, high)
    return weights


def naive_pursuit(columns, target, budget, per_round, refit_every):
    chosen, residual, rounds = [], target, 0
    while len(chosen) < budget:
        correlation = columns.T @ residual
        correlation[chosen] = -np.inf
        chosen += np.argsort(-correlation, kind="stable")[:min(per_round, budget - len(chosen))].tolist()
        if rounds % refit_every == 0:
            residual = target - columns[:, chosen] @ naive_weights(columns[:, chosen], target, 1e-12, np.exp(7))
        rounds += 1
    return np.array(chosen)


def naive_compact(method, queries, keys, values, budget, bias, scale):
    """Indices, biases and values of a head."""
    queries, keys, values, bias = (np.asarray(x, np.float64) for x in (queries, keys, values, bias))
    scores = queries @ keys.T * scale
    largest = (scores + bias).max(1, keepdims=True)
    columns, terms = np.exp(scores - largest), np.exp(scores + bias - largest)
    target, attention = terms.sum(1), terms / terms.sum(1, keepdims=True)
    if method == "am_highest":
        chosen = np.argsort(-np.sqrt((attention**2).mean(0)), kind="stable")[:budget]
        weights = naive_weights(columns[:, chosen], target, np.exp(-3), np.exp(3), 2)
    else:
        chosen = naive_pursuit(columns, target, budget, *SCHEDULES[method])
        weights = naive_weights(columns[:, chosen], target, 1e-12, np.exp(7))
    kept = columns[:, chosen] * weights
    # As the code, without what float32 cannot resolve: tokens whose weight is clamped to almost nothing.
    fitted = np.linalg.pinv(kept / kept.sum(1, keepdims=True), rcond=2e-6) @ (attention @ values)
    return chosen, np.log(weights), fitted


@pytest.mark.parametrize("method", ["highest", "omp", "omp_fast"])
def test_reference_values_are_met(method):
    golden = np.load(GOLDEN)
    made = compact(f"am_{method}", golden["queries"], golden["keys"], golden["values"], int(golden["budget"]))
    np.testing.assert_array_equal(made.indices, golden[f"{method}_indices"])
    np.testing.assert_allclose(made.bias, golden[f"{method}_beta"], atol=1e-3)
    np.testing.assert_allclose(made.values, golden[f"{method}_values"], atol=1e-3)
    np.testing.assert_array_equal(made.keys, golden["keys"][made.indices])


@pytest.mark.parametrize("method", FITTED)
def test_every_head_is_compacted_as_by_a_naive_loop(method):
    queries, keys, values, bias, counted = ragged(1)
    counts = np.array([[SLOTS, 9, 5], [12, SLOTS, 10]])
    made = compact(method, queries, keys, values, SLOTS, scale=0.4, bias=bias, counted=counted, counts=counts)
    assert isinstance(made, Compacted) and made.indices.dtype == jnp.int32
    assert made.bias.dtype == made.values.dtype == jnp.float32
    for i in np.ndindex(LEAD):
        held, used = bias[i] > MASKED / 2, counts[i]
        expected = naive_compact(method, queries[i][counted[i]], keys[i][held], values[i][held], used, bias[i][held],
                                 0.4)
        indices, kept, new, fitted = (np.asarray(x)[i] for x in made)
        np.testing.assert_array_equal(indices[:used], expected[0], str(i))
        np.testing.assert_array_equal(kept[:used], keys[i][expected[0]])
        np.testing.assert_allclose(new[:used], expected[1], atol=5e-3)
        np.testing.assert_allclose(fitted[:used], expected[2], rtol=1e-2, atol=5e-3)
        assert (indices[used:] == -1).all() and (kept[used:] == 0).all() and (fitted[used:] == 0).all()
        assert (new[used:] == np.float32(MASKED)).all()


@pytest.mark.parametrize("method", ["am_highest", "recent", "snapkv", "kvzip"])
def test_padding_changes_nothing(method):
    queries, keys, values, bias, counted = ragged(2)
    made = compact(method, queries, keys, values, SLOTS, bias=bias, counted=counted)
    i = (1, 0)
    held = bias[i] > MASKED / 2
    assert held.sum() < T and not counted[i].all()
    alone = compact(method, queries[i][counted[i]], keys[i][held], values[i][held], SLOTS, bias=bias[i][held])
    for padded, expected in zip(made, alone, strict=True):
        np.testing.assert_allclose(padded[i], expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(made.indices[i], alone.indices)


@pytest.mark.parametrize("method", SCHEDULES)
def test_loops_of_the_benchmark_choose_the_same(method):
    shape = benchmark.Shape(heads=2, queries=60, tokens=30, width=8, slots=7, loop_heads=2, rounds=1)
    runs = benchmark.runs_of(method, shape, benchmark.made_up_heads(shape))
    found = {name: np.asarray(run()).tolist() for name, (run, _) in runs.items()}
    assert len(found) == 4 and all(tokens == found["batched"] for tokens in found.values())


def test_heads_of_fewer_tokens_than_slots_use_what_they_have():
    queries, keys, values = heads(3, ())
    bias = np.where(np.arange(T) % 8 == 3, 0, MASKED).astype(np.float32)
    for method in ("am_highest", "am_omp_fast", "snapkv", "random"):
        made = compact(method, queries, keys, values, 8, bias=bias, key=KEY)
        assert sorted(made.indices.tolist()) == [-1, -1, -1, 3, 11, 19, 27, 35], method
        assert ((made.bias > MASKED / 2) == (made.indices >= 0)).all()
        assert (made.values[5:] == 0).all() and jnp.isfinite(made.values).all()
        np.testing.assert_allclose(attention_outputs(queries, made.keys, made.values, made.bias),
                                   attention_outputs(queries, keys, values, bias), atol=1e-3)


@pytest.mark.parametrize("method", FITTED)
def test_all_tokens_kept_means_no_bias_and_their_values(method):
    queries, keys, values = heads(4, (), number=200, tokens=20)
    made = compact(method, queries, keys, values, 20)
    assert sorted(made.indices.tolist()) == list(range(20))
    np.testing.assert_allclose(made.bias, 0, atol=1e-3)
    np.testing.assert_allclose(made.values, values[made.indices], atol=1e-3)


def test_fits_beat_copies_and_biases_matter():
    queries, keys, values = heads(5)
    exact = attention_outputs(queries, keys, values)
    error = lambda made, bias: float(jnp.linalg.norm(attention_outputs(queries, made.keys, made.values, bias) - exact))
    made = {method: compact(method, queries, keys, values, SLOTS, key=KEY) for method in METHODS}
    errors = {method: error(x, x.bias) for method, x in made.items()}
    baselines = [errors[method] for method in METHODS if method not in FITTED]
    for method in FITTED:
        assert errors[method] < 0.8 * min(baselines), method
        assert error(made[method], 0 * made[method].bias) > 1.05 * errors[method], "a dropped bias changes outputs"
    assert all((made[method].bias == 0).all() for method in METHODS if method not in FITTED)


def test_mass_is_matched_and_common_biases_carry_over():
    queries, keys, values = heads(6, ())
    mass = lambda keys, bias: jax.nn.logsumexp(attention_scores(queries, keys) + bias, axis=-1)
    made = compact("am_omp", queries, keys, values, SLOTS)
    np.testing.assert_allclose(mass(made.keys, made.bias), mass(keys, 0), atol=0.5)
    # Biases of a compaction before belong to the target: a common one comes out again, and outputs stay.
    again = compact("am_omp", queries, keys, values, SLOTS, bias=np.full(T, 1.5, np.float32))
    np.testing.assert_array_equal(again.indices, made.indices)
    np.testing.assert_allclose(again.bias, made.bias + 1.5, atol=1e-3)
    np.testing.assert_allclose(again.values, made.values, atol=2e-3)


def test_baselines_choose_as_they_say():
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((2, 40, 60)).astype(np.float32)
    logits[1, :, 50:] = MASKED
    counted = rng.random((2, 40)) < 0.8
    for i, tokens in ((0, 60), (1, 50)):
        attention = np.exp(logits[i, counted[i], :tokens])
        attention /= attention.sum(1, keepdims=True)
        order = lambda wanted: np.argsort(-wanted, kind="stable")
        given, masked = (jnp.asarray(logits), 45), counted
        np.testing.assert_array_equal(key_choice.recent(*given)[i], np.arange(tokens)[::-1][:45])
        np.testing.assert_array_equal(key_choice.kvzip(*given, masked)[i], order(attention.max(0))[:45])
        np.testing.assert_array_equal(key_choice.highest_attention(*given, masked)[i],
                                      order((attention**2).mean(0))[:45])
        mean = attention.mean(0)
        mean[tokens - 32:] = 0
        pooled = np.array([mean[max(0, j - 3): j + 4].max() for j in range(tokens - 32)])
        expected = [*range(tokens - 1, tokens - 33, -1), *order(pooled)][:45]
        np.testing.assert_array_equal(key_choice.snapkv(*given, masked)[i], expected)
    drawn = np.asarray(key_choice.random(*given, KEY))
    assert len(set(drawn[0].tolist())) == 45 and drawn[1].max() < 50 and (drawn[0] != drawn[1]).any()
    both = compact("random", *heads(8), SLOTS, key=KEY), compact("random", *heads(8), SLOTS, key=jax.random.key(1))
    assert (both[0].indices != both[1].indices).any() and (both[0].indices[0, 0] != both[0].indices[0, 1]).any()


def test_pursuit_with_columns_that_repeat():
    queries, keys, values = heads(9, ())
    keys[10:30] = keys[:20]
    for method in ("am_omp", "am_omp_fast"):
        made = compact(method, queries, keys, values, 35)
        assert len(set(made.indices.tolist())) == 35 and jnp.isfinite(made.bias).all()
        exact = attention_outputs(queries, keys, values)
        error = attention_outputs(queries, made.keys, made.values, made.bias) - exact
        assert jnp.linalg.norm(error) < 0.05 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("number, width, rank", [(60, 20, 20), (60, 20, 11), (12, 20, 12), (300, 17, 17)])
def test_least_squares_is_the_pseudoinverse(number, width, rank):
    rng = np.random.default_rng(number)
    matrix = (rng.standard_normal((number, rank)) @ rng.standard_normal((rank, width))).astype(np.float32)
    if rank == 17:
        matrix *= 10.0 ** rng.uniform(-3, 0, width).astype(np.float32)  # columns of unlike sizes
    target = rng.standard_normal((number, 3)).astype(np.float32)
    found = np.asarray(jax.jit(least_squares)(matrix, target), np.float64)
    expected = np.linalg.pinv(matrix.astype(np.float64), rcond=1e-6) @ target
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max(1, keepdims=True).min())
    residual = matrix.T @ (matrix @ found - target)
    assert np.abs(residual).max() < 1e-5 * np.abs(matrix).max() * np.abs(target).max() * number


def test_bounds_of_weights_are_kept_and_steps_help():
    queries, keys, _ = heads(10, ())
    scores = attention_scores(queries, keys, 1.0)
    cost = {}
    for steps in (0, 2, 40):
        bias = fit_bias(scores[:, :25], scores, np.exp(-0.5), np.exp(0.5), steps)
        assert bias.min() >= -0.5 - 1e-6 and bias.max() <= 0.5 + 1e-6
        columns, target = features(scores[:, :25], scores, jnp.ones(N, bool))
        cost[steps] = float(jnp.sum((columns @ jnp.exp(bias) - target) ** 2))
    assert cost[40] < cost[2] < cost[0]


def test_parts_give_what_the_whole_gives():
    queries, keys, values, bias, counted = ragged(11)
    clean = [np.nan_to_num(x) for x in (queries, keys, values)]
    scores = attention_scores(*clean[:2])
    made = compact("am_omp", queries, keys, values, SLOTS, bias=bias, counted=counted)
    indices = choose("am_omp", scores, SLOTS, bias=bias, counted=counted)
    np.testing.assert_array_equal(indices, made.indices)
    fitted = fit_bias_of("am_omp", scores, indices, bias, counted)
    np.testing.assert_allclose(fitted, made.bias, rtol=1e-3, atol=1e-3)
    columns = jnp.take_along_axis(scores, indices[..., None, :], axis=-1)
    outputs = attention_outputs(*clean, bias)
    np.testing.assert_allclose(fit_values(biased(columns, fitted), outputs, counted), made.values, rtol=1e-3,
                               atol=5e-3)


@pytest.mark.parametrize("method", ["am_omp_fast", "snapkv"])
def test_under_jit_and_vmap_results_are_the_same(method):
    queries, keys, values, bias, counted = ragged(12)
    counts = np.full(LEAD, 11)
    run = lambda q, k, v, b, c, n: compact(method, q, k, v, SLOTS, bias=b, counted=c, counts=n)
    given = (queries, keys, values, bias, counted, counts)
    expected = run(*given)
    for made in (jax.jit(run)(*given), jax.jit(jax.vmap(jax.vmap(run)))(*given)):
        np.testing.assert_array_equal(made.indices, expected.indices)
        for a, b in zip(made, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_heads_side_by_side_are_compacted_as_one_by_one(monkeypatch):
    queries, keys, values, bias, counted = ragged(13)
    run = lambda: compact("am_omp_fast", queries, keys, values, SLOTS, bias=bias, counted=counted)
    expected = run()
    monkeypatch.setattr(batching, "heads_at_once", lambda elements: 4)  # as on accelerators; and a rest of 2
    made = run()
    np.testing.assert_array_equal(made.indices, expected.indices)
    np.testing.assert_allclose(made.bias, expected.bias, atol=5e-3)
    np.testing.assert_allclose(made.values, expected.values, rtol=1e-2, atol=5e-3)


def test_types_of_keys_and_of_copied_values_stay():
    queries, keys, values = (x.astype(jnp.bfloat16) for x in heads(13, ()))
    copied, fitted = (compact(method, queries, keys, values, SLOTS) for method in ("kvzip", "am_highest"))
    assert copied.keys.dtype == copied.values.dtype == fitted.keys.dtype == jnp.bfloat16
    assert fitted.values.dtype == jnp.float32
    np.testing.assert_array_equal(copied.values, values[copied.indices])


def bad(x, place, value=np.nan):
    x = np.array(x, np.float32)
    x[place] = value
    return x


Q, K, VALUES = heads(14)
ZERO = np.zeros((*LEAD, T), np.float32)
REFUSED = {
    "nan query": (dict(queries=bad(Q, (0, 1, 2, 3))), r"queries at \[0, 1, 2, 3\] is nan: queries must be finite"),
    "inf key": (dict(keys=bad(K, (1, 1, 2, 3), np.inf)), r"keys at \[1, 1, 2, 3\] is inf"),
    "nan value": (dict(values=bad(VALUES, (1, 2, 0, 0))), r"values at \[1, 2, 0, 0\] is nan"),
    "bias -inf": (dict(bias=bad(ZERO, (0, 0, 7), -np.inf)), r"bias at \[0, 0, 7\] is -inf.*-1e\+30 marks slots"),
    "budget 0": (dict(budget=0), "the budget is 0: it must be between 1 and the 40 tokens"),
    "budget above": (dict(budget=41), "the budget is 41: it must be between 1 and the 40 tokens"),
    "counts 0": (dict(counts=np.array([[3, 3, 3], [3, 0, 3]])), r"counts at \[1, 1\] are 0: .*between 1 slot and"),
    "counts above": (dict(counts=np.array([[3, 3, 14], [3, 3, 3]])), r"counts at \[0, 2\] are 14: .*budget of 13"),
    "method": (dict(method="am_omp_fst"), "unknown method 'am_omp_fst'.*did you mean 'am_omp_fast'"),
    "no key": (dict(method="random"), "give it a random key"),
    "none counts": (dict(counted=np.zeros((*LEAD, N), bool)), r"no query of head \[0, 0\] counts"),
    "overflow": (dict(queries=Q * 1e25, keys=K * 1e25), r"largest score, of head at \[0, 0\] is inf: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_its_place(case):
    given, message = REFUSED[case]
    given = dict(method="am_highest", queries=Q, keys=K, values=VALUES, budget=SLOTS) | given
    before = {name: np.array(x) for name, x in given.items()}
    with pytest.raises(ValueError, match=message):
        compact(**given)
    for name, x in given.items():
        np.testing.assert_array_equal(x, before[name], "what is given never changes")


def test_checkify_refuses_the_same_under_jit():
    run = jax.jit(lambda keys, counts: compact("kvzip", Q, keys, VALUES, SLOTS, counts=counts))
    counts = jnp.full(LEAD, 3)
    assert checkify.checkify(run)(K, counts)[0].get() is None
    assert "keys at [1 1 2 3] is nan" in checkify.checkify(run)(bad(K, (1, 1, 2, 3)), counts)[0].get()
    assert "counts at [0 0] are 0" in checkify.checkify(run)(K, 0 * counts)[0].get()


def test_methods_by_name():
    assert find_method("am_omp") is METHODS["am_omp"] and set(FITTED) == {"am_highest", "am_omp", "am_omp_fast"}


def test_sensitivity_falls_with_slots_and_is_the_error():
    queries, keys, values, bias, counted = ragged(15)
    losses = np.asarray(sensitivity("kvzip", queries, keys, values, (4, 20), bias=bias, counted=counted))
    assert losses.shape == (*LEAD, 2) and (losses[..., 1] < losses[..., 0]).mean() > 0.8
    i = (1, 2)
    held, alone = bias[i] > MASKED / 2, queries[i][counted[i]]
    made = compact("kvzip", alone, keys[i][held], values[i][held], 4, bias=bias[i][held])
    exact = attention_outputs(alone, keys[i][held], values[i][held], bias[i][held])
    error = attention_outputs(alone, made.keys, made.values, made.bias) - exact
    np.testing.assert_allclose(losses[i][0], (error**2).sum() / (exact**2).sum(), rtol=1e-2)


def test_exchange_beats_uniform_and_keeps_the_total():
    rng = np.random.default_rng(16)
    sizes = np.array([2, 4, 8, 16, 32])
    need = 10 ** rng.uniform(0, 2, 12)
    losses = np.exp(-sizes / need[:, None])
    got = exchange(losses, sizes, 12 * 8)
    at = lambda chosen: losses[np.arange(12), np.searchsorted(sizes, chosen)].sum()
    assert got.sum() <= 96 and set(got) <= set(sizes.tolist()) and at(got) < at(np.full(12, 8))
    # Small enough to try everything: exchanges find the best.
    few = losses[[0, 3, 7]]
    best = min(few[[0, 1, 2], list(levels)].sum() for levels in np.ndindex(5, 5, 5) if sizes[list(levels)].sum() <= 24)
    assert few[[0, 1, 2], np.searchsorted(sizes, exchange(few, sizes, 24))].sum() == pytest.approx(best)


def test_exchange_leaves_equal_heads_uniform_and_spends_what_is_left():
    sizes = [1, 2, 3, 4]
    equal = np.tile([4.0, 2.0, 1.0, 0.5], (3, 1))
    assert exchange(equal, sizes, 6).tolist() == [2, 2, 2]
    assert sorted(exchange(equal, sizes, 7).tolist()) == [2, 2, 3]
    assert exchange(equal, sizes, 100).tolist() == [4, 4, 4]
    steps = np.array([[5.0, 5.0, 5.0, 0.0], [5.0, 4.9, 4.8, 4.7], [5.0, 4.9, 4.8, 4.7]])  # gains only at its end
    assert exchange(steps, sizes, 6).tolist() == [4, 1, 1]


@pytest.mark.parametrize("losses, sizes, total, message", [
    (np.ones((2, 3)), [1, 2], 4, r"shape \(2, 3\) and sizes \(2,\)"),
    (np.full((2, 2), np.nan), [1, 2], 4, r"the loss at \(0, 0\) is nan"),
    (np.ones((2, 2)), [2, 1], 4, "must ascend"),
    (np.ones((2, 2)), [2, 4], 3, "the total is 3: 2 heads need at least 2 slots each, 4 in all"),
])
def test_exchange_refuses(losses, sizes, total, message):
    with pytest.raises(ValueError, match=message):
        exchange(losses, sizes, total)


def test_random_choice_asks_for_a_key():
    with pytest.raises(ValueError, match="method 'random' draws tokens: give it a random key"):
        choose("random", jnp.zeros((1, 4, 6)), 2)

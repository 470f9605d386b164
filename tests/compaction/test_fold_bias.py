"""FoldBias: the direction, folding, rounding and refits, the bound, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kvjax.attention.partials import MASKED
from kvjax.compaction.fitting import attention_outputs, attention_scores, fit_values
from kvjax.compaction.fold_bias import (
    TYPES,
    diagnostic,
    fit_direction,
    fold_keys,
    output_error_bound,
    refit_rounded_cache,
)

LEAD, N, SLOTS, D, V = (2, 3), 48, 10, 8, 6


def heads(seed=0, lead=LEAD, number=N, slots=SLOTS):
    """Queries, keys, values and biases of heads; queries vary around a mean."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal((*lead, *shape)).astype(np.float32)
    bias = rng.uniform(-3, 3, (*lead, slots)).astype(np.float32)
    return draw(number, D) + draw(1, D), draw(slots, D), draw(slots, V), bias


def moments(queries):
    """Mean [..., d] and covariance [..., d, d] over N, float64."""
    queries = np.asarray(queries, np.float64)
    mean = queries.mean(-2)
    centred = queries - mean[..., None, :]
    return mean, np.einsum("...ni,...nj->...ij", centred, centred) / queries.shape[-2]


def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=-1)


@pytest.mark.parametrize("seed, dtype", [(0, "bfloat16"), (1, "float8_e4m3fn")])
def test_the_diagnostic_finds_what_must_hold(seed, dtype):
    found = diagnostic(seed, dtype)
    assert all(type(x) is float for x in found.values())
    for name in ("mean_constraint", "rank_one_identity", "kkt_residual", "normal_equations"):
        assert found[name] < (1e-4 if name == "normal_equations" else 1e-5), name
    assert found["bound_violation"] <= 1e-6
    assert found["folded_error"] < found["dropped_error"] / 5 and found["refitted_error"] < 1


def test_the_direction_is_the_constrained_ridge_fit():
    queries = heads()[0]
    u = np.asarray(fit_direction(queries), np.float64)
    mean, covariance = moments(queries)
    ridged = covariance + 1e-2 * np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / D * np.eye(D)
    np.testing.assert_allclose((mean * u).sum(-1), 1, atol=1e-6)
    # Stationary: (Σ + λI) u is a multiple of μ, that of the closed form.
    gradient, a = np.einsum("...ij,...j->...i", ridged, u), np.linalg.solve(ridged, mean[..., None])[..., 0]
    np.testing.assert_allclose(gradient, mean / (mean * a).sum(-1, keepdims=True), rtol=1e-4, atol=1e-7)
    rng = np.random.default_rng(1)
    for _ in range(20):  # no other direction of mean projection 1 costs less
        aside = rng.standard_normal(u.shape)
        other = u + 0.1 * (aside - mean * ((aside * mean).sum(-1) / (mean**2).sum(-1))[..., None])
        cost = lambda x: np.einsum("...i,...ij,...j->...", x, ridged, x)
        assert (cost(other) > cost(u)).all()


def test_a_ridge_fit_without_the_constraint_shrinks_the_mean():
    mean, covariance = moments(heads()[0])
    second = covariance + mean[..., :, None] * mean[..., None, :]
    ridged = second + 1e-2 * np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / D * np.eye(D)
    free = np.linalg.solve(ridged, mean[..., None])[..., 0]
    assert ((mean * free).sum(-1) < 0.999).all()


@pytest.mark.parametrize("scale", [None, 0.05])
def test_folding_shifts_scores_by_the_bias_times_the_projection(scale):
    queries, keys, _, bias = heads()
    u = fit_direction(queries)
    folded = fold_keys(keys.astype(jnp.bfloat16), bias, u, scale)
    assert folded.dtype == jnp.float32
    factor = D**-0.5 if scale is None else scale
    scores = factor * np.einsum("...nd,...td->...nt", queries.astype(np.float64), keys.astype(jnp.bfloat16))
    expected = scores + bias[..., None, :] * np.einsum("...nd,...d->...n", queries, u)[..., None]
    np.testing.assert_allclose(attention_scores(queries, folded, scale), expected, atol=2e-5)


def test_the_bound_holds_for_thousands_of_heads():
    rng = np.random.default_rng(3)
    queries, keys, values, bias = heads(3, (3000,), 12, 5)
    spread = 10 ** rng.uniform(-2, 1, (3000, 1)).astype(np.float32)
    bias, values = bias * spread, values * 10 ** rng.uniform(-2, 2, (3000, 1, 1)).astype(np.float32)

    @jax.jit
    def measured(queries, keys, values, bias, far):
        u = fit_direction(queries)
        folded = fold_keys(keys, bias, u)
        queries = jnp.concatenate([queries, far], axis=1)  # and queries that were not calibrated on
        error = attention_outputs(queries, folded, values) - attention_outputs(queries, keys, values, bias)
        return jnp.linalg.norm(error, axis=-1), output_error_bound(bias, values, queries, u)

    far = rng.standard_normal((3000, 12, D)).astype(np.float32)
    error, bound = measured(queries, keys, values, bias, far)
    size = np.abs(values).max(axis=(1, 2))[:, None]
    assert error.shape == bound.shape == (3000, 24)
    assert (error <= bound * (1 + 1e-4) + 1e-5 * size).all()
    assert np.median(error / bound) > 0.02, "the bound says something"


def test_the_bound_is_its_formula():
    queries, _, values, bias = heads(4)
    u = fit_direction(queries)
    apart = norm(values[..., :, None, :] - values[..., None, :, :]).max((-2, -1))
    drift = np.abs(np.einsum("...nd,...d->...n", queries.astype(np.float64), u) - 1)
    expected = ((bias.max(-1) - bias.min(-1)) / 4 * apart)[..., None] * drift
    np.testing.assert_allclose(output_error_bound(bias, values, queries, u), expected, rtol=1e-4, atol=1e-5)


def test_a_common_bias_changes_nothing_and_a_dropped_one_does():
    queries, keys, values, bias = heads()
    u = fit_direction(queries)
    exact = attention_outputs(queries, keys, values, bias)
    np.testing.assert_allclose(attention_outputs(queries, keys, values, bias + 2), exact, atol=1e-5)
    folded = lambda bias: attention_outputs(queries, fold_keys(keys, bias, u), values)
    # The fold of a common bias shifts all scores of a query alike, whatever the query's projection.
    np.testing.assert_allclose(folded(bias + 2), folded(bias), atol=1e-4)
    np.testing.assert_allclose(output_error_bound(bias + 2, values, queries, u),
                               output_error_bound(bias, values, queries, u), atol=1e-5)
    np.testing.assert_allclose(folded(np.full_like(bias, 1.5)), attention_outputs(queries, keys, values), atol=1e-5)
    dropped = norm(attention_outputs(queries, keys, values) - exact).mean()
    assert norm(folded(bias) - exact).mean() < dropped / 3 and dropped > 0.3


@pytest.mark.parametrize("dtype", TYPES)
def test_values_are_refitted_behind_rounded_keys(dtype):
    queries, keys, values, bias = heads(5)
    outputs = attention_outputs(queries, keys, values, bias)
    folded = fold_keys(keys, bias, fit_direction(queries))
    stored, fitted = refit_rounded_cache(folded, queries, outputs, dtype)
    assert stored.dtype == fitted.dtype == jnp.dtype(dtype) and fitted.shape == values.shape
    rounded = np.asarray(folded).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(stored, np.float32), rounded.astype(np.float32))
    scores = np.einsum("...nd,...td->...nt", queries.astype(np.float64), rounded.astype(np.float64)) / D**0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    free = np.asarray(fit_values(attention_scores(queries, stored), outputs), np.float64)
    transposed = np.swapaxes(weights, -1, -2)
    residual = transposed @ (weights @ free - outputs)
    assert np.abs(residual).max() < 1e-5 * np.abs(transposed @ np.asarray(outputs)).max()
    np.testing.assert_allclose(free, np.linalg.pinv(weights) @ np.asarray(outputs), atol=2e-3)
    np.testing.assert_array_equal(np.asarray(fitted, np.float32), free.astype(np.float32).astype(dtype))
    error = lambda v: norm(weights @ np.asarray(v, np.float64) - outputs).mean()
    assert error(free) < 0.9 * error(values)


def test_keys_that_became_the_same_get_the_values_of_least_norm():
    queries, keys, values, _ = heads(6, ())
    keys[1], keys[7] = keys[0], keys[4]
    outputs = attention_outputs(queries, keys, values)
    found = np.asarray(refit_rounded_cache(keys, queries, outputs, "float32")[1])
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)
    weights = np.asarray(jax.nn.softmax(attention_scores(queries, keys), axis=-1), np.float64)
    expected = np.linalg.pinv(weights, rcond=1e-5) @ np.asarray(outputs, np.float64)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert norm(found).sum() < norm(values).sum()


def test_what_does_not_count_changes_nothing():
    queries, keys, values, bias = heads(7)
    counted = np.arange(N) < np.array([[N, 30, 20], [25, 40, 35]])[..., None]
    padded = np.where(counted[..., None], queries, np.nan)
    padded_bias = bias.copy()
    padded_bias[..., 6:] = MASKED
    outputs = attention_outputs(queries, keys, values, bias)
    u = fit_direction(padded, counted)
    folded = fold_keys(keys, padded_bias, u)
    np.testing.assert_array_equal(folded[..., 6:, :], keys[..., 6:, :])
    found = refit_rounded_cache(folded, padded, outputs, "bfloat16", counted=counted, used=padded_bias > MASKED / 2)
    assert (found[1][..., 6:, :] == 0).all()
    bound = output_error_bound(padded_bias, values, queries, u)
    for i in ((0, 1), (1, 2)):
        alone, few = queries[i][counted[i]], slice(6)
        direction = fit_direction(alone)
        np.testing.assert_allclose(u[i], direction, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(bound[i], output_error_bound(bias[i][few], values[i][few], queries[i], direction),
                                   rtol=1e-4, atol=1e-5)
        _, expected = refit_rounded_cache(np.asarray(folded)[i][few], alone, np.asarray(outputs)[i][counted[i]],
                                          "bfloat16")
        np.testing.assert_allclose(np.asarray(found[1], np.float32)[i][few], np.asarray(expected, np.float32),
                                   rtol=1e-2, atol=1e-3)


def test_under_jit_and_vmap_results_are_the_same():
    queries, keys, values, bias = heads(8)

    def everything(queries, keys, values, bias):
        u = fit_direction(queries)
        outputs = attention_outputs(queries, keys, values, bias)
        return (u, *refit_rounded_cache(fold_keys(keys, bias, u), queries, outputs, "float16"),
                output_error_bound(bias, values, queries, u))

    expected = everything(queries, keys, values, bias)
    for made in (jax.jit(everything), jax.jit(jax.vmap(jax.vmap(everything)))):
        for a, b in zip(made(queries, keys, values, bias), expected, strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=3e-3, atol=2e-4)


def bad(x, place, value):
    x = x.copy()
    x[place] = value
    return x


Q, K, VALUES, B = heads(9)
U = np.full((*LEAD, D), 0.1, np.float32)
OUT = np.zeros((*LEAD, N, V), np.float32)
SYMMETRIC = np.concatenate([Q, -Q], axis=-2)
FP8 = "float8_e4m3fn"
REFUSED = {
    "constant queries": (fit_direction, (np.ones_like(Q) * 0.3,), r"head \[0, 0\] have zero covariance.*calibrate"),
    "one query": (fit_direction, (Q, np.arange(N) < 1), "zero covariance"),
    "one constant head": (fit_direction, (bad(Q, (1, 2), 0.7),), r"head \[1, 2\] have zero covariance"),
    "zero mean": (fit_direction, (SYMMETRIC,), r"head \[0, 0\] have zero mean \(norm .*keep the bias"),
    "nan query": (fit_direction, (bad(Q, (1, 0, 5, 2), np.nan),), r"queries at \[1, 0, 5, 2\] is nan"),
    "huge queries": (fit_direction, (Q * 1e30,), r"head \[0, 0\] have variance inf .* leave the range"),
    "none counts": (fit_direction, (Q, np.zeros((*LEAD, N), bool)), r"no query of head \[0, 0\] counts"),
    "bias -inf": (fold_keys, (K, bad(B, (0, 1, 3), -np.inf), U), r"bias at \[0, 1, 3\] is -inf.*MASKED"),
    "bias nan": (fold_keys, (K, bad(B, (0, 1, 3), np.nan), U), r"the bias at \[0, 1, 3\] is nan"),
    "key inf": (fold_keys, (bad(K, (1, 1, 1, 1), np.inf), B, U), r"keys at \[1, 1, 1, 1\] is inf"),
    "direction nan": (fold_keys, (K, B, bad(U, (0, 2, 0), np.nan)), r"the direction at \[0, 2, 0\] is nan"),
    "folded overflow": (fold_keys, (K, B, np.full_like(U, 3e38)), "folded key .* too large for float32"),
    "fp8 overflow": (lambda *x: refit_rounded_cache(*x, FP8), (bad(K, (0, 2, 1, 4), 500.0), Q, OUT),
                     r"folded key at \[0, 2, 1, 4\] is 500.0: float8_e4m3fn ends at 448; choose a wider type"),
    "fp16 overflow": (lambda *x: refit_rounded_cache(*x, "float16"), (bad(K, (0, 0, 0, 0), -1e5), Q, OUT),
                      "is -100000.0: float16 ends at 65504"),
    "value overflow": (lambda *x: refit_rounded_cache(*x, FP8), (K, Q, OUT + 1e4), "the refitted value .* ends at 448"),
    "outputs nan": (lambda *x: refit_rounded_cache(*x, "float32"), (K, Q, bad(OUT, (0, 0, 1, 1), np.nan)),
                    r"outputs at \[0, 0, 1, 1\] is nan"),
    "bound": (output_error_bound, (B, bad(VALUES, (0, 0, 0, 0), np.inf), Q, U), r"values at \[0, 0, 0, 0\] is inf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_its_place(case):
    function, given, message = REFUSED[case]
    before = [x.copy() for x in given]
    with pytest.raises(ValueError, match=message):
        function(*given)
    for a, b in zip(given, before, strict=True):
        np.testing.assert_array_equal(a, b, "what is given never changes")


@pytest.mark.parametrize("case", ["constant queries", "zero mean", "bias -inf", "fp8 overflow", "outputs nan"])
def test_checkify_refuses_the_same_under_jit(case):
    function, given, message = REFUSED[case]
    error, _ = checkify.checkify(jax.jit(function))(*map(jnp.asarray, given))
    assert error.get() is not None
    words = message.replace("\\", "").split(".*")[0].split("[")
    assert words[0] in error.get()


def test_without_checkify_checks_cost_nothing():
    text = jax.jit(fold_keys).lower(K, B, U).compile().as_text()
    assert "is-finite" not in text and "custom-call" not in text


def test_types_that_need_scales_are_refused():
    with pytest.raises(ValueError, match="cannot be rounded to int8: choose one of bfloat16, float16"):
        refit_rounded_cache(K, Q, OUT, "int8")

"""FoldBias: biases of kept tokens folded into their keys, so that every standard kernel can read the cache.

After "Folding Attention Biases into Keys Makes Compacted KV Caches Run on Standard Kernels" (Kanwat 2026, arXiv v1;
equations as there). A dot product is linear in the query, so no key holds a constant for all queries: one direction u
a head, along which queries vary least around a mean projection of 1, holds biases approximately. Order: fold, round to
the cache's type, refit values.

Functions of arrays alone, float32, batched over leading axes `...` (layers, sequences, KV heads): N calibration
queries (after RoPE; heads that share a KV head pooled), t kept tokens, width d, value width v; `counted` [..., N] bool
are the queries that count, by default all; `scale` is the factor on scores, by default d ** -0.5. Slots whose bias is
`MASKED` hold no token: they take no part, and a length or a mask must hide them.

Bad input raises ValueError with its place, and is never repaired; under `jax.jit` it does so only under
`jax.experimental.checkify`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import cho_factor, cho_solve

from kvjax.attention.partials import MASKED
from kvjax.compaction.batching import over_heads
from kvjax.compaction.checks import check, check_finite
from kvjax.compaction.fitting import HIGHEST, attention_outputs, attention_scores, fit_values

TYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
"""Types of caches that folded keys can be rounded to: all without scales."""
RIDGE = 1e-2
"""λ as a share of the mean variance of queries (Eq. 6)."""


def fit_direction(queries: Array, counted: Array | None = None) -> Array:
    """Direction u [..., d] along which queries [..., N, d] vary least, with mean projection 1 (Eqs. 5 and 6).

    `u = a / (μᵀa)`, `a = (Σ + λI)⁻¹ μ`, `λ = 1e-2 tr(Σ)/d`, Σ divided by N.

    Raises ValueError if a query is not finite, none counts, all are equal (no covariance), or their mean is no larger
    than rounding errors.
    """
    queries = jnp.asarray(queries, jnp.float32)
    counted = jnp.broadcast_to(True if counted is None else counted, queries.shape[:-1])
    check_finite("queries", queries, "queries must be finite", counted[..., None])
    check(counted.any(axis=-1), "no query of head {place} counts: give at least two")
    u, variance, mean, noise = over_heads(_direction, (2, 1), queries, counted, elements=queries.shape[-2]
                                          * queries.shape[-1])
    check(jnp.isfinite(variance) & jnp.isfinite(mean), "queries of head {place} have variance {variance} and a mean of "
          "norm {mean}: they leave the range of float32; scale them", variance=variance, mean=mean)
    check(variance > 0, "queries of head {place} have zero covariance (variance {variance}: all are the same): no "
          "direction can be fitted; calibrate with queries of more positions", variance=variance)
    check(mean > noise, "queries of head {place} have zero mean (norm {mean}, where rounding errors alone make "
          "{noise}): no direction has a mean projection of 1; calibrate with other queries, or keep the bias",
          mean=mean, noise=noise)
    check_finite("the direction", u, "queries leave the range of float32; scale them")
    return u


def _direction(queries: Array, counted: Array) -> tuple[Array, Array, Array, Array]:
    """u [d], mean variance, norm of the mean, and the norm that rounding alone gives a mean, of one head."""
    number, width = counted.sum(), queries.shape[1]
    first = queries[jnp.argmax(counted)]  # differences from one of them are exactly 0 where all are the same
    moved = jnp.where(counted[:, None], queries - first, 0)
    shift = moved.sum(axis=0) / number
    mean = first + shift
    centred = jnp.where(counted[:, None], moved - shift, 0)
    covariance = jnp.matmul(centred.T, centred, precision=HIGHEST) / number
    variance = jnp.trace(covariance) / width
    solved = cho_solve(cho_factor(covariance + RIDGE * variance * jnp.eye(width)), mean)
    size = jnp.sqrt(jnp.sum(mean**2) + variance * width)
    noise = jnp.finfo(jnp.float32).eps * jnp.sqrt(number) * size
    return solved / jnp.dot(mean, solved, precision=HIGHEST), variance, jnp.linalg.norm(mean), noise


def fold_keys(keys: Array, bias: Array, u: Array, scale: float | None = None) -> Array:
    """Float32 keys [..., t, d] that carry their biases: `k'_j = k_j + β_j u / scale` (Eq. 4).

    Args:
        keys: [..., t, d] kept keys, any floating type.
        bias: [..., t]; 0 for tokens without one. Keys of slots at `MASKED` are returned as they are.
        u: [..., d] of `fit_direction`.

    Raises ValueError if anything given is not finite (a bias of -inf is no finite shift of a key), or a result is not.
    """
    keys, bias, u = (jnp.asarray(x, jnp.float32) for x in (keys, bias, u))
    check(bias != -jnp.inf, "the bias at {place} is {bias}: a token that is never attended to cannot be folded; leave "
          f"it out, or mark its slot with MASKED ({MASKED:g})", bias=bias)
    check_finite("the bias", bias, "biases must be finite")
    check_finite("keys", keys, "keys must be finite")
    check_finite("the direction", u, "directions must be finite; fit_direction makes them")
    scale = keys.shape[-1] ** -0.5 if scale is None else scale
    folded = keys + jnp.where(bias > MASKED / 2, bias / scale, 0)[..., None] * u[..., None, :]
    check_finite("the folded key", folded, "the bias or the direction is too large for float32")
    return folded


def refit_rounded_cache(folded_keys: Array, queries: Array, outputs: Array, dtype, scale: float | None = None,
                        counted: Array | None = None, used: Array | None = None) -> tuple[Array, Array]:
    """Folded keys rounded to a cache's type, and the values that fit best behind the rounded keys (Algorithm 1, Eq. 9).

    Args:
        folded_keys: [..., t, d] of `fold_keys`.
        queries: [..., N, d] calibration queries.
        outputs: [..., N, v] of the full cache, for these queries.
        dtype: one of `TYPES`.
        used: [..., t] bool, slots that hold a token; by default all. The values of the others are 0.
    Returns:
        Keys [..., t, d] and values [..., t, v], of type `dtype`. Values are fitted in float32 (pseudoinverse), then
        rounded.

    Raises ValueError if the type is none of `TYPES`, anything is not finite, or a key or value overflows the type.
    """
    keys, values = _refit(folded_keys, queries, outputs, dtype, scale, counted, used)
    return keys, _rounded("the refitted value", values, keys.dtype)


def _refit(folded, queries, outputs, dtype, scale, counted, used) -> tuple[Array, Array]:
    """Rounded keys, and values that are still float32."""
    folded, queries, outputs = (jnp.asarray(x, jnp.float32) for x in (folded, queries, outputs))
    counted = jnp.broadcast_to(True if counted is None else counted, queries.shape[:-1])
    check_finite("the folded key", folded, "keys must be finite")
    check_finite("queries", queries, "queries must be finite", counted[..., None])
    check_finite("outputs", outputs, "outputs must be finite", counted[..., None])
    keys = _rounded("the folded key", folded, cache_type(dtype))
    scores = attention_scores(jnp.where(counted[..., None], queries, 0), keys, scale)
    scores = scores if used is None else jnp.where(used[..., None, :], scores, MASKED)
    values = fit_values(scores, outputs, counted)
    check_finite("the refitted value", values, "queries or outputs leave the range of float32; scale them")
    return keys, values


def cache_type(dtype) -> jnp.dtype:
    """The type of a cache whose keys are rounded without scales. Raises ValueError unless it is one of `TYPES`."""
    name = dtype if isinstance(dtype, str) else getattr(jnp.dtype(dtype), "name", str(dtype))
    if name not in TYPES:
        raise ValueError(f"folded keys cannot be rounded to {name}: choose one of {', '.join(TYPES)}")
    return jnp.dtype(name)


def _rounded(name: str, x: Array, dtype: jnp.dtype) -> Array:
    """x in a cache's type; what was fitted to it sees it rounded, which compilers may otherwise leave out."""
    stored = jax.lax.optimization_barrier(x.astype(dtype))
    largest = float(jnp.finfo(dtype).max)
    check(jnp.isfinite(stored.astype(jnp.float32)) | ~jnp.isfinite(x),
          f"{name} at {{place}} is {{value}}: {dtype.name} ends at {largest:g}; choose a wider type for the cache",
          value=x)
    return stored


def output_error_bound(bias: Array, values: Array, queries: Array, u: Array) -> Array:
    """Bound [..., N] on the distance of folded outputs from biased ones, of each query (§3.3).

    `(max β - min β) / 4 · max_ij ||v_i - v_j|| · |qᵀu - 1|`, for the same values and keys that are not rounded.

    Args:
        bias: [..., t], with 0 for every token that takes part without a bias; slots at `MASKED` take no part.
        values: [..., t, v].
        queries: [..., N, d].
        u: [..., d].

    Raises ValueError if anything given is not finite.
    """
    bias, values, queries, u = (jnp.asarray(x, jnp.float32) for x in (bias, values, queries, u))
    for name, x in (("the bias", bias), ("values", values), ("queries", queries), ("the direction", u)):
        check_finite(name, x, "the bound holds for finite numbers")
    used = bias > MASKED / 2
    spread = jnp.where(used, bias, -jnp.inf).max(axis=-1) - jnp.where(used, bias, jnp.inf).min(axis=-1)
    drift = jnp.abs(jnp.einsum("...nd,...d->...n", queries, u, precision=HIGHEST) - 1)
    return (spread * _diameter(values, used) / 4)[..., None] * drift


def _diameter(values: Array, used: Array) -> Array:
    """Largest distance [...] between two values [..., t, v] of used slots [..., t]."""
    # Measured from their middle, the largest distance is as large as the largest norm: nothing cancels.
    weight = used[..., None] / jnp.maximum(used.sum(axis=-1), 1)[..., None, None]
    values = jnp.where(used[..., None], values - (values * weight).sum(axis=-2, keepdims=True), 0)
    norms = jnp.sum(values**2, axis=-1)
    products = jnp.einsum("...iv,...jv->...ij", values, values, precision=HIGHEST)
    distances = norms[..., :, None] + norms[..., None, :] - 2 * products
    return jnp.sqrt(jnp.where(used[..., :, None] & used[..., None, :], distances, 0).max(axis=(-2, -1)).clip(0))


def diagnostic(seed: int, dtype="bfloat16") -> dict[str, float]:
    """What must hold of folding, measured on one made-up head (t = 24 of T = 96 tokens, N = 256, d = 32).

    Returns:
        mean_constraint: |μᵀu - 1|.
        rank_one_identity: largest error of `q·k'·scale = q·k·scale + β (q·u)`, over the largest score.
        kkt_residual: of `(Σ + λI) u = ν μ`, relative.
        folded_error, dropped_error, refitted_error: relative distance of outputs from those of biased keys, with
            biases folded, and dropped; and from those of all tokens, after rounding to `dtype` and refitting.
        bound_violation: largest excess of the folded error over `output_error_bound`; at most 0 but for rounding.
        normal_equations: relative size of `Aᵀ(AX - O)` behind rounded keys.
    """
    queries, keys, values, bias = _made_up_head(seed)
    kept, kept_values, scale = keys[:24], values[:24], keys.shape[-1] ** -0.5
    outputs, u = attention_outputs(queries, keys, values), fit_direction(queries)
    folded = fold_keys(kept, bias, u)
    exact = attention_outputs(queries, kept, kept_values, bias)
    of_folded = attention_outputs(queries, folded, kept_values)
    excess = jnp.linalg.norm(of_folded - exact, axis=-1) - output_error_bound(bias, kept_values, queries, u)
    logits = attention_scores(queries, kept) + bias * (queries @ u)[:, None]
    rounded, refitted = _refit(folded, queries, outputs, dtype, scale, None, None)
    weights = jax.nn.softmax(attention_scores(queries, rounded), axis=-1)
    mean = queries.mean(axis=0)
    covariance = jnp.cov(queries.T, bias=True)
    ridged = covariance @ u + RIDGE * jnp.trace(covariance) / len(u) * u
    multiplier = (ridged @ mean) / (mean @ mean)
    size, norm = lambda x: jnp.abs(x).max(), jnp.linalg.norm
    found = {
        "mean_constraint": jnp.abs(mean @ u - 1),
        "rank_one_identity": size(attention_scores(queries, folded) - logits) / size(logits),
        "kkt_residual": norm(ridged - multiplier * mean) / norm(ridged),
        "folded_error": norm(of_folded - exact) / norm(exact),
        "dropped_error": norm(attention_outputs(queries, kept, kept_values) - exact) / norm(exact),
        "refitted_error": norm(weights @ refitted - outputs) / norm(outputs),
        "bound_violation": excess.max(),
        "normal_equations": norm(weights.T @ (weights @ refitted - outputs)) / norm(weights.T @ outputs),
    }
    return {name: float(value) for name, value in found.items()}


def _made_up_head(seed: int) -> tuple[Array, Array, Array, Array]:
    """Queries [256, 32] that vary around a mean as those of trained heads do, keys and values [96, 32], bias [24]."""
    of_queries, of_mean, of_keys, of_values, of_bias = jax.random.split(jax.random.key(seed), 5)
    queries = jax.random.normal(of_queries, (256, 32)) + 2 * jax.random.normal(of_mean, (32,))
    keys, values = (jax.random.normal(key, (96, 32)) for key in (of_keys, of_values))
    return queries, keys, values, jax.random.uniform(of_bias, (24,), minval=-3, maxval=3)

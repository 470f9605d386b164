"""Every attention variant with every sharing scheme, without and with a sliding window; and what is refused."""

import invariants
import numpy as np
import pytest
import references
from variants import (
    CASES,
    COMBINATIONS,
    MORE_COMBINATIONS,
    MORE_SHARINGS,
    SHARINGS,
    allowed,
    fitting,
    model_config,
    sizes,
)

import kvjax
from kvjax.attention import SkipV1, Yoco

MODELS = COMBINATIONS | MORE_COMBINATIONS


def over(names, default=()):
    """Runs a test over the models called `names`, with `-m full` if not by default; those of one model together."""
    return pytest.mark.parametrize("name", [
        pytest.param(name, marks=() if name in default else pytest.mark.full) for name in names], scope="module")


def naive(name, tokens):
    """Logits [B, T, V] of the naive loops."""
    params = invariants.random_params(MODELS[name])
    return np.stack([references.logits(MODELS[name], params, row) for row in np.asarray(tokens)])


def test_all_pairs_are_tried():
    attentions, schemes = ({type(value) for value in values} for values in (
        [c.attention for c in COMBINATIONS.values()], [c.sharing for c in COMBINATIONS.values()]))
    assert len(attentions) == len(references.ATTENTION) and len(schemes) == len(references.SHARING)
    assert len(COMBINATIONS) == 2 * (3 * 11 - 2 * 2 - 3), "two schemes are of heads only, three of values only"


@over(MODELS, default=[name for name in COMBINATIONS if COMBINATIONS[name].window is None])
def test_combination_equals_the_naive_loops(name):
    _, _, tokens, full = invariants.full_pass(MODELS[name])
    np.testing.assert_allclose(full[:2], naive(name, tokens[:2]), atol=invariants.TOLERANCE)


@over(MODELS, default=COMBINATIONS)
def test_combination_decodes_as_the_naive_loops(name):
    expected = naive(name, invariants.tokens_of(MODELS[name])[:, :8])
    invariants.check_decoding(MODELS[name], invariants.SMALL_CHUNKS, expected)


@over(MODELS)
def test_combination_decodes_in_chunks_and_steps(name):
    invariants.check_decoding(MODELS[name])


@over(MODELS, default=COMBINATIONS)
def test_combination_holds_what_the_formula_says(name):
    invariants.check_sizes(MODELS[name], sizes(MODELS[name]))


@over(MODELS, default=[name for name in COMBINATIONS if isinstance(COMBINATIONS[name].sharing, Yoco)])
def test_last_logits_of_a_combination(name):
    """By default where they are computed in another way: the upper half of YOCO runs for one token only."""
    invariants.check_last_logits(MODELS[name], invariants.SMALL_CHUNKS)


@over(COMBINATIONS)
def test_gradients_of_a_combination(name):
    invariants.check_gradients(MODELS[name])
    invariants.check_causality(MODELS[name])


@over(COMBINATIONS)
def test_positions_of_a_combination(name):
    invariants.check_positions(MODELS[name])


@over(COMBINATIONS)
def test_packed_documents_of_a_combination(name):
    invariants.check_packing(MODELS[name])


@over(COMBINATIONS)
def test_low_precision_of_a_combination(name):
    invariants.check_low_precision(MODELS[name])


@over(COMBINATIONS)
def test_vmap_of_a_combination(name):
    invariants.check_vmap(MODELS[name])


REFUSED = [(a, s) for a, case in CASES.items() for s, shared in (SHARINGS | MORE_SHARINGS).items()
           if not allowed(case.attention, fitting(case.attention, shared.sharing))]


@pytest.mark.parametrize(("attention", "sharing"), REFUSED)
def test_every_other_pair_is_refused(attention, sharing):
    attention, shared = CASES[attention].attention, (SHARINGS | MORE_SHARINGS)[sharing]
    method = "SkipV1" if isinstance(shared.sharing, SkipV1) else type(shared.sharing).__name__
    with pytest.raises(kvjax.ConfigError, match=method):
        kvjax.build_model(model_config(attention, sharing=fitting(attention, shared.sharing), layers=shared.layers))

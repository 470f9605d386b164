"""Which attention works with which sharing, and what is said of the rest."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.evaluation import combinations
from kvjax.evaluation.combinations import ATTENTION, SHARING, WINDOW, model, refusal
from kvjax.model import abstract_parameters

REFUSED = {
    ("MQA", "SkipV1"): "a share of 0.5 of the 1 of v",
    ("MQA", "SkipV1-YOCO"): "a share of 0.5 of the 1 of v",
    ("MLA", "KVPath-Residual"): "this attention keeps none: use GroupedQuery, or PathConcat",
    ("KPA", "KVPath-Residual"): "this attention keeps none: use GroupedQuery, or PathConcat",
    ("TPA", "KVPath-Residual"): "this attention keeps none: use GroupedQuery, or PathConcat",
    ("MLA", "CLA-V"): "keys and values come from one latent",
    ("MLA", "YOCO-V"): "keys and values come from one latent",
    ("MLA", "SkipV1-YOCO"): "a latent holds both",
    ("MLA", "ResFormer"): "use GroupedQuery",
    ("KPA", "ResFormer"): "use GroupedQuery",
    ("TPA", "ResFormer"): "use GroupedQuery",
}
ALLOWED = [pair for pair in itertools.product(ATTENTION, SHARING) if pair not in REFUSED]


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("attention", "sharing"), REFUSED)
def test_what_is_refused_says_why(attention, sharing, window):
    assert REFUSED[attention, sharing] in refusal(attention, sharing, window)


@pytest.mark.parametrize(("attention", "sharing"), ALLOWED)
def test_what_is_allowed_decodes(attention, sharing):
    """As far as shapes tell; a window is the harder case."""
    assert refusal(attention, sharing) is refusal(attention, sharing, WINDOW) is None
    config = model(attention, sharing, WINDOW)
    cache = jax.eval_shape(lambda: kvjax.init_cache(config, 1, 32))
    logits, _ = jax.eval_shape(lambda params, cache: kvjax.decode(
        kvjax.build_model(config), params, jnp.zeros((1, 1), int), cache), abstract_parameters(config), cache)
    assert logits.shape == (1, 1, config.vocab_size)


def test_the_table_shows_both():
    lines = combinations.table().splitlines()
    cells = {(attention, cells[0]): cell for cells in ([c.strip() for c in line.split("|")[1:-1]]
             for line in lines[2:2 + len(SHARING)]) for attention, cell in zip(ATTENTION, cells[1:], strict=True)}
    assert {pair for pair, cell in cells.items() if cell != "yes"} == set(REFUSED)
    for pair in REFUSED:
        number = cells[pair].removeprefix("no (").removesuffix(")")
        (note,) = (line for line in lines if line.startswith(f"{number}. "))
        assert REFUSED[pair] in note

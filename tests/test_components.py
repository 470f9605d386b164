"""The table of components, its routing rule, and schemes that share components between layers."""

from dataclasses import dataclass

import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from variants import CASES, model_config

import kvjax
from kvjax.attention import Component, Plan, Segment, Sharing
from kvjax.attention.components import latest


@pytest.mark.parametrize(("own", "before", "cumulative", "read"), [
    ((), "x", False, ("x",)), ((), None, True, ()),
    (("a", "b"), "x", False, ("b",)), (("a", "b"), "x", True, ("a", "b"))])
def test_routing_rule(own, before, cumulative, read):
    assert latest(own, before, cumulative) == read


def test_slots_count_what_layers_write():
    k, v = (Component(n, (2, 4), n, n) for n in "kv")
    plan = Plan((k, v), (Segment(1, (("k", "v"),), ("k", "v")), Segment(3, (("k",), ()), ("k", "v"))))
    assert (plan.slots("k"), plan.slots("v")) == (4, 1)
    assert plan.first_slot(1, "k") == 1 and plan.segments[1].depth == 6


def test_tables_that_name_unknown_or_double_components_are_refused():
    k = Component("k", (2, 4), "k", "k")
    with pytest.raises(kvjax.ConfigError, match="'v'"):
        Plan((k,), (Segment(1, (("k",),), ("k", "v")),))
    with pytest.raises(kvjax.ConfigError, match="twice"):
        Plan((k, k), ())


@kvjax.register("test_first_layer_of_pairs")
@dataclass(frozen=True)
class Pairs(Sharing):
    """The first layer stands alone, later layers come in pairs that share what the first of them writes."""

    def plan(self, components, layers, window):
        names = tuple(c.name for c in components)
        pairs = Segment((layers - 1) // 2, (names, ()), names, window)
        return Plan(components, (Segment(1, (names,), names, window), pairs))


@kvjax.register("test_one_for_all")
@dataclass(frozen=True)
class OneForAll(Sharing):
    """All layers read what the first one writes."""

    def plan(self, components, layers, window):
        names = tuple(c.name for c in components)
        return Plan(components, (Segment(1, (names,), names, window), Segment(layers - 1, ((),), names, window)))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("sharing", "slots"), [(Pairs(), 3), (OneForAll(), 1)])
@pytest.mark.parametrize("name", ["gqa", "kpa"])
def test_layers_that_share_decode_as_they_train(name, sharing, slots, window):
    case = CASES[name]
    config = model_config(case.attention, layers=5, sharing=sharing, window=window)
    invariants.check_decoding(config)
    if window is None:
        assert kvjax.cache_bytes_per_token(config) == 4 * slots * case.elements


def test_sharing_layers_read_what_the_table_says():
    """One entry for all layers, against the naive layer that is handed the first layer's stream for its keys."""
    config = model_config(CASES["gqa"].attention, layers=2, sharing=OneForAll())
    model, params, tokens, full = invariants.full_pass(config)
    assert set(params["segment_1"]["layer_0"]["attention"]) == {"q_proj", "o_proj"}
    other = jax.tree.map(lambda x: x, params)
    first = other["segment_0"]["layer_0"]["attention"]
    first["v_proj"] = jnp.zeros_like(first["v_proj"])
    # Without the first layer's values no layer's attention adds anything: only feed-forward layers are left.
    alone = model.apply({"params": other}, tokens)
    shuffled = model.apply({"params": other}, tokens[:, ::-1])[:, ::-1]
    np.testing.assert_allclose(alone, shuffled, atol=1e-5)
    assert np.abs(full - alone).max() > 0.1
    assert references.visible_tokens(3).sum() == 6

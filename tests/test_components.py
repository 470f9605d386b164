"""The table of components, its routing rule, and schemes that share components between layers."""

from dataclasses import dataclass, replace

import invariants
import numpy as np
import pytest
import references
from variants import CASES, model_config

import kvjax
from kvjax.attention import Component, GroupedQuery, Plan, Segment, Sharing
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


NAIVE = {
    Pairs: references.Scheme(lambda turn: turn.make() if turn.number in (0, 1, 3) else turn.used[-1],
                             lambda scheme, n: [(1, 1), (n - 1, 2)]),
    OneForAll: references.Scheme(lambda turn: turn.used[0] if turn.number else turn.make(),
                                 lambda scheme, n: [(1, 1), (n - 1, 1)]),
}


@pytest.mark.parametrize(("name", "sharing", "slots", "window"), [
    ("gqa", Pairs(), 3, None), ("kpa", Pairs(), 3, 3), ("mla", OneForAll(), 1, 3), ("kpa", OneForAll(), 1, None)])
def test_layers_that_share_read_what_the_table_says(monkeypatch, name, sharing, slots, window):
    """Schemes of one's own, against naive loops that are told which layer's states each layer uses."""
    case = CASES[name]
    config = model_config(case.attention, layers=5, sharing=sharing, window=window)
    invariants.check_decoding(config)
    invariants.check_sizes(config, [(slots * case.elements, window)])
    monkeypatch.setitem(references.SHARING, sharing.variant_name, NAIVE[type(sharing)])
    _, params, tokens, full = invariants.full_pass(config)
    np.testing.assert_allclose(full[0], references.logits(config, params, tokens[0]), atol=1e-4)


@kvjax.register("test_values_in_two_parts")
@dataclass(frozen=True)
class TwoParts(GroupedQuery):
    """Grouped-query attention whose values are one projection in two components, and a component that is not kept."""

    def components(self):
        k, v = super().components()
        half = replace(v, features=(self.kv_heads, self.head_dim // 2), axis=-1)
        aside = replace(k, name="aside", state="aside", param="aside", cached=False)
        return k, replace(half, name="v_low"), replace(half, name="v_high"), aside


def test_a_state_in_two_components_equals_the_whole():
    sizes = {name: getattr(CASES["gqa"].attention, name) for name in ("heads", "kv_heads", "head_dim")}
    config = model_config(TwoParts(**sizes))
    invariants.check_decoding(config)
    invariants.check_bytes(config, CASES["gqa"].elements)
    _, _, tokens, full = invariants.full_pass(config)
    params = invariants.random_params(config)
    del params["segment_0"]["layer_0"]["attention"]["aside"]
    plain = kvjax.build_model(model_config(CASES["gqa"].attention)).apply({"params": params}, tokens)
    np.testing.assert_allclose(full, plain, atol=1e-5)


def test_a_window_of_a_component_belongs_to_the_model():
    @dataclass(frozen=True)
    class Windowed(GroupedQuery):
        def components(self):
            return tuple(replace(c, window=4) for c in super().components())
    with pytest.raises(kvjax.ConfigError, match="component k has a window of 4: set ModelConfig.window"):
        kvjax.build_model(model_config(Windowed(4, 2, 8)))

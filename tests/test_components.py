"""The table of components, its routing rule, and schemes that share components between layers."""

from dataclasses import dataclass, replace

import invariants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from variants import CASES, model_config

import kvjax
from kvjax.attention import Component, GroupedQuery, Plan, Segment, Sharing, make_plan
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


@pytest.mark.parametrize(("sharing", "writer"), [(Pairs(), (0, 1, 1, 3, 3)), (OneForAll(), (0, 0, 0, 0, 0))])
def test_layers_that_share_read_what_the_table_says(sharing, writer):
    """Against a naive loop that is told which layer's keys and values each layer reads."""
    config = model_config(CASES["gqa"].attention, layers=5, sharing=sharing)
    _, params, tokens, full = invariants.full_pass(config)
    layers = [jax.tree.map(lambda x, i=i: np.asarray(x[i], np.float64), params[f"segment_{s}"][f"layer_{j}"])
              for s, segment in enumerate(make_plan(config).segments)
              for i in range(segment.repeats) for j in range(len(segment.layers))]
    np.testing.assert_allclose(full[0], naive_sharing(config, params, layers, writer, tokens[0]), atol=1e-4)


def naive_sharing(config, params, layers, writer, tokens):
    a, positions, visible = config.attention, np.arange(len(tokens)), references.visible_tokens(len(tokens))
    turn = lambda head: np.stack([references.rotate(head[p], p, config.rope_base) for p in positions])
    x, made = np.asarray(params["embedding"], np.float64)[np.asarray(tokens)], {}
    for number, weights in enumerate(layers):
        h = references.rms_norm(x, weights["attention_norm"], config.norm_eps)
        w = weights["attention"]
        if writer[number] == number:
            made[number] = ([turn(h @ w["k_proj"][:, g]) for g in range(a.kv_heads)],
                            [h @ w["v_proj"][:, g] for g in range(a.kv_heads)])
        keys, values = made[writer[number]]
        queries = [turn(h @ w["q_proj"][:, i]) for i in range(a.heads)]
        served = [i * a.kv_heads // a.heads for i in range(a.heads)]
        heads = references.attend(queries, [keys[g] for g in served], [values[g] for g in served], visible,
                                  a.head_dim**-0.5)
        x = x + references.project_out(heads, w["o_proj"])
        x = x + references.feed_forward(weights["feed_forward"],
                                        references.rms_norm(x, weights["feed_forward_norm"], config.norm_eps))
    final = references.rms_norm(x, np.asarray(params["final_norm"], np.float64), config.norm_eps)
    return final @ np.asarray(params["embedding"], np.float64).T


@kvjax.register("test_values_in_two_parts")
@dataclass(frozen=True)
class TwoParts(GroupedQuery):
    """Grouped-query attention whose values are one projection in two components, and a component that is not kept."""

    def components(self):
        k, v = super().components()
        half = replace(v, features=(self.kv_heads, self.head_dim // 2), axis=-1)
        return k, replace(half, name="v_low"), replace(half, name="v_high"), replace(k, name="aside", param="aside",
                                                                                   cached=False)

    def partial(self, layer, path, queries, view):
        whole = jnp.concatenate([view["v_low"], view["v_high"]], axis=-1)
        return super().partial(layer, path, queries, view.replace(entries=view.entries | {"v": (whole,)}))


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

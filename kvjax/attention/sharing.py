"""How components are spread over layers: functions from an attention variant's components to a plan."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.variant import Attention
from kvjax.config import ModelConfig, Variant, require


class Sharing(Variant):
    """Base of sharing schemes: a registered frozen dataclass with its sizes and one or two methods."""

    def adapt(self, attention: Attention) -> Attention:
        """The attention that a model of this scheme runs: most schemes leave it as it is."""
        return attention

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        """Spreads an attention variant's components over `layers` layers, whose queries see `window` keys."""
        raise NotImplementedError


def names_of(components: tuple[Component, ...]) -> tuple[str, ...]:
    """Their names, in order."""
    return tuple(c.name for c in components)


def own(components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
    """Every layer writes and reads components of its own."""
    names = names_of(components)
    return Plan(components, (Segment(layers, (names,), names, window),))


def require_states(scheme: Sharing, components: tuple[Component, ...], states: tuple[str, ...], reason: str) -> None:
    """Raises ConfigError with the reason unless some component belongs to one of the states that a scheme shares."""
    have = sorted({c.state for c in components})
    require(any(state in states for state in have),
            f"{type(scheme).__name__} shares {', '.join(states)}, and this attention keeps {', '.join(have)}: {reason}")


def require_multiple(scheme: Sharing, layers: int, group: int) -> None:
    """Raises ConfigError unless the layers form whole groups."""
    require(group > 0 and layers % group == 0,
            f"{scheme}: {layers} layers do not split into groups of {group}; choose a number that divides {layers}")


@lru_cache(maxsize=256)
def make_attention(config: ModelConfig) -> Attention:
    """The attention that the layers of a model run. Raises ConfigError if the sharing scheme cannot work on it."""
    require(isinstance(config.attention, Attention), f"attention is {config.attention}: choose an attention variant, "
            "such as GroupedQuery")
    require(config.sharing is None or isinstance(config.sharing, Sharing),
            f"sharing is {config.sharing}: choose a sharing scheme, such as SkipV1, or None")
    return config.attention if config.sharing is None else config.sharing.adapt(config.attention)


@lru_cache(maxsize=256)
def make_plan(config: ModelConfig) -> Plan:
    """The table of components and segments of a model. Raises ConfigError for sizes that do not fit."""
    components = make_attention(config).components()
    for c in components:
        require(c.window is None, f"component {c.name} has a window of {c.window}: set ModelConfig.window instead")
    components = tuple(dataclasses.replace(c, window=config.window) for c in components)
    spread = own if config.sharing is None else config.sharing.plan
    return spread(components, config.layers, config.window)

"""How components are spread over layers: functions from components to a plan."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from kvjax.attention.components import Component, Plan, Segment
from kvjax.config import ModelConfig, Variant, require


class Sharing(Variant):
    """Base of sharing schemes: a registered frozen dataclass with its sizes and one method."""

    def plan(self, components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
        """Spreads an attention variant's components over `layers` layers, whose queries see `window` keys."""
        raise NotImplementedError


def own(components: tuple[Component, ...], layers: int, window: int | None) -> Plan:
    """Every layer writes and reads components of its own."""
    names = tuple(c.name for c in components)
    return Plan(components, (Segment(layers, (names,), names, window),))


@lru_cache(maxsize=256)
def make_plan(config: ModelConfig) -> Plan:
    """The table of components and segments of a model. Raises ConfigError for sizes that do not fit."""
    components = config.attention.components()
    for c in components:
        require(c.window is None, f"component {c.name} has a window of {c.window}: set ModelConfig.window instead")
    components = tuple(dataclasses.replace(c, window=config.window) for c in components)
    spread = own if config.sharing is None else config.sharing.plan
    return spread(components, config.layers, config.window)

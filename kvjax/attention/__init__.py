"""Attention variants: tables of cached components and pure functions of weights."""

from kvjax.attention import grouped_query, kronecker
from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.kronecker import Kronecker
from kvjax.attention.sharing import Sharing, make_plan
from kvjax.attention.variant import Attention, Layer, Param, View

__all__ = ["Attention", "Component", "GroupedQuery", "Kronecker", "Layer", "Param", "Plan", "Segment", "Sharing",
           "View", "grouped_query", "kronecker", "make_plan"]

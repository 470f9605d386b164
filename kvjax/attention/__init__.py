"""Attention variants and sharing schemes: tables of cached components and pure functions of weights."""

from kvjax.attention.components import Component, Plan, Segment
from kvjax.attention.cross_layer import CrossLayer, CrossLayerValues
from kvjax.attention.denseformer import DenseFormer
from kvjax.attention.grouped_query import GroupedQuery
from kvjax.attention.kronecker import Kronecker
from kvjax.attention.kv_path import PathConcat, PathResidual
from kvjax.attention.latent import Latent
from kvjax.attention.resformer import ResFormer
from kvjax.attention.rotary import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling
from kvjax.attention.sharing import Sharing, make_attention, make_plan
from kvjax.attention.skip_v1 import SkipV1, SkipV1Yoco
from kvjax.attention.variant import Attention, Layer, Param, View
from kvjax.attention.yoco import Yoco, YocoValues

__all__ = ["Attention", "Component", "CrossLayer", "CrossLayerValues", "DenseFormer", "GroupedQuery", "Kronecker",
           "Latent", "Layer", "LinearScaling", "Llama3Scaling", "Param", "PathConcat", "PathResidual", "Plan",
           "ResFormer", "Rope", "RopeScaling", "Segment", "Sharing", "SkipV1", "SkipV1Yoco", "View", "YarnScaling",
           "Yoco", "YocoValues", "make_attention", "make_plan"]

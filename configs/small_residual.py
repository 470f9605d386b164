"""KVPath-Residual, one path with deltas of a quarter of a head, at the quick start's size."""

from configs._small import heads, small
from kvjax.attention import PathResidual

config = small(heads(), PathResidual(layers=4, delta=8))

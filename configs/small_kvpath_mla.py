"""KVPath-Concat over latents, one path with deltas of a quarter, at the quick start's size."""

from configs._small import latent, small
from kvjax.attention import PathConcat

config = small(latent(), PathConcat(layers=4, delta=16))

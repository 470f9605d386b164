"""SkipV1Former with latent attention at the quick start's size."""

from configs._small import latent, small
from kvjax.attention import SkipV1

config = small(latent(), SkipV1())

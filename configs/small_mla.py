"""Multi-head latent attention at the quick start's size."""

from configs._small import latent, small

config = small(latent())

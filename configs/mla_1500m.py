"""Multi-head latent attention at 1.5B, as in the published comparison of KPA."""

from configs._published import mla

config = mla("1500m")

"""Multi-head latent attention at 353M, as in the published comparison of KPA."""

from configs._published import mla

config = mla("353m")

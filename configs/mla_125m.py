"""Multi-head latent attention at 125M, as in the published comparison of KPA."""

from configs._published import mla

config = mla("125m")

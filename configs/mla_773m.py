"""Multi-head latent attention at 773M, as in the published comparison of KPA."""

from configs._published import mla

config = mla("773m")

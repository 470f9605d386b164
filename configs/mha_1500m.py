"""Multi-head attention at 1.5B, as in the published comparison of KPA."""

from configs._published import mha

config = mha("1500m")

"""Multi-head attention at 125M, as in the published comparison of KPA."""

from configs._published import mha

config = mha("125m")

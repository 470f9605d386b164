"""Multi-head attention at 353M, as in the published comparison of KPA."""

from configs._published import mha

config = mha("353m")

"""Multi-head attention at 773M, as in the published comparison of KPA."""

from configs._published import mha

config = mha("773m")

"""CLA-2 over multi-head attention at 125M (sizes are this project's choice)."""

from configs._sharing import cla2

config = cla2("125m")

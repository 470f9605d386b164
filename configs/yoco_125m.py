"""YOCO over multi-head attention at 125M (sizes are this project's choice)."""

from configs._sharing import yoco

config = yoco("125m")

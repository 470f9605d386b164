"""YOCO over multi-head attention at 353M (sizes are this project's choice)."""

from configs._sharing import yoco

config = yoco("353m")

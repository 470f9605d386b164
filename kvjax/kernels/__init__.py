"""Kernels for the hot loops: functions of arrays alone, which know no model and no framework."""

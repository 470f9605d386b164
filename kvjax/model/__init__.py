"""The decoder-only language model."""

from kvjax.model.decoder import Decoder, build_attention, build_model
from kvjax.model.parameters import abstract_parameters, parameter_count, parameters

__all__ = ["Decoder", "abstract_parameters", "build_attention", "build_model", "parameter_count", "parameters"]

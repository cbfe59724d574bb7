"""8-bit weights for PyTorch models: stored in 8 bits, used as if they were not.

A plain torch library without any WebUI import::

    import lib_fp8

    report = lib_fp8.convert_model(unet, lib_fp8.Policy(format="int8"))
    print(report.summary())
"""

import lib_fp8.compute  # noqa: F401  # registers the computation of QuantWeight
from lib_fp8.convert import ConversionError, StreamingConversion, convert_model, convert_models, restore_model
from lib_fp8.formats import Format, UnknownFormatError, format_names, get_format
from lib_fp8.patterns import PatternError
from lib_fp8.policy import DEFAULT_KEEP, LayerPlan, Policy, plan
from lib_fp8.qweight import QuantWeight
from lib_fp8.report import Report, measure, stored_bytes

__all__ = [
    "DEFAULT_KEEP",
    "ConversionError",
    "Format",
    "LayerPlan",
    "PatternError",
    "Policy",
    "QuantWeight",
    "Report",
    "StreamingConversion",
    "UnknownFormatError",
    "convert_model",
    "convert_models",
    "format_names",
    "get_format",
    "measure",
    "plan",
    "restore_model",
    "stored_bytes",
]

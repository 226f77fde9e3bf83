"""The quickstart's DLRM with softplus where it has ReLU: rounding stays rounding in it.

A ReLU whose input is within rounding of zero for one sample passes that sample's whole gradient or none of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.jobs.models import dlrm


def build(**args: Any) -> nn.Module:
    """``shoal.jobs.models.dlrm:build`` with the same arguments, and softplus."""
    model = dlrm.build(**args)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Softplus())
    return model

"""Fixtures of several unit tests."""

import pytest
import torch

from sdcrun.shim.fingerprint import engines, torch_ops
from sdcrun.shim.fingerprint.quiet import quiet

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["native", "torch"])
def each_implementation(request):
    """The CPU's fingerprints come from the compiled library, then from torch's operations."""
    with quiet():
        usual = engines._choice(CPU)
    if request.param == "native" and usual[1] != "native":
        pytest.skip(usual[1])
    engines._chosen[CPU] = usual if request.param == "native" else (torch_ops.Sums, "torch")
    yield
    engines._chosen[CPU] = usual

"""Switches between kernels that a script sets around a forward or a backward: a replay computes under the same."""

import torch
import torch.nn.functional as F
from replaykit import Probe, Solo
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

SEEN = Probe()


def switches():
    flash = torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled()
    return *flash, torch._C._get_mkldnn_enabled(), torch.get_default_dtype(), parametrize._cache_enabled > 0


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        SEEN.append(switches())
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        SEEN.append(switches())
        return gradient * 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x):
        q = self.a(x).view(3, 24, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_a_replay_computes_under_the_switches_of_forward_and_backward():
    SEEN.clear()
    net = nn.Linear(6, 3)
    net.forward = lambda x: F.linear(x, net.weight, Watched.apply(net.bias))
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    before = switches()
    with Solo(net) as solo:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False), parametrize.cached():
            torch.set_default_dtype(torch.float64)
            out = solo(x)
            torch.set_default_dtype(torch.float32)
        with torch.backends.mkldnn.flags(enabled=False):
            F.cross_entropy(out, y).backward()
        expected, result = solo.again()
    assert expected == result.table and switches() == before
    assert SEEN[:2] == [(False, True, False, torch.float64, True), (True, True, False, torch.float32, False)]
    assert SEEN[2:] == SEEN[:2]


def test_the_scripts_cached_parametrizations_stay_its_own():
    """The update, and with it the replay, may stand inside the script's block."""
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 3)))
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    with Solo(net) as solo, parametrize.cached():
        F.cross_entropy(solo(x), y).backward()
        kept = dict(parametrize._cache)
        gradients = [p.grad.clone() for p in net.parameters()]
        expected, result = solo.again()
        assert expected == result.table and len(result.table) == 4
        assert kept and parametrize._cache.keys() == kept.keys()
        assert all(parametrize._cache[key] is kept[key] for key in kept)
        assert all(torch.equal(p.grad, old) for p, old in zip(net.parameters(), gradients))


def test_attention_by_another_kernel_has_the_same_bits():
    net = Attention()
    with Solo(net) as solo:
        with sdpa_kernel(SDPBackend.MATH):
            out = solo(torch.randn(3, 24, 32))
        out.square().sum().backward()
        expected, result = solo.again()
    assert expected == result.table and "loss" in expected

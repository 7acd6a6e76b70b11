"""Fingerprints of gradients that are taken while a backward runs: as autograd made them, whatever happens to them."""

import pytest
import torch
from torch import nn

from sdcrun.shim.fingerprint import fingerprints
from sdcrun.shim.replay.collect import HELD_BYTES, SMALL_BYTES, GradientTable


def test_table_sees_gradients_before_the_scripts_hooks():
    parameter = nn.Parameter(torch.ones(3))
    parameter.register_hook(lambda gradient: gradient * 10)
    table = GradientTable(keep=["p"])
    table.watch("p", parameter)
    (parameter * 2).sum().backward()
    table.take()
    assert torch.equal(table.kept["p"], torch.full((3,), 2.0))
    assert torch.equal(parameter.grad, torch.full((3,), 20.0))
    assert len(parameter._backward_hooks) == 1


def test_table_counts_repeated_gradients_and_sees_nan():
    parameter = nn.Parameter(torch.ones(2))
    table = GradientTable()
    table.watch("p", parameter)
    (parameter * 2).sum().backward()
    (parameter * float("nan")).sum().backward()
    assert set(table.take()) == {"p", "p#1"}
    assert not table.finite()


def _seen(parameters, loss):
    table = GradientTable()
    for name, parameter in parameters.items():
        table.watch(name, parameter)
    loss().backward()
    return table, table.take()


def test_small_gradients_are_read_late_and_still_as_they_were():
    """Whatever happens to `.grad` meanwhile: it is another tensor as long as a gradient is held."""
    few = {f"p{i}": nn.Parameter(torch.full((50,), float(i))) for i in range(3)}
    count = HELD_BYTES // SMALL_BYTES + 3
    many = {f"q{i}": nn.Parameter(torch.full((SMALL_BYTES // 4,), float(i))) for i in range(count)}
    large = {"large": nn.Parameter(torch.ones(SMALL_BYTES // 4 + 1))}
    parameters = few | many | large

    def spoil(parameter):
        parameter.grad.fill_(7.0)

    for parameter in parameters.values():
        parameter.register_post_accumulate_grad_hook(spoil)
    table, pairs = _seen(parameters, lambda: sum((p * p).sum() for p in parameters.values()))
    right = fingerprints([2 * parameters[name].detach() for name in pairs]).tolist()
    assert [list(pair) for pair in pairs.values()] == right and set(pairs) == set(parameters)
    assert list(pairs) == list(table.details) and not table.altered and table.finite()
    assert all(torch.equal(p.grad, torch.full_like(p, 7.0)) for p in parameters.values())


def test_a_gradient_changed_in_place_is_said():
    parameter = nn.Parameter(torch.ones(4))
    shown = []
    table = GradientTable()
    table.watch("p", parameter)
    doubled = parameter + 0.0
    doubled.register_hook(shown.append)
    (doubled * 2).sum().backward()
    shown[0].mul_(3.0)
    table.take()
    assert table.altered == ["p"]


def test_order_and_numbers_of_gradients_read_at_once_and_late():
    """Small, large and sparse ones, some of them twice, appear in the order in which autograd made them."""
    small, large = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(SMALL_BYTES // 4 + 1))
    sparse = nn.Embedding(5, 2, sparse=True)
    order = []
    parameters = {"small": small, "large": large, "sparse": sparse.weight}
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    table = GradientTable()
    for name, parameter in parameters.items():
        table.watch(name, parameter)
    for _ in range(2):
        (small * 2).sum().backward()
        sparse(torch.tensor([1, 1, 3])).sum().backward()
        (large * 3).sum().backward()
    pairs = table.take()
    assert order == ["small", "sparse", "large"] * 2
    assert list(pairs) == list(table.details) == [*order[:3], *(f"{name}#1" for name in order[:3])]
    whole = torch.zeros(5, 2)
    whole[1], whole[3] = 2.0, 1.0
    right = fingerprints([torch.full((3,), 2.0), whole, torch.full_like(large, 3.0)]).tolist()
    assert [list(pair) for pair in pairs.values()] == right * 2
    assert table.details["sparse#1"] == ("float32", (5, 2)) and table.finite() and not table.altered


@pytest.mark.parametrize("elements", [5, SMALL_BYTES])
@pytest.mark.parametrize("hooked", [False, True])
def test_what_cannot_be_read_does_not_reach_the_backward(elements, hooked, monkeypatch):
    parameter, table = nn.Parameter(torch.ones(elements)), GradientTable()
    if hooked:
        parameter.register_hook(lambda gradient: None)
    table.watch("p", parameter)

    def broken(*args, **kwargs):
        raise ValueError("no data")

    monkeypatch.setattr(table._collector, "add", broken)
    monkeypatch.setattr(table._collector, "extend", broken)
    (parameter * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))
    with pytest.raises(ValueError, match="no data"):
        table.take()
    assert len(parameter._backward_hooks or ()) == hooked


def test_a_hook_behind_the_table_that_changes_in_place():
    parameter = nn.Parameter(torch.ones(3))
    parameter.register_hook(lambda gradient: gradient.mul_(10))
    table, pairs = _seen({"p": parameter}, lambda: (parameter * 2).sum())
    assert list(pairs["p"]) == fingerprints([torch.full((3,), 2.0)])[0].tolist() and not table.altered
    assert torch.equal(parameter.grad, torch.full((3,), 20.0))

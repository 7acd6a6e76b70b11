"""The start-up self-test: it passes where the checks work, finds each one that does not, and touches nothing."""

import random
import types

import pytest
import torch
from eventmaker import Job
from torch import nn

from sdcrun.core import ballot, decide, selftests
from sdcrun.core.types import Config
from sdcrun.report import build
from sdcrun.report.verdict import headline, unexplained
from sdcrun.shim import fingerprint, selftest
from sdcrun.shim.checks import nonfinite, opinion


class Group:
    """A group of `size` ranks of which this one is the first and the others agree with whatever it says, but for the
    flag that each raises when it is its turn."""

    def __init__(self, model, size=3):
        self.rank, self.size = 0, size
        self.config = Config(selftest=True)
        self.auditor = types.SimpleNamespace(off=None)
        self.said, self.off = [], None
        self.guard = types.SimpleNamespace(
            parameters=dict(model.named_parameters()), buffers=dict(model.named_buffers()), name="")

    def emit(self, kind, data):
        assert kind == "selftest"
        self.said.append(data)

    def turn_off(self, reason):
        self.off = reason

    def run(self):
        selftest.run(self, self.guard)
        return {row["check"]: row["passed"] for row in self.said}, " ".join(row["text"] for row in self.said)


class Alone(Group):
    """A group of one, whose collectives are real."""

    def __init__(self, model):
        super().__init__(model, size=1)
        self.exchange = types.SimpleNamespace(gather=lambda payload, tag: [payload])

    def all_reduce_max(self, words):
        return words


def model():
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3).to(torch.bfloat16),
                         nn.Linear(3, 3).to(torch.float16), nn.Linear(2, 2).to(torch.float64))  # fmt: skip
    made.register_buffer("mask", torch.tensor([True, False]))
    return made


def test_all_checks_pass_on_every_type_of_number_and_touch_nothing():
    module = model()
    before = [t.clone() for t in (*module.parameters(), *module.buffers())]
    state, python = torch.get_rng_state(), random.getstate()
    passed, _ = Alone(module).run()
    assert passed == {"nonfinite": True, "weights": True, "replay": True, "ballot": True}
    after = [*module.parameters(), *module.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and all(p.grad is None for p in module.parameters())
    assert torch.equal(state, torch.get_rng_state()) and python == random.getstate()
    assert not any(p._backward_hooks for p in module.parameters())


@pytest.mark.parametrize(("place", "name", "broken", "check"), [
    (nonfinite, "bucket_sum", lambda bucket: torch.zeros(()), "nonfinite"),
    (nonfinite, "bucket_sum", lambda bucket: bucket.sum() * float("nan"), "nonfinite"),
    (nonfinite, "bucket_sum", lambda bucket: bucket.sum(), "nonfinite"),
    (fingerprint, "fingerprints", lambda tensors: torch.zeros(len(tensors), 2, dtype=torch.int64), "weights"),
    (opinion, "differing_names", lambda first, second, excluded: [], "replay"),
])  # fmt: skip
def test_a_check_that_is_broken_is_found(monkeypatch, place, name, broken, check):
    monkeypatch.setattr(place, name, broken)
    passed, text = Alone(model()).run()
    assert passed[check] is False and passed["ballot" if check != "ballot" else "weights"] is not None
    assert "see" in text or "fires" in text or "fingerprint" in text


class Deaf(Alone):
    """The flags of others do not arrive, though they are three."""

    def __init__(self, module):
        super().__init__(module)
        self.size = 3


def test_flags_that_do_not_arrive_are_found():
    passed, text = Deaf(model()).run()
    assert passed["ballot"] is False and "not noticed" in text or "is not seen" in text


def test_ranks_that_do_not_meet_are_a_failure_and_guarding_ends():
    from sdcrun.shim.transport import BallotFailed

    group = Alone(model())

    def fail(words):
        raise BallotFailed("gone")

    group.all_reduce_max = fail
    passed, text = group.run()
    assert passed["ballot"] is False and "gone" in text and "gone" in group.off


def test_probing_many_ranks_takes_the_first_and_the_last():
    places = selftest._probed(types.SimpleNamespace(size=16384))
    assert len(places) == selftest.MANY and places[0] == 0 and places[-1] == 16383
    assert selftest._probed(types.SimpleNamespace(size=3)) == [0, 1, 2]
    assert ballot.tag(places[-1], 0, 0) < 1 << 62


# -- what the controller makes of it ---------------------------------------------------------------------------------


def events(world=3, failing=()):
    job = Job(world=world, selftest=True)
    job.hello()
    for rank in range(world):
        for check in ("nonfinite", "weights", "ballot"):
            bad = (rank, check) in failing
            job.emit("selftest", rank, {"check": check, "passed": not bad, "text": "is blind" if bad else "fires"})
    return job


def test_all_passed_is_one_line_and_no_stop():
    job = events()
    state, said = decide.initial(job.config), []
    for event in job.events:
        state, actions = decide.apply(state, event)
        said += [action.data["text"] for action in actions if action.kind == "say"]
    assert state.stop is None and len([line for line in said if "self-test passed on 3 ranks" in line]) == 1
    report = build.build(state)
    assert report["selftest"] == {"ranks": 3, "checks": ["ballot", "nonfinite", "weights"], "failed": []}


def test_a_failure_stops_the_job_for_a_person_to_look():
    job = events(failing={(1, "weights")})
    state, stops = decide.initial(job.config), []
    for event in job.events:
        state, actions = decide.apply(state, event)
        stops += [action for action in actions if action.kind == "stop"]
    assert len(stops) == 1 and stops[0].data["code"] == 87 and "rank 1: is blind" in stops[0].data["why"]
    assert selftests.failures(state) == [(1, "weights", "is blind")]
    report = build.build(state)
    assert "self-test failed on rank 1" in headline(report)[1] and unexplained(report)


def test_nonsense_is_counted_not_believed():
    job = events()
    job.emit("selftest", 0, {"check": "nosuch", "passed": False, "text": "x"})
    job.emit("selftest", "node:gpu:7", {"check": "weights", "passed": False, "text": "x"})
    state = build.fold(job.config, job.events)
    assert state.malformed == {"selftest": 2} and not selftests.failures(state)

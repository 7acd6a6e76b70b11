"""The live question, between ranks of one process: agreement, dissent, silence, ranks that have left, verdicts."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sdcrun.core.types import Config
from sdcrun.shim.checkpoints.clock import Clock
from sdcrun.shim.checkpoints.question import QUERY, Questions, Snapshots, group_key
from sdcrun.shim.checkpoints.recognise import Dropped
from sdcrun.shim.checkpoints.verdict import PROVISIONAL, UNVERIFIED, WITHHELD, Judge
from sdcrun.shim.checks.weights import WeightVote


class Link:
    """Passes a question to all ranks that can be reached, as the controller does."""

    def __init__(self, job):
        self.job = job

    def ask(self, kind, data, timeout):
        assert kind == QUERY
        answers = {f"rank:{rank.rank}": rank.questions.answer(data) for rank in self.job.ranks if rank.reachable}
        return {source: answer for source, answer in answers.items() if answer is not None}


class Rank:
    def __init__(self, job, number, size):
        torch.manual_seed(0)
        self.rank, self.job, self.reachable, self.events = number, job, True, []
        self.config = Config(checkpoint_timeout=5.0)
        self.link = Link(job)
        self.module = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5), nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        guard = SimpleNamespace(ddp=self, module=self.module, parameters=dict(self.module.named_parameters()),
                                buffers=dict(self.module.named_buffers()), name="",
                                qualified=lambda name: name)  # fmt: skip
        self.group = SimpleNamespace(
            ranks=tuple(range(size)), rank=number, size=size, guards=[guard], optimizers=[lambda: self.optimizer],
            step=0, weights_clock=Clock(), off_reason=None, wanted=set(), weights=None, left_version=0, runtime=self,
            config=self.config, dropped=[],
        )  # fmt: skip
        self.group.snapshots = Snapshots(self.group)
        self.groups = {self.group.ranks: self.group}
        self.questions = Questions(self)
        self.judge = Judge(self, self.questions)

    def emit(self, kind, data):
        self.events.append((kind, data))

    def step(self):
        torch.manual_seed(self.group.step)
        self.module(torch.randn(4, 20)).square().sum().backward()
        self.group.weights_clock.let_go(5.0)
        self.group.weights_clock.begin()
        self.optimizer.step()
        self.group.weights_clock.written()
        self.group.snapshots.mark()
        self.group.weights_clock.end()
        self.group.step += 1

    def flip(self, name, bit=22):
        self.module.get_parameter(name).data.view(-1).view(torch.int32)[3] ^= 1 << bit

    def contents(self):
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def voted(self):
        """All ranks have just agreed in band."""
        vote = self.group.weights = self.group.weights or WeightVote(self.group)
        from sdcrun.shim.checks.weights import Table

        for kind, tensors in (("weights", vote.parameters()), ("optimizer", vote.optimizer_state())):
            table = Table(kind, tensors)
            table.read()
            vote.agreed[kind].append((kind, self.group.step - 1, self.group.weights_clock.version, "vote", table.names,
                                      table.rows, table.metas))  # fmt: skip


@pytest.fixture
def job():
    job = SimpleNamespace()
    job.ranks = [Rank(job, number, 3) for number in range(3)]
    job.first = job.ranks[0]
    job.step = lambda: [rank.step() for rank in job.ranks]
    job.step()
    job.step()
    return job


def judged(job, contents=None):
    verdict = job.first.judge.judge(contents if contents is not None else job.first.contents())
    return verdict.state, verdict.reason, verdict


def clones(rank):
    return {name: value.detach().clone() for name, value in rank.module.state_dict().items()}


def test_all_agree(job):
    state, reason, verdict = judged(job)
    assert state == PROVISIONAL and "what all ranks hold after step 1" in reason and verdict.step == 1
    assert judged(job, {"net": clones(job.first)})[0] == PROVISIONAL


def test_a_table_of_a_vote_is_enough_and_nobody_is_asked(job):
    job.first.voted()
    for rank in job.ranks:
        rank.reachable = False
    older = clones(job.first)
    job.step()
    assert judged(job, older)[:2] == (PROVISIONAL, "weights equal the vote after step 1")


def test_a_wrong_bit_in_the_copy(job):
    copy = clones(job.first)
    copy["1.bias"].view(torch.int32)[2] ^= 1 << 30
    state, reason, verdict = judged(job, copy)
    assert state == WITHHELD and "1.bias, word 2 (element 2), bit 30 flipped" in reason
    assert verdict.differing[0]["bits"] == [30]


def test_a_wrong_bit_in_the_copy_of_voted_weights_of_another_step(job):
    job.first.voted()
    job.step()
    job.step()
    job.first.voted()
    older = clones(job.first)
    job.step()
    older["1.weight"].view(-1).view(torch.int32)[2] ^= 1 << 30
    for rank in job.ranks:
        rank.reachable = False
    assert judged(job, older)[0] == WITHHELD


def test_a_wrong_bit_in_a_buffer_of_the_copy(job):
    copy = {f"module.{name}": value for name, value in clones(job.first).items()}
    copy["module.3.running_var"].view(torch.int32)[4] ^= 1 << 18
    state, reason, verdict = judged(job, {"net": copy})
    assert state == WITHHELD and "net: 3.running_var, word 4 (element 4), bit 18 flipped" in reason
    assert [row["name"] for row in verdict.differing] == ["net/module.3.running_var"]


def test_buffers_that_have_moved_since_the_copy_or_belong_to_other_weights_are_nobody_s_fault(job):
    copy = clones(job.first)
    job.first.module(torch.randn(4, 20))
    assert judged(job, copy)[0] == PROVISIONAL
    other = {**clones(job.first), "3.running_mean": copy["3.running_mean"]}
    other = {name: 0.9 * value if value.is_floating_point() else value for name, value in other.items()}
    other["3.running_var"] = clones(job.first)["3.running_var"]
    other["3.running_var"][2] += 1
    assert judged(job, other)[0] == UNVERIFIED
    wrong, found = clones(job.first), []
    wrong["3.running_var"].view(torch.int32)[4] ^= 1 << 18
    thread = threading.Thread(target=lambda: found.append(judged(job, wrong)[0]))
    thread.start()
    thread.join()
    assert found == [PROVISIONAL]


def merged(copy):
    copy["0.weight"] += 0.01 * torch.randn_like(copy["0.weight"])
    copy["1.weight"] += 0.01 * torch.randn_like(copy["1.weight"])


def emptied(copy):
    copy["2.weight"].zero_()


def clamped(copy):
    for value in list(copy.values())[:3]:
        value.clamp_(-0.05, 0.05)


def a_run_of_words(copy):
    copy["0.weight"].view(-1)[40:56] = 7.0


def several_words(copy):
    for name in ("0.weight", "2.bias"):
        copy[name].view(-1)[0] *= 3.0


@pytest.mark.parametrize("voted", [False, True])
@pytest.mark.parametrize("change", [merged, emptied, clamped, a_run_of_words, several_words])
def test_what_a_script_has_changed_on_purpose_in_a_copy_is_saved_and_not_taken_for_damage(job, change, voted):
    if voted:
        job.first.voted()
    copy = clones(job.first)
    change(copy)
    state, reason, _ = judged(job, copy)
    if change in (a_run_of_words, several_words):
        assert state == WITHHELD and "0.weight" in reason
    else:
        assert state == UNVERIFIED and "changed on purpose" in reason


@pytest.mark.parametrize("where", ["0.weight", "2.bias"])
def test_a_wrong_bit_in_the_weights_of_the_rank_that_saves(job, where):
    job.first.flip(where)
    state, reason, _ = judged(job)
    assert state == WITHHELD and where in reason and "bit 22 flipped" in reason and job.first.group.wanted == {"vote"}


def test_a_wrong_bit_on_another_rank(job):
    job.ranks[2].flip("0.weight")
    state, reason, _ = judged(job)
    assert state == WITHHELD and "rank 2 holds other weights than the majority (0.weight)" in reason
    assert job.first.group.wanted == {"vote"}


def test_wrong_optimizer_state(job):
    state = job.first.optimizer.state[job.first.module[0].weight]["exp_avg"]
    state.view(-1).view(torch.int32)[3] ^= 1 << 20
    found, reason, verdict = judged(job)
    assert found == WITHHELD and "0.exp_avg.0.weight" in reason
    assert [f.state for f in verdict.findings if f.part.kind == "weights"] == [PROVISIONAL]


def test_two_wrong_ranks_in_different_tensors(job):
    job.ranks[1].flip("0.weight")
    job.ranks[2].flip("2.bias")
    assert judged(job)[0] == WITHHELD


def test_no_majority(job):
    job.ranks[1].flip("0.weight", 3)
    job.ranks[2].flip("0.weight", 4)
    state, reason, _ = judged(job)
    assert state == UNVERIFIED and "no version has a majority" in reason


def test_weights_swapped_on_the_rank_that_saves_accuse_nobody(job):
    with torch.no_grad():
        for parameter in job.first.module.parameters():
            parameter.mul_(0.999)
    state, reason, verdict = judged(job, job.first.module.state_dict())
    assert state == UNVERIFIED and "swapped or loaded on purpose" in reason and not verdict.differing


def test_a_rank_that_is_further_on_with_a_swap_of_weights_does_not_withhold_the_file(job):
    for rank in job.ranks:
        with torch.no_grad():
            rank.module[0].weight.mul_(0.5)
    with torch.no_grad():
        job.ranks[1].module[0].weight.mul_(2.0)
        job.ranks[1].module[2].bias.add_(1.0)
    state, reason, _ = judged(job)
    assert state == UNVERIFIED and "rank 1 had changed its weights since the step" in reason


def test_a_rank_that_has_put_other_weights_in_the_place_of_its_own(job):
    """`p.data = ...` moves no version counter."""
    for parameter in job.ranks[1].module.parameters():
        parameter.data = 0.999 * parameter.data
    state, reason, _ = judged(job)
    assert state == UNVERIFIED and "rank 1 had changed its weights since the step" in reason


def test_the_vote_reads_weights_where_they_are_now(job):
    vote, weight = WeightVote(job.first.group), job.first.module[0].weight
    vote._take()
    known, before = vote.weights, vote.weights.read()
    vote._take()
    assert vote.weights is known
    for moved in (weight.data.clone(), weight.data.t().clone().t()):
        weight.data = moved
        vote._take()
        assert vote.weights is not known and vote.weights.tensors[0].data_ptr() == weight.data_ptr()
        known = vote.weights
    weight.data[3] += 1
    vote._take()
    assert vote.weights is known and vote.weights.read() != before


def test_an_older_state_of_which_no_vote_is_known(job):
    older = clones(job.first)
    job.step()
    assert judged(job, older)[0] == UNVERIFIED


def test_a_rank_that_is_silent_or_away(job):
    job.ranks[1].reachable = False
    state, reason, _ = judged(job)
    assert state == UNVERIFIED and "rank 1 could not answer" in reason


def test_without_a_controller(job):
    job.first.link = None
    state, reason, _ = judged(job)
    assert state == UNVERIFIED and "the controller is away" in reason


def test_a_rank_that_has_gone_on_cannot_answer(job):
    job.ranks[2].step()
    state, reason, _ = judged(job)
    assert state == UNVERIFIED and "rank 2 could not answer (already in the next optimizer step)" in reason


def test_a_rank_that_is_behind_is_waited_for(job):
    job.first.step()
    job.ranks[1].step()
    job.first.config = Config(checkpoint_timeout=20.0)
    late = threading.Timer(0.2, job.ranks[2].step)
    late.start()
    assert judged(job)[0] == PROVISIONAL
    late.join()


def test_a_save_in_the_background_keeps_its_rank_from_the_next_step_until_the_others_have_answered(job):
    asked, go, found = threading.Event(), threading.Event(), []
    ask = job.first.link.ask

    def slowly(*arguments):
        asked.set()
        go.wait(30)
        return ask(*arguments)

    job.first.link.ask = slowly
    contents = clones(job.first)
    saving = threading.Thread(target=lambda: found.append(judged(job, contents)[:2]))
    training = threading.Thread(target=job.step)
    saving.start()
    assert asked.wait(30)
    training.start()
    training.join(0.2)
    go.set()
    training.join(30)
    saving.join(30)
    assert found == [(PROVISIONAL, "weights equal what all ranks hold after step 1")] and job.first.group.step == 3


def test_ranks_that_have_left(job):
    for rank in job.ranks[1:]:
        rank.questions.leave()
        rank.questions.leave()
        ((kind, data),) = rank.events
        assert kind == "left" and data["first"] == 0 and data["group"] == group_key(rank.group)
        job.first.questions.heard({"left": data})
        rank.reachable = False
    assert judged(job)[0] == PROVISIONAL
    job.first.group.snapshots.forget()
    job.first.judge = Judge(job.first, job.first.questions)
    job.first.flip("0.weight")
    state, reason, _ = judged(job)
    assert state == WITHHELD and "0.weight, word 3 (element 3), bit 22 flipped" in reason
    job.first.step()
    assert judged(job)[0] == UNVERIFIED, "what they held was of an earlier version"


def test_a_module_that_the_script_has_dropped_can_still_be_said(job):
    rank = job.ranks[1]
    rank.group.guards[0].ddp = None
    rank.questions.leave(rank.group)
    (_, data) = rank.events[0]
    assert data["digests"]["weights"] == _digest_of(job.first)


@pytest.mark.parametrize("inner", [True, False])
def test_weights_saved_after_the_script_has_dropped_its_ddp_are_still_those_of_all_ranks(job, inner):
    contents = {"net": clones(job.first) if inner is False else job.first.module.state_dict()}
    for rank in job.ranks:
        rank.questions.leave(rank.group)
        rank.group.dropped = [Dropped(rank.group.guards.pop())]
    state, reason, _ = judged(job, contents)
    assert state == PROVISIONAL and "what all ranks hold after step 1" in reason
    if not inner:
        contents["net"]["1.bias"].view(torch.int32)[2] ^= 1 << 30
        state, reason, verdict = judged(job, contents)
        assert state == WITHHELD and verdict.differing[0]["bits"] == [30]
        emptied(contents["net"])
        assert judged(job, {"net": {**contents["net"], "1.bias": clones(job.first)["1.bias"]}})[0] == UNVERIFIED
        del job.first.module
        assert judged(job, contents)[0] != PROVISIONAL


def _digest_of(rank):
    rank.questions.leave()
    return rank.events[-1][1]["digests"]["weights"]


def test_one_replica_a_guard_that_is_off_and_a_job_too_large(job):
    job.first.group.off_reason = "no lockstep"
    assert "the guard is off: no lockstep" in judged(job)[1]
    job.first.group.off_reason = None
    job.first.group.size = 1
    assert "one replica" in judged(job)[1]
    job.first.group.size, job.first.group.rank = 1000, 5
    assert "only the first rank asks" in judged(job)[1]


def test_another_group_s_question_is_not_answered(job):
    data = {"group": "0" * 16, "version": 2, "kinds": ["weights"], "limit": 0.1, "page": None}
    assert job.first.questions.answer(data) is None


def test_saves_of_other_things_are_not_looked_at(job):
    assert job.first.judge.judge({"loss": torch.tensor(1.0), "name": "x"}) is None
    assert job.first.judge.judge([1, 2, 3]) is None

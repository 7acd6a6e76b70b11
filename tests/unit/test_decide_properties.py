"""Properties of the controller's decisions: order does not matter, and one bad device costs no healthy one its name."""

from eventmaker import Job
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcrun.core import decide
from sdcrun.core.ledger import ACCUSING
from sdcrun.report.build import build

WORLD = 4
RANKS = st.integers(0, WORLD - 1)
STEPS = st.integers(1, 12)
TENSORS = st.sampled_from(["w", "b", "layers.0.weight"])
SUBSETS = st.sets(RANKS, max_size=WORLD)


@st.composite
def happenings(draw):
    """A list of (step, what happened), in the order of steps."""
    steps = sorted(draw(st.sets(STEPS, max_size=6)))
    found = []
    for step in steps:
        what = draw(st.sampled_from(["local", "reduced", "vote", "no-majority", "inject"]))
        found.append((step, what, draw(SUBSETS), draw(RANKS), draw(TENSORS), draw(st.booleans())))
    return found


def job_of(happened, faults=("weight:rank=1,step=3",)):
    """The events of what happened, as ranks would send them."""
    job = Job(WORLD, faults=faults, on_weight_fault="repair")
    job.hello()
    for step, what, some, one, tensor, flag in happened:
        if what == "local":
            job.nonfinite(step, {rank: [tensor] for rank in some}, amp=flag)
        elif what == "reduced":
            job.nonfinite(step, reduced={rank: [tensor] for rank in some}, silent=(one,) if flag else ())
        elif what == "vote":
            job.vote(step, {tensor: [one]}, again="clean" if flag else "dissent")
        elif what == "no-majority":
            job.vote(step, no_majority=(tensor,), action="declined", again=None)
        else:
            job.inject(step, one)
    job.summaries(13)
    return job


def state_of(job, events):
    state = decide.initial(job.config)
    for event in events:
        state, _ = decide.apply(state, event)
    decide.finish(state)
    return state


@settings(max_examples=150)
@given(happenings(), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_speak_changes_nothing(happened, random):
    job = job_of(happened)
    queues = {}
    for event in job.events:
        queues.setdefault(event.source, []).append(event)
    mixed = []
    while queues:
        source = random.choice(sorted(queues))
        mixed.append(queues[source].pop(0))
        if not queues[source]:
            del queues[source]
    one, other = state_of(job, job.events), state_of(job, mixed)
    assert one.ledger.ordered() == other.ledger.ordered()
    assert build(one) == build(other)


@settings(max_examples=150)
@given(happenings())
def test_reading_the_record_gives_what_the_controller_knew(happened):
    job = job_of(happened)
    live = state_of(job, job.events)
    reading = decide.initial(job.config)
    for event in job.events:
        decide.fold(reading, event)
    decide.finish(reading)
    assert live.ledger.ordered() == reading.ledger.ordered()
    assert live.ledger.strikes(live.device_key) == reading.ledger.strikes(reading.device_key)


@settings(max_examples=150)
@given(
    RANKS, st.lists(st.tuples(STEPS, st.sampled_from(["local", "reduced", "vote"]), TENSORS, st.booleans()), max_size=8)
)
def test_one_bad_device_never_costs_a_healthy_one_its_name(bad, story):
    job = Job(WORLD)
    job.hello()
    for step, what, tensor, flag in sorted({entry[0]: entry for entry in story}.values()):
        if what == "local":
            job.nonfinite(step, {bad: [tensor]}, silent=((bad + 1) % WORLD,) if flag else ())
        elif what == "reduced":
            job.nonfinite(step, reduced={bad: [tensor]})
        else:
            job.vote(step, {tensor: [bad]}, again="clean" if flag else "dissent")
    state = state_of(job, job.events)
    found = [entry.finding for entry in state.ledger.ordered()]
    assert {rank for finding in found for rank in finding.ranks} <= {bad}
    strikes = state.ledger.strikes(state.device_key)
    assert set(strikes) <= {state.device_key(0, bad)}
    report = build(state)
    assert {s["rank"] for s in report["suspects"]} <= {bad}
    confirmed = any(s["verdict"] == "confirmed" for s in report["suspects"])
    assert confirmed == any(len(steps) > 1 for steps in strikes.values())
    assert all(f["verdict"] in [v.value for v in ACCUSING] or f["device"] is None for f in report["findings"])


@settings(max_examples=100)
@given(st.lists(st.tuples(STEPS, SUBSETS, st.booleans()), max_size=6))
def test_software_nans_on_several_ranks_accuse_nobody(story):
    job = Job(WORLD)
    job.hello()
    for step, some, amp in {entry[0]: entry for entry in story}.values():
        if len(some) != 1:
            job.nonfinite(step, {rank: ["w"] for rank in some}, amp=amp)
    state = state_of(job, job.events)
    assert not any(entry.finding.ranks or entry.finding.strike for entry in state.ledger.ordered())

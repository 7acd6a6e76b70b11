"""The controller's decisions on a job's events, and what came of them."""

from sdcrun.core import decide


def run(job, finish=True):
    """Fold a job's events; returns (state, actions)."""
    state, actions = decide.initial(job.config), []
    for event in job.events:
        state, more = decide.apply(state, event)
        actions += more
    if finish:
        actions += decide.finish(state)
    return state, actions


def findings(state):
    return [entry.finding for entry in state.ledger.ordered()]


def only(state):
    found = findings(state)
    assert len(found) == 1, found
    return found[0]


def said(actions):
    return "\n".join(a.data["text"] for a in actions if a.kind == "say")


def stops(actions):
    return [a.data for a in actions if a.kind == "stop"]

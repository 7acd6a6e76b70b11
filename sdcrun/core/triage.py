"""Check 1's second question: is a non-finite gradient the device's doing? The replay of the same micro-batch knows.

Software makes far more NaNs than hardware does. A second device that gets a non-finite result from the same micro-batch
clears the first one; a second device that gets a finite one accuses it.
"""

from __future__ import annotations

from sdcrun.core import words
from sdcrun.core.attribute import grade
from sdcrun.core.audit import OWN, REPEAT, Audit, History
from sdcrun.core.opinions import Opinion, not_replayable, opinions
from sdcrun.core.types import Finding, Verdict


def triage(audit: Audit, history: History | None = None, attempt: int = 0, amp: bool = False) -> dict[int, Finding]:
    """Global rank of an owner whose own result was non-finite -> the finding of check 1 about it.

    The cause of the audit does not matter, a scheduled one answers as well. Owners whose case nobody else could compute
    are missing from the result: for them check 1's own rules stand. So are all of them where the script is not
    replayable or the weights differ, since another device's finite result means nothing then. `amp`: a GradScaler is at
    work, so that an overflow that others reproduce is its daily business ("amp-overflow").

    With two failure domains one finite recomputation accuses; with more, opinions on both sides are weighed: an owner
    whose non-finite result another domain reproduces is never accused (a device that turns a NaN into a number is
    convicted by `core.attribute.judge` when the others agree to the bit).
    """
    history = history or History()
    if audit.weights_agree is False or not history.replayable or not_replayable(audit):
        return {}
    found = {}
    for owner, made in sorted(audit.cases.items()):
        if any(c.nonfinite_owner for c in made):
            others = [o for o in opinions(audit, owner) if o.rank != owner and o.nonfinite is not None]
            if others:
                found[owner] = _judge(audit, history, attempt, amp, owner, others)
    return found


def _judge(audit: Audit, history: History, attempt: int, amp: bool, owner: int, others: list[Opinion]) -> Finding:
    held = opinions(audit, owner)
    same = sorted({o.rank for o in others if o.nonfinite})
    finite = sorted({o.rank for o in others if not o.nonfinite})
    row = {
        "step": audit.step, "check": "nonfinite", "phase": "local", "rank": owner, "owner": owner, "tensor": None,
        "dtype": None, "shape": None, "expected": "finite" if not same else "not finite", "observed": "not finite",
        "peers_agreeing": finite if not same else same,
        "replays": [{"rank": o.rank, "role": o.role, "digest": o.digest, "nonfinite": o.nonfinite} for o in held],
    }  # fmt: skip
    if same:
        equal = all(o.digest == held[0].digest for o in others if o.nonfinite)
        bits = "the same bits" if equal else "non-finite values too"
        text = f"The gradients of rank {owner} are not finite, and {words.ranks(same)} got {bits} from its micro-batch."
        if finite:
            text += f" ({words.ranks(finite).capitalize()} did not.)"
        if amp:
            return Finding(attempt, audit.step, "nonfinite", Verdict.AMP_OVERFLOW, "overflow-reproduced",
                           f"{text} A GradScaler expects this and lowers its scale.", (), False, (row,))  # fmt: skip
        return Finding(attempt, audit.step, "nonfinite", Verdict.NOT_HARDWARE, "reproduced-elsewhere",
                       f"{text} Not the hardware: look at data, learning rate and code.", (), False, (row,),
                       (f"the device of rank {owner}: another one computes the same",))  # fmt: skip
    again = [o for o in held if o.rank == owner and o.role in (OWN, REPEAT) and o.nonfinite is not None]
    repeated = sum(1 for o in again if o.nonfinite)
    persistence = "unknown" if not again else "persistent" if repeated else "transient"
    text = f"The gradients of rank {owner} are not finite; {words.ranks(finite)} got finite ones from its micro-batch."
    if again:
        text += f" {repeated} of {words.count(len(again), 'repeat')} on rank {owner} were not finite."
    return Finding(attempt, audit.step, "nonfinite", grade(owner, history), "finite-elsewhere", text, (owner,), True,
                   (row,), ("data, learning rate and code: the same micro-batch is finite elsewhere",),
                   persistence=persistence)  # fmt: skip

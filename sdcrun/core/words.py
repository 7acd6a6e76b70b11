"""Words for people: safe names, numbers, and the block that a finding becomes. The same text in log, report and page.
"""

from __future__ import annotations

import difflib
import shlex
import signal
import unicodedata
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from sdcrun.core.types import Device, Finding, Verdict

CHECK_NAMES = {"nonfinite": "non-finite gradients", "replay": "replay audit", "weights": "weight vote"}
CHECK_TITLES = {check: f"check {number}, {name}" for number, (check, name) in enumerate(CHECK_NAMES.items(), 1)}
LIMIT = 160
RANKS_APART = (
    "Look for code that treats ranks differently: seeds, a load on one rank, weights changed outside the optimizer."
)
UNCLEAR = {
    "checkpoint-withheld": "Go on with the newest safe checkpoint (sdcrun checkpoints); test the machine that saved if "
                           "it happens again.",
    "checkpoint-damaged": "Stop and load another checkpoint (sdcrun checkpoints); check the file system and the memory "
                          "of the machine that read it.",
    "no-majority": "Do not trust weights from this step on: go back to the newest safe checkpoint (see the report).",
    "minority-at-start": RANKS_APART,
    "minority-moves": RANKS_APART,
    "two-domains": "Run the job over three or more nodes to learn which side is wrong; test both devices until then.",
    "no-arbiter": "Run the job over more nodes of one kind to learn which side is wrong; test the devices until then.",
    "all-pairs-differ": "Check that all nodes have the same devices, drivers and libraries.",
    "no-agreement": "More than one device is bad, or the nodes are not alike: test the devices of this step.",
    "wanders": "Look for kernels that are not deterministic; no device is accused.",
}


def clean(text: Any, limit: int = LIMIT) -> str:
    """`text` on one line and harmless on a terminal: control and format characters escaped, cut at `limit`."""
    shown = "".join(
        c
        if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        else c.encode("unicode_escape", "backslashreplace").decode()
        for c in str(text)[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def moment(time: Any) -> str | None:
    """A time in seconds since the epoch as people write it (UTC, to the second); None for what is no time."""
    if not isinstance(time, (int, float)):
        return None
    try:
        return datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def names(items: list[Any] | tuple[Any, ...], show: int = 3) -> str:
    """Up to `show` names and how many more there are."""
    head = ", ".join(clean(i, 80) for i in items[:show])
    return head if len(items) <= show else f"{head} and {len(items) - show} more"


def ranks(items: Any) -> str:
    """ "rank 2", "ranks 1 and 2", "ranks 0, 1, 2 and 9 more"."""
    items = sorted(items)
    if len(items) == 1:
        return f"rank {items[0]}"
    if len(items) <= 4:
        return f"ranks {', '.join(map(str, items[:-1]))} and {items[-1]}"
    return f"ranks {', '.join(map(str, items[:3]))} and {len(items) - 3} more"


def count(number: int, noun: str) -> str:
    """ "1 element", "3 elements"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def number(value: Any) -> str:
    """A value of a tensor as short as a person needs it; what is not a number as it is."""
    return f"{value:.7g}" if isinstance(value, float) else clean(value, 30)


def device(one: Device) -> str:
    """Host and device as an operator names them, with model and serial where known."""
    known = [clean(one.model, 60)] if one.model else []
    known += [f"serial {clean(one.serial, 40)}"] if one.serial else []
    known += [f"PCI {clean(one.pci, 40)}"] if one.pci else []
    return f"host {clean(one.host, 80)}, device {clean(one.uuid, 80)}" + (f" ({', '.join(known)})" if known else "")


def lines_to_paste(job_id: str) -> str:
    """The command that prints the lines which take a node out of service."""
    return f"{report_command(job_id)} --commands slurm|kubernetes|hyperpod|gcloud"


def ended(code: Any) -> str:
    """An exit code as Python gives it (negative for a signal), in words."""
    if not isinstance(code, int) or code >= 0:
        return f"exit code {clean(code, 20)}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (often the kernel's out-of-memory killer)" if code == -signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def choice(given: str, known: Iterable[str]) -> str:
    """What is wrong with `given`, which is none of `known`."""
    known = list(known)
    near = difflib.get_close_matches(given, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"must be {', '.join(known[:-1])} or {known[-1]}, got {given!r}{hint}"


def report_command(job_id: str) -> str:
    """The command that prints the report of a job; harmless to paste, whatever a record calls the job."""
    return f"sdcrun report {shlex.quote(clean(job_id or 'JOB', 80))}"


def advice(finding: Finding, job_id: str) -> str:
    """What a person should do about `finding` now."""
    if finding.injected:
        return "Nothing: --inject-fault put this fault there."
    if finding.verdict is Verdict.CONFIRMED:
        return (
            f"Take the device out of service, run the vendor's diagnostics on it, requeue without it. "
            f"Lines to paste: {lines_to_paste(job_id)}"
        )
    if finding.verdict is Verdict.SUSPECT and finding.strike:
        return "Let it run and watch this device: a second independent finding confirms it. Test it at the next chance."
    if finding.verdict is Verdict.SUSPECT:
        return (
            "Look at this step's data, learning rate and code first: they make most NaNs. If the same rank is named "
            "again while others stay clean, test its device."
        )
    if finding.verdict is Verdict.NOT_HARDWARE:
        return "Debug data, learning rate or code; the devices are not the cause."
    if finding.verdict is Verdict.INCONCLUSIVE:
        software = "Look at data, learning rate and code first; no device is accused."
        return UNCLEAR.get(finding.rule, software)
    return "Nothing."


def block(finding: Finding, devices: dict[int, Device], done: str, job_id: str) -> str:
    """The block for one finding: what happened, who, how sure and by which rule, what was done, what to do now.

    `devices` maps each accused rank to its device and, where known, is enough to walk to the machine; `done` says what
    the run did about it. Every line is safe to print.
    """
    sure = f"{finding.verdict.value} (rule: {finding.rule})"
    if finding.verdict is Verdict.SUSPECT:
        sure += ", one strike" if finding.strike else ", no strike"
    if finding.ruled_out:
        sure += f"; ruled out: {'; '.join(clean(r) for r in finding.ruled_out)}"
    who = [f"rank {rank} on {device(devices[rank])}" for rank in finding.ranks[:4] if rank in devices]
    if len(finding.ranks) > 4:
        who.append(f"and {len(finding.ranks) - 4} more")
    mark = " · injected" if finding.injected else ""
    title = CHECK_TITLES.get(finding.check, clean(finding.check))
    tried = f" of attempt {finding.attempt}" if finding.attempt else ""
    return "\n".join(
        (
            f"{finding.verdict.value.upper()} at step {finding.step}{tried} · {title}{mark}",
            f"  what  {finding.text}",
            f"  who   {'; '.join(who) if who else 'no device is accused'}",
            f"  sure  {sure}",
            f"  done  {done}",
            f"  now   {advice(finding, job_id)}",
        )
    )

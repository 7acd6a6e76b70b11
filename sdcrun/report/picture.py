"""What the page draws, as plain numbers and texts: the time line, the map of nodes and ranks, the bits of a word. Pure.
"""

from __future__ import annotations

from typing import Any

from sdcrun.core.roster import Attempt
from sdcrun.core.state import State

BINS = 240
GRAVITY = ("clean-after-triage", "amp-overflow", "not-hardware", "inconclusive", "suspect", "confirmed")
LANES = ("findings", "audits", "skipped", "checkpoints", "injected")
BAD_CHECKPOINTS = ("withheld", "tainted")
NO_LABELS_ABOVE = 64


def timeline(report: dict[str, Any], state: State) -> dict[str, Any]:
    """Steps of all attempts one after the other, in at most `BINS` bins.

    {"bins", "attempts": [{"number", "at" (bin), "steps"}], "lanes": [{"name", "marks": [{"at", "kind", "text"}]}]}; a
    lane without marks is left out. A mark's kind is a verdict or "clean", "mismatch", "skip", "good", "bad", "fault".
    """
    starts, total = {}, 0
    for number, attempt in sorted(state.roster.attempts.items()):
        steps = (
            max(attempt.last_step + 1, *(s["steps"]["seen"] for s in attempt.summaries.values()), 1)
            if (attempt.summaries)
            else max(attempt.last_step + 1, 1)
        )
        starts[number] = (total, steps)
        total += steps
    bins = max(1, min(BINS, total))

    def place(attempt: int, step: int) -> int:
        start, steps = starts.get(attempt, (0, 1))
        return (start + min(max(step, 0), steps - 1)) * bins // max(total, 1)

    marks: dict[str, dict[int, list[tuple[int, str, str]]]] = {lane: {} for lane in LANES}

    def mark(lane: str, attempt: int, step: int, rank: int, kind: str, text: str) -> None:
        marks[lane].setdefault(place(attempt, step), []).append((rank, kind, f"step {step}: {text}"))

    for finding in report["findings"]:
        kind = finding["verdict"]
        who = "" if finding["rank"] is None else f", rank {finding['rank']}"
        mark(
            "findings",
            finding["attempt"],
            finding["step"],
            GRAVITY.index(kind),
            kind,
            f"{kind}{who} ({finding['rule']})",
        )
    for key, case in state.replays.audits.items():
        clean = case.kind == "clean"
        mark("audits", key.attempt, key.step, int(not clean), "clean" if clean else "mismatch", f"audit {case.kind}")
    for (attempt, _), steps in state.skips.items():
        for step in steps:
            mark("skipped", attempt, step, 0, "skip", "skipped")
    for saved, row in zip(state.checkpoints.values(), report["checkpoints"], strict=True):
        if saved["step"] is not None:
            bad = row["state"] in BAD_CHECKPOINTS
            mark(
                "checkpoints",
                saved["attempt"],
                saved["step"],
                int(bad),
                "bad" if bad else "good",
                f"{row['state']} checkpoint",
            )
    for firing in state.firings.all:
        if firing.phase == "step":
            mark("injected", firing.attempt, firing.step, 0, "fault", f"fault in rank {firing.rank} ({firing.site})")
    lanes = [{"name": lane, "marks": [_bin(at, found) for at, found in sorted(marks[lane].items())]}
             for lane in LANES if marks[lane]]  # fmt: skip
    attempts = [{"number": number, "at": start * bins / max(total, 1), "steps": steps}
                for number, (start, steps) in starts.items()]  # fmt: skip
    return {"bins": bins, "total": total, "attempts": attempts, "lanes": lanes}


def _bin(at: int, found: list[tuple[int, str, str]]) -> dict[str, Any]:
    """One mark for everything in a bin: the gravest kind, the first few texts."""
    worst = max(found)
    texts = [text for _, _, text in found[:4]]
    return {
        "at": at,
        "kind": worst[1],
        "text": "; ".join(texts) + (f" and {len(found) - 4} more" if len(found) > 4 else ""),
    }


def nodes(report: dict[str, Any], state: State) -> list[dict[str, Any]]:
    """Nodes of the newest attempt in order: {"label", "ranks": [{"rank", "kind", "text"}]}.

    A rank's kind is "confirmed", "suspect", "injected", "unguarded" or "clean". Ranks that never spoke are put on nodes
    by the size of the others.
    """
    attempt = state.roster.last
    world = state.roster.expected_world(attempt)
    kinds, texts = _kinds(report, attempt)
    places = attempt.places if attempt else {}
    size = max((place.local_rank + 1 for place in places.values()), default=1)
    found: dict[int, dict[str, Any]] = {}
    for rank in range(world):
        place = places.get(rank)
        number = place.node if place else rank // size
        node = found.setdefault(number, {"number": number, "host": None, "ranks": []})
        node["host"] = node["host"] or (place.device.host if place else None)
        kind = kinds.get(rank, "clean" if rank in places else "unguarded")
        node["ranks"].append({"rank": rank, "kind": kind, "text": texts.get(rank, kind)})
    ordered = [found[number] for number in sorted(found)]
    for node in ordered:
        node["label"] = f"node {node['number']}" + (f" · {node['host']}" if node["host"] else "")
    return ordered


def _kinds(report: dict[str, Any], attempt: Attempt | None) -> tuple[dict[int, str], dict[int, str]]:
    """Kind and words of each rank that is not simply clean; suspects go with their device, not with their old rank."""
    kinds: dict[int, str] = {}
    texts: dict[int, str] = {}
    for row in report["unguarded"]:
        kinds[row["rank"]], texts[row["rank"]] = "unguarded", "unguarded"
    where = {place.device.key: rank for rank, place in attempt.places.items()} if attempt else {}
    for suspect in reversed(report["suspects"]):
        rank = where.get(f"{suspect['device']['host']}/{suspect['device']['uuid']}", suspect["rank"])
        kinds[rank] = "injected" if suspect["injected"] else suspect["verdict"]
        texts[rank] = suspect["verdict"] + (" (injected)" if suspect["injected"] else "")
    return kinds, texts


def bits(evidence: dict[str, Any]) -> dict[str, Any] | None:
    """Two rows of 32 bits, the most significant first: {"rows": [{"name", "value", "bits"}], "flipped": [places],
    "fields": [(name, first place, length)]}; None where the evidence has no two words."""
    words = []
    for side in ("expected", "observed"):
        text = evidence.get(side)
        if not isinstance(text, str) or not text.startswith("0x") or len(text) > 10:
            return None
        try:
            words.append(int(text, 16))
        except ValueError:
            return None
    difference = words[0] ^ words[1]
    fields = {"float32": [("±", 0, 1), ("exponent", 1, 8), ("fraction", 9, 23)]}.get(str(evidence.get("dtype")), [])
    return {
        "rows": [
            {"name": side, "value": evidence.get(f"{side}_value"), "bits": f"{word:032b}"}
            for side, word in zip(("expected", "observed"), words, strict=True)
        ],
        "flipped": [place for place in range(32) if difference >> (31 - place) & 1],
        "fields": fields,
    }

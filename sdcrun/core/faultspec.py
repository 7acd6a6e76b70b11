"""The grammar of --inject-fault: text to `FaultSpec` and back, when a fault fires, and which faults no check can see.

`SITE[:key=value,...]`. SITE alone is a whole fault: what is not said has a default (`help_text`). Pure; the shim puts
the fault into a tensor, this module says only which, where, what and when.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import random
import textwrap
from dataclasses import dataclass

from sdcrun.core.types import Config

SITES: dict[str, tuple[str, str]] = {
    "activation": ("output of a module in forward", "activation:rank=2,step=5,tensor=blocks.1.*,kind=scale,by=1.5"),
    "saved": ("an activation between forward and backward", "saved:rank=1,step=3,tensor=blocks.0.*,bit=20"),
    "gradient": ("a local gradient before the all-reduce", "gradient:rank=2,step=5,kind=bitflip,bit=30"),
    "reduced": ("the reduced gradient on one rank", "reduced:rank=0,step=4,kind=sign"),
    "allreduce": ("inside the reduction: the same wrong sum on every rank", "allreduce:step=7,kind=bitflip,bit=22"),
    "weight": ("a parameter after the update", "weight:rank=1,step=6,tensor=*.weight,kind=bitflip,bit=12"),
    "optimizer": ("optimizer state after the update", "optimizer:rank=2,step=6,tensor=*exp_avg_sq,kind=zero"),
    "buffer": ("a buffer at the start of a forward", "buffer:rank=0,step=8,tensor=*running_mean,kind=bitflip"),
    "loss": ("the value of the loss that backward starts from", "loss:rank=1,step=5,kind=scale,by=1.01"),
    "input": ("the batch given to the model", "input:rank=2,step=5,kind=zero,count=8"),
    "checkpoint": ("bytes being written by a save", "checkpoint:step=10,kind=bitflip,bit=3"),
}
KINDS: dict[str, tuple[str, str]] = {
    "bitflip": ("invert one bit (default); bits count from the least significant", "gradient:kind=bitflip,bit=30"),
    "nan": ("not a number", "gradient:kind=nan"),
    "inf": ("infinity with the element's sign", "gradient:kind=inf"),
    "zero": ("zero", "activation:kind=zero,count=32"),
    "scale": ("multiply by by=F (default 2)", "gradient:kind=scale,by=0.5"),
    "sign": ("change the sign", "reduced:kind=sign"),
    "stuck": ("force one bit to to=0|1 (default 1)", "activation:kind=stuck,bit=23,to=0,repeat=always"),
}
PLACES: dict[str, tuple[str, str]] = {
    "rank": ("global rank (default 0; for allreduce and checkpoint: all)", "gradient:rank=2"),
    "node": ("every rank of a node", "gradient:node=1,repeat=always"),
    "tensor": ("glob over names: modules for activation and saved, parameters, buffers, inputs, checkpoint's entries, "
               "PARAMETER.STATE for optimizer; of several, one in use is drawn (default *)",
               "weight:tensor=blocks.*.weight"),
    "index": ("flat element number, or random (default)", "gradient:index=17"),
    "count": ("a run of so many neighbours (default 1)", "gradient:count=4"),
    "where": ("device: also when that device replays for another rank, and it moves with the device on a restart "
              "(default for activation, saved, gradient); step: only in the original computation",
              "activation:where=step"),
}
TIMES: dict[str, tuple[str, str]] = {
    "step": ("S: that step alone, or the first one with every, p or repeat; A-B: a range (default 1)",
             "gradient:step=3-9"),
    "every": ("every K-th step, from the first one on", "gradient:step=5,every=10"),
    "p": ("chance per step, drawn from the job's seed", "gradient:p=0.01"),
    "repeat": ("always: every step, from the first one on", "gradient:step=5,repeat=always"),
    "when": ("lo:hi, only elements with a magnitude in that range; either may be left out", "activation:when=1e-3:10"),
}
_WHAT = {
    "kind": ", ".join(KINDS),
    "bit": "0-63 or random, with kind=bitflip or kind=stuck",
    "by": "a finite factor other than 1, with kind=scale",
    "to": "0 or 1, with kind=stuck",
}
KEYS = (*PLACES, *_WHAT, *TIMES)
FIRST_STEP = 1
FOLLOWS_DEVICE = ("activation", "saved", "gradient")
COMPUTED = ("activation", "saved", "gradient", "loss")
EVERYWHERE = ("allreduce", "checkpoint")
_WITH_BIT = ("bitflip", "stuck")
# Where this stands in a reason, a check must see the fault all the same; only nobody can be named.
SEEN = "the difference is seen"


class FaultSpecError(ValueError):
    """A fault that is not in the grammar. The message names the wrong key or value and the right ones."""


@dataclass(frozen=True)
class FaultSpec:
    """One fault. `index` and `bit` None mean random; `rank` and `node` both None mean every rank.

    Steps are window numbers: active from `first` to `last` inclusive (None: to the end), on every `every`-th of them,
    each with chance `p`. `low` and `high` bound the magnitude of elements that can be hit. `where` is device or step.
    """

    site: str
    rank: int | None = 0
    node: int | None = None
    tensor: str = "*"
    index: int | None = None
    count: int = 1
    kind: str = "bitflip"
    bit: int | None = None
    by: float = 2.0
    to: int = 1
    where: str = "step"
    first: int = FIRST_STEP
    last: int | None = FIRST_STEP
    every: int = 1
    p: float = 1.0
    low: float = 0.0
    high: float = math.inf

    @property
    def shared(self) -> bool:
        """Whether all ranks must hit the same element with the same bits (a wrong sum that everyone receives)."""
        return self.site == "allreduce"


def parse(text: str) -> FaultSpec:
    """One --inject-fault text as a `FaultSpec`; raises FaultSpecError for anything outside the grammar."""
    site, colon, rest = text.strip().partition(":")
    site = site.strip()
    if site not in SITES:
        raise FaultSpecError(f"{text!r}: no site {site!r}{_nearest(site, SITES)}; sites are {', '.join(SITES)}")
    if colon and not rest.strip():
        raise FaultSpecError(f"{text!r}: nothing after the colon; keys are {', '.join(KEYS)}")
    given: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in KEYS:
            raise FaultSpecError(f"{text!r}: no key {key!r}{_nearest(key, KEYS)}; keys are {', '.join(KEYS)}")
        if not equals or not value:
            raise FaultSpecError(f"{text!r}: {key} has no value; write {key}=..., as in {_example(key)!r}")
        if key in given:
            raise FaultSpecError(f"{text!r}: {key} is given twice ({given[key]!r} and {value!r})")
        given[key] = value
    try:
        return _build(site, given)
    except FaultSpecError as error:
        raise FaultSpecError(f"{text!r}: {error}") from None


def _build(site: str, given: dict[str, str]) -> FaultSpec:
    """The spec of checked keys; raises FaultSpecError (without the text) for a wrong value or combination."""
    kind = _one_of("kind", given.get("kind", "bitflip"), KINDS)
    for key, kinds in (("bit", _WITH_BIT), ("by", ("scale",)), ("to", ("stuck",))):
        if key in given and kind not in kinds:
            raise FaultSpecError(f"{key}={given[key]} goes only with {' or '.join('kind=' + k for k in kinds)}, "
                                 f"not with kind={kind}")
    if "rank" in given and "node" in given:
        raise FaultSpecError(f"rank={given['rank']} and node={given['node']}: give one of them")
    values: dict[str, object] = {"kind": kind}
    if site in EVERYWHERE or "node" in given:
        values["rank"] = None
    for key in ("rank", "node"):
        if key in given:
            values[key] = _whole(key, given[key], 0)
    if "tensor" in given:
        values["tensor"] = given["tensor"]
    if given.get("index", "random") != "random":
        values["index"] = _whole("index", given["index"], 0, "random")
    if "count" in given:
        values["count"] = _whole("count", given["count"], 1)
    if given.get("bit", "random") != "random":
        values["bit"] = _whole("bit", given["bit"], 0, "random")
        if values["bit"] > 63:
            raise FaultSpecError(f"bit={given['bit']}: bits are 0 to 63, counted from the least significant")
    if "by" in given:
        values["by"] = _number("by", given["by"])
        if values["by"] == 1:
            raise FaultSpecError("by=1 changes nothing; give another factor")
    if "to" in given:
        values["to"] = int(_one_of("to", given["to"], ("0", "1")))
    default_where = "device" if site in FOLLOWS_DEVICE else "step"
    values["where"] = _one_of("where", given.get("where", default_where), ("device", "step"))
    return FaultSpec(site, **values, **_times(given), **_magnitudes(given))


def _times(given: dict[str, str]) -> dict[str, object]:
    """first, last, every, p from step, every, p and repeat."""
    open_ended = any(key in given for key in ("every", "p", "repeat"))
    values: dict[str, object] = {}
    if "step" not in given:
        if open_ended:
            values |= {"first": 0, "last": None}
    elif "-" in given["step"].lstrip("-"):
        first, last = given["step"].split("-", 1)
        values |= {"first": _whole("step", first, 0), "last": _whole("step", last, 0)}
        if values["last"] < values["first"]:
            raise FaultSpecError(f"step={given['step']}: the range ends before it begins")
        if "repeat" in given:
            raise FaultSpecError(f"step={given['step']} says when it ends; repeat=always goes with a single step")
    else:
        first = _whole("step", given["step"], 0)
        values |= {"first": first, "last": None if open_ended else first}
    if "every" in given:
        values["every"] = _whole("every", given["every"], 1)
    if "p" in given:
        values["p"] = _number("p", given["p"])
        if not 0 < values["p"] <= 1:
            raise FaultSpecError(f"p={given['p']}: a chance is above 0 and at most 1")
    if "repeat" in given:
        _one_of("repeat", given["repeat"], ("always",))
    return values


def _magnitudes(given: dict[str, str]) -> dict[str, float]:
    """low and high from when=lo:hi."""
    if "when" not in given:
        return {}
    low, colon, high = given["when"].partition(":")
    if not colon or not (low or high):
        raise FaultSpecError(f"when={given['when']}: write when=lo:hi, as in {TIMES['when'][1]!r}")
    values = {}
    if low:
        values["low"] = _number("when", low)
    if high:
        values["high"] = _number("when", high)
    if values.get("low", 0.0) < 0 or values.get("high", math.inf) < values.get("low", 0.0):
        raise FaultSpecError(f"when={given['when']}: magnitudes are 0 or more, the lower one first")
    return values


def _whole(key: str, text: str, least: int, word: str = "") -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        also = f" or {word}" if word else ""
        raise FaultSpecError(f"{key}: {text!r} is not a whole number from {least} on{also}{_nearest(text, [word])}")
    return int(text)


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FaultSpecError(f"{key}={text}: {text!r} is not a finite number")
    return value


def _one_of(key: str, text: str, allowed) -> str:
    if text not in allowed:
        raise FaultSpecError(f"{key}={text}: no {key} {text!r}{_nearest(text, allowed)}; it is {' or '.join(allowed)}")
    return text


def _nearest(word: str, known) -> str:
    """", did you mean ...?" or nothing."""
    close = difflib.get_close_matches(word.lower(), [k for k in known if k], n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def _example(key: str) -> str:
    for table in (PLACES, TIMES):
        if key in table:
            return table[key][1]
    return {"kind": KINDS["nan"][1], "bit": KINDS["bitflip"][1], "by": KINDS["scale"][1], "to": KINDS["stuck"][1]}[key]


def format(spec: FaultSpec) -> str:
    """Canonical text of a spec: `parse(format(spec)) == spec`, defaults left out, keys in one order."""
    parts: list[str] = []
    if spec.node is not None:
        parts.append(f"node={spec.node}")
    elif spec.rank is not None:
        parts.append(f"rank={spec.rank}")
    for key, value, default in (("tensor", spec.tensor, "*"), ("index", spec.index, None), ("count", spec.count, 1)):
        if value != default:
            parts.append(f"{key}={value}")
    parts.append(f"kind={spec.kind}")
    if spec.kind in _WITH_BIT and spec.bit is not None:
        parts.append(f"bit={spec.bit}")
    if spec.kind == "scale":
        parts.append(f"by={spec.by!r}")
    if spec.kind == "stuck":
        parts.append(f"to={spec.to}")
    if spec.where != ("device" if spec.site in FOLLOWS_DEVICE else "step"):
        parts.append(f"where={spec.where}")
    open_ended = spec.last is None
    single = open_ended or (spec.first == spec.last and spec.every == 1 and spec.p == 1)
    parts.append(f"step={spec.first}" if single else f"step={spec.first}-{spec.last}")
    if spec.every != 1:
        parts.append(f"every={spec.every}")
    if spec.p != 1:
        parts.append(f"p={spec.p!r}")
    if open_ended and spec.every == 1 and spec.p == 1:
        parts.append("repeat=always")
    if spec.low != 0 or spec.high != math.inf:
        parts.append(f"when={spec.low!r}:{'' if spec.high == math.inf else repr(spec.high)}")
    return f"{spec.site}:{','.join(parts)}"


def draw(seed: int, position: int, step: int, rank: int, salt: str = "") -> random.Random:
    """A generator of its own for one decision, the same in every process: nothing else's random numbers are used up."""
    text = f"{seed}|{position}|{step}|{rank}|{salt}".encode()
    return random.Random(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big"))


def targets(spec: FaultSpec, rank: int, node: int) -> bool:
    """Whether the spec's place is this rank. A wrong sum reaches every rank, whatever the spec calls its origin."""
    if spec.shared:
        return True
    if spec.node is not None:
        return spec.node == node
    return spec.rank is None or spec.rank == rank


def fires(
    spec: FaultSpec, step: int, rank: int, node: int, position: int = 0, drawn: int | None = None, seed: int = 0
) -> bool:
    """Whether the fault is active on this rank in this step (a window number): same arguments, same answer. The chance
    `p` is drawn for the number `position` and the step `drawn` (None: `step`)."""
    if not targets(spec, rank, node) or step < spec.first or (spec.last is not None and step > spec.last):
        return False
    if (step - spec.first) % spec.every:
        return False
    if spec.p >= 1:
        return True
    chance = draw(seed, position, step if drawn is None else drawn, -1 if spec.shared else rank, "p")
    return chance.random() < spec.p


def by_design_unseen(spec: FaultSpec, config: Config, domains: int | None = None,
                     replicas: int | None = None) -> str | None:
    """Why no check of this run can see the fault or name its device, or None where one must.

    `domains` is the number of failure domains and `replicas` the world size of the guarded module, where known: with
    two of them a difference is seen but nobody can say which side is wrong. An interval of 0 is a check that is off;
    with a budget the intervals are not known beforehand and count as on.
    """
    if spec.site == "allreduce":
        return "every rank receives the same wrong sum, so no replica differs from another"
    if spec.site == "input":
        return "a replay starts from the same wrong input, so it gives the same result"
    if spec.site == "checkpoint":
        return None
    loud = spec.kind in ("nan", "inf") and spec.site in ("activation", "saved", "gradient")
    if spec.site in COMPUTED:
        return None if loud else _unseen_by_replay(spec, config, domains)
    if spec.site == "reduced" and spec.kind in ("nan", "inf"):
        return None
    return _unseen_by_votes(spec, config, replicas)


def _unseen_by_replay(spec: FaultSpec, config: Config, domains: int | None) -> str | None:
    every = config.audit_every
    if config.budget is None and every == 0:
        return "audits are off, and a finite wrong value shows nowhere else"
    if domains == 1:
        return "one failure domain: there is no other device to replay on"
    if config.budget is None and spec.last is not None and spec.every == 1:
        audited = -(-spec.first // every) * every
        if audited > spec.last:
            return f"no audit (one every {every} steps) falls into steps {spec.first} to {spec.last}, then it is gone"
    if domains == 2:
        return f"two failure domains: {SEEN}, but nobody can say which of the two is wrong"
    return None


def _unseen_by_votes(spec: FaultSpec, config: Config, replicas: int | None) -> str | None:
    voted = config.budget is not None or config.weights_every or (spec.site == "optimizer" and config.optimizer_every)
    if not voted:
        return "weight votes are off, and nothing else compares replicas"
    if replicas == 1:
        return "one replica: there is nothing to compare it with"
    if replicas == 2:
        return f"two replicas: {SEEN}, but neither side has a majority"
    return None


def help_text() -> str:
    """Every site, kind, place and time with one example each, as `--inject-fault help` prints it."""
    lines = ["--inject-fault 'SITE[:key=value,...]', repeatable. SITE alone is enough; what is not said has a default."]
    for title, prefix, table in (("Sites", "", SITES), ("Kinds (kind=...)", "", KINDS), ("Places", "=", PLACES),
                                 ("Times", "=", TIMES)):
        lines += ["", f"{title}:"]
        for name, (text, example) in table.items():
            lines += [f"  {name + prefix:<11}{row}" if first else f"{'':13}{row}"
                      for first, row in zip([True] + [False] * 9, [*textwrap.wrap(text, 100), example], strict=False)]
    lines += ["", "Random choices (element, bit, chance) come from the job's seed: the same text on the same job hits",
              "the same element with the same bits."]
    return "\n".join(lines)

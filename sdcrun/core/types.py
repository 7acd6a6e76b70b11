"""Data that crosses a room's border: configuration, events, findings, verdicts, actions. Frozen, plain, JSON-able.

Vocabulary is the field's: rank, local rank, node, world size, micro-batch, replica. A *device* is what is accused
(host
and GPU UUID; on a CPU host, local-node index and local rank), because ranks move on a restart and devices do not.

Kinds of `Event` and what `data` holds. Everything but `source`, `attempt`, `seq` is filled by the sender; all values
are
JSON values; tensors are named as `named_parameters()` of the module inside DDP names them.

From a rank (`source` = "rank:<global rank>"):

hello      {rank, local_rank, node, world_size, local_world_size, restart_count, pid, device: Device as dict,
           versions: {sdcrun, torch, python, cuda, nccl, driver}, interpreter, session: random id of this process}
guarded    {group: [global ranks of the DDP group], modules: [{name, parameters, tensors, bytes}]}
unguarded  {reason, so_far?}            the whole rank is not guarded; so_far: unless a module of it is later
limit      {text, check|null}           something this run cannot see, said once
check_off  {check, reason, step}        a check went off for the rest of the attempt
summary    {steps: {seen, committed, skipped}, checks: {nonfinite|replay|weights: {run, fired, seconds}},
           parts: {part: seconds}, train_seconds, last_audit_step|null}        cumulative, every few seconds and at
           the end
nonfinite  {step, group, amp: bool, skipped: bool, local: [Bad], reduced: [Bad]}  this rank's view after a hit (maybe
           empty
           lists); Bad = {tensor, elements, nan, inf, numel}
audit      see `sdcrun.core.attribute.Audit`: the comparisons of one audit step, as every rank of the group knows them
vote       {step, group, table: "weights"|"optimizer"|"buffers", minority: {tensor: [ranks]}, no_majority: [tensors],
           action: repaired|reported|stopped|declined, again: "clean"|"dissent"|null, why|null}   only after dissent,
           sent by
           the group's first rank and by each rank in a minority; the same content from all
word       {step, table, tensor, dtype, shape, words, index, expected, observed, expected_value, observed_value, bits:
           [..],
           peer, rank}   evidence of a minority rank: `words` 32-bit words differ; the first at element `index` (flat);
           expected/observed are hex strings of that word, *_value the elements as numbers, bits the flipped bit
           numbers
inject     {spec: position in --inject-fault order, step, site, tensor, index, kind, bits: [...], before, after, phase:
           "step"|"replay"}
checkpoint {path, step|null, state: verified|provisional|unverified|withheld|tainted, reason, id, rank, dissent: bool,
           differing: [Wrong], was: earlier path|absent}   Wrong = {tensor, name, dtype, shape, text|null, index|null,
           expected|null, observed|null, bits}. From the controller too, when a state changes later
loaded     {path, step, id, differing: [Wrong], count}   a checkpoint that was loaded is not what was saved
left       {group: key, first: first rank of it, rank, version, digests: {table: hex}, rows: {table: base64}}   what a
           rank
           held when it left, so that the rank that saves last need not ask it
selftest   {check: nonfinite|replay|weights|ballot, passed: bool, text}   --sdc-selftest, one per check, by each rank
segment    {slot, group, rank, losses: [..], norms: [..], state: digest|null, restored: null|why not}   a campaign's
           launch: what this rank saw in one slot, step by step, its state at the end, whether it could put back the
           one from before the slot; slot -1 is the warm-up
bye        {reason: "end"|"destroyed"|"exception", steps: int}

From a supervisor ("node:<host>:<pid>"):  node_up {host, node|null, nnodes, nproc|null, command: [argv], versions,
local_nodes}
           worker_lost {rank|null, node|null, exit, text} · node_down {exit} · job_end {exit_code, status}
From the controller ("controller"):  started {restarted: bool} · approved {device, by} ·
           command {what: audit|vote|skip|stop, why, code|null; a stop of the supervisors has to: "supervisors"} ·
           blind {since, until|null, reason, sources: [the first few], count} · gap {source, after, upto: first and
           last
           missing sequence number are after + 1 and upto}
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field, fields
from typing import Any

EVENT_SCHEMA = 1
REPORT_SCHEMA = 1

CHECKS = ("nonfinite", "replay", "weights")
# Where sdcrun's own time in a rank goes, in the order of a step; `capture` is what is kept in case of an audit.
PARTS = ("capture", "hook", "ballot", "ship", "replay", "compare", "vote", "events")


@dataclass(frozen=True)
class Config:
    """Settings of one job, the same in the supervisor, the controller and every rank (as JSON in `SDCRUN_CONFIG`).

    Intervals are in steps (0 switches a check off), times in seconds, `budget` in per cent of step time (None: fixed
    intervals). `faults` are raw --inject-fault texts in the order given. `campaign` is the path of the plan of a
    campaign's launch, which no policy stops.
    """

    job_id: str = ""
    job_dir: str = ""
    audit_every: int = 100
    weights_every: int = 10
    optimizer_every: int = 100
    budget: float | None = None
    on_fault: str = "skip"
    on_weight_fault: str = "repair"
    on_suspect: str = "report"
    on_bad_checkpoint: str = "withhold"
    max_strikes: int = 3
    max_skipped: int = 20
    replay_repeats: int = 3
    faults: tuple[str, ...] = ()
    selftest: bool = False
    campaign: str = ""
    quiet: bool = False
    off: bool = False
    controller: str = ""
    seed: int = 0
    ballot_timeout: float = 600.0
    exchange_timeout: float = 120.0
    arm_timeout: float = 20.0
    summary_every: float = 2.0
    checkpoint_timeout: float = 5.0

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self) | {"faults": list(self.faults)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Config:
        """Inverse of `to_json`; raises ValueError on a key that is not a field."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown setting {unknown[0]!r}")
        return cls(**{**values, "faults": tuple(values.get("faults", ()))})


@dataclass(frozen=True)
class Device:
    """What is accused. `uuid` is unique within the job; pci, model and serial are None where nobody can tell."""

    host: str
    uuid: str
    pci: str | None = None
    model: str | None = None
    serial: str | None = None

    @property
    def key(self) -> str:
        """Identity used for strikes: host and uuid."""
        return f"{self.host}/{self.uuid}"


@dataclass(frozen=True)
class Event:
    """One statement by one source. (attempt, source, seq) is unique; seq counts from 1 per (attempt, source, session).

    `session` is a random text made once per process, so that a restarted process cannot collide with its predecessor.
    `time` is seconds since the epoch by the sender's clock, for people only; no decision reads it.
    """

    kind: str
    source: str
    attempt: int
    seq: int
    time: float
    data: dict[str, Any] = field(default_factory=dict)
    session: str = ""


class Verdict(str, enum.Enum):
    """What findings mean. SUSPECT is the strongest word before a repeat; CONFIRMED needs two independent findings."""

    CLEAN_AFTER_TRIAGE = "clean-after-triage"
    SUSPECT = "suspect"
    CONFIRMED = "confirmed"
    INCONCLUSIVE = "inconclusive"
    NOT_HARDWARE = "not-hardware"
    AMP_OVERFLOW = "amp-overflow"


@dataclass(frozen=True)
class Finding:
    """One check's statement about one step. `ranks` are those it accuses (none: it accuses nobody).

    `rule` is the short name of the rule that made the verdict, `text` one sentence for a person, `strike` whether it
    counts against the devices of `ranks`, `evidence` a list of JSON objects with the keys of the schema's `evidence`.
    `injected` marks a finding that a fault of --inject-fault explains.
    """

    attempt: int
    step: int
    check: str
    verdict: Verdict
    rule: str
    text: str
    ranks: tuple[int, ...] = ()
    strike: bool = False
    evidence: tuple[dict[str, Any], ...] = ()
    ruled_out: tuple[str, ...] = ()
    injected: bool = False
    persistence: str = "unknown"


@dataclass(frozen=True)
class Action:
    """What the controller must do. kind: "command" (to all ranks, next ballot) {what, why, code} · "say" {text, level}
    · "stop" (to all supervisors) {code, why} · "reply" {to, ...} · "record" (an event of its own) {kind, data}."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExitCode:
    """Exit codes of `sdcrun` runs that are not torchrun's own."""

    USAGE = 2
    CONFIRMED = 86
    UNCLEAR = 87
    INJECTION_FAILED = 88

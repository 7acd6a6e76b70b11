"""Lines for a person to paste: taking a suspect's node out of service on Slurm, Kubernetes, HyperPod, Google Cloud.

Printed, never executed. Names come from machines that may lie: a host name that is not a plain one gets no line at all,
and everything else is reduced to harmless characters and quoted.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from sdcrun.core import words

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
REPLACED = "# WARNING: a replacement destroys the instance's own volumes; copy what you need from it first."
HYPERPOD_LABEL = "sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReplacement"
TAINT = "sdcrun/silent-data-corruption"


def _slurm(host: str, reason: str, names: dict[str, str | None]) -> list[str]:
    node = _slurm_node(host, names)
    return [
        f"scontrol update NodeName={node} State=DRAIN Reason={shlex.quote(f'[node_problem] {reason} [sdcrun]')}",
        f"# requeue without it: sbatch --exclude={node} YOUR_SCRIPT",
    ]


def _slurm_node(host: str, names: dict[str, str | None]) -> str:
    return names["slurm_node"] or host.partition(".")[0]


def _kubernetes(host: str, reason: str, names: dict[str, str | None]) -> list[str]:
    return [
        _node_of(host, names),
        'kubectl cordon "$NODE"',
        f'kubectl taint nodes "$NODE" {TAINT}=suspect:NoSchedule --overwrite',
        f'kubectl annotate node "$NODE" {TAINT}-reason={shlex.quote(reason)} --overwrite',
    ]


def _node_of(host: str, names: dict[str, str | None]) -> str:
    """A shell line that sets NODE: as the supervisor knew it, else by the host name, which in a pod is the pod's."""
    if names["kubernetes_node"]:
        return f"NODE={names['kubernetes_node']}"
    return f"NODE=$(kubectl get pod {host} -o jsonpath='{{.spec.nodeName}}' 2>/dev/null); NODE=${{NODE:-{host}}}"


def _hyperpod(host: str, reason: str, names: dict[str, str | None]) -> list[str]:
    return [
        REPLACED,
        "# HyperPod on EKS:",
        _node_of(host, names),
        f'kubectl label node "$NODE" {HYPERPOD_LABEL} --overwrite',
        "# HyperPod on Slurm (the reason is matched letter by letter):",
        f"scontrol update node={_slurm_node(host, names)} state=fail reason='Action:Replace'",
    ]


def _gcloud(host: str, reason: str, names: dict[str, str | None]) -> list[str]:
    return [
        "# add --zone=ZONE unless it is configured; IMMEDIATE moves the instance now, FUTURE at the next maintenance",
        f"gcloud compute instances report-host-as-faulty {host.partition('.')[0]} "
        f"--fault-reasons=behavior=SILENT_DATA_CORRUPTION,description={shlex.quote(reason)} "
        "--disruption-schedule=IMMEDIATE",
    ]


PLATFORMS = {"slurm": _slurm, "kubernetes": _kubernetes, "hyperpod": _hyperpod, "gcloud": _gcloud}


def render(report: dict[str, Any], platform: str) -> str:
    """The lines for every suspect of a report, as a shell script of comments and commands. KeyError: no such platform.
    """
    lines_for = PLATFORMS[platform]
    lines = [f"# sdcrun: job {_plain(report['job_id'])}. Nothing has been executed; read before you paste."]
    real = [suspect for suspect in report["suspects"] if not suspect["injected"]]
    if not real:
        why = "all suspects come from --inject-fault" if report["suspects"] else "no device is suspect"
        lines.append(f"# {why}: nothing to do.")
    for suspect in real:
        lines += ["", *_about(suspect)]
        host = suspect["device"]["host"]
        if not suspect["strikes"]:
            lines.append("# no strike: look at data, learning rate and code first; no line is made for it")
        elif all(_is_plain(name) for name in (host, *filter(None, suspect["names"].values()))):
            lines += lines_for(host, _reason(report, suspect), suspect["names"])
        else:
            lines.append("# the host name is not a plain one, so no line is made for it; look it up by hand")
    return "\n".join(lines) + "\n"


def _is_plain(name: str) -> bool:
    """Whether a name may stand in a command as it is. Slurm takes the name ALL, in any case, for every node."""
    return HOST.fullmatch(name) is not None and name.partition(".")[0].lower() != "all"


def _about(suspect: dict[str, Any]) -> list[str]:
    device = suspect["device"]
    known = "".join(f", {key} {_plain(device[key])}" for key in ("model", "serial", "pci") if device[key])
    approved = f", approved by {_plain(suspect['approved_by'])}" if suspect["approved_by"] else ", not approved yet"
    who = f"rank {suspect['rank']}, host {_plain(device['host'])}, {_plain(device['uuid'])}{known}"
    return [
        f"# {suspect['verdict'].upper()}: {who}",
        f"# {words.count(suspect['strikes'], 'strike')}, {suspect['persistence']}, rule {suspect['rule']}{approved}",
    ]


def _reason(report: dict[str, Any], suspect: dict[str, Any]) -> str:
    """One parseable reason, without spaces in values, commas or quotes: "sdc: weights gpu=UUID job=ID"."""
    check = suspect["evidence"][0]["check"] if suspect["evidence"] else suspect["rule"]
    return f"sdc: {_plain(check)} gpu={_plain(suspect['device']['uuid'])} job={_plain(report['job_id'])}"


def _plain(text: Any) -> str:
    """`text` in letters, digits and harmless punctuation, at most 100 characters."""
    return re.sub(r"[^A-Za-z0-9._:/@+-]", "_", str(text))[:100]

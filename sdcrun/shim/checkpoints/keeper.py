"""One save from beginning to end in one rank: verdict, file, sidecar, event; and one load: is it what was saved?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from sdcrun import __version__
from sdcrun.core import saves
from sdcrun.shim import boot
from sdcrun.shim.checkpoints import files, reader
from sdcrun.shim.checkpoints.contents import leaves
from sdcrun.shim.checkpoints.locate import locate_in_tensor
from sdcrun.shim.checkpoints.question import QUERY, Questions
from sdcrun.shim.checkpoints.tables import Saved
from sdcrun.shim.checkpoints.verdict import PROVISIONAL, UNVERIFIED, WITHHELD, Judge, Verdict

SIDECAR_SCHEMA = 1
POLL_SECONDS = 0.02
KEPT_STEPS = 8
MASK = (1 << 64) - 1


class CheckpointWithheld(RuntimeError):
    """Raised into the script by `on_bad_checkpoint: raise`. The contents are in FILE.withheld."""


class Keeper:
    """The checkpoints of one rank."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.questions = Questions(runtime)
        self.judge = Judge(runtime, self.questions)
        self.followers = files.Followers(self._moved)
        self._together = 0
        self._places: dict[str, dict[str, Any]] = {}

    def listen(self, link) -> None:
        """Lets the link answer questions and take the controller's words."""
        link.on(QUERY, self.questions.answer)
        link.on("reply", self._heard)

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, contents: Any, target: Any, writer: Callable[[Any, Any], Any], format: str = "torch") -> Any:
        """Saves `contents` by `writer(contents, target)`; `target` is a path or an object to write to. Raises what the
        writer raises, and CheckpointWithheld where the policy says so; nothing else."""
        contents, verdict = self._verdict(contents)
        if verdict is None:
            return writer(contents, target)
        path, is_path = _path_of(target)
        if verdict.state == WITHHELD:
            return self._withhold(contents, target, path, is_path, writer, verdict, format)
        if is_path:
            describe = self._describer(verdict, format, verdict.state, verdict.reason)
            size = sum(meta[3] for meta in verdict.saved.metas.values())
            result, problem = files.write_whole(
                path, self._mark(), lambda place: writer(contents, place), describe, size=size
            )
            self._no_sidecar(path, problem)
        else:
            result = writer(contents, target)
            self._say_limit(path)
            self._sidecar_beside(path, verdict, format, verdict.state, verdict.reason)
        self._note(path, verdict, verdict.state, verdict.reason)
        return result

    def _verdict(self, contents: Any) -> tuple[Any, Verdict | None]:
        """What is written (with --inject-fault it may be another object) and the verdict on it."""
        try:
            injector = self.runtime.injector
            if injector is not None:
                step = max((group.step - 1 for group in self.runtime.groups.values()), default=0)
                contents = injector.checkpoint(contents, max(step, 0))
            return contents, self.judge.judge(contents)
        except Exception as error:
            boot.trace(f"a save was not checked: {error!r}")
            self.runtime.limit(f"a checkpoint could not be checked: {type(error).__name__}: {error}"[:300])
            return contents, None

    def _withhold(self, contents, target, path, is_path, writer, verdict: Verdict, format: str) -> Any:
        if path is None:
            self._say_limit(None)
            reason = f"DISSENT, but written into memory, where nothing can be withheld: {verdict.reason}"
            if self.runtime.config.on_bad_checkpoint == "raise":
                self._note(None, verdict, WITHHELD, verdict.reason, dissent=True)
                raise CheckpointWithheld(reason)
            result = writer(contents, target)
            self._note(None, verdict, UNVERIFIED, reason, dissent=True)
            return result
        describe = self._describer(verdict, format, WITHHELD, verdict.reason)
        try:
            _, problem = files.write_whole(
                path, self._mark(), lambda place: writer(contents, place), describe, files.WITHHELD
            )
            self._no_sidecar(path, problem)
        except Exception as error:
            # It would not have been the file that the script wants; that there is no room for it is no reason to end.
            self.runtime.limit(f"what was withheld from {path} could not be kept: {error}"[:300])
        if not is_path:
            self._say_limit(path)
        self._note(path + files.WITHHELD, verdict, WITHHELD, verdict.reason, dissent=True)
        self.followers.saved(path, True)
        if self.runtime.config.on_bad_checkpoint == "raise":
            raise CheckpointWithheld(f"{path} was not written (contents in {path}{files.WITHHELD}): {verdict.reason}")
        return None

    def save_together(self, contents: Any, path: str, writer: Callable[[Any, str, Callable[[], None]], Any],
                      coordinator: bool, members: int) -> Any:  # fmt: skip
        """A save in which `members` ranks take part under one path, a folder: they tell each other their verdicts
        first, so that all of them write to the same place. `writer(contents, place, written)` calls `written` once the
        folder is complete; the `coordinator` notes it then."""
        contents, verdict = self._verdict(contents)
        self._together += 1
        state, reason = verdict.state if verdict is not None else "", verdict.reason if verdict is not None else ""
        worst = self._worst_of_all(f"together/{self.runtime.attempt}/{self._together}", state, members)
        if verdict is None:
            return writer(contents, path + files.WITHHELD if worst == WITHHELD else path, lambda: None)
        if worst is None:
            state, reason = UNVERIFIED, f"not all ranks said whether their part is good; here: {reason}"
        elif worst != state:
            state, reason = worst, f"another rank's part is {worst}"
        place = path + files.WITHHELD if state == WITHHELD else path

        def written() -> None:
            if coordinator:
                self._no_sidecar(place, files.write_sidecar(place, self._folder_sidecar(place, verdict, state, reason)))
                self._note(place, verdict, state, reason, dissent=state == WITHHELD)

        result = writer(contents, place, written)
        if state == WITHHELD and self.runtime.config.on_bad_checkpoint == "raise":
            raise CheckpointWithheld(f"{path} was not written (contents in {place}): {reason}")
        return result

    def _worst_of_all(self, name: str, state: str, members: int) -> str | None:
        """The worst state that any of `members` ranks gave to one save of all of them, through torch's own store; None
        when not all have said theirs in time. Not a collective: each rank says its own and looks."""
        store = self.runtime.store
        if store is None or members <= 1:
            return state
        try:
            if state in (UNVERIFIED, WITHHELD):
                store.add(f"{name}/{state}", 1)
            if store.add(f"{name}/said", 1) == members:
                worst = next((s for s in (WITHHELD, UNVERIFIED) if store.add(f"{name}/{s}", 0)), PROVISIONAL)
                store.set(f"{name}/worst", worst)
            deadline = time.monotonic() + self.runtime.config.checkpoint_timeout
            while not store.check([f"{name}/worst"]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_SECONDS)
            return store.get(f"{name}/worst").decode()
        except Exception as error:
            boot.trace(f"verdicts were not exchanged: {error!r}")
            return None

    # -- what is said about a save ----------------------------------------------------------------------------------

    def _describer(self, verdict: Verdict, format: str, state: str, reason: str) -> files.Describe:
        """What makes the sidecar of a complete file."""
        return lambda written: {**self._sidecar(verdict, format, state, reason), "frame": _frame(written)}

    def _sidecar_beside(self, path: str | None, verdict: Verdict, format: str, state: str, reason: str) -> None:
        """The sidecar of what is not, or not surely, complete and closed."""
        if path is not None:
            self._no_sidecar(path, files.write_sidecar(path, self._sidecar(verdict, format, state, reason)))

    def _folder_sidecar(self, place: str, verdict: Verdict, state: str, reason: str) -> dict[str, Any]:
        """The sidecar of a folder. Any rank may have written a tensor on which ranks do not vote (a buffer, which may
        differ from rank to rank): of these it holds what is in the folder now."""
        sidecar = self._sidecar(verdict, "dcp", state, reason)
        try:
            reading = reader.read(place)
            for name, entry in sidecar["table"].items():
                stored = reading.tensors.get(name.replace("/", "."))
                if "voted" not in entry and stored is not None:
                    entry["fingerprint"] = hexadecimal(stored.fingerprint())
            sidecar["frame"] = reading.frame()
        except (OSError, ValueError, NotImplementedError, MemoryError) as error:
            self.runtime.limit(f"{place} could not be read back: {error}"[:300])
        return sidecar

    def _no_sidecar(self, path: str, problem: str | None) -> None:
        if problem is not None:
            self.runtime.limit(f"the sidecar of {os.path.abspath(path)} could not be written: {problem}"[:300])

    def _note(self, path: str | None, verdict: Verdict, state: str, reason: str, dissent: bool = False) -> None:
        """The event of a save that is written. Never raises."""
        try:
            group = verdict.group
            self._remember(group, verdict.step)
            place = os.path.abspath(path) if path is not None else f"(in memory, save {verdict.id})"
            said = {
                "path": place, "step": verdict.step, "state": state, "reason": reason, "id": verdict.id,
                "rank": self.runtime.rank, "dissent": dissent, "differing": verdict.differing[:16],
            }  # fmt: skip
            if path is not None:
                if state != WITHHELD:
                    self.followers.saved(place, False)
                self._places[place] = said
            self.runtime.emit("checkpoint", said)
        except Exception as error:
            boot.trace(f"a checkpoint was not noted: {error!r}")

    def _sidecar(self, verdict: Verdict, format: str, state: str, reason: str) -> dict[str, Any]:
        config, saved = self.runtime.config, verdict.saved
        device, audited = self.runtime.device_key, verdict.group.last_clean_audit
        return {
            "schema": SIDECAR_SCHEMA, "sdcrun": __version__, "id": verdict.id, "job": config.job_id,
            "job_dir": config.job_dir, "attempt": self.runtime.attempt, "rank": self.runtime.rank,
            "saved_at": time.time(), "step": verdict.step, "state": state, "reason": reason, "format": format,
            "parts": [{"place": f.part.place, "kind": f.part.kind, "state": f.state, "step": f.step, "how": f.how,
                       "reason": f.reason} for f in verdict.findings],
            "last_clean_audit": {device: audited} if device is not None and audited is not None else {},
            "differing": verdict.differing[:16], "table": sidecar_table(saved, verdict.voted),
            "unreadable": saved.unreadable,
        }  # fmt: skip

    def _remember(self, group, step: int | None) -> None:
        """Feeds the forecast of the next save; asks for an audit of the next step where this one was not foreseen."""
        steps = group.save_steps
        if step is None or steps and steps[-1] >= step:
            return
        steps.append(step)
        del steps[:-KEPT_STEPS]
        if group.last_audit_step is None or step - group.last_audit_step >= saves.SHORTEST:
            group.wanted.add("audit")

    def _say_limit(self, path: str | None) -> None:
        if path is None:
            self.runtime.limit(
                "a checkpoint is saved into memory: its tensors are checked, but nothing can be withheld and there is "
                "no sidecar, since where it goes is not known"
            )
        else:
            self.runtime.limit(
                "a checkpoint is saved into a file that the script had opened (and so emptied) itself: a kill leaves "
                "half of it, and where it is withheld the file stays empty"
            )

    def _moved(self, source: str, goal: str) -> None:
        """A checkpoint has another path now."""
        said = self._places.get(source)
        if said is not None:
            self._places[goal] = {**said, "path": goal}
            self.runtime.emit("checkpoint", {**said, "path": goal, "was": source})

    def _mark(self) -> str:
        return f"{self.runtime.rank}-{self.runtime.config.job_id}"[:60]

    def _heard(self, data: Any) -> None:
        """In the link thread: the controller's words on a checkpoint's state, or a rank that has left."""
        if not isinstance(data, dict):
            return
        self.questions.heard(data)
        change = data.get("checkpoint")
        if isinstance(change, dict):
            changes = {key: change[key] for key in ("state", "reason", "last_clean_audit") if key in change}
            files.update_sidecar(str(change.get("path")), str(change.get("id")), changes)

    # -- loading ----------------------------------------------------------------------------------------------------

    def loaded(self, contents: Any, path: str) -> None:
        """Compares what was loaded from `path` with its sidecar; a difference is said at once."""
        sidecar = files.read_sidecar(path)
        table = sidecar.get("table") if sidecar is not None else None
        if not isinstance(table, dict):
            return
        found = [leaf for leaf in leaves(contents) if leaf.name in table]
        saved, differing = Saved(found), []
        for name, row in saved.rows.items():
            entry = table[name]
            dtype, shape, _, _ = saved.metas[name]
            if dtype.removeprefix("torch.") != entry.get("dtype") or list(shape) != entry.get("shape"):
                continue
            expected = entry.get("fingerprint")
            if expected == hexadecimal(row):
                continue
            word = locate_in_tensor(saved.leaves[name].tensor, (int(expected[:16], 16), int(expected[16:], 16)))
            itemsize = saved.leaves[name].tensor.element_size()
            differing.append({
                "tensor": name, "text": word.text(itemsize) if word else None, "bits": word.bits if word else [],
                "index": word.index * 4 // itemsize if word else None,
            })  # fmt: skip
        if differing:
            step = max((group.step for group in self.runtime.groups.values()), default=0)
            self.runtime.emit(
                "loaded", {"path": os.path.abspath(path), "step": step, "id": sidecar.get("id"),
                           "differing": differing[:16], "count": len(differing)},
            )  # fmt: skip


def hexadecimal(row: tuple[int, int]) -> str:
    """A fingerprint as 32 hexadecimal digits."""
    return f"{row[0] & MASK:016x}{row[1] & MASK:016x}"


def sidecar_table(saved: Saved, voted: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Name in the file -> {dtype, shape, bytes, fingerprint, voted?} of every tensor of a save; `voted` maps names to
    those in the ranks' tables."""
    table = {}
    for name, row in saved.rows.items():
        dtype, shape, _, nbytes = saved.metas[name]
        table[name] = {
            "dtype": dtype.removeprefix("torch."), "shape": list(shape) if isinstance(shape, tuple) else [],
            "bytes": nbytes, "fingerprint": hexadecimal(row),
            **({"voted": voted[name]} if name in voted else {}),
        }  # fmt: skip
    return table


def _frame(path: str) -> str | None:
    """Digest of what in the file is no tensor, None where it cannot be told."""
    try:
        return reader.read(path).frame()
    except (OSError, ValueError, NotImplementedError):
        return None


def _path_of(target: Any) -> tuple[str | None, bool]:
    """(path, whether the target is the path itself). An open file has a path, a buffer has none."""
    if isinstance(target, (str, os.PathLike)):
        path = os.fspath(target)
        return (path, True) if isinstance(path, str) else (os.fsdecode(path), True)
    name = getattr(target, "name", None)
    if isinstance(name, (str, os.PathLike)) and os.path.isfile(name):
        return os.path.abspath(os.fspath(name)), False
    return None, False

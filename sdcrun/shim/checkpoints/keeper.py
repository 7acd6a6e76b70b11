"""One save from beginning to end in one rank: verdict, file, sidecar, event."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import Any

from sdcrun import __version__
from sdcrun.core import saves
from sdcrun.shim import boot
from sdcrun.shim.checkpoints import files, reader
from sdcrun.shim.checkpoints.followers import Followers
from sdcrun.shim.checkpoints.loads import hexadecimal, sidecar_table
from sdcrun.shim.checkpoints.opened import Held, Opened
from sdcrun.shim.checkpoints.question import QUERY, Questions
from sdcrun.shim.checkpoints.verdict import PROVISIONAL, UNVERIFIED, WITHHELD, Judge, Verdict

SIDECAR_SCHEMA = 1
POLL_SECONDS = 0.02
KEPT_STEPS = 8


class CheckpointWithheld(RuntimeError):
    """Raised into the script by `on_bad_checkpoint: raise`. The contents are in FILE.withheld."""


class Keeper:
    """The checkpoints of one rank."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.questions = Questions(runtime)
        self.judge = Judge(runtime, self.questions)
        self.followers = Followers(self._moved, runtime.limit)
        self.opened = Opened(self.followers, self._mark)
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
            self._note(path, verdict, verdict.state, verdict.reason)
            return result
        if isinstance(target, Held):
            return self._save_held(contents, target, writer, verdict, format)
        result = writer(contents, target)
        self._say_limit(path)
        self._sidecar_beside(path, verdict, format, verdict.state, verdict.reason)
        self._note(path, verdict, verdict.state, verdict.reason)
        return result

    def _save_held(self, contents: Any, target: Held, writer, verdict: Verdict, format: str) -> Any:
        """Into a file that the script has opened over an older checkpoint: settled when it is closed."""
        target.saves += 1
        try:
            result = writer(contents, target)
        except BaseException:
            target.failed = True
            raise

        def settled(problem: str | None) -> None:
            self._no_sidecar(target.place, problem)
            self._note(target.place, verdict, verdict.state, verdict.reason)

        target.describe, target.settled = self._describer(verdict, format, verdict.state, verdict.reason), settled
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
            return self._withhold_memory(contents, target, writer, verdict, format)
        describe = self._describer(verdict, format, WITHHELD, verdict.reason)
        try:
            _, problem = files.write_whole(
                path, self._mark(), lambda place: writer(contents, place), describe, files.WITHHELD
            )
            self._no_sidecar(path, problem)
        except Exception as error:
            # It would not have been the file that the script wants; that there is no room for it is no reason to end.
            self.runtime.limit(f"what was withheld from {path} could not be kept: {error}"[:300])
        if isinstance(target, Held):
            target.withheld = True
        elif not is_path:
            self._say_limit(path)
            _remove_emptied(target, path)
        older = is_path or isinstance(target, Held)
        self._note(path + files.WITHHELD, verdict, WITHHELD, verdict.reason, dissent=True, older=older)
        self.followers.saved(path, True)
        if self.runtime.config.on_bad_checkpoint == "raise":
            raise CheckpointWithheld(f"{path} was not written (contents in {path}{files.WITHHELD}): {verdict.reason}")
        return None

    def _withhold_memory(self, contents, target, writer, verdict: Verdict, format: str) -> Any:
        """Into memory: the script gets its bytes, and no file that it opens from now on and writes them to."""
        self._say_limit(None)
        place = f"(in memory, save {verdict.id})"
        if self.runtime.config.on_bad_checkpoint == "raise":
            self._note(None, verdict, WITHHELD, verdict.reason, dissent=True)
            raise CheckpointWithheld(f"not saved into memory: {verdict.reason}")

        def found(path: str, contents: str) -> None:
            sidecar = {**self._sidecar(verdict, format, WITHHELD, verdict.reason), "frame": _frame(contents)}
            self._no_sidecar(path, files.write_sidecar(contents, sidecar))
            self._note(contents, verdict, WITHHELD, verdict.reason, dissent=True, was=place)

        start = target.tell() if isinstance(target, io.BytesIO) else None
        result = writer(contents, target)
        if start is not None:
            with target.getbuffer() as whole:
                self.opened.saved_in_memory(whole[start:], found)
        reason = f"DISSENT, in memory: {verdict.reason}"
        self._note(None, verdict, UNVERIFIED, reason, dissent=True)
        return result

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

        def describe(written: str) -> dict[str, Any]:
            sidecar = self._sidecar(verdict, format, state, reason)
            return {**sidecar, "frame": _frame(written), "written": files.written(written)}

        return describe

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
            sidecar.update(frame=reading.frame(), written=files.written(place))
        except (OSError, ValueError, NotImplementedError, MemoryError) as error:
            self.runtime.limit(f"{place} could not be read back: {error}"[:300])
        return sidecar

    def _no_sidecar(self, path: str, problem: str | None) -> None:
        if problem is not None:
            self.runtime.limit(f"the sidecar of {os.path.abspath(path)} could not be written: {problem}"[:300])

    def _note(self, path: str | None, verdict: Verdict, state: str, reason: str, dissent: bool = False,
              older: bool = True, was: str | None = None) -> None:  # fmt: skip
        """The event of a save that is written. `older`: an older file of that name is as it was; `was`: what the save
        has been called before. Never raises."""
        try:
            group = verdict.group
            self._remember(group, verdict.step)
            place = os.path.abspath(path) if path is not None else f"(in memory, save {verdict.id})"
            said = {
                "path": place, "step": verdict.step, "state": state, "reason": reason, "id": verdict.id,
                "rank": self.runtime.rank, "dissent": dissent, "differing": verdict.differing[:16],
                **({} if older else {"older": False}),
            }  # fmt: skip
            if path is not None:
                if state != WITHHELD:
                    self.followers.saved(place, False)
                self._places[place] = said
            self.runtime.emit("checkpoint", said if was is None else {**said, "was": was})
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
                "a checkpoint is saved into memory: its tensors are checked, but it has no sidecar, and of a bad one "
                "only a file that the script opens after the save can be withheld, not what is sent elsewhere"
            )
        else:
            self.runtime.limit(
                "a checkpoint is saved into a file that the script has opened itself: a kill leaves half of it where "
                "there is no older one"
            )

    def _moved(self, source: str, goal: str, kept: bool) -> None:
        """A checkpoint has another path now, or one more."""
        said = self._places.get(source)
        if said is not None:
            self._places[goal] = {**said, "path": goal}
            self.runtime.emit("checkpoint", {**said, "path": goal, "copied" if kept else "was": source})

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


def _frame(path: str) -> str | None:
    """Digest of what in the file is no tensor, None where it cannot be told."""
    try:
        return reader.read(path).frame()
    except (OSError, ValueError, NotImplementedError):
        return None


def _remove_emptied(target: Any, path: str) -> None:
    """Removes the file that the script's own `open` has made or emptied: none is better than one without contents.

    Files of another kind than `open` gives stay, for a temporary one is removed by the one who has made it.
    """
    try:
        if type(target) in (io.BufferedWriter, io.FileIO, io.BufferedRandom) and target.tell() == 0:
            status = os.fstat(target.fileno())
            if status.st_size == 0 and os.path.samestat(status, os.stat(path)):
                files.unlink(path)
        files.quietly(files.unlink, files.sidecar_of(path))
    except (OSError, ValueError) as error:
        boot.trace(f"{path} stays empty: {error!r}")


def _path_of(target: Any) -> tuple[str | None, bool]:
    """(path, whether the target is the path itself). An open file has a path, a buffer has none."""
    if isinstance(target, (str, os.PathLike)):
        path = os.fspath(target)
        return (path, True) if isinstance(path, str) else (os.fsdecode(path), True)
    if isinstance(target, Held):
        return target.place, False
    name = getattr(target, "name", None)
    if isinstance(name, (str, os.PathLike)) and os.path.isfile(name):
        return os.path.abspath(os.fspath(name)), False
    return None, False

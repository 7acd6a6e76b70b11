"""What clients and the controller say to each other once both are proven: hello, events, acknowledgements, queries."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from sdcrun import __version__
from sdcrun.core.codec import CodecError, decode_line, encode_message, message_of, whole_lines
from sdcrun.core.types import EVENT_SCHEMA, Config
from sdcrun.report.store import EVENTS, approvals
from sdcrun.runner.copies import PREFIX, Copies
from sdcrun.runner.intake import Intake
from sdcrun.runner.outages import Absences, Outages
from sdcrun.runner.server import Connection, Server
from sdcrun.wire.spool import spool_folder, spool_name

HOLD_ABOVE = 16 << 20
SUMMARIES_PER_SECOND = 50.0
SUMMARY_AT_MOST_EVERY = 60.0
MAX_ASK_TIME = 600.0
FINISH_AT_MOST = 600.0
# A client that cannot reach its controller tries again every few seconds.
LATE_SECONDS = 5.0


class _Ask:
    """A question that is out: who asked, whose answers are missing, what was answered by whom."""

    def __init__(self, asker: Connection, key: str, waiting: set[Connection], deadline: float) -> None:
        self.asker, self.key, self.waiting, self.deadline = asker, key, waiting, deadline
        self.answers: list[tuple[Any, list[str]]] = []

    def add(self, source: str, answer: Any) -> None:
        """Ranks that agree share one entry: thousands of equal answers stay one short line."""
        for known, sources in self.answers:
            if known == answer:
                sources.append(source)
                return
        self.answers.append((answer, [source]))


class Conversation:
    """The server's handler: turns lines into intake, and intake's acknowledgements and actions into lines.

    `server` is set right after construction (each needs the other).
    """

    server: Server

    def __init__(self, config: Config, intake: Intake, say: Callable[[str], None], log: Callable[[str], None]) -> None:
        self._config, self._intake, self._say, self._log = config, intake, say, log
        self._outages, self._absences = Outages(), Absences()
        self._owed_acks: dict[Connection, dict[int, None]] = {}
        self._asks: dict[str, _Ask] = {}
        self._copies = Copies(
            os.path.join(config.job_dir, EVENTS),
            lambda connection, line: self.server.send(connection, line),
            lambda connection, why: self.server.close(connection, why),
        )
        self._held: tuple[int, list[tuple[Connection, int, int]]] | None = None
        self._successor: dict[str, Any] | None = None
        self._began = time.monotonic()
        self._ticked = (time.monotonic(), time.time())
        self._complained = False
        self._approvals: set[str] = set()
        self._open_at = 0.0
        self.finisher: Connection | None = None
        self.finish_by: float | None = None
        self._late_by = 0.0

    # -- Handler ------------------------------------------------------------------------------------------------

    def lines(self, connection: Connection, lines: list[bytes]) -> None:
        """Act on lines of a proven client."""
        for line in lines:
            values = decode_line(line)
            if not connection.source:
                message_of(values, "hello")
                self._hello(connection, values)
            elif "msg" in values:
                self._message(connection, values)
            elif (values.get("source"), values.get("session")) != (connection.source, connection.session):
                raise CodecError("an event of somebody else")
            else:
                event = self._intake.take(values, line)
                self._owed_acks.setdefault(connection, {})[event.attempt] = None

    def gone(self, connection: Connection) -> None:
        """A proven client is away."""
        self._owed_acks.pop(connection, None)
        for ask in self._asks.values():
            ask.waiting.discard(connection)
        self._copies.gone(connection)
        if connection.source and not connection.source.startswith(PREFIX):
            self._absences.left(connection.source, connection.session, time.monotonic(), time.time())

    # -- messages -----------------------------------------------------------------------------------------------

    def _hello(self, connection: Connection, values: dict[str, Any]) -> None:
        source, session, seen = values.get("source"), values.get("session"), values.get("seen")
        if not all(type(text) is str and 0 < len(text) <= 256 for text in (source, session)):
            raise CodecError("hello without source and session")
        if values.get("schema") != EVENT_SCHEMA or values.get("version") != __version__:
            theirs = f"sdcrun {str(values.get('version'))[:40]}, schema {str(values.get('schema'))[:10]}"
            why = f"{theirs} is not sdcrun {__version__}, schema {EVENT_SCHEMA}; install the same version on every node"
            self._say(f"refused {source!r}: {why}")
            self.server.send(connection, encode_message("refused", why=why))
            raise CodecError(f"refused, {theirs}")
        if not self._intake.opened:
            self._open(time.monotonic())
        connection.source, connection.session = source, session
        now = time.monotonic()
        for earlier in self._absences.came(source, session):
            self._read_spool(source, earlier)
        self._note_blindness(connection, values.get("blind"))
        written = self._intake.write(now)
        commands = self._intake.commands
        self.server.send(
            connection,
            encode_message(
                "welcome",
                acked=self._intake.acked(source, session) if written and self._copied else {},
                summary_every=self._summary_every(now),
                command=len(commands),
            ),
        )
        if source.startswith("rank:") and type(seen) is int and seen >= 0:
            for command in commands[seen:]:
                self.server.send(connection, encode_message("command", **command))
        if self._intake.owes_stop(source):
            self.server.send(connection, encode_message("stop", **(self._intake.stop or {})))
        if source.startswith("node:") and self._successor is not None:
            self.server.send(connection, encode_message("next", address=self._successor))

    @property
    def _copied(self) -> bool:
        """Whether all that is on the record is on its copy, too, if there is one."""
        return not self._copies.following or self._copies.copied >= self._copies.size

    def _summary_every(self, now: float) -> float:
        """Seconds between two summaries of a client: rarer in large jobs and old ones, to keep the record small."""
        crowd = len(self.server.clients) / SUMMARIES_PER_SECOND
        age = min((now - self._began) / 60.0, SUMMARY_AT_MOST_EVERY)
        return max(self._config.summary_every, crowd, age)

    def _note_blindness(self, connection: Connection, blind: Any) -> None:
        if blind is None:
            return
        if type(blind) is not dict or not all(type(blind.get(key)) in (int, float) for key in ("since", "until")):
            raise CodecError("malformed blindness")
        reason = str(blind.get("reason"))[:200]
        self._outages.add(time.monotonic(), connection.source, blind["since"], blind["until"], reason)

    def _message(self, connection: Connection, values: dict[str, Any]) -> None:
        msg = message_of(values, "ping", "goodbye", "blind", "ask", "answer", "finish", "follow", "copied")
        if msg == "ping":
            self.server.send(connection, encode_message("pong"))
        elif msg == "blind":
            self._note_blindness(connection, values)
        elif msg == "ask":
            self._ask(connection, values)
        elif msg == "answer":
            ask = self._asks.get(str(values.get("id")))
            if ask is not None and connection in ask.waiting:
                ask.waiting.discard(connection)
                ask.add(connection.source, values.get("data"))
        elif msg == "finish":
            self._finish(connection, values.get("grace"))
        elif msg == "follow":
            self._copies.follow(connection, values, self._intake.session)
        elif msg == "copied":
            self._copies.took(connection, values.get("upto"))
        else:
            self.server.close(connection)
            self._absences.came(connection.source, connection.session)

    def _finish(self, connection: Connection, grace: Any) -> None:
        if type(grace) not in (int, float) or not 0 <= grace <= FINISH_AT_MOST:
            raise CodecError("finish without a grace time")
        self.finisher = connection
        self.finish_by = time.monotonic() + grace
        self._late_by = time.monotonic() + min(grace, LATE_SECONDS)

    def _ask(self, connection: Connection, values: dict[str, Any]) -> None:
        key, kind, limit = values.get("id"), values.get("kind"), values.get("timeout")
        if type(key) is not str or type(kind) is not str or type(limit) not in (int, float):
            raise CodecError("malformed question")
        ranks = {client for client in self.server.clients if client.source.startswith("rank:")}
        own = secrets.token_hex(8)
        deadline = time.monotonic() + max(0.0, min(limit, MAX_ASK_TIME))
        self._asks[own] = _Ask(connection, key, ranks, deadline)
        query = encode_message("query", id=own, kind=kind, data=values.get("data"))
        for rank in list(ranks):
            self.server.send(rank, query)

    # -- between two turns of the server ------------------------------------------------------------------------

    def settle(self) -> None:
        """After a turn: decide, write, acknowledge, act, answer."""
        actions = list(self._intake.actions())
        now = time.monotonic()
        if not self._intake.opened and self._complained:
            self._open(now)
        written = self._intake.write(now)
        self.server.hold_reading(not written and self._intake.unwritten > HOLD_ABOVE)
        self._copies.turn(now)
        if written:
            self._acknowledge()
        if self._copies.successor != self._successor:
            self._successor = self._copies.successor
            self._send_to("node:", encode_message("next", address=self._successor))
        for action in actions:
            self._act(action.kind, action.data)
        for own, ask in list(self._asks.items()):
            if not ask.waiting or now >= ask.deadline:
                del self._asks[own]
                self._reply(ask)

    def _acknowledge(self) -> None:
        """All is on the record: acknowledge it, or note what to acknowledge once the copy is as long."""
        if self._held is not None and (not self._copies.following or self._copies.copied >= self._held[0]):
            for connection, attempt, seq in self._held[1]:
                self.server.send(connection, encode_message("ack", attempt=attempt, seq=seq))
            self._held = None
        if self._owed_acks and self._held is None:
            owed, self._owed_acks = self._owed_acks, {}
            rows = []
            for connection, attempts in owed.items():
                seqs = self._intake.acked(connection.source, connection.session)
                rows += [(connection, attempt, seqs[attempt]) for attempt in attempts]
            self._held = self._copies.size, rows
            if not self._copies.following:
                self._acknowledge()

    def _reply(self, ask: _Ask) -> None:
        try:
            self.server.send(ask.asker, encode_message("reply", id=ask.key, answers=ask.answers))
        except CodecError:
            self._log("the answers to a question are too long for one line")
            self.server.send(ask.asker, encode_message("reply", id=ask.key, answers=[]))

    def _act(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "say":
            self._say(str(data.get("text")))
        elif kind == "command":
            self._send_to("rank:", encode_message("command", **data))
        elif kind == "stop":
            self._send_to("node:", encode_message("stop", code=data.get("code"), why=data.get("why")))
        elif kind == "reply":
            reply = encode_message("reply", data={key: value for key, value in data.items() if key != "to"})
            self._send_to(str(data.get("to")), reply)
        else:
            self._log(f"unknown action {kind!r}")

    def _send_to(self, prefix: str, line: bytes) -> None:
        exact = not prefix.endswith(":")
        for client in list(self.server.clients):
            if client.source == prefix or (not exact and client.source.startswith(prefix)):
                self.server.send(client, line)

    def _open(self, now: float) -> None:
        if now < self._open_at:
            return
        try:
            self._intake.open()
        except OSError as error:
            self._open_at = now + 1.0
            if not self._complained:
                self._complained = True
                self._say(f"cannot open the record in {self._config.job_dir} ({error}); training goes on, trying again")

    def tick(self) -> None:
        """Once a second: time-outs, absences, and whether this process itself was stopped."""
        now, wall = time.monotonic(), time.time()
        since, self._ticked = self._ticked, (now, wall)
        if not self._intake.opened:
            return
        if now - since[0] > 8.0:
            self._outages.add(now, "controller", since[1], wall, "the controller was paused")
        self._intake.tick(wall)
        self._take_approvals()
        for source, session in self._absences.spools_due(now):
            self._read_spool(source, session)
        for source, away_since in self._absences.lost(now):
            self._outages.add(now, source, away_since, None, "no connection, and none since")
        for statement in self._outages.due(now):
            self._intake.own("blind", statement)

    # -- spools and the end -------------------------------------------------------------------------------------

    def others_due(self) -> bool:
        """Whether clients other than the one that asked to finish are connected, or supervisors that have said nothing
        yet may still come: those of a job that was over as soon as it began."""
        others = (client.source for client in self.server.clients if client is not self.finisher)
        if any(source and not source.startswith(PREFIX) for source in others):
            return True
        return self._intake.awaits_supervisors and time.monotonic() < self._late_by

    def finish(self) -> bool:
        """Take in the spools of the dead, write, delete them. True when all is on record."""
        if not self._intake.opened:
            return True
        folder = spool_folder(self._config.job_dir)
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".jsonl"))
        except OSError:
            names = []
        for name in names:
            self._take_spool(os.path.join(folder, name))
        self._take_approvals()
        for statement in self._outages.due(time.monotonic(), everything=True):
            self._intake.own("blind", statement)
        self._intake.tick(time.time())
        self.settle()
        if not self._intake.write(float("inf")):
            return False
        self._copies.over()
        alive = {spool_name(client.source, client.session) for client in self.server.clients if client.source}
        for name in names:
            if name not in alive:
                _unlink(os.path.join(folder, name))
        try:
            os.rmdir(folder)
        except OSError:
            pass
        return True

    def _take_approvals(self) -> None:
        """What people have decided about this job's suspects since the last look."""
        for path in map(str, approvals(self._config.job_dir)):
            if path not in self._approvals:
                self._approvals.add(path)
                self._take_spool(path)

    def _read_spool(self, source: str, session: str) -> None:
        self._take_spool(os.path.join(spool_folder(self._config.job_dir), spool_name(source, session)))

    def _take_spool(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            return
        for line in whole_lines(content):
            try:
                self._intake.take(decode_line(line), line)
            except CodecError as error:
                self._log(f"a line of {path} is unreadable: {error}")


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass

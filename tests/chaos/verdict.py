"""What became of the threads, read from the database and from the outside world's count."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from keepstep.errors import KeepstepError
from keepstep.runtime.history import verify
from keepstep.runtime.reader import Reader
from keepstep.store import checkpoints
from keepstep.store.engine import Store
from tests.chaos.workload import Database, Job
from tests.crash.outside import Outside


@dataclass
class Verdict:
    """How many threads have which fate, and why those that should not."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)

    def blame(self, fate: str, job: Job, reason: str) -> None:
        """Count a thread under a fate that needs a reason."""
        self.counts[fate] += 1
        self.reasons.append(f"{fate}: {job.thread}: {reason}")


def judge(jobs: Sequence[Job], database: Database, outside: Outside) -> Verdict:
    """Return the fates of accepted jobs; each thread has one, the worst."""
    verdict = Verdict()
    store = Store.open(database.url)
    reader = Reader(store=store)
    try:
        for job in jobs:
            fate, reason = _fate(job, database, store, reader, outside)
            if fate == "done":
                verdict.counts[fate] += 1
            else:
                verdict.blame(fate, job, reason)
    finally:
        reader.close()
        store.dispose()
    return verdict


def _fate(job: Job, database: Database, store: Store, reader: Reader, outside: Outside) -> tuple[str, str]:
    rows = database.query(
        "SELECT id, status, error, seq, checkpoint_id FROM keepstep_thread WHERE name = :name", name=job.thread
    )
    if not rows:
        return "lost", "it was accepted and is not there"
    [(runs,)] = database.query(
        "SELECT count(*) FROM keepstep_run r JOIN keepstep_thread t ON t.id = r.thread_id WHERE t.name = :name",
        name=job.thread,
    )
    if len(rows) > 1 or runs > 1:
        return "duplicated", f"{len(rows)} threads, {runs} runs"
    thread_id, status, error, seq, head = rows[0]
    calls = outside.calls(job.thread)
    twice = [name for name in job.paid if calls.get(name, 0) > 1]
    if twice:
        return "duplicated", f"{twice} happened more than once: {calls}"
    crooked = _crooked(store, thread_id, seq, head)
    if crooked:
        return "divergent", crooked
    if status == "done":
        return _done(job, reader, outside)
    code = json.loads(error)["code"] if error else ""
    if status == "blocked" and code in {"effect_unknown", "diverged"}:
        return ("unknown" if code == "effect_unknown" else "divergent"), str(error)
    return "stuck", f"{status}: {error}"


def _crooked(store: Store, thread_id: str, seq: int, head: str | None) -> str:
    """Return what is wrong with a history; nothing when it is one unbroken line that ends at the head."""
    rows = [row for row, _ in checkpoints.history(store, thread_id, 0)]
    try:
        verify(rows)
    except KeepstepError as error:
        return error.message
    if [row.seq for row in rows] != list(range(seq + 1)):
        return f"the history is {[row.seq for row in rows]}, its head {seq}"
    if [row.parent_id for row in rows] != [None, *(row.id for row in rows[:-1])][: len(rows)]:
        return "a checkpoint's parent is not the one before it"
    return "" if not rows or rows[-1].id == head else "the head is not the last checkpoint"


def _done(job: Job, reader: Reader, outside: Outside) -> tuple[str, str]:
    calls, log = outside.calls(job.thread), tuple(reader.state(job.thread).get("log", ()))
    left_out = [name for name in (*job.paid, *job.read) if calls.get(name, 0) == 0]
    if left_out or len(log) < len(job.log):
        return "lost", f"done without {left_out or job.log}: {log}"
    if log != job.log:
        return "divergent", f"its state is {log} instead of {job.log}"
    keys = {name: len(outside.keys(job.thread, name)) for name in (*job.paid, *job.read)}
    if any(number != 1 for number in keys.values()):
        return "divergent", f"an effect has several keys: {keys}"
    return "done", ""

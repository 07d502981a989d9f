"""The connection is cut during a write, before the database has it or after; the worker finds out which and goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest

from tests.crash import evidence
from tests.crash.conftest import AGENTS
from tests.servers import Proxy, running
from tests.worker.deployment import deployed, eventually

COMMIT = b"COMMIT"


@dataclass(frozen=True)
class Cut:
    """A write whose connection is cut."""

    name: str
    needle: bytes
    """What only this write sends to the database when the trap is set."""
    graph: str
    held: str = ""
    """The call during which the trap is set; none: before the start."""
    after: bytes = b""
    """What its connection sends before: others commit, too."""
    seats: int = 0
    starts: Mapping[str, int] = field(default_factory=dict)
    """Node runs that are started more than once when the write had landed."""
    is_left: bool = False
    """A write that had landed looks like another's to the worker, which leaves what follows to the sweep."""


CUTS = [
    Cut("start", COMMIT, "errand", after=b"INSERT INTO keepstep_run"),
    Cut("claim", b"FROM keepstep_claim_thread_", "errand", "walk", starts={"home": 2}),
    Cut("input", b"FROM keepstep_commit_", "errand"),
    Cut("intent", COMMIT, "errand", "walk", after=b"INSERT INTO keepstep_effect"),
    Cut("result", b"UPDATE keepstep_effect", "errand", "walk"),
    Cut("commit", b"FROM keepstep_commit_", "errand", "walk"),
    Cut("last-commit", COMMIT, "slow_bank", "transfer", after=b"FROM keepstep_commit_"),
    Cut("park", COMMIT, "doubtful", "walk", after=b"INSERT INTO keepstep_wait", is_left=True),
    Cut("fan-out", COMMIT, "crowd", "walk", after=b"INSERT INTO keepstep_node_run", seats=-3, is_left=True),
    Cut("claim-of-a-node-run", b"FROM keepstep_claim_node_", "crowd", "walk", seats=-3, starts={"guest#0": 2}),
    Cut("pending-write", COMMIT, "crowd", "walk", after=b"UPDATE keepstep_node_run", seats=3, is_left=True),
    Cut("last-pending-write", COMMIT, "crowd", "walk", after=b"UPDATE keepstep_node_run", seats=2, is_left=True),
]


@pytest.fixture(scope="module")
def behind_a_proxy(tmp_path_factory, module_database, postgresql_server, redis_server, outside):
    """A deployment whose only worker reaches the database through a proxy; and the proxy."""
    redis_server.flush()
    proxy = Proxy(postgresql_server.socket_path)
    database = urlsplit(module_database).path.removeprefix("/")
    url = f"postgresql+psycopg2://postgres@127.0.0.1:{proxy.port}/{database}?sslmode=disable"
    # A window that no worker misses on a busy machine.
    times = {"renew_seconds": 0.5, "liveness_window_seconds": 10.0}
    folder = tmp_path_factory.mktemp("cut")
    with running(proxy), deployed(folder, url, redis_server.url, module_database, graphs=AGENTS, **times) as deployment:
        deployment.environment["KEEPSTEP_TEST_OUTSIDE"] = outside.address
        deployment.worker(concurrency=1)
        yield deployment, proxy


def settled(deployment, thread, status):
    """Wait for a status, and let the time pass in which nudges are waited for that were never published."""

    def look():
        evidence.hasten(deployment)
        return deployment.statuses().get(thread) == status

    try:
        eventually(look, seconds=60, what=f"{thread} {status}")
    except AssertionError:
        deployment.ended(thread, status=status, seconds=0)


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_a_write_is_cut(behind_a_proxy, outside, cut, landed):
    deployment, proxy = behind_a_proxy
    [worker] = deployment.workers
    thread = f"{cut.name}-held-{'landed' if landed else 'lost'}"
    trap = proxy.lose_reply if landed else proxy.lose_request

    if cut.held:
        outside.hold(cut.held, thread)
        deployment.start(cut.graph, thread, seats=cut.seats)
        outside.called(cut.held, thread)
        trap(cut.needle, after=cut.after)
        outside.let_go(cut.held, thread)
    else:
        trap(cut.needle, after=cut.after)
        deployment.start(cut.graph, thread, seats=cut.seats)
    assert proxy.lost.wait(60)
    if cut.graph == "doubtful":
        settled(deployment, thread, "waiting")
        [(approval,)] = deployment.query(
            "SELECT a.id FROM keepstep_approval a JOIN keepstep_thread t ON t.id = a.thread_id WHERE t.name = :name",
            name=thread,
        )
        deployment.client.approve(approval, by="anna")
    settled(deployment, thread, "done")

    check(deployment, outside, thread, cut, landed=landed)
    left = [event for event in worker.events("lease_lost") if event["thread"] == thread]
    assert len(left) == (cut.is_left and landed)
    assert worker.process.poll() is None


def check(deployment, outside, thread, cut, *, landed):
    starts = {
        "errand": [{}, {"go": 1}, {"home": 1}],
        "slow_bank": [{}, {"transfer": 1}],
        "doubtful": [{}, {"doubt": 2}],
        "crowd": [{}, {"invite": 1}, {f"guest#{number}": 1 for number in range(abs(cut.seats))}, {"toast": 1}],
    }[cut.graph]
    calls = {
        "errand": {"enter-go": 1, "shop": 1, "walk": 1, "goods": 1, "enter-home": 1},
        "slow_bank": {"enter-transfer": 1, "transfer": 1},
        "doubtful": {"enter-doubt": 2, "walk": 1},
        "crowd": {
            "enter-invite": 1,
            "walk": 1 + (cut.seats < 0),
            "enter-toast": 1,
            **{f"{what}{number}": 1 for number in range(abs(cut.seats)) for what in ("guest", "enter-guest")},
        },
    }[cut.graph]
    again = cut.starts if landed else {}
    assert [runs for _, runs in evidence.history(deployment, thread)] == [
        {run: again.get(run, times) for run, times in step.items()} for step in starts
    ]
    assert outside.calls(thread) == calls
    assert set(evidence.journal(deployment, thread).values()) <= {("done", 1)}
    assert evidence.count(deployment, "run", thread, "x.status = 'done'") == 1
    assert evidence.count(deployment, "approval", thread) == (cut.graph == "doubtful")

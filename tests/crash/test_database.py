"""The database drops connections and is started again, under work."""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlsplit

import pytest

from tests.conftest import _migrate
from tests.crash import evidence

pytestmark = pytest.mark.kill


@pytest.fixture(params=["plain", "tls"])
def reached(request, deploy, postgresql_url, redis_url):
    """A deployment whose workers reach the database by a socket, or by TLS."""
    if request.param == "plain":
        return deploy(postgresql_url, redis_url)
    return deploy(request.getfixturevalue("secured_postgresql_url"), redis_url, postgresql_url)


def test_connections_dropped_during_a_long_node_cost_nothing(
    request, reached, outside, postgresql_server, postgresql_url
):
    thread, served = f"dropped-{request.node.callspec.id}", reached
    worker = served.worker(concurrency=1)
    outside.hold("walk", thread)
    served.start("errand", thread)
    outside.called("walk", thread)

    served._engine.dispose()
    assert postgresql_server.cut_connections(urlsplit(postgresql_url).path.removeprefix("/")) >= 4
    outside.let_go("walk", thread)
    served.ended(thread, seconds=60)

    assert outside.calls(thread) == {"enter-go": 1, "shop": 1, "walk": 1, "goods": 1, "enter-home": 1}
    assert [runs for _, runs in evidence.history(served, thread)] == [{}, {"go": 1}, {"home": 1}]
    assert len(worker.events("database_unavailable")) == 1

    # No dead connection is left to be stumbled over: each of the worker's threads says it once, at its next turn.
    for number in range(5):
        served.start("errand", f"{thread}-{number}")
        served.ended(f"{thread}-{number}", seconds=60)
    told = Counter((e["event"], e.get("service")) for e in worker.events() if e["level"] in {"warning", "error"})
    assert told.pop(("database_unavailable", None)) <= 2  # the node's, and that of the next command
    assert {event for event, _ in told} <= {"service_failed"}
    assert max(told.values(), default=1) == 1
    log = worker.log.read_text()
    assert "Traceback" not in log
    for secret in ("INSERT", "UPDATE", "SELECT", f"shop of {thread}", "keepstep_thread"):
        assert secret not in log


def test_a_restart_under_load_strands_nothing(deploy, spare_postgresql, redis_url, outside):
    database = spare_postgresql.create_database()
    _migrate(spare_postgresql.url(database))
    deployment = deploy(spare_postgresql.url(database), redis_url)
    workers = [deployment.worker(concurrency=2) for _ in range(2)]
    threads = [f"load-{number}" for number in range(40)]

    deployment.start("errand", *threads)
    outside.called_in_all("goods", 8)
    deployment._engine.dispose()
    spare_postgresql.crash()
    spare_postgresql.start()

    deployment.ended(*threads, seconds=100)
    for thread in threads:
        calls = outside.calls(thread)
        # A claim may be lost with the database's last moments: the body is then entered again, and its read with it.
        assert calls["goods"] == 1
        assert calls["shop"] <= calls["enter-go"] <= 2
        assert calls["enter-home"] <= 2
        assert [kind for kind, _ in evidence.history(deployment, thread)] == ["input", "step", "step"]
        assert evidence.journal(deployment, thread) == {"look:shop": ("done", 1), "pay:goods": ("done", 1)}
    assert [worker.process.poll() for worker in workers] == [None, None]

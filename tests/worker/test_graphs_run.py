"""Real workers run graphs, on a laptop's stack and on a server's."""

from __future__ import annotations

import itertools
import os
import textwrap
import time
from collections import Counter

import pytest

from keepstep.tasks.nudges import _GO_ON_SECONDS
from tests.worker.deployment import AGENTS, deployed, eventually

CHAIN = ("a", "b", "c")


def test_threads_finish_with_every_node_started_once(deployment):
    deployment.worker(concurrency=2)
    threads = [f"t{number}" for number in range(10)]

    deployment.start("chain", *threads)
    deployment.ended(*threads)

    every_node_once = Counter({f"{thread} {node}": 1 for thread in threads for node in CHAIN})
    assert deployment.counts("starts") == every_node_once
    assert deployment.counts("paid") == every_node_once


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_other_pools_run_graphs_in_the_main_process(deployment, pool):
    worker = deployment.worker(concurrency=2, pool=pool)

    deployment.start("chain", "t1", "t2")
    deployment.ended("t1", "t2")

    assert {words[-2] for words in deployment.notes("starts")} == {str(worker.pid)}


def test_children_that_are_started_afresh_instead_of_forked(deployment):
    worker = deployment.launch("--pool-start-method", "spawn", concurrency=2).ready()

    deployment.start("chain", "t1", "t2")
    deployment.ended("t1", "t2")

    assert {words[-2] for words in deployment.notes("starts")} <= {str(pid) for pid in worker.children()}
    assert worker.stop() == 0


def test_a_fan_out_is_spread_over_workers_and_joined_once(deployment):
    deployment.touch("hold-part")
    workers = [deployment.worker(concurrency=1) for _ in range(2)]

    deployment.start("fan", "f", count=6)
    # Part 1 holds one worker's only child; what is left runs on the other.
    [*_, held_by, held_at] = deployment.started("f part 1")[0]
    eventually(lambda: len(deployment.notes("starts")) == 6, what="the other parts")
    deployment.touch("release")
    deployment.ended("f")

    assert deployment.counts("starts") == Counter({"f join": 1, **{f"f part {item}": 1 for item in range(6)}})
    # No nudge lay behind the held node until a sweep found its row.
    assert [worker.events("swept") for worker in workers] == [[], []]
    parts = [words for words in deployment.notes("starts") if words[1] == "part"]
    assert held_by not in {pid for *_, pid, at in parts if float(at) > float(held_at)}
    assert {pid for *_, pid, _ in parts} <= {str(pid) for worker in workers for pid in worker.children()}


EARLY = """
    import os
    import keepstep
    from agents import chain, held

    # At import, in the process that the pool is forked from: a query, and a broker connection that stays open.
    reader = keepstep.Reader(database=os.environ["KEEPSTEP_DATABASE"])
    assert reader.threads() == []
    client = keepstep.Client()
    client.start("chain", "early", {})
"""


@pytest.fixture(params=["files", "redis", "secured_redis", "rabbitmq", "secured_rabbitmq"])
def early(request, tmp_path):
    """Deployments whose graphs use the database and the broker when they are imported, also by TLS."""
    if request.param == "files":
        urls = request.getfixturevalue("sqlite_url"), f"file://{tmp_path}/broker"
    else:
        database = "secured_postgresql_url" if request.param.startswith("secured") else "postgresql_url"
        urls = request.getfixturevalue(database), request.getfixturevalue(f"{request.param}_url")
    (tmp_path / "early.py").write_text(textwrap.dedent(EARLY))
    with deployed(tmp_path, *urls, graphs="early.py") as deployment:
        deployment.environment["PYTHONPATH"] = str(AGENTS.parent)
        yield deployment


def test_each_child_has_a_connection_of_its_own(early):
    served = early
    worker = served.worker(concurrency=4)
    served.ended("early")
    children = {str(pid) for pid in worker.children()}
    assert len(children) == 4

    # One held thread for each child, so that every one of them has to use the database.
    threads = [f"h{number}" for number in range(4)]
    served.start("held", *threads)
    for thread in threads:
        served.started(f"{thread} hold")
    served.touch("release")
    served.ended(*threads)
    short = [f"t{number}" for number in range(60)]
    served.start("chain", *short)
    served.ended(*short)

    assert {words[-2] for words in served.notes("starts")} == children
    assert set(served.counts("starts").values()) == {1}
    if served.settings.database.startswith("postgresql"):
        backends = served.query(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'keepstep'"
        )
        # Of the main process: registration, liveness, sweep, commands, and what was opened at import.
        assert backends == [(4 + 4 + 1,)]
    # No answer to another's question, no broken record, no service or node that stumbled over one.
    assert [event for event in worker.events() if event["level"] in {"warning", "error"}] == []
    assert "Traceback" not in worker.log.read_text()


def test_a_worker_that_is_asked_to_stop_finishes_what_runs_and_leaves(deployment):
    worker = deployment.supervised(concurrency=1)
    deployment.start("held", "h")
    started_at = float(deployment.started("h hold")[0][-1])

    os.kill(worker.pid, 15)
    eventually(lambda: worker.events("worker_stopping"), what="the stop")
    assert worker.process.poll() is None
    eventually(lambda: time.time() > started_at + 2 * _GO_ON_SECONDS, what="the moment in which a child goes on")
    deployment.touch("release")

    assert worker.process.wait(20) == 0
    assert worker.events("worker_left")
    assert deployment.query("SELECT id FROM keepstep_worker") == []
    # The node that ran was finished and committed; what comes next waits for another worker.
    assert deployment.counts("starts") == Counter({"h before": 1, "h hold": 1})
    assert deployment.query("SELECT name, status, seq, deaths FROM keepstep_thread") == [("h", "ready", 2, 0)]


def test_with_room_for_one_all_parts_of_a_fan_out_run_one_after_the_other(deployment):
    deployment.worker(concurrency=1)

    deployment.start("fan", "f", count=6)
    deployment.ended("f")

    times = [
        (float(start[-1]), float(end[-1]))
        for item in range(6)
        for start, end in zip(
            deployment.started(f"f part {item}"), deployment.noted("ends", f"f part {item}"), strict=True
        )
    ]
    assert len(times) == 6
    in_order = sorted(times)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(in_order))
    assert deployment.counts("starts")["f join"] == 1

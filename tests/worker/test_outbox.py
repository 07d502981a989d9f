"""Starts from a producer's outbox: with the producer's transaction or not at all, and once, whatever is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest
import sqlalchemy as sa

from keepstep import Client
from keepstep.settings import load
from keepstep.store.outbox import Outbox
from keepstep.tasks.relay import Relay
from tests.worker.deployment import eventually


@pytest.fixture
def shop(tmp_path):
    """A producer's database with an outbox, and an engine on it."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    outbox = Outbox.open(url)
    outbox.install()
    outbox.dispose()
    engine = sa.create_engine(url)
    yield url, engine
    engine.dispose()


def sold(deployment, engine, *threads, graph="quick", commits=True):
    """Write starts as a producer does."""
    with Client(deployment.settings.broker) as client, engine.connect() as connection:
        for thread in threads:
            client.start(graph, thread, {}, connection=connection)
        if commits:
            connection.commit()


def runs(deployment):
    return deployment.query("SELECT count(*) FROM keepstep_run")[0][0]


def waiting(url):
    with closing_outbox(url) as outbox:
        return outbox.counts()


class closing_outbox(closing):  # noqa: N801  a context manager by its use
    def __init__(self, url):
        outbox = Outbox.open(url)
        outbox.close = outbox.dispose
        super().__init__(outbox)


def test_a_worker_starts_what_was_committed_and_nothing_else(deployment, shop):
    url, engine = shop
    sold(deployment, engine, "rolled-back", commits=False)
    sold(deployment, engine, "a", "b")
    deployment.worker(KEEPSTEP_OUTBOXES=url)
    deployment.ended("a", "b")
    sold(deployment, engine, "c")
    deployment.ended("c")
    eventually(lambda: waiting(url)["waiting"] == 0, what="an empty outbox")
    assert runs(deployment) == 3
    assert waiting(url) == {"waiting": 0, "refused": 0}


def test_what_is_refused_stays_with_the_reason(deployment, shop):
    url, engine = shop
    sold(deployment, engine, "a", graph="nobody")
    deployment.worker(KEEPSTEP_OUTBOXES=url)
    eventually(lambda: waiting(url)["refused"] == 1, what="a refusal")
    ran = subprocess.run(
        [sys.executable, "-m", "keepstep", "relay", "--refused", "--json", url],
        env={**os.environ, "KEEPSTEP_BROKER": deployment.settings.broker},
        capture_output=True,
        text=True,
        check=True,
    )
    (refused,) = json.loads(ran.stdout)["refused"]
    assert refused["error"]["code"] == "unknown_graph"
    subprocess.run(
        [sys.executable, "-m", "keepstep", "relay", "--again", "--json", url],
        env={**os.environ, "KEEPSTEP_BROKER": deployment.settings.broker},
        check=True,
    )
    eventually(lambda: len(deployment.workers[0].events("start_refused")) == 2, what="a second refusal")
    assert refused["message"]["thread"] == "a"


def test_a_start_that_is_relayed_twice_makes_one_run(deployment, shop, monkeypatch):
    url, engine = shop
    deployment.worker()
    sold(deployment, engine, "a")
    relay = Relay(load(broker=deployment.settings.broker), url)

    def dies(*_):
        raise KeyboardInterrupt

    # As if it were killed when the worker has accepted, before the outbox knows.
    monkeypatch.setattr("keepstep.tasks.relay._answered", dies)
    with pytest.raises(KeyboardInterrupt):
        relay.relay()
    monkeypatch.undo()
    deployment.ended("a")
    assert relay.outbox.counts()["waiting"] == 1
    assert relay.relay() == 1
    assert relay.outbox.counts()["waiting"] == 0
    assert runs(deployment) == 1
    relay.finish()


def test_nothing_is_removed_while_no_worker_answers(deployment, shop, monkeypatch):
    url, engine = shop
    sold(deployment, engine, "a")
    relay = Relay(load(broker=deployment.settings.broker), url)
    # Only now: its client has all the time that a broker may take.
    monkeypatch.setattr("keepstep.tasks.relay._CONFIRM_SECONDS", 0.3)
    assert relay.relay() == 0
    assert relay.outbox.counts() == {"waiting": 1, "refused": 0}
    deployment.worker()
    eventually(lambda: relay.relay() == 1, what="an answer")
    deployment.ended("a")
    assert runs(deployment) == 1
    relay.finish()


def test_while_no_worker_answers_the_queue_is_not_filled_with_copies(deployment, shop, monkeypatch):
    url, engine = shop
    names = [f"t{number}" for number in range(25)]
    sold(deployment, engine, *names)
    relay = Relay(load(broker=deployment.settings.broker), url, poll_seconds=0.5)
    monkeypatch.setattr("keepstep.tasks.relay._CONFIRM_SECONDS", 0.1)  # not of its client, as above
    sent = []
    forward = relay._client.forward

    def counted(command_id, body):
        sent.append(command_id)
        return forward(command_id, body)

    monkeypatch.setattr(relay._client, "forward", counted)
    assert [relay.work() for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert len(sent) == 25 + 6 * 10
    deployment.worker()
    eventually(lambda: relay.work() == 0.5, what="an answer")
    deployment.ended(*names[:10])
    eventually(lambda: relay.work() == 0.5 and relay.outbox.counts()["waiting"] == 0, what="all answers")
    deployment.ended(*names)
    assert runs(deployment) == 25
    relay.finish()


def test_the_command_relays_until_it_is_told_to_stop(deployment, shop, tmp_path):
    url, engine = shop
    deployment.worker()
    environment = {**os.environ, "KEEPSTEP_BROKER": deployment.settings.broker, "KEEPSTEP_OUTBOXES": url}
    with subprocess.Popen(
        [sys.executable, "-m", "keepstep", "relay"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"relaying {url}\n"
        sold(deployment, engine, "a")
        deployment.ended("a")
        process.terminate()
        assert process.wait(20) == 0
    once = [sys.executable, "-m", "keepstep", "relay", "--once", "--json"]
    sold(deployment, engine, "b")
    ran = subprocess.run(once, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == {"outboxes": [{"outbox": url, "waiting": 0, "refused": 0}]}
    deployment.ended("b")

"""A thread waits in a node, and the next release has no such node: it is blocked, and nothing of it is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from keepstep import END, START, Graph
from keepstep.cli.program import run
from tests.steps.agents import State


def release(node, starts, *, fan_out=None, version="1"):
    """The graph with its node under that name; None: without it."""
    graph = Graph("review", state=State, version=version, fan_out=fan_out)

    def body(name, _state, ctx):
        starts[name] += 1
        return {"log": [f"{name}: {ctx.approve('Publish?', arguments={'page': 7}).verdict}"]}

    def beside(name, _state, _ctx):
        starts[name] += 1
        return {"log": [name]}

    for name in [*([node] if node else []), *(["beside"] if fan_out else [])]:
        made = beside if name == "beside" else body
        graph.node(lambda state, ctx, name=name, made=made: made(name, state, ctx), name=name)
        graph.edge(START, name)
        graph.edge(name, END)
    if not (node or fan_out):
        graph.node(lambda state, ctx: beside("other", state, ctx), name="other")
        graph.edge(START, "other")
        graph.edge("other", END)
    return graph


@pytest.mark.parametrize("fan_out", [None, True], ids=["alone", "fanned-out"])
@pytest.mark.parametrize("following", ["human_review", None], ids=["renamed", "deleted"])
def test_a_thread_in_a_node_that_is_gone_is_blocked_and_its_approval_kept(
    deploy, store_url, monkeypatch, capsys, following, fan_out
):
    monkeypatch.setenv("KEEPSTEP_DATABASE", store_url)
    starts = Counter()
    first = release("review", starts, fan_out=fan_out)
    d = deploy(first)
    d.start()
    assert d.drain() == "waiting"
    before = dict(starts)
    d.graphs = (release(following, starts, fan_out=fan_out),)
    newer = d.worker_of(pid=2)
    approval = d.approvals()[0].id
    d.decide(worker=newer)
    d.drain(newer)
    # With the node runs beside it ended, the step is what is blocked.
    d.sweep(worker=newer)
    assert d.drain(newer) == "blocked"
    code, message = d.error
    assert code == "graph"
    assert "graph 'review' version '1' has no node 'review'" in message
    assert starts == before
    assert [(each.id, each.status) for each in d.approvals(None)] == [(approval, "approved")]
    assert [each["by"] for each in d.reader.decisions(approval)] == ["anna"]

    assert run(["threads", "--status", "blocked"]) == 0
    assert "graph 'review' version '1' has no node 'review'" in " ".join(capsys.readouterr().out.split())
    run(["doctor"])
    said = " ".join(capsys.readouterr().out.split())
    assert "1 blocked as graph: t" in said
    assert "deploy code that has the node, then keepstep retry t" in said

    # The release before is brought back: it goes on with the approval that it has.
    d.graphs = (first,)
    older = d.worker_of(pid=3)
    d.control("retry", worker=older)
    assert d.drain(older) == "done"
    assert d.values()["log"][0] == "review: approve"
    assert starts["review"] == before["review"] + 1
    assert len(d.approvals(None)) == 1


def test_a_thread_of_a_version_that_nobody_carries_waits_for_it_with_its_approval(
    deploy, store_url, monkeypatch, capsys
):
    monkeypatch.setenv("KEEPSTEP_DATABASE", store_url)
    starts = Counter()
    d = deploy(release("review", starts))
    d.start()
    assert d.drain() == "waiting"
    first = d.worker
    d.graphs = (release("human_review", starts, version="2"),)
    newer = d.worker_of(pid=2)
    d.decide(worker=newer)
    assert d.drain(newer) == "ready"
    assert starts == {"review": 1}
    d.execute("UPDATE keepstep_worker SET alive_until = 0 WHERE id = :id", id=first.owner.worker)
    run(["doctor"])
    assert "1 ready of review version 1, which no live worker carries" in " ".join(capsys.readouterr().out.split())
    d.execute("UPDATE keepstep_thread SET next_nudge_at = 0")
    d.sweep(worker=first)
    assert d.drain(first) == "done"
    assert starts == {"review": 2}

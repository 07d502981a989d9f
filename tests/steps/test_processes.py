"""Two processes and one thread: whoever gets the lease commits, the other writes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from keepstep.runtime.graph import Graph
from tests.steps.driver import Deployment
from tests.steps.test_limits import Loop

ROUNDS = 200

# Each process takes a version from its input and says whether it had a step to run; the other end is the barrier.
_WORKER = """
    import sys
    sys.path.insert(0, {root!r})
    from keepstep.runtime import superstep
    from tests.steps.driver import Deployment
    from tests.steps.test_processes import rounds
    d = Deployment({url!r}, rounds())
    d.reader.get("t")
    print("ready", flush=True)
    for line in sys.stdin:
        thread_id, version = line.split()
        print(int(superstep.run_step(d.worker, thread_id, int(version))), flush=True)
"""


def rounds() -> Graph:
    """A graph that goes round for ever."""
    graph = Graph("rounds", state=Loop, step_limit=10**6)

    @graph.node
    def turn(state, ctx):
        return {"count": ctx.effect(one), "rounds": state["rounds"]}

    graph.edge("__start__", "turn")
    graph.edge("turn", "turn")
    return graph


def one() -> int:
    return 1


@pytest.mark.slow
def test_exactly_one_commit_in_each_of_many_rounds(deploy, store_url):
    d: Deployment = deploy(rounds())
    thread_id = d.start({"rounds": 0}).thread_id
    program = textwrap.dedent(_WORKER).format(root=str(Path(__file__).parents[2]), url=store_url)
    workers = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outcomes = Counter()
    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for _ in range(ROUNDS):
            version = d.thread.row.version
            for worker in workers:
                worker.stdin.write(f"{thread_id} {version}\n")
            for worker in workers:
                worker.stdin.flush()
            outcomes[tuple(sorted(worker.stdout.readline() for worker in workers))] += 1
    finally:
        for worker in workers:
            worker.stdin.close()
            worker.wait(20)
            worker.stdout.close()

    assert outcomes == {("0\n", "1\n"): ROUNDS}
    history = d.reader.history("t")
    assert [checkpoint.seq for checkpoint in history] == list(range(ROUNDS + 1))
    assert [checkpoint.parent for checkpoint in history] == [None, *(checkpoint.id for checkpoint in history[:-1])]
    assert all(node["starts"] == 1 for checkpoint in history for node in checkpoint.nodes)
    assert d.values()["count"] == ROUNDS
    assert Counter(effect.calls for effect in d.reader.effects("t")) == {1: ROUNDS}
    won = {json.dumps(checkpoint.meta["worker"]) for checkpoint in history}
    assert len(won) == 2

"""How many nudges the queues should hold."""

from __future__ import annotations

from collections import Counter

import pytest

from keepstep.store.leases import Nudge
from keepstep.tasks.room import Room

A, B = "a@1", "b@1"


class Broker:
    """Queues that are as full as a test says."""

    def __init__(self):
        self.lengths = Counter()
        self.is_up = True
        self.looks = 0
        self.withheld = []

    def __call__(self, nudges):
        self.lengths.update(nudge.queue for nudge in nudges)

    def waiting(self, graphs):
        self.looks += 1
        return {graph: self.lengths[graph] for graph in graphs} if self.is_up else None


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def room(broker, clock):
    return Room(broker, [A, B], concurrency=2, nudges_max=100, withheld=broker.withheld.extend, clock=clock)


def nudges(queue, count):
    return [Nudge("step", f"{number:026}", 1, queue, 1) for number in range(count)]


def test_a_queue_holds_a_few_nudges_for_each_child(room, broker):
    broker.lengths[B] = 5
    assert room.look() is True
    assert (room.left(A), room.left(B)) == (8, 3)


def test_what_does_not_fit_is_left(room, broker):
    room.publish([*nudges(A, 20), *nudges(B, 3)])
    assert broker.lengths == {A: 8, B: 3}
    assert broker.withheld == nudges(A, 20)[8:]


def test_a_queue_of_another_workers_graph_is_measured_as_well(room, broker):
    broker.lengths["other@1"] = 6
    room.publish(nudges("other@1", 5))
    assert broker.lengths["other@1"] == 8


def test_it_is_not_measured_for_each_nudge(room, broker, clock):
    room.publish(nudges(A, 30))
    for _ in range(10):
        room.publish(nudges(A, 1))
    assert broker.looks == 1
    clock.now += 0.1
    broker.lengths[A] = 0
    room.publish(nudges(A, 1))
    assert (broker.looks, broker.lengths[A]) == (2, 1)


def test_a_queue_that_runs_empty_between_looks_holds_twice_as_much_and_one_that_does_not_less_again(room, broker):
    held = []
    for _ in range(6):
        room.look()
        held.append(room.left(A))
        room.publish_admitted(nudges(A, room.left(A)))
        broker.lengths[A] = 0
    assert held == [8, 16, 32, 64, 100, 100]
    broker.lengths[A] = 90
    for _ in range(20):
        room.look()
    assert room.left(A) == 8 - 90
    broker.lengths[A] = 0
    room.look()
    assert room.left(A) == 8


def test_a_queue_that_was_not_filled_says_nothing_by_being_empty(room, broker):
    room.look()
    room.publish_admitted(nudges(A, 3))
    broker.lengths[A] = 0
    room.look()
    assert room.left(A) == 8


def test_of_a_broker_that_cannot_be_asked_nothing_is_known(room, broker):
    broker.is_up = False
    assert room.look() is False
    room.publish(nudges(A, 2))
    assert (room.left(A), broker.lengths[A]) == (0, 0)

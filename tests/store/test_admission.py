"""Which of many due rows are nudged next: the urgent ones, every tenant in turn, no more than there is room for."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from keepstep.ids import new_id
from keepstep.store import claims, leases, limits, outcomes, threads
from keepstep.store.admission import Admission, _walks
from keepstep.store.engine import Store
from keepstep.store.schema import NEVER
from keepstep.store.statements import Statement
from tests.store.records import CARRIED, OWNER, claimed, created, registered, row

NO_LIMITS: dict[str, int] = {}


@pytest.fixture
def admission(store):
    return Admission(store, [("agent", "1")])


def due(store):
    """Let the seconds pass in which a nudge is believed to be on its way."""
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_thread SET next_nudge_at = due_at WHERE next_nudge_at < 1e12")


def names(store, admitted):
    return [row(store, nudge.thread_id)["name"] for nudge in admitted.nudges]


def test_each_row_is_nudged_once_and_then_left_alone_for_longer_each_time(store, admission):
    ids = sorted(created(store, f"t{number}") for number in range(3))
    assert admission.look(lambda _queue: 9, NO_LIMITS).nudges == []  # nudged when they were made
    waits = []
    for _ in range(7):
        due(store)
        admitted = admission.look(lambda _queue: 9, NO_LIMITS)
        assert sorted(nudge.thread_id for nudge in admitted.nudges) == ids
        assert admission.look(lambda _queue: 9, NO_LIMITS).nudges == []
        after = row(store, ids[0])
        waits.append(round(after["next_nudge_at"] - row(store, ids[0])["due_at"]))
    assert [later - waits[0] for later in waits] == pytest.approx([0, 2, 6, 14, 30, 58, 58], abs=2)


def test_no_more_than_there_is_room_for(store, admission):
    for number in range(5):
        created(store, f"t{number}")
    due(store)

    first = admission.look(lambda _queue: 3, NO_LIMITS)
    second = admission.look(lambda _queue: 3, NO_LIMITS)

    assert (len(first.nudges), first.more) == (3, True)
    assert (len(second.nudges), second.more) == (2, False)
    assert len({nudge.thread_id for nudge in first.nudges + second.nudges}) == 5
    due(store)
    full = admission.look(lambda _queue: 0, NO_LIMITS)
    assert (full.nudges, full.more) == ([], True)


def test_every_tenant_has_its_turn_whatever_another_has_waiting(store, admission):
    for number in range(30):
        created(store, f"flood{number}", tenant="flood")
    for tenant in ("a", "z"):
        for number in range(2):
            created(store, f"{tenant}{number}", tenant=tenant)
    due(store)

    looks = [names(store, admission.look(lambda _queue: 6, NO_LIMITS)) for _ in range(2)]

    assert Counter(name.rstrip("0123456789") for name in looks[0]) == {"flood": 2, "a": 2, "z": 2}
    assert Counter(name.rstrip("0123456789") for name in looks[1]) == {"flood": 6}


def test_with_less_room_than_tenants_each_has_its_turn_in_time(store, admission):
    for tenant in "abcde":
        for number in range(4):
            created(store, f"{tenant}{number}", tenant=tenant)
    due(store)

    looks = [names(store, admission.look(lambda _queue: 2, NO_LIMITS)) for _ in range(10)]

    assert [len(look) for look in looks] == [2] * 10
    assert len({name for look in looks for name in look}) == 20
    assert Counter(name[0] for look in looks[:5] for name in look) == dict.fromkeys("abcde", 2)


def test_a_tenant_is_found_at_once_however_many_have_nothing_to_do_now(store, admission):
    for number in range(200):
        created(store, f"off{number}", tenant=f"t{number:03}")
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_thread SET due_at = due_at + 1e6, next_nudge_at = due_at + 1e6")
    created(store, "mine", tenant="zz")
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_thread SET next_nudge_at = due_at WHERE tenant = 'zz'")
    assert names(store, admission.look(lambda _queue: 9, NO_LIMITS)) == ["mine"]


@pytest.mark.parametrize(("room", "looks"), [(100, 2), (2, 65)])
def test_of_more_tenants_than_one_look_goes_through_none_is_left_out(store, admission, room, looks):
    for number in range(130):
        for thread in range(2):
            created(store, f"{number}.{thread}", tenant=f"t{number:03}")
    due(store)
    found = [name for _ in range(looks) for name in names(store, admission.look(lambda _queue: room, NO_LIMITS))]
    tenants = Counter(name.split(".")[0] for name in found)
    assert len(tenants) >= (128 if room > 2 else 130)


def test_a_walk_that_is_cut_short_goes_on_where_it_was(store, monkeypatch):
    monkeypatch.setattr("keepstep.store.admission._SEEN_MAX", 3)
    monkeypatch.setattr("keepstep.store.admission._WALK", Statement(_walks))
    admission = Admission(store, [("agent", "1")])
    for name in "abcdefgh":
        created(store, name, tenant=name)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_thread SET next_nudge_at = 1 WHERE tenant = 'h'")
    looks = [names(store, admission.look(lambda _queue: 9, NO_LIMITS)) for _ in range(3)]
    assert looks == [[], [], ["h"]]


def test_node_runs_get_their_part_of_the_room_beside_a_flood_of_steps(store, admission):
    for number in range(20):
        created(store, f"flood{number}", tenant="flood")
    for tenant in ("flood", "other"):
        fence = claimed(store, created(store, "fanned", tenant=tenant)).fence
        outcomes.fan_out(store, fence, [outcomes.NewNodeRun(f"n#{n}", "step", "n", None, 60.0) for n in range(2)])
    due(store)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_node_run SET next_nudge_at = due_at")
    look = admission.look(lambda _queue: 8, NO_LIMITS)
    assert Counter(nudge.kind for nudge in look.nudges) == {"node": 4, "step": 4}


def test_the_urgent_ones_go_first(store, admission):
    for name, priority in (("low", 2), ("normal", 1), ("high", 0), ("high too", 0)):
        created(store, name, priority=priority)
    due(store)
    seen = [names(store, admission.look(lambda _queue: 1, NO_LIMITS)) for _ in range(4)]
    assert seen == [["high"], ["high too"], ["normal"], ["low"]]


def test_what_is_paused_is_not_looked_at_again_until_it_is_resumed(store, admission):
    thread_id = created(store)
    with store.transaction() as transaction:
        threads.pause(transaction, threads.by_id(transaction, thread_id))
    due(store)

    assert admission.look(lambda _queue: 9, NO_LIMITS).nudges == []
    assert row(store, thread_id)["next_nudge_at"] == NEVER
    with store.transaction() as transaction:
        (nudge,) = threads.resume(transaction, threads.by_id(transaction, thread_id))
    due(store)
    assert admission.look(lambda _queue: 9, NO_LIMITS).nudges == [nudge]


def test_what_is_leased_is_looked_at_again_when_the_lease_ends(store, admission):
    thread_id = created(store)
    claimed(store, thread_id)
    due(store)
    assert admission.look(lambda _queue: 9, NO_LIMITS).nudges == []
    after = row(store, thread_id)
    assert after["next_nudge_at"] == after["lease_deadline"]
    assert after["nudges"] == 0


def test_graphs_that_are_not_carried_are_left_alone(store):
    created(store, "mine")
    theirs = created(store, "theirs", agent="another")
    due(store)
    before = row(store, theirs)
    admitted = Admission(store, [("agent", "1"), ("agent", "2")]).look(lambda _queue: 9, NO_LIMITS)
    assert names(store, admitted) == ["mine"]
    assert {nudge.queue for nudge in admitted.nudges} == {"agent@1"}
    assert row(store, theirs) == before


# --- limits ---


def test_as_many_run_at_once_as_may(store):
    first, second, third = (created(store, f"t{number}") for number in range(3))
    running_max = {"graph agent": 2, "tenant other": 1}

    def claim(thread_id, version=1):
        return claims.claim_thread(store, thread_id, version, owner=OWNER, carried=CARRIED, running_max=running_max)

    one, two = claim(first), claim(second)
    assert (one.scopes, two.scopes) == (("graph agent",), ("graph agent",))
    assert limits.taken(store) == {"graph agent": 2}
    assert claim(third) is None
    held_back = row(store, third)
    assert (held_back["lease_nonce"], held_back["starts"], held_back["nudges"]) == (None, 0, 0)
    assert held_back["next_nudge_at"] <= row(store, second)["lease_deadline"] - 60.0 + 5.0
    assert claim(first) is None  # it is leased, and that is no place that was lost

    with store.engine.begin() as connection:  # however a lease ends, its place is free
        connection.exec_driver_sql(f"UPDATE keepstep_thread SET lease_nonce = NULL WHERE id = '{first}'")
    assert limits.free(store, running_max) == {"graph agent": 1, "tenant other": 1}
    assert claim(third) is not None
    assert claim(first) is None
    assert limits.taken(store) == {"graph agent": 2}


def test_a_lease_that_overstayed_its_deadline_does_not_keep_its_own_takeover_out(store):
    lost, other = created(store, "lost"), created(store, "other")
    worker = leases.Owner(registered(store), 1)

    def claim(thread_id):
        return claims.claim_thread(store, thread_id, 1, owner=worker, carried=CARRIED, running_max={"graph agent": 1})

    assert claim(lost) is not None
    assert claim(other) is None
    with store.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE keepstep_thread SET lease_deadline = 1 WHERE id = '{lost}'")
    assert limits.taken(store) == {}
    assert claim(lost) is not None
    assert claim(other) is None
    assert limits.taken(store) == {"graph agent": 1}


def test_a_node_run_that_overstayed_its_deadline_neither(store):
    thread_id = created(store)
    fence = claimed(store, thread_id).fence
    outcomes.fan_out(store, fence, [outcomes.NewNodeRun("n#0", "step", "n", None, 60.0)])
    worker = leases.Owner(registered(store), 1)

    def claim():
        return claims.claim_node(
            store, thread_id, 0, "n#0", 0, owner=worker, carried=CARRIED, running_max={"graph agent": 1}
        )

    assert claim() is not None
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE keepstep_node_run SET lease_deadline = 1")
    assert claim() is not None


def test_a_tenants_limit_stands_beside_the_graphs(store):
    mine = [created(store, f"m{number}", tenant="mine") for number in range(2)]
    theirs = [created(store, f"t{number}", tenant="theirs") for number in range(2)]
    running_max = {"graph agent": 2, "tenant mine": 1}
    found = [
        claims.claim_thread(store, thread_id, 1, owner=OWNER, carried=CARRIED, running_max=running_max)
        for thread_id in (*mine, *theirs)
    ]
    assert [claim is not None for claim in found] == [True, False, True, False]
    assert found[0].scopes == ("graph agent", "tenant mine")
    assert found[2].scopes == ("graph agent",)


def test_admission_lets_in_what_may_run_and_says_that_it_held_others_back(store, admission):
    running = created(store, "running")
    claims.claim_thread(store, running, 1, owner=OWNER, carried=CARRIED, running_max={"graph agent": 3})
    for number in range(5):
        created(store, f"t{number}")
    due(store)

    admitted = admission.look(lambda _queue: 9, {"graph agent": 3})

    assert len(admitted.nudges) == 2
    assert (admitted.more, admitted.held_back) == (False, True)


def test_whoever_ends_lets_in_what_waits_under_its_limits_only(store, admission):
    waiting, other = created(store, "waiting", tenant="mine"), created(store, "other", tenant="theirs")
    due(store)
    running_max = {"tenant mine": 1, "tenant theirs": 1}
    look = admission.look(lambda _queue: 1, running_max, scopes=("tenant mine",))
    assert [nudge.thread_id for nudge in look.nudges] == [waiting]
    look = admission.look(lambda _queue: 1, running_max, scopes=("tenant theirs",))
    assert [nudge.thread_id for nudge in look.nudges] == [other]


def test_limits_are_set_and_taken_away(store):
    with store.transaction() as transaction:
        limits.put(transaction, "tenant", "acme", 3)
        limits.put(transaction, "graph", "refunds", 5)
        limits.put(transaction, "graph", "refunds", 4)
    assert limits.all_limits(store) == [("graph", "refunds", 4), ("tenant", "acme", 3)]
    with store.transaction() as transaction:
        limits.put(transaction, "graph", "refunds", None)
    assert limits.all_limits(store) == [("tenant", "acme", 3)]


def test_of_many_at_once_no_more_get_in_than_may(store):
    """Claims that count at one moment would each see room."""
    ids = [created(store, f"t{number}") for number in range(12)]
    stores = [Store.open(store.url.render_as_string(hide_password=False)) for _ in ids]
    barrier, won = threading.Barrier(len(ids)), []

    def race(own, thread_id):
        limits.all_limits(own)  # connected before the start
        barrier.wait()
        claim = own.patiently(
            lambda: claims.claim_thread(own, thread_id, 1, owner=OWNER, carried=CARRIED, running_max={"graph agent": 4})
        )
        if claim is not None:
            won.append(thread_id)

    racers = [threading.Thread(target=race, args=pair) for pair in zip(stores, ids, strict=True)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    for own in stores:
        own.dispose()

    assert len(won) == 4
    assert limits.taken(store) == {"graph agent": 4}


@pytest.mark.parametrize("left", [0, 1])
def test_a_node_runs_lease_takes_a_place_too(store, left):
    thread_id = created(store, new_id())
    fence = claimed(store, thread_id).fence
    outcomes.fan_out(store, fence, [outcomes.NewNodeRun(f"n#{n}", "step", "n", None, 60.0) for n in range(2)])
    running_max = {"graph agent": 1 + left}

    def claim(number):
        return claims.claim_node(
            store, thread_id, 0, f"n#{number}", 0, owner=OWNER, carried=CARRIED, running_max=running_max
        )

    first = claim(0)
    assert first is not None
    assert (claim(1) is not None) is bool(left)
    outcomes.finish_node(store, first.fence, status="done", write=b"w")
    assert limits.taken(store).get("graph agent", 0) == left

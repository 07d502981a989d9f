"""Connections: kept, bounded, waited for, closed."""

from __future__ import annotations

import threading

import pytest

from keepstep.store import pool as module
from keepstep.store.pool import Pool, PoolExhausted


class Connection:
    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


def test_the_one_used_last_is_used_next():
    pool = Pool(Connection, kept=2, most=2)
    first, second = pool.take(), pool.take()
    assert pool.in_use == 2
    pool.give(first)
    pool.give(second)
    assert pool.in_use == 0
    assert pool.take() is second
    assert pool.take() is first


def test_one_too_many_is_closed_and_a_broken_one_is_not_kept():
    pool = Pool(Connection, kept=1, most=3)
    kept, extra, broken = pool.take(), pool.take(), pool.take()
    pool.give(broken, broken=True)
    pool.give(kept)
    pool.give(extra)
    assert [connection.closed for connection in (kept, extra, broken)] == [False, True, True]
    assert pool.take() is kept


def test_a_thread_waits_for_one_to_come_back():
    pool = Pool(Connection, kept=1, most=1)
    held = pool.take()
    got = []
    waiting = threading.Thread(target=lambda: got.append(pool.take()))
    waiting.start()
    while not pool._waiting:
        pass
    pool.give(held)
    waiting.join(10)
    assert got == [held]


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.01)
    pool = Pool(Connection, kept=1, most=1)
    held = pool.take()
    with pytest.raises(PoolExhausted):
        pool.take()
    pool.give(held)
    assert pool.take() is held


def test_a_failed_connect_takes_no_place():
    attempts = iter([OSError("away"), Connection()])

    def connect():
        made = next(attempts)
        if isinstance(made, OSError):
            raise made
        return made

    pool = Pool(connect, kept=1, most=1)
    with pytest.raises(OSError, match="away"):
        pool.take()
    assert pool.in_use == 0
    assert isinstance(pool.take(), Connection)


def test_closing_closes_the_idle_now_and_the_others_later():
    pool = Pool(Connection, kept=2, most=2)
    held, idle = pool.take(), pool.take()
    pool.give(idle)
    pool.close()
    assert (idle.closed, held.closed) == (True, False)
    pool.give(held)
    assert held.closed

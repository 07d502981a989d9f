"""The connection is cut while the schema is brought up to date, before the database has it or after."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from keepstep.cli.program import run
from keepstep.store import migrate
from keepstep.store.engine import Store
from tests.servers import Proxy, running
from tests.store.records import claimed, created

_COLUMNS = """
SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns
WHERE table_schema = 'public' ORDER BY 1, 2
"""
_MORE = """
SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL SELECT proname FROM pg_proc WHERE proname LIKE 'keepstep%%'
UNION ALL SELECT conname FROM pg_constraint WHERE conname LIKE 'keepstep%%' ORDER BY 1
"""


class CommitCutter(Proxy):
    """Cuts the connection at its n-th commit, before the server sees it or after it has answered."""

    def __init__(self, target, number, *, landed):
        self._number, self._end = number, "reply" if landed else "request"
        super().__init__(target)

    def sprung(self, _link, data, *, of_server=False):
        """Return which end of the exchange is lost."""
        if not of_server and b"COMMIT" in data and self._number > 0:
            self._number -= 1
            if self._number == 0:
                self.lost.set()
                return self._end
        return None


def everything(url):
    store = Store.open(url)
    with store.engine.connect() as connection:
        found = [connection.exec_driver_sql(query).all() for query in (_COLUMNS, _MORE)]
    store.dispose()
    return found


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
@pytest.mark.parametrize("number", [1, 2, 3], ids=["lock", "schema", "routines"])
def test_a_second_upgrade_succeeds(
    empty_postgresql_url, postgresql_url, postgresql_server, number, landed, monkeypatch, capsys
):
    proxy = CommitCutter(postgresql_server.socket_path, number, landed=landed)
    with running(proxy):
        database = urlsplit(empty_postgresql_url).path.removeprefix("/")
        url = f"postgresql+psycopg2://postgres@127.0.0.1:{proxy.port}/{database}?sslmode=disable"
        monkeypatch.setenv("KEEPSTEP_DATABASE", url)
        assert run(["db", "upgrade"]) == 1
        assert proxy.lost.is_set()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "database" in err
        # What had landed is found, and is not done again.
        assert run(["db", "upgrade"]) == 0
        assert run(["db", "upgrade"]) == 0
        assert run(["db", "status"]) == 0

    store = Store.open(empty_postgresql_url)
    assert migrate.state(store).is_current
    assert claimed(store, created(store)).attempt.starts == 1
    store.dispose()
    assert everything(empty_postgresql_url) == everything(postgresql_url)

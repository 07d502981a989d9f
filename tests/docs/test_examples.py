"""What README and docs show is run as it stands there."""

from __future__ import annotations

import http.server
import importlib.util
import json
import re
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from keepstep.errors import NodeFailed
from keepstep.settings import Settings
from keepstep.store.status import TRANSITIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_A_BROKER = "Client("


def blocks(page: Path) -> list[str]:
    """Return a page's Python examples in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page), 1)
    if NEEDS_A_BROKER not in block
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run an example as a module of its own, as a reader who saved it would."""

    def run_block(block: str) -> ModuleType:
        file = tmp_path / "documented_example.py"
        file.write_text(block, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        spec.loader.exec_module(module)
        return module

    return run_block


@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_runs(run, block):
    before = set(vars(ModuleType("empty")))
    assert set(vars(run(block))) - before


def test_the_readme_graph_does_what_the_readme_says(run):
    graph = run(blocks(ROOT / "README.md")[0]).graph

    assert graph.run({"order": "7", "amount": 120}, decisions=[True]) == {
        "order": "7",
        "amount": 120,
        "status": "paid 120 for 7",
    }
    assert graph.run({"order": "7", "amount": 120}, decisions=[False])["status"] == "rejected"


class ModelServer:
    """Speaks as much of OpenAI's chat completions as the example asks for; remembers what it was asked."""

    def __init__(self):
        self.asked = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                assert self.path == "/v1/chat/completions"
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((request, self.headers["Idempotency-Key"]))
                usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
                self.send_response(200)
                self.end_headers()
                if not request.get("stream"):
                    choices = [{"message": {"content": "complaint"}, "finish_reason": "stop"}]
                    self.wfile.write(json.dumps({"model": "small-1", "choices": choices, "usage": usage}).encode())
                    return
                for text in ("We are ", "sorry."):
                    chunk = {"model": "small-1", "choices": [{"delta": {"content": text}}]}
                    self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                if "cut" not in str(request):
                    self.wfile.write(b"data: [DONE]\n\n")

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def letters(run, monkeypatch):
    """The example of docs/models.md, and a server that it asks."""
    server = ModelServer()
    monkeypatch.setenv("MODEL_URL", server.url)
    module = run(blocks(ROOT / "docs" / "models.md")[0])
    yield module, server
    module.client.close()
    server.stop()


def test_the_models_example_asks_whole_and_in_chunks(letters):
    module, server = letters

    assert module.graph.run({"text": "It is broken."}) == {
        "text": "It is broken.",
        "kind": "complaint",
        "answer": "We are sorry.",
    }
    (whole, key), (streamed, none) = server.asked
    assert (whole["model"], whole["messages"][1]["content"], none) == ("small", "It is broken.", None)
    assert "/sort/chat:" in key
    assert streamed["stream"] is True


def test_the_models_example_notices_a_stream_that_breaks_off(letters):
    module, _ = letters
    with pytest.raises(NodeFailed, match="the stream broke off"):
        module.graph.run({"text": "cut"})


def test_every_link_in_the_documentation_leads_somewhere():
    dead = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "ARCHITECTURE.md"]
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_every_file_the_map_names_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:store|runtime|tasks|keepstep|tests)/[\w./]*)", text))
    missing = {
        path for path in named if not any((ROOT / name).exists() for name in (path, f"{path.rpartition('.')[0]}.py"))
    }
    assert missing == set()


def test_every_setting_is_documented_with_its_default():
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \| (\S.*?) \|", text, flags=re.MULTILINE))

    shown = {
        name: "none" if field.default in {(), ""} else f"`{field.default}`"
        for name, field in Settings.model_fields.items()
    }
    assert {name: documented.get(name) for name in shown} == shown


def test_the_drawing_of_the_statuses_is_the_table():
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^    (\w+) --> (\w+): (.*)$", text, flags=re.MULTILINE)

    assert drawn == [(old, new, why) for old, follows in TRANSITIONS.items() for new, why in follows.items()]


def test_every_schedule_names_a_test_that_there_is():
    text = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)

    assert len(named) > 30
    missing = [
        f"{file}::{name}" for file, name in named if f"\ndef {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []

"""What requests and responses of models say, in the shapes that servers speak; and the spool of responses."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest
from pydantic import BaseModel

from keepstep import settings
from keepstep.errors import InvalidSettings
from keepstep.runtime.environment import Runtime
from keepstep.runtime.modelfacts import Facts, Tokens, facts_of, is_whole, plain, text_of, tool_versions
from keepstep.runtime.responsespool import Received, ResponseSpool, SpoolBounds, default_folder
from keepstep.store.engine import Store
from keepstep.store.leases import Owner

CHAT = {
    "object": "chat.completion",
    "model": "small-2026-01-01",
    "system_fingerprint": "fp_7",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
}
RESPONSES = {
    "object": "response",
    "model": "small-2026-01-01",
    "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"},
    "output": [
        {"type": "reasoning", "summary": []},
        {"type": "message", "content": [{"type": "output_text", "text": "Ye"}, {"type": "output_text", "text": "s"}]},
    ],
    "usage": {"input_tokens": 9, "output_tokens": 2, "total_tokens": 11},
}
MESSAGES = {
    "type": "message",
    "model": "tiny-1",
    "content": [{"type": "text", "text": "Yes"}, {"type": "tool_use", "name": "pay", "input": {}}],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 9, "output_tokens": 2},
}
CHAT_CHUNKS = [
    {"model": "small-2026", "choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"model": "small-2026", "choices": [{"delta": {"content": "Ye"}, "finish_reason": None}], "usage": None},
    {"model": "small-2026", "choices": [{"delta": {"content": "s"}, "finish_reason": None}]},
    {"model": "small-2026", "choices": [{"delta": {}, "finish_reason": "length"}]},
    {"model": "small-2026", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}},
]
RESPONSES_CHUNKS = [
    {"type": "response.created", "response": {"model": "small-2026", "status": "in_progress", "output": []}},
    {"type": "response.output_text.delta", "delta": "Ye"},
    {"type": "response.output_text.delta", "delta": "s"},
    {"type": "response.completed", "response": {**RESPONSES, "status": "completed", "incomplete_details": None}},
]
MESSAGES_CHUNKS = [
    {"type": "message_start", "message": {"model": "tiny-1", "usage": {"input_tokens": 9, "output_tokens": 1}}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Ye"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "s"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    {"type": "message_stop"},
]


@pytest.mark.parametrize(
    ("response", "chunks", "model", "version", "reason", "text"),
    [
        (CHAT, None, "small-2026-01-01", "fp_7", "stop", "Yes."),
        (RESPONSES, None, "small-2026-01-01", None, "max_output_tokens", "Yes"),
        (MESSAGES, None, "tiny-1", None, "tool_use", "Yes"),
        (None, CHAT_CHUNKS, "small-2026", None, "length", "Yes"),
        (None, RESPONSES_CHUNKS, "small-2026-01-01", None, "completed", "Yes"),
        (None, MESSAGES_CHUNKS, "tiny-1", None, "end_turn", "Yes"),
    ],
    ids=["chat", "responses", "messages", "chat-chunks", "responses-chunks", "messages-chunks"],
)
def test_every_known_shape_is_read(response, chunks, model, version, reason, text):
    request = {"model": "asked-for", "temperature": 0.5, "seed": 7, "messages": []}

    assert facts_of(request, response, chunks) == Facts(model, version, 0.5, 7, Tokens(9, 2, 11), reason)
    assert text_of(response, chunks) == text


def test_what_is_not_there_is_not_made_up():
    assert facts_of("Say yes.", "yes") == Facts()
    assert facts_of({"model": "m"}, None) == Facts(model="m")
    assert facts_of({}, {"usage": {"input_tokens": 3}}).tokens == Tokens(3, None, None)
    odd = {"model": 7, "usage": {"input_tokens": "3", "output_tokens": True}, "choices": {"0": 1}, "content": 5}
    assert facts_of({"temperature": "hot", "seed": 1.5}, odd) == Facts()
    assert text_of(odd) == ""
    assert text_of(None, [1, {"choices": [None]}, {"type": "content_block_delta"}, "tail"]) == "tail"
    assert facts_of({"model": "m" * 1000}, {}).model == "m" * 200


class Part(BaseModel):
    text: str
    type: str = "text"


class Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int


@dataclass
class Answer:
    model: str
    content: list[Part]
    usage: Usage


def test_objects_are_read_by_their_fields():
    answer = Answer("m", [Part(text="Yes")], Usage(1, 2))
    assert facts_of({}, answer) == Facts(model="m", tokens=Tokens(1, 2, 3))
    assert text_of(answer) == "Yes"
    assert plain(answer) == {
        "model": "m",
        "content": [{"text": "Yes", "type": "text"}],
        "usage": {"input_tokens": 1, "output_tokens": 2},
    }


def test_tools_are_known_by_name_and_version():
    tools = [
        SimpleNamespace(name="pay", version="2"),
        {"name": "mail"},
        {"type": "function", "name": "x", "version": 3},
    ]
    assert tool_versions(tools) == [
        {"name": "pay", "version": "2"},
        {"name": "mail", "version": None},
        {"name": "x", "version": None},
    ]


def test_a_stream_is_told_from_a_response():
    async def chunks():
        yield 1

    for whole in ({}, [], (), "text", b"bytes", None, 7, Part(text=""), Usage(1, 2), Answer("m", [], Usage(1, 2)), {1}):
        assert is_whole(whole)
    for stream in (iter([1]), (each for each in "ab"), chunks()):
        assert not is_whole(stream)


# --- the spool ---

BOUNDS = SpoolBounds(seconds_max=100.0, count_max=10, bytes_max=10_000)
RECEIVED = Received(b"digest", b"result", b"said")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "spool"


@pytest.fixture
def spool(folder):
    return ResponseSpool(folder, BOUNDS)


def test_a_response_is_found_until_it_is_removed(spool, folder):
    assert spool.get("k", b"digest") is None
    spool.put("k", RECEIVED)
    assert ResponseSpool(folder, BOUNDS).get("k", b"digest") == RECEIVED
    assert spool.get("other", b"digest") is None
    spool.put("k", RECEIVED._replace(result=b"later"))
    assert spool.get("k", b"digest").result == b"later"
    spool.remove("k")
    assert spool.get("k", b"digest") is None
    assert list(folder.iterdir()) == []
    spool.remove("k")


def test_the_response_to_another_request_is_none(spool):
    spool.put("k", RECEIVED)
    assert spool.get("k", b"another") is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_file_that_is_not_whole_is_ignored(spool, folder, damage):
    spool.put("k", RECEIVED)
    [path] = folder.iterdir()
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[:-1], "flipped": data[:-1] + b"!", "empty": b"", "foreign": b"\x00" * len(data)}[damage]
    )
    assert spool.get("k", b"digest") is None


def test_only_the_user_may_look(spool, folder):
    spool.put("k", RECEIVED)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    [path] = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_a_folder_that_is_not_the_users_alone_is_not_used(tmp_path, folder, how):
    if how == "open":
        folder.mkdir(mode=0o777)
        folder.chmod(0o750)
    elif how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    spool = ResponseSpool(folder, BOUNDS)
    spool.put("k", RECEIVED)
    assert spool.get("k", b"digest") is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == ([folder] if how == "file" else [])


def test_a_link_in_the_folder_is_not_followed(spool, folder, tmp_path):
    spool.put("k", RECEIVED)
    [path] = folder.iterdir()
    path.rename(tmp_path / "planted")
    path.symlink_to(tmp_path / "planted")
    assert spool.get("k", b"digest") is None


@pytest.mark.parametrize(
    ("bounds", "left"),
    [
        (SpoolBounds(100.0, 3, 10**9), {3, 4, 5}),
        (SpoolBounds(25.0, 100, 10**9), {4, 5}),
        (SpoolBounds(100.0, 100, 2100), {4, 5}),
        (SpoolBounds(100.0, 100, 10**9), {1, 2, 3, 4, 5}),
    ],
    ids=["count", "age", "bytes", "none"],
)
def test_the_oldest_are_given_up_first(folder, bounds, left):
    spool = ResponseSpool(folder, bounds)
    keys = {number: f"k{number}" for number in range(1, 6)}
    keeping = ResponseSpool(folder, SpoolBounds(1e6, 100, 10**9))
    for number, key in keys.items():
        keeping.put(key, Received(b"d", b"x" * 1000, b""))
        at = time.time() - (6 - number) * 10 - 1
        os.utime(keeping._path(key), (at, at))
    assert spool.sweep() == 5 - len(left)
    assert {number for number, key in keys.items() if spool.get(key, b"d")} == left


def test_what_is_no_response_is_left_alone(folder):
    folder.mkdir(mode=0o700)
    for name in ("notes.txt", "a" * 40 + ".txt", "b" * 39):
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    part = folder / ("c" * 40 + ".12-345")
    part.write_text("torn")
    os.utime(part, (0, 0))
    assert ResponseSpool(folder, BOUNDS).sweep() == 1
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "a" * 40 + ".txt", "b" * 39}


def test_a_write_sweeps_now_and_then(folder):
    spool = ResponseSpool(folder, SpoolBounds(100.0, 1, 10**9))
    spool.put("a", RECEIVED)
    spool._next_sweep = 0.0
    spool.put("b", RECEIVED)
    assert [spool.get(key, b"digest") for key in "ab"].count(RECEIVED) == 1


def test_a_spool_that_cannot_be_written_costs_nothing_but_itself(spool, folder):
    spool.put("k", RECEIVED)
    spool.remove("k")
    folder.rmdir()
    spool.put("k", RECEIVED)
    assert spool.get("k", b"digest") is None
    spool.put("k", RECEIVED)
    assert spool.get("k", b"digest") == RECEIVED


def test_each_user_has_a_folder_of_their_own():
    assert default_folder().name == f"keepstep-responses-{os.geteuid()}"


def test_where_a_runtime_spools(tmp_path):
    def spool(database, **chosen):
        runtime = Runtime(Store.open(database), {}, settings.load(**chosen), Owner("w", 1), lambda _nudges: None)
        return runtime.responses and runtime.responses.folder

    on_disk = f"sqlite:///{tmp_path}/keepstep.db"
    assert spool(on_disk) == default_folder()
    assert spool(on_disk, response_spool=str(tmp_path / "here")) == tmp_path / "here"
    assert spool(on_disk, response_spool="off") is None
    assert spool("sqlite://") is None


# --- settings ---


@pytest.mark.parametrize(
    "url", ["", "s3://bucket", "gs://bucket/folder", "az://container", "file:///a/b", "memory:///x"]
)
def test_a_place_for_artifacts(url):
    assert settings.load(artifacts=url).artifacts == url


@pytest.mark.parametrize("url", ["/a/b", "http://box/x", "s3://key:secret@bucket", "s3://bucket?secret=1", "s4://b"])
def test_a_place_that_cannot_be_used_is_refused_and_not_shown(url):
    with pytest.raises(InvalidSettings, match="artifacts: ") as refused:
        settings.load(artifacts=url)
    assert "secret" not in str(refused.value)

"""From stored checkpoints to the head a step runs from, and from a step's result to the next checkpoint.

A checkpoint stores what changed, and now and then the whole state; restoring starts at the last whole one. Each is
chained to its parent by digest, and every load checks the chain that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keepstep import __version__
from keepstep.errors import HistoryCorrupt
from keepstep.ids import new_id
from keepstep.runtime import delta
from keepstep.runtime.codec import Codec, digest
from keepstep.runtime.planner import Cursor
from keepstep.store.claims import CheckpointRow

Channels = dict[str, Any]

# A state this small is stored again for less than it costs to read, check and apply one more change.
_TINY_STATE_BYTES = 128
# While the whole state is this small, a short chain of changes costs more to read than the state costs to store.
_SMALL_STATE_BYTES = 1024
_SMALL_STATE_CHAIN_MAX = 8


class Head(msgspec.Struct, frozen=True):
    """The checkpoint a step runs from, restored."""

    seq: int
    checkpoint_id: str
    channels: Channels
    cursor: Cursor
    digest: bytes
    chain_count: int
    """Checkpoints since the last snapshot."""
    chain_bytes: int
    """Bytes of their changes."""
    snapshot_bytes: int


class Payload(msgspec.Struct, frozen=True):
    """The parts of a checkpoint that its digest covers, encoded."""

    id: str
    change: bytes | None
    snapshot: bytes | None
    cursor: bytes
    meta: bytes
    digest: bytes


def chained(parent_digest: bytes, change: bytes | None, snapshot: bytes | None, cursor: bytes, meta: bytes) -> bytes:
    """Return a checkpoint's digest: of its parent's and of everything that it holds."""
    return digest(parent_digest, change or b"", snapshot or b"", cursor, meta)


def verify(rows: Sequence[CheckpointRow]) -> None:
    """Raise `HistoryCorrupt` naming the first of some consecutive checkpoints that is not what was written."""
    before: CheckpointRow | None = None
    for row in rows:
        whole = row.digest == chained(row.parent_digest, row.change, row.snapshot, row.cursor, row.meta)
        follows = before is None or (row.seq == before.seq + 1 and row.parent_digest == before.digest)
        if not (whole and follows):
            message = f"checkpoint {row.id} (seq {row.seq}) does not match its digest: the stored history was changed"
            raise HistoryCorrupt(message)
        before = row


def restore(codec: Codec, rows: Sequence[CheckpointRow]) -> Head:
    """Return the last of some consecutive checkpoints, which begin with a snapshot, after verifying all of them.

    Raises `HistoryCorrupt`, `UnknownType`.
    """
    verify(rows)
    first, last = rows[0], rows[-1]
    if first.snapshot is None:
        message = f"checkpoint {first.id} (seq {first.seq}) should hold a snapshot and does not"
        raise HistoryCorrupt(message)
    channels: Channels = codec.decode(first.snapshot)
    chain_bytes = 0
    for row in rows[1:]:
        if row.change is not None:
            chain_bytes += len(row.change)
            channels = delta.apply(channels, codec.decode(row.change))
    cursor = Cursor.from_plain(codec.decode(last.cursor))
    return Head(last.seq, last.id, channels, cursor, last.digest, len(rows) - 1, chain_bytes, len(first.snapshot))


def describe(
    *,
    graph_version: str,
    nodes: Sequence[Mapping[str, Any]] = (),
    worker: str,
) -> dict[str, Any]:
    """Return a checkpoint's metadata: versions, the node runs it took (run, starts, failures, seconds), and by whom."""
    meta: dict[str, Any] = {"graph": graph_version, "keepstep": __version__, "worker": worker}
    if nodes:
        meta["nodes"] = [dict(node) for node in nodes]
    return meta


def payload(
    codec: Codec,
    head: Head | None,
    channels: Channels,
    cursor: Cursor,
    meta: Mapping[str, Any],
    *,
    chain_max: int,
) -> Payload:
    """Return the next checkpoint's payload; raise `NotStorable` or `TooLarge` naming what cannot be kept."""
    change: bytes | None = None
    snapshot: bytes | None = None
    if head is None:
        snapshot = codec.encode(channels)
    else:
        changed = delta.change(head.channels, channels)
        # Sizes and paths are judged on the values themselves, not on how the change spells them.
        change = codec.encode(changed) if changed else None
        if change is not None:
            _check_sizes(codec, channels, changed)
        if _is_long(head, len(change or b""), chain_max):
            snapshot = codec.encode(channels)
    encoded_cursor = codec.encode(cursor.to_plain(), path="$cursor")
    encoded_meta = codec.encode(dict(meta), path="$meta")
    parent = head.digest if head is not None else b""
    return Payload(
        new_id(),
        change,
        snapshot,
        encoded_cursor,
        encoded_meta,
        chained(parent, change, snapshot, encoded_cursor, encoded_meta),
    )


def _check_sizes(codec: Codec, channels: Channels, changed: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a value that grew past its limit bit by bit."""
    for key, operation in changed.items():
        if operation[0] in {"extend", "text", "put"}:
            codec.encode({key: channels[key]})


def _is_long(head: Head, change_bytes: int, chain_max: int) -> bool:
    """Whether reading the chain of changes would cost more than storing the state again."""
    if head.snapshot_bytes <= _TINY_STATE_BYTES:
        return True
    count, total = head.chain_count + 1, head.chain_bytes + change_bytes
    if head.snapshot_bytes <= _SMALL_STATE_BYTES:
        return count >= _SMALL_STATE_CHAIN_MAX or total > _SMALL_STATE_BYTES
    return count >= chain_max or total > head.snapshot_bytes

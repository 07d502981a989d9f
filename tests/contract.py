"""The contract of messages as a producer in another language has it: docs/asyncapi.json and nothing of Keepstep."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema

DOCUMENT = Path(__file__).parents[1] / "docs" / "asyncapi.json"


class Contract:
    """Holds messages against the schemas of the document."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = json.loads(DOCUMENT.read_text(encoding="utf-8"))

    def problems(self, schema: str, value: object) -> list[str]:
        """Return what is wrong with a value by one of the document's schemas, nothing when it is right."""
        reference = {"$ref": f"#/components/schemas/{schema}", "components": self.document["components"]}
        validator = jsonschema.Draft202012Validator(reference)
        return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]

    def command(self, text: bytes | str) -> dict[str, Any]:
        """Return the command that stands in Redis as `text`; fail when any part of it is not as the document says."""
        payload, headers = self._opened(text)
        self._check("CommandHeaders", headers)
        if "jwt" in payload:
            payload = self._signed(payload)
        channel = self.document["channels"]["commands"]["messages"]
        assert payload["verb"] in channel
        message = self.document["components"]["messages"][payload["verb"]]
        self._check(message["payload"]["$ref"].rpartition("/")[2], payload)
        assert headers["correlation_id"] == payload["id"]
        return payload

    def reply(self, text: bytes | str) -> dict[str, Any]:
        """Return the reply that stands in Redis as `text`; fail when any part of it is not as the document says."""
        payload, headers = self._opened(text)
        self._check("ReplyHeaders", headers)
        self._check("Reply", payload)
        assert headers["correlation_id"] == payload["id"]
        return payload

    def event(self, text: bytes | str) -> dict[str, Any]:
        """Return the event that stands in Redis as `text`; fail when any part of it is not as the document says."""
        payload, headers = self._opened(text)
        self._check("ReplyHeaders", headers)
        self._check("EventMessage", payload)
        assert payload["event"] in self.document["channels"]["events"]["parameters"]["event"]["enum"]
        assert headers["correlation_id"] == str(payload["id"])
        return payload

    def _opened(self, text: bytes | str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the payload of a message in Kombu's format, and what AsyncAPI calls its headers."""
        message = json.loads(text)
        self._check("KombuMessage", message)
        properties = message["properties"]
        named = {name: properties[name] for name in ("correlation_id", "reply_to") if name in properties}
        return json.loads(base64.b64decode(message["body"], validate=True)), {**message["headers"], **named}

    def _signed(self, payload: dict[str, Any]) -> dict[str, Any]:
        self._check("Signed", payload)
        header, claims, _signature = payload["jwt"].split(".")
        self._check("SignedHeader", _json_part(header))
        claimed = _json_part(claims)
        self._check("SignedClaims", claimed)
        assert claimed["jti"] == claimed["command"]["id"]
        command: dict[str, Any] = claimed["command"]
        return command

    def _check(self, schema: str, value: object) -> None:
        assert self.problems(schema, value) == [], schema


def _json_part(text: str) -> dict[str, Any]:
    part: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    return part

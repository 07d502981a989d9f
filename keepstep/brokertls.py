"""TLS to RabbitMQ, by the options that URLs of Redis have, and with the server's name looked at.

Kombu hands a URL's `ssl_…` to amqp under names that it does not know, and amqp compares no host name unless told one.
"""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import parse_qsl, urlencode

from keepstep.errors import InvalidSettings

_FILES = {"ssl_ca_certs": "ca_certs", "ssl_certfile": "certfile", "ssl_keyfile": "keyfile"}
_LEVELS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_KNOWN = (*_FILES, "ssl_cert_reqs", "ssl_check_hostname", "ssl_server_hostname")


class _OfEachHost(dict[str, Any]):
    """Options in which Kombu puts the name of the host that it connects to; the next host has another name."""

    def __getitem__(self, name: str) -> Any:
        return None if name == "server_hostname" else super().__getitem__(name)


def separated(url: str) -> tuple[str, dict[str, Any]]:
    """Return an `amqps` URL (or several, with `;` between) without its TLS options, and those as amqp names them.

    Certificates are verified, and the host's name in them, unless an option says otherwise. Of several URLs each may
    name the options; they are the same for all. Raises `InvalidSettings` for one that is not known.
    """
    given: dict[str, str] = {}
    plain = []
    for one in url.split(";"):
        address, question, query = one.partition("?")
        options = parse_qsl(query, keep_blank_values=True)
        given.update(option for option in options if option[0].startswith("ssl_"))
        others = [option for option in options if not option[0].startswith("ssl_")]
        plain.append(address + (question + urlencode(others) if others else ""))
    return ";".join(plain), _options(given)


def _options(given: dict[str, str]) -> dict[str, Any]:
    for name in given:
        if name not in _KNOWN:
            message = f"broker: the URL's option {name!r} is not one of TLS to RabbitMQ; use {', '.join(_KNOWN)}"
            raise InvalidSettings(message)
    level = _LEVELS.get(given.get("ssl_cert_reqs", "required").lower().removeprefix("cert_"))
    if level is None:
        message = f"broker: the URL's option 'ssl_cert_reqs' is one of {', '.join(_LEVELS)}"
        raise InvalidSettings(message)
    found: dict[str, Any] = {ours: given[name] for name, ours in _FILES.items() if name in given}
    found["cert_reqs"] = level
    if "ssl_server_hostname" in given:
        return {**found, "server_hostname": given["ssl_server_hostname"]}
    if level == ssl.CERT_NONE or given.get("ssl_check_hostname", "true").lower() == "false":
        return found
    return _OfEachHost(found, server_hostname=None)

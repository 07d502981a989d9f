"""TLS to RabbitMQ: which options a URL may name, and what of a certificate is looked at."""

from __future__ import annotations

import contextlib
import ssl

import pytest

from keepstep import broker, brokertls
from keepstep.errors import InvalidSettings
from tests.servers import running
from tests.tls import TlsFront


def test_options_are_amqps_and_the_rest_of_the_url_stays():
    url = "amqps://u:p%40@host:5671/v?ssl_ca_certs=/etc/ca.pem&heartbeat=5&ssl_certfile=c.pem&ssl_keyfile=k.pem"
    plain, options = brokertls.separated(url)
    assert plain == "amqps://u:p%40@host:5671/v?heartbeat=5"
    assert dict(options) == {
        "ca_certs": "/etc/ca.pem",
        "certfile": "c.pem",
        "keyfile": "k.pem",
        "cert_reqs": ssl.CERT_REQUIRED,
        "server_hostname": None,
    }


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}),
        ("?ssl_cert_reqs=CERT_NONE", {"cert_reqs": ssl.CERT_NONE}),
        ("?ssl_cert_reqs=optional", {"cert_reqs": ssl.CERT_OPTIONAL, "server_hostname": None}),
        ("?ssl_check_hostname=False", {"cert_reqs": ssl.CERT_REQUIRED}),
        ("?ssl_server_hostname=mq.internal", {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": "mq.internal"}),
    ],
)
def test_everything_is_looked_at_unless_the_url_says_otherwise(query, expected):
    assert brokertls.separated(f"amqps://host//{query}") == ("amqps://host//", expected)


def test_each_of_several_hosts_is_looked_at_by_its_own_name():
    plain, options = brokertls.separated("amqps://a/v?ssl_ca_certs=ca.pem;amqps://b/v")
    assert plain == "amqps://a/v;amqps://b/v"
    # What Kombu does at each connect.
    options["server_hostname"] = "a"
    assert options["server_hostname"] is None
    assert dict(**options)["server_hostname"] == "a"
    assert options["ca_certs"] == "ca.pem"


@pytest.mark.parametrize(
    ("query", "told"),
    [("ssl_cacert=x", "'ssl_cacert' is not one"), ("ssl_cert_reqs=maybe", "none, optional, required")],
)
def test_an_option_that_is_none_is_refused_and_named(query, told):
    with pytest.raises(InvalidSettings, match=told):
        broker.connection(f"amqps://host//?{query}", commands=True)


def test_celery_is_given_the_same():
    settings = broker.celery_settings("amqps://host/v?ssl_ca_certs=ca.pem")
    assert settings["broker_url"] == "amqps://host/v"
    assert settings["broker_use_ssl"]["ca_certs"] == "ca.pem"
    assert "broker_use_ssl" not in broker.celery_settings("amqp://host/v")


@pytest.mark.parametrize(
    ("host", "query", "told"),
    [
        ("127.0.0.1", "", "unable to get local issuer"),
        ("127.0.0.2", "?ssl_ca_certs={}", "certificate is not valid for '127.0.0.2'"),
        ("127.0.0.1", "?ssl_ca_certs={}&ssl_server_hostname=mq.internal", "certificate is not valid for 'mq.internal'"),
    ],
)
def test_a_server_that_is_another_is_not_spoken_to(certificates, host, query, told):
    front = TlsFront(1, certificates, host=host)
    url = f"amqps://u:p@{host}:{front.port}//{query.format(certificates.authority)}"
    with running(front), contextlib.closing(broker.connection(url, commands=True)) as connection:
        with pytest.raises(ssl.SSLCertVerificationError, match=told):
            connection.connect()
        assert front.handshakes == 0

"""TLS in front of the test servers, whose own builds may have none, and the certificates that are shown there."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import select
import socket
import ssl
import struct
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_SSL_REQUEST = struct.pack("!ii", 8, 80877103)
_GSS_REQUEST = struct.pack("!ii", 8, 80877104)
_HANDSHAKE_SECONDS = 10.0


class Certificates:
    """An authority of this run and a certificate of it for this machine's loopback; all files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "authority.pem"
        self._server = folder / "server.pem"
        key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests of Keepstep")])
        authority = self._certificate(name, name, key, key, authority=True)
        server = self._certificate(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]), name, server_key, key, authority=False
        )
        self.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
        private = server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._server.write_bytes(private + server.public_bytes(serialization.Encoding.PEM))

    @staticmethod
    def _certificate(
        subject: x509.Name,
        issuer: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        signer: ec.EllipticCurvePrivateKey,
        *,
        authority: bool,
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        if not authority:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(signer, hashes.SHA256())

    def context(self) -> ssl.SSLContext:
        """Return what a server shows its clients."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._server)
        return context


class TlsFront:
    """A TLS port on loopback that leads to a server (a unix socket's path or a port) on this machine.

    `postgresql`: a client asks for TLS in PostgreSQL's protocol first, and is let in by nothing else.
    """

    def __init__(
        self, target: str | int, certificates: Certificates, *, postgresql: bool = False, host: str = "127.0.0.1"
    ) -> None:
        self._target = target
        self._context = certificates.context()
        self._postgresql = postgresql
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self.handshakes = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(client):
            client.settimeout(_HANDSHAKE_SECONDS)
            if self._postgresql and not self._is_asked_for(client):
                return
            with self._context.wrap_socket(client, server_side=True) as secured, self._connected() as server:
                self.handshakes += 1
                _exchange(secured, server)

    @staticmethod
    def _is_asked_for(client: socket.socket) -> bool:
        request = client.recv(8)
        if request == _GSS_REQUEST:
            client.sendall(b"N")
            request = client.recv(8)
        if request != _SSL_REQUEST:
            return False
        client.sendall(b"S")
        return True

    def _connected(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection(("127.0.0.1", self._target))
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._target)
        return server

    def stop(self) -> None:
        """Stop listening; connections end with their ends."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _exchange(client: ssl.SSLSocket, server: socket.socket) -> None:
    """Carry both ways until one end closes. By one thread: a TLS connection is not to be used by two at once."""
    while True:
        client.settimeout(0)
        data = b""
        with contextlib.suppress(ssl.SSLWantReadError):
            data = client.recv(1 << 16)
            if not data:
                return
        client.settimeout(None)
        if data:
            server.sendall(data)
            continue
        readable, _, _ = select.select([client, server], [], [])
        if server in readable:
            data = server.recv(1 << 16)
            if not data:
                return
            client.sendall(data)

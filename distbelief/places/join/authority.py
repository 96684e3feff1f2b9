"""Certificate authority of one job, in memory only: it issues the certificates and keys of the roles."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from distbelief.places.processes.options import ANYWHERE, is_loopback
from distbelief.record.folder import write_atomically
from distbelief.transport.addresses import own_addresses
from distbelief.transport.secure import Identity, prove

LIFETIME = timedelta(days=30)
"""Lifetime of certificates. Links that exist outlive them; new ones are refused afterwards."""
_SKEW = timedelta(days=1)  # between the clocks of two machines


class Authority:
    """Issuer of certificates that name roles. A peer with another authority's certificate, or none, is refused.

    >>> Authority("a job").issue("shard 0").certificate.splitlines()[0]
    '-----BEGIN CERTIFICATE-----'
    """

    def __init__(self, job: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"distbelief {job}"[:64])
        issued = self._certify(self._name, self._key.public_key(), x509.BasicConstraints(ca=True, path_length=0))
        self._certificate = issued.public_bytes(Encoding.PEM).decode()

    def issue(self, role: str, hosts: Iterable[str] = ()) -> Identity:
        """Return a new key, and a certificate for it that names a role, and hosts where clients check these."""
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = x509.BasicConstraints(ca=False, path_length=None)
        certificate = self._certify(_name(role), key.public_key(), leaf, [*map(_host, hosts)])
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Identity(self._certificate, certificate.public_bytes(Encoding.PEM).decode(), secret.decode())

    def _certify(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        may: x509.BasicConstraints,
        hosts: Sequence[x509.GeneralName] = (),
    ) -> x509.Certificate:
        # an authority only signs, and a role only proves its identity
        usage = x509.KeyUsage(not may.ca, False, False, False, False, may.ca, False, False, False)
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
        )
        builder = builder.not_valid_before(now - _SKEW).not_valid_after(now + LIFETIME)
        builder = builder.add_extension(may, critical=True).add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return builder.sign(self._key, SHA256())


def for_clients(host: str, authority: Path) -> ssl.SSLContext | None:
    """Return the TLS of a server for scrapers and browsers, which hold no certificate; None if they are on loopback.

    Args:
        host: the host at which it listens, which the certificate names; all of this machine's if it is any.
        authority: file that is written, by which clients know the certificate.
    """
    if is_loopback(host):
        return None
    own = [socket.gethostname(), *(one for several in own_addresses().values() for one in several)]
    identity = Authority("clients").issue("server", own if host in ANYWHERE else [host])
    write_atomically(authority, identity.authority.encode())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    prove(tls, identity)
    return tls


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

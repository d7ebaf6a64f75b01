"""An authority and a server certificate for 127.0.0.1, made by the openssl of the machine for one test."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Certificates:
    """Files of PEM."""

    authority: Path
    certificate: Path
    key: Path


def make(folder: Path) -> Certificates:
    """A new authority, and a certificate of it, in `folder`. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    _openssl(
        "req", "-x509", *new_key, "-keyout", str(folder / "authority.key"), "-out", str(made.authority),
        "-subj", "/CN=aerie test authority", "-addext", "basicConstraints=critical,CA:TRUE",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip
    _openssl(
        "req", "-x509", *new_key, "-keyout", str(made.key), "-out", str(made.certificate), "-subj", "/CN=127.0.0.1",
        "-CA", str(made.authority), "-CAkey", str(folder / "authority.key"), "-addext", NAMES,
        "-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=serverAuth",
    )  # fmt: skip
    return made


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)

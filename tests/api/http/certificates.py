"""Certificates of 127.0.0.1 that sign themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from epd.config import AccessConfig


def make_certificate(folder: Path, days: int = 2) -> AccessConfig:
    """cert.pem and key.pem there, in place of those before."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with openssl")
    path, key = folder / "cert.pem", folder / "key.pem"
    command = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days {days}"
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(path)]
    subprocess.run([openssl, *command.split(), *names, *files], check=True, capture_output=True)
    return AccessConfig(ssl_certfile=str(path), ssl_keyfile=str(key))

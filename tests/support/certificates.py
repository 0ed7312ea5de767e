"""A certificate of this machine."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here, which makes a certificate")


def certificate_in(folder: Path, *addresses: str) -> tuple[Path, Path]:
    """Of 127.0.0.1 and of these, signed by itself; and its key."""
    names = ",".join(f"IP:{address}" for address in ("127.0.0.1", *addresses))
    files = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", f"subjectAltName={names}", "-days", "2"]
    subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True, timeout=60)
    return files

"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moonpool.wire.auth import TlsFiles

needs_openssl = pytest.mark.skipif(
    not shutil.which("openssl"), reason="makes its certificates with the openssl command"
)


class Authority:
    """Signs certificates in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.ca = self._openssl("req", "-x509", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.pem")

    def sign(self, name: str, alternatives: str) -> tuple[str, str]:
        """Certificate and key."""
        self._openssl("req", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (self.folder / "extensions").write_text(f"subjectAltName={alternatives}")
        options = ["-CAcreateserial", "-days", "2", "-extfile", "extensions"]
        pem = self._openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", *options, "-out", f"{name}.pem"
        )
        return pem, str(self.folder / f"{name}.key")

    def _openssl(self, verb: str, *arguments: str) -> str:
        """The last argument's path."""
        new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"] if verb == "req" else []
        subprocess.run(["openssl", verb, *new_key, *arguments], cwd=self.folder, check=True, capture_output=True)
        return str(self.folder / arguments[-1])

    def files(self, who: str = "", **others: object) -> TlsFiles:
        """This authority, with the certificate of `who` if given."""
        own = {"cert": str(self.folder / f"{who}.pem"), "key": str(self.folder / f"{who}.key")} if who else {}
        return TlsFiles(**{"ca": self.ca, **own, **others})  # type: ignore[arg-type]

"""Unusable TLS files: the error names the file and the reason before anything connects."""

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from command_line import assert_refused, run, run_json
from servers import Certificates, make_certificates
from store import StoreUnavailable, open_store
from store.tls import TlsOptionError, tls_context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_text("no certificate\n")
    return str(path)


def refusal(**options: str | Path) -> str:
    with pytest.raises(TlsOptionError) as caught:
        tls_context({name: str(path) for name, path in options.items()})
    return str(caught.value)


def test_valid_files_are_accepted(files: Certificates) -> None:
    context = tls_context(
        {
            "ssl_ca_certs": str(files.authority),
            "ssl_certfile": str(files.client),
            "ssl_keyfile": str(files.client_key),
        }
    )
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_a_file_that_is_not_there(files: Certificates, option: str) -> None:
    options: dict[str, str | Path] = {
        "ssl_ca_certs": files.authority, "ssl_certfile": files.client,
        "ssl_keyfile": files.client_key, option: "/not/there.pem",
    }  # fmt: skip
    assert refusal(**options) == f"{option} /not/there.pem: No such file or directory"


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_a_file_that_is_something_else(files: Certificates, text: str, option: str) -> None:
    options: dict[str, str | Path] = {
        "ssl_ca_certs": files.authority, "ssl_certfile": files.client,
        "ssl_keyfile": files.client_key, option: text,
    }  # fmt: skip
    what = "private key" if option == "ssl_keyfile" else "certificate"
    assert refusal(**options).startswith(f"{option} {text}: it contains no {what} in PEM format")


def test_a_key_of_another_certificate(files: Certificates) -> None:
    said = refusal(ssl_certfile=files.client, ssl_keyfile=files.server_key)
    assert f"ssl_keyfile {files.server_key}: the key does not belong to" in said
    assert str(files.client) in said


def test_a_key_and_no_certificate(files: Certificates) -> None:
    assert "ssl_certfile" in refusal(ssl_keyfile=files.client_key)
    assert "no private key" in refusal(ssl_certfile=files.client)


def test_no_passphrase_is_requested_at_the_terminal(files: Certificates, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(files.client_key.read_bytes(), None)
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    said = refusal(ssl_certfile=files.client, ssl_keyfile=encrypted)
    assert f"ssl_keyfile {encrypted}" in said
    assert "without a passphrase" in said


def test_a_file_that_is_removed_at_run_time(files: Certificates, tmp_path: Path) -> None:
    """As during a renewal of certificates: the file may return, so the store is only
    unavailable.
    """
    authority = tmp_path / "authority.pem"
    os.link(files.authority, authority)
    with open_store(f"rediss://127.0.0.1:1/0?ssl_ca_certs={authority}") as store:
        authority.unlink()
        with pytest.raises(StoreUnavailable, match=f"ssl_ca_certs {authority}: No such file"):
            store.ping()


def test_commands_and_nodes_do_not_start_with_an_unusable_file(tmp_path: Path) -> None:
    settings = {
        "LOOKUP_BUFFER_STORE_URL": "rediss://127.0.0.1:1/0?ssl_ca_certs=/not/there.pem",
        "LOOKUP_BUFFER_DIRECTORY": str(tmp_path / "d"),
    }
    words = ("store_url", "ssl_ca_certs /not/there.pem: No such file")
    assert_refused(run("ls", **settings), 2, *words)
    assert_refused(run("serve", **settings), 2, *words)
    checks = {one["name"]: one for one in run_json("doctor", code=1, **settings)["checks"]}
    assert "ssl_ca_certs /not/there.pem" in checks["store"]["found"]
    assert "correct the file" in checks["store"]["advice"]

"""Whom a server answers, asked by real clients: curl, Python's own, Triton's."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from launching import call
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import World
from tritonclient.utils import InferenceServerException

X = np.array([[0.5, -1.0, 2.0]], dtype=np.float32)
TOKEN = "swordfish-2f81"
WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}


def secured(world: World, keys: str) -> Path:
    """A policy whose server section has more keys."""
    world.models.add("affine", Affine(), **AFFINE)
    policy = world.policy("affine")
    policy.write_text(policy.read_text().replace("server: {", f"server: {{{keys}, "))
    return policy


def token_file(folder: Path, text: str = f"# of tests\n{TOKEN}\n", mode: int = 0o600) -> Path:
    file = folder / "tokens"
    file.write_text(text)
    file.chmod(mode)
    return file


def certificate(folder: Path, name: str = "own") -> tuple[Path, Path]:
    """A certificate for this machine that vouches for itself, and its key."""
    made = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                    "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
                    "-out", made[0], "-keyout", made[1]], check=True, capture_output=True)
    return made


def inference() -> triton.InferInput:
    made = triton.InferInput("x", list(X.shape), "FP32")
    made.set_data_from_numpy(X)
    return made


def status_of(url: str, headers: dict[str, str]) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_SECONDS) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


@pytest.fixture
def guarded(world, tmp_path):
    token_file(tmp_path)
    return world.serve(secured(world, "token_file: tokens"))


def test_clients_with_the_token_are_answered_and_no_others(guarded):
    address = guarded.url.removeprefix("http://")
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live() and client.is_server_ready()
        answer = client.infer("affine", [inference()], headers=WITH_TOKEN)
        assert answer.as_numpy("y").shape == (1, 2)
        with pytest.raises(InferenceServerException, match="token") as refused:
            client.infer("affine", [inference()])
        assert refused.value.status() == "401"
    for path in ("/v2", "/metrics", "/v2/sluice/status", "/v2/models/affine"):
        assert status_of(guarded.url + path, WITH_TOKEN) == 200
        assert status_of(guarded.url + path, {}) == 401
        assert status_of(guarded.url + path, {"Authorization": f"Bearer {TOKEN}x"}) == 401
    assert TOKEN not in guarded.log()


def test_curl_is_refused_before_it_sends_a_large_body(guarded, tmp_path):
    body = tmp_path / "body"
    body.write_bytes(bytes(64 << 20))
    done = call("curl", "-s", "-o", "-", "-w", "\n%{http_code} %{size_upload}", "-H", "Expect: 100-continue", "-H", "Authorization: Bearer no",
                "--data-binary", f"@{body}", f"{guarded.url}/v2/models/affine/infer")
    answer, figures = done.stdout.rsplit("\n", 1)
    code, uploaded = figures.split()
    assert code == "401" and "token" in json.loads(answer)["error"]
    assert int(uploaded) < 64 << 20


def test_sluice_status_needs_no_token(guarded, world):
    status = world.status()
    assert status["server"]["answers"] and [each["name"] for each in status["models"]] == ["affine"]


def test_a_token_file_is_read_again_when_it_changes(guarded, tmp_path):
    token_file(tmp_path, "another\n")
    another = {"Authorization": "Bearer another"}
    eventually(lambda: status_of(f"{guarded.url}/v2", another) == 200, "the new token is known")
    assert status_of(f"{guarded.url}/v2", WITH_TOKEN) == 401
    token_file(tmp_path, "\n")
    eventually(lambda: "keeps the tokens" in guarded.log(), "the bad file is told")
    assert status_of(f"{guarded.url}/v2", another) == 200
    assert "another" not in guarded.log()


@pytest.mark.parametrize("text, mode, told", [
    (None, 0o600, "there is no such file"), ("# none\n", 0o600, "there is no token in it"), ("a b\n", 0o600, "line 1 is no token"),
    (f"{TOKEN}\n", 0o644, "its mode is 0644, so that others can use it; run `chmod 600")])
def test_a_wrong_token_file_is_told_by_check_and_start(world, sluice, tmp_path, text, mode, told):
    policy = secured(world, "token_file: tokens")
    if text is not None:
        token_file(tmp_path, text, mode)
    done = call(sluice, "policy", "check", policy)
    assert done.returncode == 1
    assert f"server.token_file: {tmp_path / 'tokens'}: {told}" in done.stderr and TOKEN not in done.stderr
    code, log = world.refused(policy)
    assert code == (3 if text is None else 2) and told in log


@pytest.mark.parametrize("target, told", [("nowhere/access.log", "No such file or directory"), (".", "directory"), ("pipe", "nobody reads that pipe")])
def test_an_access_log_that_cannot_be_written_is_told_by_check_and_start(world, sluice, tmp_path, target, told):
    os.mkfifo(tmp_path / "pipe")
    policy = secured(world, f"access_log: {target}")
    done = call(sluice, "policy", "check", policy)
    assert done.returncode == 1 and "server.access_log: cannot write to" in done.stderr and told in done.stderr
    code, log = world.refused(policy)
    assert code == 2 and told in log


def test_the_check_of_an_access_log_makes_no_file(world, sluice, tmp_path):
    done = call(sluice, "policy", "check", secured(world, "access_log: access.log"))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "access.log").exists()


def test_a_right_token_file_passes_the_check(world, sluice, tmp_path):
    token_file(tmp_path)
    done = call(sluice, "policy", "check", secured(world, "token_file: tokens"))
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_an_address_for_other_machines_is_warned_of_unless_it_asks_for_a_token(world, tmp_path):
    token_file(tmp_path)
    for told, make in ((False, lambda: secured(world, "token_file: tokens")), (True, lambda: world.policy("affine"))):
        server = world.start(make(), "--host", "0.0.0.0")
        assert server.process.stdout.readline().startswith(b"listening on"), server.log()
        warned = [line for line in server.log().splitlines() if "from other machines" in line]
        assert ("asks nobody who they are" in "".join(warned)) == told, server.log()
        assert server.end() == 0


TLS_KEYS = "tls: {certificate_file: own.pem, key_file: own.key}"


@pytest.fixture
def encrypted(world, tmp_path):
    """A server that speaks TLS and asks for a token."""
    certificate(tmp_path)
    token_file(tmp_path)
    return world.serve(secured(world, f"token_file: tokens, {TLS_KEYS}"))


def port_of(server) -> int:
    return int(server.url.rsplit(":", 1)[1])


def trusting(tmp_path: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=tmp_path / "own.pem")


def test_clients_of_tls_are_answered(encrypted, world, tmp_path):
    assert encrypted.url.startswith("https://")
    with triton.InferenceServerClient(f"localhost:{port_of(encrypted)}", ssl=True,
                                      ssl_options={"ca_certs": str(tmp_path / "own.pem")}) as client:
        assert client.is_server_live()
        for _ in range(3):
            assert client.infer("affine", [inference()], headers=WITH_TOKEN).as_numpy("y").shape == (1, 2)
        with pytest.raises(InferenceServerException, match="token"):
            client.infer("affine", [inference()])
    with urllib.request.urlopen(urllib.request.Request(f"{encrypted.url}/metrics", headers=WITH_TOKEN), timeout=PATIENCE_SECONDS,
                                context=trusting(tmp_path)) as answer:
        assert answer.status == 200
    told = world.status()["server"]  # asked for without either
    assert told["answers"] and told["scheme"] == "https"
    done = call("curl", "-s", "--cacert", tmp_path / "own.pem", "-o", "/dev/null", "-w", "%{http_code} %{http_version}",
                f"{encrypted.url}/v2/health/ready")
    assert done.stdout == "200 1.1", done.stderr


def test_curl_sends_large_bodies_over_tls_and_hears_refusals(encrypted, tmp_path):
    body = tmp_path / "body"
    body.write_bytes(b" " * (20 << 20))
    for token, wanted in ((TOKEN, "400"), ("no", "401")):
        for expect in ("Expect:", "Expect: 100-continue"):
            done = call("curl", "-s", "--cacert", tmp_path / "own.pem", "-o", "/dev/null", "-w", "%{http_code}", "-H", expect,
                        "-H", f"Authorization: Bearer {token}", "--data-binary", f"@{body}", f"{encrypted.url}/v2/models/affine/infer")
            assert done.stdout == wanted, done


@pytest.mark.parametrize("options, agreed", [
    (["-tls1_2"], "TLSv1.2"), (["-tls1_3", "-alpn", "h2,http/1.1"], "TLSv1.3"), (["-tls1_1", "-cipher", "ALL:@SECLEVEL=0"], None),
    (["-alpn", "h2"], None)])
def test_openssls_own_client_agrees_or_is_refused(encrypted, tmp_path, options, agreed):
    done = call("openssl", "s_client", "-connect", f"127.0.0.1:{port_of(encrypted)}", "-CAfile", tmp_path / "own.pem", "-verify_return_error",
                "-quiet", "-ign_eof", *options, input="GET /v2/health/live HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert ('{"live":true}' in done.stdout) == (agreed is not None), done
    assert (done.returncode == 0) == (agreed is not None), done


def test_who_speaks_no_tls_or_says_nothing_stops_nobody(encrypted, tmp_path):
    silent = [socket.create_connection(("127.0.0.1", port_of(encrypted))) for _ in range(50)]
    with socket.create_connection(("127.0.0.1", port_of(encrypted)), PATIENCE_SECONDS) as plain:
        plain.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n")
        assert plain.recv(4096).startswith(b"HTTP/1.1 400 ")
    with urllib.request.urlopen(f"{encrypted.url}/v2/health/live", timeout=PATIENCE_SECONDS, context=trusting(tmp_path)) as answer:
        assert answer.status == 200
    for each in silent:
        each.close()


def test_a_new_certificate_is_shown_once_both_files_are_there(encrypted, tmp_path):
    before = ssl.get_server_certificate(("127.0.0.1", port_of(encrypted)))
    certificate(tmp_path)
    eventually(lambda: ssl.get_server_certificate(("127.0.0.1", port_of(encrypted))) != before, "the new certificate is shown")


def spoil_encrypted(folder: Path) -> None:
    subprocess.run(["openssl", "pkey", "-aes256", "-passout", "pass:x", "-in", folder / "own.key", "-out", folder / "new.key"], check=True)
    (folder / "new.key").replace(folder / "own.key")


@pytest.mark.parametrize("spoil, told", [
    (lambda folder: (folder / "own.pem").unlink(), "server.tls.certificate_file: {}/own.pem: there is no such file"),
    (lambda folder: (folder / "own.pem").write_text("none"), "server.tls.certificate_file: {}/own.pem: holds no certificate"),
    (lambda folder: (folder / "own.key").chmod(0o640), "server.tls.key_file: {}/own.key: its mode is 0640"),
    (lambda folder: certificate(folder, "b")[1].replace(folder / "own.key"), "server.tls.key_file: {}/own.key: the key is not that of"),
    (spoil_encrypted, "server.tls.key_file: {}/own.key: the key is encrypted")], ids=["missing", "garbage", "mode", "mismatch", "encrypted"])
def test_what_is_wrong_with_a_certificate_is_told_by_check_and_start(world, sluice, tmp_path, spoil, told):
    certificate(tmp_path)
    policy = secured(world, TLS_KEYS)
    assert call(sluice, "policy", "check", policy).returncode == 0
    spoil(tmp_path)
    done = call(sluice, "policy", "check", policy)
    assert done.returncode == 1 and told.format(tmp_path) in done.stderr, done.stderr
    code, log = world.refused(policy)
    assert code in (2, 3) and told.format(tmp_path) in log, log


def test_a_certificate_that_has_expired_is_warned_of(world, sluice, tmp_path):
    own, key = certificate(tmp_path)
    subprocess.run(["openssl", "x509", "-in", own, "-signkey", key, "-days", "-1", "-out", tmp_path / "old"], check=True, capture_output=True)
    (tmp_path / "old").replace(own)
    policy = secured(world, TLS_KEYS)
    done = call(sluice, "policy", "check", policy)
    assert done.returncode == 0 and "has expired at" in done.stderr, done
    assert "has expired at" in world.serve(policy).log()


def test_half_of_tls_is_no_policy(sluice, world):
    done = call(sluice, "policy", "check", secured(world, "tls: {certificate_file: own.pem}"))
    assert done.returncode == 1 and "server.tls.key_file: is missing" in done.stderr


def test_each_request_has_a_line_and_a_file_may_be_moved(world, tmp_path):
    token_file(tmp_path)
    server = world.serve(secured(world, "token_file: tokens, access_log: access.log"))
    log = tmp_path / "access.log"
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        client.infer("affine", [inference()], headers=WITH_TOKEN, request_id="seven")
        line = eventually(lambda: next((each for each in log.read_text().splitlines() if "/infer" in each), None), "the line is written")
        values = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', line))
        assert values["id"] == '"seven"' and values["status"] == "200" and values["model"] == '"affine"' and "cause" not in values
        assert 0 < float(values["compute_ms"]) <= float(values["total_ms"])
        log.rename(tmp_path / "access.log.1")
        with pytest.raises(InferenceServerException):
            client.infer("affine", [inference()], headers={"Authorization": "Bearer hush"})
        refused = eventually(lambda: log.exists() and log.read_text(), "the line is written")
    assert "status=401" in refused and "cause=token" in refused
    assert server.end() == 0
    assert TOKEN not in log.read_text() + server.log() and "hush" not in log.read_text()


def test_the_access_log_may_be_standard_error(world):
    server = world.serve(secured(world, "access_log: stderr"))
    server.request("/v2/health/live")
    eventually(lambda: 'path="/v2/health/live" status=200' in server.log(), "the line is written")


def test_an_access_log_that_cannot_be_written_is_told(world):
    code, log = world.refused(secured(world, "access_log: nowhere/at/all.log"))
    assert code == 2 and "server.access_log: cannot write to" in log

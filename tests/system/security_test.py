"""Whom a server answers, asked by real clients: curl, Python's own, Triton's."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from launching import call
from server_models import AFFINE, Affine
from serving import PATIENCE_SECONDS, World, eventually
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

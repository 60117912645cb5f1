"""`sluice run` and the pool: it is there first, it is shared, and training does not depend on it.
And `sluice status`, and the command line as a whole."""

import json
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from patience import PATIENCE_SECONDS, eventually

from launching import POOL, SHOW_ENVIRONMENT, alive, call, environment_in, run


def status(sluice) -> dict:
    done = call(sluice, "status", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_pool_is_there_before_the_command_starts(sluice):
    done = run(sluice, [str(sluice), "status", "--json"], ["--require-pool"])
    assert done.returncode == 0, done.stderr
    pool = json.loads(done.stdout)["pool"]
    assert pool["backend"] == "host"
    assert pool["bytes"] == 16 << 20


def test_a_command_that_reached_a_broker_about_to_end_has_the_next_one(sluice, runtime_folder):
    """It had been connected to, but ends before it hears anything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ending:
        ending.bind(str(runtime_folder / "broker.sock"))
        ending.listen()

        def end() -> None:
            came, _ = ending.accept()
            (runtime_folder / "broker.sock").unlink()
            came.close()

        last = threading.Thread(target=end)
        last.start()
        done = run(sluice, ["true"], ["--require-pool"])
        last.join()
    assert done.returncode == 0, done.stderr


def test_a_command_whose_broker_ended_before_it_was_asked_starts_another(sluice, monkeypatch):
    """One that stays without clients for no time often does."""
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "0")
    for _ in range(20):
        done = run(sluice, ["true"], ["--require-pool"])
        assert done.returncode == 0, done.stderr


def test_a_broker_waits_for_who_started_it_however_soon_it_ends_without_clients(
    sluice, runtime_folder, monkeypatch
):
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "0")
    broker = subprocess.Popen([sluice, "broker", *POOL], stderr=subprocess.PIPE, text=True)
    try:
        eventually((runtime_folder / "broker.sock").exists, "the broker has its place")
        with pytest.raises(subprocess.TimeoutExpired):
            broker.wait(1)
        assert status(sluice)["pool"]["broker_pid"] == broker.pid
        assert broker.wait(PATIENCE_SECONDS) == 0, broker.stderr.read()
    finally:
        broker.kill()
        broker.communicate()


def test_a_broker_that_is_asked_several_questions_ends_after_the_last(sluice, monkeypatch):
    """Which pools there are is one conversation, each pool's status another."""

    def answered():
        done = call(sluice, "status", "--json")
        starts = "no broker runs" in done.stderr or "does not listen there" in done.stderr
        return None if starts and broker.poll() is None else done

    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "0")
    for _ in range(20):
        broker = subprocess.Popen([sluice, "broker", *POOL], stderr=subprocess.PIPE, text=True)
        try:
            done = eventually(answered, "the broker listens")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["pool"]["broker_pid"] == broker.pid
            assert broker.wait(PATIENCE_SECONDS) == 0, broker.stderr.read()
        finally:
            broker.kill()
            broker.communicate()


def test_the_broker_outlives_the_command_and_serves_the_next(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000")
    show = [str(sluice), "status", "--json"]
    first = json.loads(run(sluice, show).stdout)["pool"]
    second = json.loads(run(sluice, show).stdout)["pool"]
    assert second["broker_pid"] == first["broker_pid"]
    assert second["id"] == first["id"]
    assert alive(first["broker_pid"])


def test_a_broker_that_the_command_started_is_left_to_those_who_use_it(
    sluice, tmp_path, monkeypatch
):
    """A job whose broker died starts another, which comes to be a descendant of the launcher."""
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000")
    inner = tmp_path / "b"
    command = [
        str(sluice),
        "run",
        *POOL,
        "--runtime-dir",
        str(inner),
        "--",
        str(sluice),
        "status",
        "--json",
    ]
    pool = json.loads(run(sluice, command).stdout)["pool"]
    assert alive(pool["broker_pid"])


def test_status_without_a_broker_says_how_to_get_one(sluice):
    done = call(sluice, "status")
    assert done.returncode == 6
    assert "no broker runs in" in done.stderr
    assert not done.stdout


def test_status_is_readable(sluice):
    text = run(sluice, [str(sluice), "status"]).stdout
    assert text.startswith("pool ")
    assert "16 MiB in 8 chunks of 2 MiB, backend host" in text
    assert "clients: none" in text
    assert "server: none" in text


def test_every_chunk_of_a_pool_is_shown(sluice):
    text = run(sluice, [str(sluice), "pool", "show"]).stdout
    assert text.startswith("pool ")
    assert "\n       0  ........\n" in text
    assert "holders: none" in text
    assert "free: 8 chunks, the longest run of neighbours 8, fragmentation 0.0%" in text
    shown = json.loads(run(sluice, [str(sluice), "pool", "show", "--json"]).stdout)
    assert shown["runs"] == [{"first": 0, "count": 8, "owner": "free"}]
    assert shown["free"] == {"chunks": 8, "longest_run": 8, "fragmentation": 0.0}


def test_the_pools_of_the_machine_are_listed_with_who_keeps_them(sluice, tmp_path):
    folder = tmp_path / "r"
    done = run(sluice, [str(sluice), "pool", "list", "--json"], ["--runtime-dir", str(folder)])
    (pool,) = [each for each in json.loads(done.stdout) if each["runtime_dir"] == str(folder)]
    assert pool["state"] == "in use"
    assert pool["bytes"] == 16 << 20
    assert pool["broker_pid"] > 0
    assert "in use" in run(sluice, [str(sluice), "pool", "list"]).stdout


def test_a_pool_in_use_is_not_cleaned(sluice):
    done = run(sluice, ["sh", "-c", f"{sluice} pool clean && {sluice} status --json"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("there is no orphaned pool")


def test_a_pool_that_is_not_there_cannot_be_shown(sluice):
    done = call(sluice, "pool", "show")
    assert done.returncode == 6
    assert "no broker runs in" in done.stderr
    assert not done.stdout


def impossible_pool():
    return ["--memory", "1000000TiB"]


def test_where_there_can_be_no_pool_training_runs_all_the_same(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_RUN", "1")  # as inherited from an outer `sluice run`
    done = call(sluice, "run", "--backend", "host", *impossible_pool(), "--", *SHOW_ENVIRONMENT)
    seen = environment_in(done)
    assert "SLUICE_RUN" not in seen
    assert "SLUICE_RUNTIME_LIBRARY" not in seen
    assert (Path(seen["PYTHONPATH"].split(":")[0]) / "sluice").is_dir()
    assert "the command runs without Sluice, as plain PyTorch" in done.stderr


def test_who_requires_a_pool_gets_125_instead(sluice, tmp_path):
    mark = tmp_path / "started"
    done = call(
        sluice,
        "run",
        "--backend",
        "host",
        *impossible_pool(),
        "--require-pool",
        "--",
        "touch",
        str(mark),
    )
    assert done.returncode == 125
    assert "there is no pool" in done.stderr
    assert not mark.exists()


def test_a_pool_of_another_kind_is_not_taken_for_the_one_asked_for(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000")
    assert run(sluice, ["true"]).returncode == 0
    done = call(sluice, "run", "--backend", "cuda", "--require-pool", "--", "true")
    assert done.returncode == 125
    assert "has the backend host, not cuda" in done.stderr


def test_pools_of_several_devices_are_shown_and_told_apart(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000")
    inner = [str(sluice), "run", *POOL, "--device", "1", "--require-pool", "--", str(sluice)]
    several = json.loads(run(sluice, [*inner, "status", "--json"]).stdout)
    assert [each["pool"]["device"] for each in several["pools"]] == [0, 1]
    assert several["pool"] == several["pools"][0]["pool"]
    text = run(sluice, [*inner, "status"]).stdout
    assert "backend host, written" in text
    assert "backend host device 1, written" in text
    shown = json.loads(run(sluice, [*inner, "pool", "show", "--device", "1", "--json"]).stdout)
    assert shown["pool"]["device"] == 1
    assert shown["free"]["chunks"] == 8
    assert "pools" not in shown
    missing = call(sluice, "pool", "show", "--device", "5")
    assert missing.returncode == 3
    assert "has pools of the devices 0, 1" in missing.stderr


def test_the_command_is_told_the_device_that_was_asked_for(sluice):
    assert environment_in(run(sluice, SHOW_ENVIRONMENT, ["--device", "1"]))["SLUICE_DEVICE"] == "1"


def test_version_and_help_are_told(sluice):
    version = call(sluice, "--version").stdout
    assert version.startswith("sluice ")
    text = call(sluice, "--help").stdout
    assert {"run", "serve", "status", "pool", "policy"} <= set(text.split())


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["pool"], ["policy"], ["policy", "check"], ["serve"], ["status", "--yaml"]]
)
def test_a_wrong_command_line_is_2_with_a_hint(sluice, words):
    done = call(sluice, *words)
    assert done.returncode == 2
    assert "--help" in done.stderr
    assert not done.stdout


def test_output_that_cannot_be_written_is_an_error(sluice):
    with open("/dev/full", "w") as full:
        done = call(sluice, "policy", "schema", stdout=full)
    assert done.returncode == 6
    assert "standard output cannot be written" in done.stderr

"""`sluice run` stands in for the command it starts: exit codes, what the command sees, what is
left behind."""

import contextlib
import json
import os
import signal
import textwrap
from pathlib import Path

import pytest
from launching import (
    SHOW_ENVIRONMENT,
    alive,
    call,
    environment_in,
    in_python,
    run,
    running,
)
from patience import PATIENCE_SECONDS, reaches


@pytest.mark.parametrize("code", [0, 1, 2, 7, 124, 200, 255])
def test_the_commands_exit_code_is_returned(sluice, code):
    assert run(sluice, ["sh", "-c", f"exit {code}"]).returncode == code


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGSEGV", "SIGINT"])
def test_a_command_that_a_signal_ends_counts_as_128_plus_its_number(sluice, name):
    number = getattr(signal, name)
    done = run(sluice, ["sh", "-c", f"ulimit -c 0; kill -{int(number)} $$"])
    assert done.returncode == 128 + number


def test_a_command_that_does_not_exist_is_127(sluice):
    done = run(sluice, ["no-such-command-anywhere"])
    assert done.returncode == 127
    assert 'command="no-such-command-anywhere"' in done.stderr


def test_a_command_that_cannot_be_executed_is_126(sluice, tmp_path):
    file = tmp_path / "plain.txt"
    file.write_text("not a program")
    for command in (str(file), str(tmp_path)):
        done = run(sluice, [command])
        assert done.returncode == 126
        assert "Permission denied" in done.stderr


@pytest.mark.parametrize(
    "words, complaint",
    [
        ([], "the command is missing"),
        (["--"], "the command is missing"),
        (["true"], "true"),
        (["--memroy", "4GiB", "--", "true"], "--memroy"),
        (["--memory", "4GB", "--", "true"], "did you mean 4GiB?"),
        (["--backend", "gpu", "--", "true"], "gpu"),
        (["--device", "-1", "--", "true"], "--device"),
    ],
)
def test_a_wrong_command_line_is_125_and_starts_nothing(sluice, words, complaint, runtime_folder):
    done = call(sluice, "run", *words)
    assert done.returncode == 125
    assert complaint in done.stderr
    assert not list(runtime_folder.iterdir())


def test_a_wrong_variable_is_125_and_named(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_POOL_BYTES", "4GiB")
    done = call(sluice, "run", "--", "true")
    assert done.returncode == 125
    assert "SLUICE_POOL_BYTES" in done.stderr


def test_arguments_arrive_as_they_are(sluice):
    words = ["two words", "", "--", "--memory", "*", "$HOME", "it's", "--help", "grüße\n"]
    command = in_python("import json, sys; print(json.dumps(sys.argv[1:]))") + words
    assert json.loads(run(sluice, command).stdout) == words


def test_standard_input_arrives(sluice):
    assert run(sluice, ["cat"], input="one\ntwo\n").stdout == "one\ntwo\n"


def test_working_folder_and_inherited_descriptors_stay(sluice, tmp_path):
    reading, writing = os.pipe()
    with os.fdopen(reading) as result:
        command = in_python(f"import os; os.write({writing}, os.getcwd().encode())")
        done = run(sluice, command, cwd=tmp_path, pass_fds=[writing])
        os.close(writing)
        assert done.returncode == 0, done.stderr
        assert result.read() == str(tmp_path)


def test_the_broker_keeps_no_descriptor_of_whoever_started_it(sluice, monkeypatch):
    """Else a pipe into which the command writes would not end while the broker lives."""
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "600000")
    reading, writing = os.pipe()
    with os.fdopen(reading) as result:
        pool = json.loads(
            run(sluice, [str(sluice), "status", "--json"], pass_fds=[writing]).stdout
        )["pool"]
        os.close(writing)
        assert not result.read()
        assert alive(pool["broker_pid"])


def test_no_descriptor_of_the_launcher_leaks_into_the_command(sluice):
    listing = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])"
    assert json.loads(run(sluice, in_python(listing)).stdout) == [0, 1, 2]


def test_signal_mask_and_ignored_signals_stay_as_they_were(sluice):
    show = in_python("""
        import re
        text = open('/proc/self/status').read()
        print(re.findall(r'^(SigBlk|SigIgn):\\s*(\\w+)', text, re.M))
        """)

    def prepare():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    plain = call(*show, preexec_fn=prepare)
    assert run(sluice, show, preexec_fn=prepare).stdout == plain.stdout


def test_the_command_stays_in_the_process_group_and_session(sluice):
    ids = in_python("import os; print('ready', os.getpgrp(), os.getsid(0), flush=True); input()")
    with running(sluice, ids) as process:
        _, group, session = process.first_line.split()
        assert int(group) == os.getpgid(process.pid)
        assert int(session) == os.getsid(process.pid)


def test_the_command_is_told_where_the_pool_and_the_libraries_are(
    sluice, build, checkout, runtime_folder
):
    seen = environment_in(run(sluice, SHOW_ENVIRONMENT, ["--name", "digits", "--device", "0"]))
    assert seen["SLUICE_RUN"] == "1"
    assert seen["SLUICE_RUNTIME_DIR"] == str(runtime_folder)
    assert (
        Path(seen["SLUICE_RUNTIME_LIBRARY"]) == (build / "lib" / "libsluice_runtime.so").resolve()
    )
    assert Path(seen["SLUICE_BROKER"]) == sluice.resolve()
    assert seen["SLUICE_POOL_BYTES"] == str(16 << 20)
    assert seen["SLUICE_BACKEND"] == "host"
    assert seen["SLUICE_DEVICE"] == "0"
    assert seen["SLUICE_NAME"] == "digits"
    startup, package = seen["PYTHONPATH"].split(":")[:2]
    assert (Path(startup) / "sitecustomize.py").is_file()
    assert (Path(package) / "sluice").is_dir()


def test_python_path_grows_in_front_and_the_rest_stays(sluice, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine:/other")
    monkeypatch.setenv("UNRELATED", "value")
    seen = environment_in(run(sluice, SHOW_ENVIRONMENT))
    assert seen["PYTHONPATH"].endswith(":/mine:/other")
    assert seen["UNRELATED"] == "value"


def test_preloads_stay_alone_where_the_pool_is_on_the_host(sluice, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    assert environment_in(run(sluice, SHOW_ENVIRONMENT))["LD_PRELOAD"] == "libm.so.6"


@pytest.mark.skipif(
    not Path("/dev/nvidiactl").exists(), reason="needs a GPU: the pool is to be on one"
)
def test_gate_and_collectives_are_preloaded_behind_the_users_own_where_the_pool_is_on_a_gpu(
    sluice, build, monkeypatch
):
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    done = call(
        sluice,
        "run",
        "--backend",
        "cuda",
        "--memory",
        "256MiB",
        "--require-pool",
        "--",
        *SHOW_ENVIRONMENT,
        timeout=PATIENCE_SECONDS,
    )
    gate, collectives = ((build / "lib" / name).resolve() for name in ("libsluice_gate.so", "libsluice_nccl.so"))
    assert environment_in(done)["LD_PRELOAD"] == f"libm.so.6:{gate}:{collectives}"


# A daemon as daemons are made: forked twice, in a session of its own, deaf to signals. The command
# goes on when it has its pid, and that of the daemon's own child.
DAEMON = """
    import os, signal, sys
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            inner = os.fork()
            if inner == 0:
                signal.pause()
            os.write(writing, f"{os.getpid()} {inner}".encode())
            for fd in (0, 1, 2, writing):
                os.close(fd)
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
    print("ready", os.read(reading, 100).decode(), flush=True)
    """


@pytest.mark.parametrize("ending, code", [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137)])
def test_a_daemon_that_the_command_leaves_is_ended(sluice, ending, code):
    with running(sluice, in_python(textwrap.dedent(DAEMON) + ending)) as process:
        left = [int(word) for word in process.first_line.split()[1:]]
        assert process.wait(PATIENCE_SECONDS) == code
        assert len(left) == 2
        # No waiting: when the launcher has returned, they are gone.
        assert not [pid for pid in left if alive(pid)]


def test_a_daemon_lives_as_long_as_the_command(sluice):
    with running(sluice, in_python(textwrap.dedent(DAEMON) + "input()")) as process:
        left = [int(word) for word in process.first_line.split()[1:]]
        assert all(alive(pid) for pid in left)
        process.communicate("\n", timeout=PATIENCE_SECONDS)
        assert not [pid for pid in left if alive(pid)]


def test_orphans_that_end_by_themselves_are_waited_for(sluice):
    """The launcher is their parent then; without that they would stay as zombies."""
    command = in_python("""
        import os
        for _ in range(20):
            if os.fork() == 0:
                if os.fork() == 0:
                    os._exit(0)
                os._exit(0)
            os.wait()
        print("ready", os.getpid(), flush=True)
        input()
        """)
    with running(sluice, command) as process:
        kept = int(process.first_line.split()[1])

        def only_the_command():
            children = set()
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if entry.name.isdigit():
                        parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                        if int(parent) == process.pid:
                            children.add(int(entry.name))
            return children == {kept}

        assert reaches(only_the_command)


def test_a_killed_launcher_leaves_training_running(sluice):
    with running(
        sluice, in_python("import os; print('ready', os.getpid(), flush=True); input()")
    ) as process:
        pid = int(process.first_line.split()[1])
        process.kill()
        process.wait(PATIENCE_SECONDS)
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)
        assert reaches(lambda: not alive(pid))

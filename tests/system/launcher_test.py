"""`sluice run` stands in for the command it starts: exit codes, signals, terminal, environment, what is left behind."""

import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

POOL = ["--backend", "host", "--memory", "16MiB"]


def in_python(code: str) -> list[str]:
    """A command that runs `code` without site packages, so that it starts at once."""
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def run(sluice, command, options=(), **how):
    how.setdefault("timeout", 60)
    return subprocess.run([sluice, "run", *POOL, *options, "--", *command], capture_output=True, text=True,
                          check=False, **how)


@contextlib.contextmanager
def running(sluice, command, options=(), **how):
    """The launcher, once its command has said "ready"."""
    process = subprocess.Popen([sluice, "run", *POOL, *options, "--", *command], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)
    try:
        line = process.stdout.readline()
        assert line.startswith("ready"), process.communicate(timeout=60)[1]
        process.first_line = line
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def reaches(what, seconds=20.0):
    """Looks again and again until `what` holds; whether it came to hold in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        select.select([], [], [], 0.002)
    return True


# --- exit codes -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("words, complaint", [
    ([], "the command is missing"),
    (["--"], "the command is missing"),
    (["true"], "true"),
    (["--memroy", "4GiB", "--", "true"], "--memroy"),
    (["--memory", "4GB", "--", "true"], "did you mean 4GiB?"),
    (["--backend", "gpu", "--", "true"], "gpu"),
    (["--device", "-1", "--", "true"], "--device"),
])
def test_a_wrong_command_line_is_125_and_starts_nothing(sluice, words, complaint, runtime_folder):
    done = subprocess.run([sluice, "run", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 125
    assert complaint in done.stderr
    assert not list(runtime_folder.iterdir())


def test_a_wrong_variable_is_125_and_named(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_POOL_BYTES", "4GiB")
    done = subprocess.run([sluice, "run", "--", "true"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 125
    assert "SLUICE_POOL_BYTES" in done.stderr


# --- the command sees what it would see without the launcher ----------------------------------------------------------


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
        pool = json.loads(run(sluice, [str(sluice), "status", "--json"], pass_fds=[writing]).stdout)["pool"]
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

    plain = subprocess.run(show, capture_output=True, text=True, preexec_fn=prepare, timeout=60, check=True)
    assert run(sluice, show, preexec_fn=prepare).stdout == plain.stdout


def test_the_command_stays_in_the_process_group_and_session(sluice):
    ids = in_python("import os; print('ready', os.getpgrp(), os.getsid(0), flush=True); input()")
    with running(sluice, ids) as process:
        _, group, session = process.first_line.split()
        assert int(group) == os.getpgid(process.pid)
        assert int(session) == os.getsid(process.pid)


# --- environment ------------------------------------------------------------------------------------------------------


def environment_in(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SHOW_ENVIRONMENT = in_python("import json, os; print(json.dumps(dict(os.environ)))")


def test_the_command_is_told_where_the_pool_and_the_libraries_are(sluice, build, checkout, runtime_folder):
    seen = environment_in(run(sluice, SHOW_ENVIRONMENT, ["--name", "digits", "--device", "0"]))
    assert seen["SLUICE_RUN"] == "1"
    assert seen["SLUICE_RUNTIME_DIR"] == str(runtime_folder)
    assert Path(seen["SLUICE_RUNTIME_LIBRARY"]) == (build / "lib" / "libsluice_runtime.so").resolve()
    assert Path(seen["SLUICE_BROKER"]) == sluice.resolve()
    assert seen["SLUICE_POOL_BYTES"] == str(16 << 20)
    assert seen["SLUICE_BACKEND"] == "host"
    assert seen["SLUICE_DEVICE"] == "0"
    assert seen["SLUICE_NAME"] == "digits"
    assert (Path(seen["PYTHONPATH"].split(":")[0]) / "sluice").is_dir()


def test_python_path_grows_in_front_and_the_rest_stays(sluice, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine:/other")
    monkeypatch.setenv("UNRELATED", "value")
    seen = environment_in(run(sluice, SHOW_ENVIRONMENT))
    assert seen["PYTHONPATH"].endswith(":/mine:/other")
    assert seen["UNRELATED"] == "value"


def test_preloads_stay_alone_where_the_pool_is_on_the_host(sluice, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    assert environment_in(run(sluice, SHOW_ENVIRONMENT))["LD_PRELOAD"] == "libm.so.6"


@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs a GPU: the pool is to be on one")
def test_the_gate_is_preloaded_behind_the_users_own_where_the_pool_is_on_a_gpu(sluice, build, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    done = subprocess.run(
        [sluice, "run", "--backend", "cuda", "--memory", "256MiB", "--require-pool", "--", *SHOW_ENVIRONMENT],
        capture_output=True, text=True, timeout=100, check=False)
    gate = (build / "lib" / "libsluice_gate.so").resolve()
    assert environment_in(done)["LD_PRELOAD"] == f"libm.so.6:{gate}"


# --- signals ----------------------------------------------------------------------------------------------------------

COUNTS_SIGNALS = """
    import signal, sys
    seen = []
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"):
        signal.signal(getattr(signal, name), lambda number, frame: print(signal.Signals(number).name, flush=True))
    print("ready", flush=True)
    for line in sys.stdin:
        print("end", flush=True)
        break
    """


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"])
def test_a_signal_to_the_launcher_reaches_the_command_once(sluice, name):
    with running(sluice, in_python(COUNTS_SIGNALS)) as process:
        process.send_signal(getattr(signal, name))
        assert process.stdout.readline().strip() == name
        rest, _ = process.communicate("end\n", timeout=60)
        assert rest == "end\n"
        assert process.returncode == 0


def test_a_terminated_command_is_reported_as_terminated(sluice):
    with running(sluice, ["sh", "-c", "echo ready; exec sleep 600"]) as process:
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM


def test_the_command_may_outlive_the_signal_that_asks_it_to_end(sluice):
    slow = in_python("""
        import signal, sys
        def finish(number, frame):
            print("saving", flush=True)
            sys.stdin.readline()
            sys.exit(3)
        signal.signal(signal.SIGTERM, finish)
        print("ready", flush=True)
        signal.pause()
        """)
    with running(sluice, slow) as process:
        process.terminate()
        assert process.stdout.readline() == "saving\n"
        assert process.poll() is None
        process.communicate("go on\n", timeout=60)
        assert process.returncode == 3


class Terminal:
    """`sluice run` as the foreground job of a terminal of its own, as under a shell without job control."""

    def __init__(self, sluice, command):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(sluice, [str(sluice), "run", *POOL, "--", *command])
        self.text = ""
        self.code = None

    def read_until(self, what: str):
        while what not in self.text:
            ready, _, _ = select.select([self.fd], [], [], 60)
            assert ready, f"no {what!r} in {self.text!r}"
            self.text += os.read(self.fd, 4096).decode()

    def read_to_the_end(self) -> str:
        with contextlib.suppress(OSError):  # how a terminal tells that nobody is left
            while data := os.read(self.fd, 4096):
                self.text += data.decode()
        return self.text

    def type(self, text: str):
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def test_the_command_has_the_terminal(sluice):
    terminal = Terminal(sluice, in_python("""
        import os, sys
        print(os.isatty(0), os.isatty(1), os.tcgetpgrp(0) == os.getpgrp(), flush=True)
        print("hello " + input(), flush=True)
        """))
    terminal.read_until("True True True")
    terminal.type("world\n")
    terminal.read_until("hello world")
    assert terminal.wait() == 0


def test_ctrl_c_reaches_the_command_once(sluice):
    terminal = Terminal(sluice, in_python(COUNTS_SIGNALS))
    terminal.read_until("ready")
    terminal.type("\x03")
    terminal.read_until("SIGINT")
    terminal.type("end\n")
    text = terminal.read_to_the_end()
    assert terminal.wait() == 0
    assert text.count("SIGINT") == 1


def test_a_resized_terminal_reaches_the_command_once(sluice):
    terminal = Terminal(sluice, in_python(COUNTS_SIGNALS))
    terminal.read_until("ready")
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, b"\x20\0\x60\0\0\0\0\0")
    terminal.read_until("SIGWINCH")
    terminal.type("end\n")
    assert terminal.read_to_the_end().count("SIGWINCH") == 1
    assert terminal.wait() == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, for its job control")
def test_a_shell_stops_and_continues_the_command_as_a_job(sluice):
    """Ctrl-Z, `fg`: what a shell does with any program it does with `sluice run`."""
    command = " ".join(["'" + word.replace("'", "'\\''") + "'" for word in [
        str(sluice), "run", *POOL, "--", *in_python("print('ready', flush=True); print('got', input(), flush=True)")]])
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["PS1"] = "$ "
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    shell = Terminal.__new__(Terminal)
    shell.pid, shell.fd, shell.text, shell.code = pid, fd, "", None
    shell.type("stty -echo\n" + command + "\n")
    shell.read_until("\nready")
    shell.type("\x1a")
    shell.read_until("Stopped")
    shell.type("echo shell is' 'back; fg\n")
    shell.read_until("shell is back")
    shell.type("input\n")
    shell.read_until("got input")
    shell.type("exit $?\n")
    shell.read_to_the_end()
    assert shell.wait() == 0


def test_a_command_stopped_by_somebody_else_does_not_stop_the_launcher(sluice):
    with running(sluice, in_python("import os; print('ready', os.getpid(), flush=True); input()")) as process:
        pid = int(process.first_line.split()[1])
        os.kill(pid, signal.SIGSTOP)
        assert reaches(lambda: state_of(pid) == "T")
        os.kill(pid, signal.SIGCONT)
        assert reaches(lambda: state_of(pid) != "T")
        assert state_of(process.pid) != "T"
        process.communicate("\n", timeout=60)
        assert process.returncode == 0


# --- nothing is left behind -------------------------------------------------------------------------------------------

# A daemon as daemons are made: forked twice, in a session of its own, deaf to signals. Its pid is written to a pipe
# before the command goes on.
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
        assert process.wait(timeout=60) == code
        assert len(left) == 2
        # No waiting: when the launcher has returned, they are gone.
        assert not [pid for pid in left if alive(pid)]


def test_a_daemon_lives_as_long_as_the_command(sluice):
    with running(sluice, in_python(textwrap.dedent(DAEMON) + "input()")) as process:
        left = [int(word) for word in process.first_line.split()[1:]]
        assert all(alive(pid) for pid in left)
        process.communicate("\n", timeout=60)
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
    with running(sluice, in_python("import os; print('ready', os.getpid(), flush=True); input()")) as process:
        pid = int(process.first_line.split()[1])
        process.kill()
        process.wait(timeout=60)
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)
        assert reaches(lambda: not alive(pid))


# --- the pool ---------------------------------------------------------------------------------------------------------


def status(sluice) -> dict:
    done = subprocess.run([sluice, "status", "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_pool_is_there_before_the_command_starts(sluice):
    done = run(sluice, [str(sluice), "status", "--json"], ["--require-pool"])
    assert done.returncode == 0, done.stderr
    pool = json.loads(done.stdout)["pool"]
    assert pool["backend"] == "host"
    assert pool["bytes"] == 16 << 20


def test_the_broker_outlives_the_command_and_serves_the_next(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000")
    show = [str(sluice), "status", "--json"]
    first = json.loads(run(sluice, show).stdout)["pool"]
    second = json.loads(run(sluice, show).stdout)["pool"]
    assert second["broker_pid"] == first["broker_pid"]
    assert second["id"] == first["id"]
    assert alive(first["broker_pid"])


def test_a_broker_that_the_command_started_is_left_to_those_who_use_it(sluice, tmp_path, monkeypatch):
    """A job whose broker died starts another, which comes to be a descendant of the launcher."""
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000")
    inner = tmp_path / "b"
    command = [str(sluice), "run", *POOL, "--runtime-dir", str(inner), "--", str(sluice), "status", "--json"]
    pool = json.loads(run(sluice, command).stdout)["pool"]
    assert alive(pool["broker_pid"])


def test_status_without_a_broker_says_how_to_get_one(sluice):
    done = subprocess.run([sluice, "status"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6
    assert "no broker runs in" in done.stderr
    assert not done.stdout


def test_status_is_readable(sluice):
    text = run(sluice, [str(sluice), "status"]).stdout
    assert text.startswith("pool ")
    assert "16 MiB in 8 chunks of 2 MiB, backend host" in text
    assert "clients: none" in text
    assert "server: none" in text


def impossible_pool():
    return ["--memory", "1000000TiB"]


def test_where_there_can_be_no_pool_training_runs_all_the_same(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_RUN", "1")  # as inherited from an outer `sluice run`
    done = subprocess.run([sluice, "run", "--backend", "host", *impossible_pool(), "--", *SHOW_ENVIRONMENT],
                          capture_output=True, text=True, timeout=60, check=False)
    seen = environment_in(done)
    assert "SLUICE_RUN" not in seen
    assert "SLUICE_RUNTIME_LIBRARY" not in seen
    assert (Path(seen["PYTHONPATH"].split(":")[0]) / "sluice").is_dir()
    assert "the command runs without Sluice, as plain PyTorch" in done.stderr


def test_who_requires_a_pool_gets_125_instead(sluice, tmp_path):
    mark = tmp_path / "started"
    done = subprocess.run(
        [sluice, "run", "--backend", "host", *impossible_pool(), "--require-pool", "--", "touch", str(mark)],
        capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 125
    assert "there is no pool" in done.stderr
    assert not mark.exists()


def test_a_pool_of_another_kind_is_not_taken_for_the_one_asked_for(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000")
    assert run(sluice, ["true"]).returncode == 0
    done = subprocess.run([sluice, "run", "--backend", "cuda", "--require-pool", "--", "true"],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 125
    assert "has the backend host, not cuda" in done.stderr


# --- the program as a whole -------------------------------------------------------------------------------------------


def test_version_and_help_are_told(sluice):
    version = subprocess.run([sluice, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert version.startswith("sluice ")
    text = subprocess.run([sluice, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert {"run", "serve", "status", "policy"} <= set(text.split())


@pytest.mark.parametrize("words", [[], ["fly"], ["policy"], ["policy", "check"], ["serve"], ["status", "--yaml"]])
def test_a_wrong_command_line_is_2_with_a_hint(sluice, words):
    done = subprocess.run([sluice, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--help" in done.stderr
    assert not done.stdout


def test_output_that_cannot_be_written_is_an_error(sluice):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sluice, "policy", "schema"], stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=60, check=False)
    assert done.returncode == 6
    assert "standard output cannot be written" in done.stderr

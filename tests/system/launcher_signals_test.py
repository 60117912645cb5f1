"""Signals and terminals: what reaches the command of `sluice run`, and how often."""

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import termios

import pytest
from patience import PATIENCE_SECONDS, reaches

from launching import POOL, in_python, running, state_of

#: Through a pipe: Python acts on a signal that comes just before a read only when the read has ended.
COUNTS_SIGNALS = """
    import os, select, signal, sys
    def tell(number, frame):
        print(signal.Signals(number).name, flush=True)
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    signal.set_wakeup_fd(comes)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"):
        signal.signal(getattr(signal, name), tell)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([0, came], [], [])
        if came in ready:
            os.read(came, 64)
        if 0 in ready:
            sys.stdin.readline()
            print("end", flush=True)
            break
    """


@pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"]
)
def test_a_signal_to_the_launcher_reaches_the_command_once(sluice, name):
    with running(sluice, in_python(COUNTS_SIGNALS)) as process:
        process.send_signal(getattr(signal, name))
        assert process.stdout.readline().strip() == name
        rest, _ = process.communicate("end\n", timeout=PATIENCE_SECONDS)
        assert rest == "end\n"
        assert process.returncode == 0


def test_a_terminated_command_is_reported_as_terminated(sluice):
    with running(sluice, ["sh", "-c", "echo ready; exec sleep 600"]) as process:
        process.terminate()
        process.communicate(timeout=PATIENCE_SECONDS)
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
        process.communicate("go on\n", timeout=PATIENCE_SECONDS)
        assert process.returncode == 3


class Terminal:
    """`sluice run` as the foreground job of a terminal of its own, without a shell."""

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
    terminal = Terminal(
        sluice,
        in_python("""
        import os, sys
        print(os.isatty(0), os.isatty(1), os.tcgetpgrp(0) == os.getpgrp(), flush=True)
        print("hello " + input(), flush=True)
        """),
    )
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
    command = " ".join(
        [
            "'" + word.replace("'", "'\\''") + "'"
            for word in [
                str(sluice),
                "run",
                *POOL,
                "--",
                *in_python("print('ready', flush=True); print('got', input(), flush=True)"),
            ]
        ]
    )
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["PS1"] = "$ "
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    shell = Terminal.__new__(Terminal)
    shell.pid, shell.fd, shell.text, shell.code = pid, fd, "", None
    shell.type("stty -echo\n" + command + "\n")
    shell.read_until("ready\r\n")  # perhaps behind a prompt; the echo of the command has a quote there
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
    with running(
        sluice, in_python("import os; print('ready', os.getpid(), flush=True); input()")
    ) as process:
        pid = int(process.first_line.split()[1])
        os.kill(pid, signal.SIGSTOP)
        assert reaches(lambda: state_of(pid) == "T")
        os.kill(pid, signal.SIGCONT)
        assert reaches(lambda: state_of(pid) != "T")
        assert state_of(process.pid) != "T"
        process.communicate("\n", timeout=PATIENCE_SECONDS)
        assert process.returncode == 0

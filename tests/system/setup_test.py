"""scripts/setup.sh on checkouts of its own, without network and without touching this one."""

import os
import shutil
import socket
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def setup(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs the setup of `checkout` as a caller whose python3 is the one that runs this test."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [checkout / "scripts" / "setup.sh", *arguments], capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL, env={**os.environ, "PATH": path, **environment})


@pytest.fixture
def bare(tmp_path) -> Path:
    """A checkout with the scripts alone, which asks for a package that no index has."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    requirements = tmp_path / "scripts" / "requirements.txt"
    requirements.write_text("torch==2.11.0\nsluice-setup-probe>=1\n")
    return tmp_path


@pytest.fixture
def wheels(tmp_path) -> Path:
    """A folder with a wheel of that package."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "sluice_setup_probe-1.0.dist-info"
    with zipfile.ZipFile(folder / "sluice_setup_probe-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sluice_setup_probe.py", "")
        wheel.writestr(f"{info}/METADATA",
                       "Metadata-Version: 2.1\nName: sluice-setup-probe\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL",
                       "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def chosen(checkout: Path) -> str:
    return (checkout / ".cache" / "python").read_text().strip()


@pytest.mark.parametrize("release, boost", [
    ('ID=debian\nVERSION_ID="12"\n', "libboost1.81-dev"),
    ('ID=debian\nVERSION_ID="13"\n', "libboost-dev"),
    ('NAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n', "libboost-dev"),
])
def test_each_system_gets_the_boost_package_that_is_new_enough(bare, release, boost):
    (bare / "os-release").write_text(release)
    listed = setup(bare, "--list-packages", SLUICE_OS_RELEASE=str(bare / "os-release"))
    assert listed.returncode == 0, listed.stderr
    packages = listed.stdout.split()
    assert [p for p in packages if "boost" in p] == [boost]
    assert {"g++", "cmake", "ninja-build", "python3-venv", "libyaml-cpp-dev", "prometheus-cpp-dev", "libprotobuf-dev",
            "protobuf-compiler", "libgrpc++-dev", "zlib1g-dev", "libssl-dev"} <= set(packages)
    assert "clang-format-14" not in packages


def test_what_lies_under_a_prefix_of_cmakes_needs_no_package(bare, tmp_path):
    """Where a package is missing that no index has; what is in /usr/include counts anyway."""
    script = bare / "scripts" / "detail" / "system_packages.sh"
    header = tmp_path / "a prefix" / "include" / "sluice_setup_probe" / "probe.h"
    header.parent.mkdir(parents=True)
    header.touch()

    def is_found(prefixes: str) -> bool:
        return subprocess.run(["bash", "-c", f"cache=. && . '{script}' && has_header sluice_setup_probe/probe.h"], check=False,
                              env={**os.environ, "CMAKE_PREFIX_PATH": prefixes}).returncode == 0

    assert is_found(f"/nowhere:{tmp_path}/a prefix") and not is_found("/nowhere") and not is_found("")


def test_cmake_takes_prometheus_from_a_prefix_and_else_says_what_is_missing(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(probe CXX)\n"
        "set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)\nset(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)\n"
        f"list(APPEND CMAKE_MODULE_PATH {SCRIPTS.parent}/cmake)\nfind_package(PrometheusCore REQUIRED)\n"
        'message(STATUS "found ${PROMETHEUS_CORE_LIBRARY} of soname (${PROMETHEUS_CORE_SONAME})")\n')
    prefix = tmp_path / "prefix"

    def configured(folder: str, *more: str) -> subprocess.CompletedProcess:
        return subprocess.run(["cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / folder, *more], capture_output=True, text=True,
                              check=False, env={name: value for name, value in os.environ.items() if name != "CMAKE_PREFIX_PATH"})

    without = configured("without")
    assert without.returncode != 0
    said = " ".join(without.stderr.split())
    assert "prometheus-cpp is missing: run ./scripts/setup.sh, install prometheus-cpp-dev, or name the folder" in said, said
    for file in (prefix / "include" / "prometheus" / "text_serializer.h", prefix / "lib" / "libprometheus-cpp-core.a"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    found = configured("with", f"-DCMAKE_PREFIX_PATH={prefix}")
    assert found.returncode == 0, found.stderr
    assert f"found {prefix}/lib/libprometheus-cpp-core.a of soname ()" in found.stdout


def test_lint_tools_are_asked_for_only_with_lint(bare):
    (bare / "os-release").write_text("ID=debian\nVERSION_ID=12\n")
    listed = setup(bare, "--list-packages", "--lint", SLUICE_OS_RELEASE=str(bare / "os-release"))
    assert {"clang-format-14", "shellcheck", "clang-14", "libclang-rt-14-dev"} <= set(listed.stdout.split())


@pytest.mark.parametrize("release", [
    "ID=fedora\nVERSION_ID=40\n", 'ID=ubuntu\nVERSION_ID="22.04"\n', "",
])
def test_a_system_whose_packages_are_unknown_is_named_as_such(bare, release):
    (bare / "os-release").write_text(release)
    listed = setup(bare, "--list-packages", SLUICE_OS_RELEASE=str(bare / "os-release"))
    assert listed.returncode == 2
    assert "Debian 12, Ubuntu 24.04" in listed.stderr


def test_an_unknown_option_is_refused_and_the_known_ones_named(bare):
    refused = setup(bare, "--linter")
    assert refused.returncode == 2
    assert "'--linter'" in refused.stderr and "--lint," in refused.stderr


def test_the_two_halves_cannot_both_be_left_out(bare):
    refused = setup(bare, "--system-only", "--python-only")
    assert refused.returncode == 2 and "leave nothing to do: name one of them" in refused.stderr
    assert not (bare / ".cache" / "python").exists()


def test_a_python_that_has_everything_is_used_as_it_is(bare):
    (bare / "scripts" / "requirements.txt").write_text("torch==2.11.0\n")
    done = setup(bare, "--python-only")
    assert done.returncode == 0, done.stderr
    assert os.path.samefile(Path(chosen(bare)).parent, Path(sys.executable).parent)
    assert not (bare / ".venv").exists()


def test_missing_packages_come_from_wheels_and_torch_stays_the_callers(bare, wheels):
    first = setup(bare, "--python-only", SLUICE_WHEELS=str(wheels))
    assert first.returncode == 0, first.stdout + first.stderr
    assert chosen(bare) == str(bare / ".venv" / "bin" / "python3")
    assert not list((bare / ".venv").glob("lib/python3*/site-packages/torch"))
    subprocess.run([chosen(bare), "-c", "import sluice_setup_probe, torch"], check=True)

    again = setup(bare, "--python-only")  # nothing is missing, so no index is asked
    assert again.returncode == 0, again.stdout + again.stderr
    assert "installing" not in again.stdout


@pytest.mark.skipif(not version("torch").startswith("2.11."), reason="vLLM is for torch 2.11")
def test_vllm_for_its_test_lies_apart_and_comes_once_for_each_list(bare, wheels):
    (bare / "tests").mkdir()
    listed, into = bare / "tests" / "vllm-requirements.txt", bare / ".cache" / "vllm"

    def installs() -> bool:
        done = setup(bare, "--python-only", "--tests", SLUICE_WHEELS=str(wheels))
        assert done.returncode == 0, done.stderr
        return "installing vLLM" in done.stdout

    listed.write_text("sluice-setup-probe==1.0\n")
    assert installs()
    assert (into / "sluice_setup_probe.py").exists()
    assert not installs()
    listed.write_text("sluice-setup-probe==2.0\n")  # which is not among the wheels
    assert installs()
    assert not into.exists()
    listed.write_text("sluice-setup-probe==1.0\n")
    assert installs()
    assert (into / "sluice_setup_probe.py").exists()


def test_a_half_made_environment_is_made_anew(bare, wheels):
    (bare / ".venv").mkdir()
    (bare / ".venv" / "made-by-sluice-setup").write_text("building\n")
    (bare / ".venv" / "left-behind").touch()
    again = setup(bare, "--python-only", SLUICE_WHEELS=str(wheels))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "half made" in again.stdout
    assert not (bare / ".venv" / "left-behind").exists()


def test_an_environment_of_somebody_else_is_left_alone(bare):
    (bare / ".venv").mkdir()
    (bare / ".venv" / "precious").touch()
    refused = setup(bare, "--python-only")
    assert refused.returncode == 1
    assert "not made by this script" in refused.stderr
    assert (bare / ".venv" / "precious").exists()


def test_no_network_and_a_network_that_is_too_slow_are_told_apart(bare):
    def with_index(port: int) -> subprocess.CompletedProcess:
        return setup(bare, "--python-only", PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple",
                     PIP_EXTRA_INDEX_URL="", PIP_RETRIES="0", PIP_DEFAULT_TIMEOUT="1",
                     PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = with_index(silent.getsockname()[1])  # accepts, and never answers
        port = silent.getsockname()[1]
    absent = with_index(port)  # nobody listens there any more
    assert slow.returncode == 4 and "time-out" in slow.stderr, slow.stderr
    assert absent.returncode == 3 and "no network" in absent.stderr, absent.stderr


def check_requirements(file: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPTS / "detail" / "check_requirements.py", file],
                          capture_output=True, text=True, check=False)


@pytest.mark.parametrize("line, satisfied", [
    ("pytest", True), ("pytest>=1,<1000", True), ("PyTest >= 1", True), ("pytest<1", False),
    ("no-such-package-anywhere", False), ("# a comment", True), ("--no-binary :all:", True),
])
def test_requirements_are_compared_with_what_is_installed(tmp_path, line, satisfied):
    (tmp_path / "requirements.txt").write_text(line + "\n")
    checked = check_requirements(tmp_path / "requirements.txt")
    assert (checked.returncode, checked.stdout) == ((0, "") if satisfied else (1, line + "\n"))


def test_a_requirement_that_cannot_be_compared_is_an_error(tmp_path):
    (tmp_path / "requirements.txt").write_text("pytest[extra]~=7.0; python_version > '3'\n")
    checked = check_requirements(tmp_path / "requirements.txt")
    assert checked.returncode == 2 and "too rich" in checked.stderr

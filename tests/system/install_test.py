"""What is installed works by itself, wherever it lies: from a wheel, in an environment of its own, and by `cmake --install`."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("wheel")  # which takes minutes to make

JOB = """
import sluice, torch
model = torch.nn.Linear(8, 1)
step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=4)
x = torch.randn(8, 8)
loss = step(lambda x: model(x).square().mean(), x)
print(step.shared, sluice.__file__, sluice.__version__)
"""

PLUGIN = """
from importlib.metadata import entry_points
plugin, = entry_points(group="vllm.general_plugins", name="sluice")
plugin.load()()
from sluice.vllm import _space
path = _space.library_path()
_space._open(path)
print(path)
"""


def call(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)


def bare_environment() -> dict[str, str]:
    """Without anything that leads back to the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "PYTHON")) or name == "SLUICE_RUNTIME_DIR"}


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    """Made from a copy of what git knows, so that nothing of a build is found by chance; but a compiler's cache is: where it keeps what
    build/release was compiled to, units of the same files, options, relative paths and name of the compiler are not compiled again."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = call("git", "-C", checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout.split("\0")
    for name in filter(None, files):
        if (checkout / name).is_file() and not name.startswith("benchmarks/results/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, source / name)
    python = Path(sys.executable)
    if python.is_relative_to(checkout):
        (source / ".venv").symlink_to(checkout / ".venv")
        python = source / python.relative_to(checkout)
    preset = next(each for each in json.loads((checkout / "CMakePresets.json").read_text())["configurePresets"] if each["name"] == "base")
    as_release = {**preset["cacheVariables"], "CMAKE_DISABLE_PRECOMPILE_HEADERS": "OFF", "SLUICE_PYTHON": python}
    made = call(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder,
                "-C", "build-dir=build/release", *(word for name, value in as_release.items() for word in ("-C", f"cmake.define.{name}={value}")),
                source, env={**bare_environment(), "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()), "CC": "cc", "CXX": "c++"})
    assert made.returncode == 0, made.stdout + made.stderr
    (found,) = folder.glob("sluice-*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """An environment with torch, as links to this one's packages, and with the wheel; its path has a space and an umlaut."""
    folder = tmp_path_factory.mktemp("environments") / "my umgebung ü"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        (packages / each.name).symlink_to(each)
    done = call(folder / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, env=bare_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.deadline(900)
def test_a_wheel_trains_in_the_pool_also_where_python_is_isolated_and_nothing_can_be_written(environment, tmp_path):
    (package,) = environment.glob("lib/python*/site-packages/sluice")
    for path in [package, *package.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    done = call(environment / "bin" / "sluice", "run", "--backend", "host", "--memory", "64MiB", "--require-pool", "--",
                environment / "bin" / "python", "-I", "-c", JOB, env=bare_environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shared, where, version = done.stdout.rsplit(maxsplit=2)[0].split(maxsplit=1)[0], done.stdout, done.stdout.split()[-1]
    assert shared == "True" and str(package) in where
    assert call(environment / "bin" / "sluice", "--version").stdout.strip() == f"sluice {version}"


@pytest.mark.deadline(900)
def test_outside_of_sluice_run_its_package_is_plain_pytorch(environment, tmp_path):
    done = call(environment / "bin" / "python", "-c", JOB, env=bare_environment(), cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("False "), done.stderr


@pytest.mark.deadline(900)
def test_what_it_needs_is_the_c_library_and_the_torch_beside_it(environment, tmp_path):
    done = call(environment / "bin" / "sluice-server", "--help", env=bare_environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = environment.glob("lib/python*/site-packages/sluice")
    parts = [each for each in (package / "lib" / "_torch").rglob("*") if each.is_file() and each.suffix != ".a"]
    assert {each.name for each in parts} >= {"sluice-executor", "libsluice_torch_host.so", "libsluice_store.so"}
    assert {each.name for each in (package / "bin").iterdir()} == {"sluice", "sluice-server"}
    brought = {each.name for each in (package / "lib").glob("libprometheus-cpp-core.so*")}
    for each in [*(package / "bin").iterdir(), *(package / "lib").glob("*.so"), *parts]:
        said = call("readelf", "-d", each).stdout
        (places,) = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", said)
        assert all(place.startswith("$ORIGIN") for place in places.split(":")), (each.name, places)
        needed = re.findall(r"NEEDED.*\[(.*)\]", said)
        if each in parts:
            assert "libtorch_cpu.so" in needed, (each.name, needed)
        else:
            also = brought if each.name == "sluice-server" else set()
            assert set(needed) - also <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}, (each.name, needed)


def test_protobuf_meets_no_other_that_a_process_has(build):
    """Nor torch's, which has parts of one: its names are neither to be had from a program, nor looked for outside of it."""
    programs = [build / "bin" / "sluice", build / "bin" / "sluice-server", *build.glob("lib/_torch/*/sluice-executor")]
    assert len(programs) > 2
    for program in programs:
        assert "google8protobuf8internal" in program.read_bytes().decode("latin-1"), f"{program.name} has none"
        names = [line.split()[-1] for line in call("readelf", "--dyn-syms", "--wide", program).stdout.splitlines() if line.strip()]
        assert len(names) > 50
        assert not [name for name in names if "protobuf" in name], program.name
        assert "protobuf" not in call("readelf", "-d", program).stdout


@pytest.mark.deadline(900)
def test_a_torch_that_it_was_not_built_for_is_told_at_once_with_what_mends_it(environment, checkout, runtime_folder, tmp_path):
    (package,) = environment.glob("lib/python*/site-packages/sluice")
    (part,) = (package / "lib" / "_torch").iterdir()
    other = part.rename(part.with_name("2.10"))
    bin_folder, policy = environment / "bin", checkout / "examples" / "policies" / "policy-host.yaml"
    try:
        mend = "-m pip install --no-build-isolation --force-reinstall --no-deps ."
        run = [bin_folder / "sluice", "run", "--backend", "host", "--memory", "64MiB"]
        training = [bin_folder / "python", "-c", "import sluice\nprint('imported')\n" + JOB]
        plain = call(*run, "--", *training, env=bare_environment(), cwd=tmp_path)
        (said,) = [line for line in plain.stderr.splitlines() if line.startswith("sluice: ")]
        assert "its torch is " in said and "built for 2.10;" in said and mend in said
        assert plain.returncode == 0 and plain.stdout.splitlines()[1].startswith("False ")
        refused = call(*run, "--require-pool", "--", *training, env=bare_environment(), cwd=tmp_path)
        assert refused.returncode == 125 and not refused.stdout and mend in refused.stderr, refused.stderr
        for program in (["sluice", "serve", "--policy", policy], ["sluice-server", "--policy", policy]):
            served = call(bin_folder / program[0], *program[1:], env=bare_environment(), cwd=tmp_path)
            assert served.returncode != 0 and "built for torch 2.10" in served.stderr and mend in served.stderr, served.stderr
    finally:
        other.rename(part)


@pytest.mark.deadline(900)
def test_a_wheel_is_a_plugin_of_vllm_and_has_the_library_that_this_opens(environment):
    done = call(environment / "bin" / "python", "-c", PLUGIN, env=bare_environment())
    assert done.returncode == 0, done.stderr
    (package,) = environment.glob("lib/python*/site-packages/sluice")
    assert Path(done.stdout.strip()) == package / "lib" / "libsluice_runtime.so"


@pytest.mark.deadline(900)
def test_what_is_uninstalled_leaves_nothing(environment, wheel):
    (package,) = environment.glob("lib/python*/site-packages/sluice")
    for path in [package, *package.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    done = call(environment / "bin" / "python", "-m", "pip", "uninstall", "-y", "sluice", env=bare_environment())
    assert done.returncode == 0, done.stderr
    left = [path for path in environment.rglob("*sluice*") if not path.is_symlink()]
    assert not left, left


@pytest.mark.deadline(900)
def test_cmake_installs_what_programs_for_libtorch_are_built_against(build, checkout, runtime_folder, tmp_path):
    prefix = tmp_path / "a prefix"
    made = call("cmake", "--install", build, "--prefix", prefix)
    assert made.returncode == 0, made.stderr
    copy = shutil.copytree(checkout / "examples" / "train_cpp", tmp_path / "train_cpp")
    for words in (("-S", copy, "-B", tmp_path / "built", f"-DCMAKE_PREFIX_PATH={prefix}", f"-DSLUICE_PYTHON={sys.executable}"),
                  ("--build", tmp_path / "built")):
        made = call("cmake", *words)
        assert made.returncode == 0, made.stdout + made.stderr
    done = call(prefix / "bin" / "sluice", "run", "--backend", "host", "--memory", "64MiB", "--require-pool", "--",
                tmp_path / "built" / "train_cpp", env=bare_environment())
    assert done.returncode == 0 and done.stdout.startswith("in the pool: "), done.stderr
    done = call(prefix / "bin" / "sluice", "run", "--backend", "host", "--memory", "64MiB", "--require-pool", "--",
                sys.executable, "-c", JOB, env=bare_environment(), cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"True {prefix}"), done.stderr
    assert not list(runtime_folder.glob("lib-*"))  # on the host nothing is preloaded, which would need a way around the blank

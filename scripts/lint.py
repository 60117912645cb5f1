#!/usr/bin/env python3
"""Checks format and findings of the project's sources: clang-format, clang-tidy, shellcheck, and functions that nobody calls.

    ./scripts/lint.sh                         all four
    ./scripts/lint.sh --dead                  functions of the product without a caller, in all of it
    ./scripts/lint.sh --tidy scheduler        clang-tidy, on the files under scheduler/ alone
    ./scripts/lint.sh --fix                   rewrite what clang-format finds

clang-tidy looks at what is shipped: in tests most of what it finds is the way of GoogleTest. It
reads the compile commands of build/release, so that must have been built. A unit of
compilation that was clean is not looked at again until its text, a project header that it
includes, its compile command or the configuration changes; stamps lie in .cache/lint. Exit status:
0 clean, 1 findings, 2 it could not be run.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

from detail import callers
from detail.interpreter import chosen_python

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "lint"
SOURCES = (".cpp", ".hpp", ".h")

# What reads one file at a time and was written for g++: warnings (g++ gives its own), and the
# precompiled header, which clang cannot read.
DROPPED = re.compile(r"-W(?!l,|a,|p,).*|-fno-sanitize-recover.*|-fpch-preprocess|-Winvalid-pch")


class Unusable(Exception):
    """The check cannot be made here; the message says what would help."""


def tool(*candidates: str | Path) -> str:
    """The path of the first that is there: before others the release that the configuration was written for."""
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    raise Unusable(f"{Path(candidates[-1]).name} is not here: run ./scripts/setup.sh --lint")


def project_files() -> list[Path]:
    """Every file that belongs to the project: known to git, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True)
    files = (ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name)
    return [file for file in files if file.is_file()]


def under(files: list[Path], folders: list[str]) -> list[Path]:
    """Those of `files` that lie in one of `folders`; all without folders."""
    roots = [(Path.cwd() / folder).resolve() for folder in folders]
    return [f for f in files if not roots or any(f.is_relative_to(root) for root in roots)]


def run(command: list[str]) -> tuple[bool, str]:
    """Runs a checker: whether it was content, and what it said."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def check_format(folders: list[str], fix: bool) -> tuple[bool, str]:
    """clang-format over all C++ sources."""
    files = [str(f) for f in under(project_files(), folders) if f.suffix in SOURCES]
    mode = ["-i"] if fix else ["--dry-run", "--Werror"]
    return run([tool("clang-format-14", "clang-format"), "--style=file", *mode, *files]) if files else (True, "")


def check_shell(folders: list[str]) -> tuple[bool, str]:
    """shellcheck over all shell scripts."""
    files = [f for f in under(project_files(), folders) if is_shell_script(f)]
    names = [str(f.relative_to(ROOT)) for f in files]
    return run([tool("shellcheck"), "--external-sources", *names]) if names else (True, "")


def is_shell_script(file: Path) -> bool:
    with file.open("rb") as opened:
        return file.suffix == ".sh" or re.match(rb"#!.*\b(ba)?sh\b", opened.readline()) is not None


def check_callers() -> tuple[bool, str]:
    """Nothing in the product is without a caller, but for what detail/callers.py lists with a reason."""
    said = callers.check(ROOT, project_files(), callers.UNCALLED)
    return not said, "\n".join(said)


class CompileCommands:
    """The compile commands of a build but for its tests, as clang can follow them, and what each unit depends on.

    A unit is what clang-tidy reads at once: the sources of a target, and of all targets that are built against torch. Most of its time
    goes into the headers of others, at which it looks again for every unit.
    """

    def __init__(self, build: Path):
        database = build / "compile_commands.json"
        if not database.exists():
            raise Unusable(f"{database} is not there: run ./scripts/build.sh {build.name}")
        self.commands: dict[Path, list[str]] = {}
        self.outputs: dict[Path, list[str]] = {}
        self.members: dict[Path, list[Path]] = {}
        (CACHE / "units").mkdir(parents=True, exist_ok=True)
        seen: set[Path] = set()
        for entry in json.loads(database.read_text()):
            source = (Path(entry["directory"]) / entry["file"]).resolve()
            members = [each for each in self.put_together(source) or [source]
                       if each not in seen and not (each.is_relative_to(ROOT / "tests") or each.is_relative_to(build))]
            words = shlex.split(entry["command"])
            if source.suffix not in (".cpp", ".cxx") or not members or "c++-header" in words:
                continue
            output = words[words.index("-o") + 1]
            of_torch = any(word.endswith("/torch/include") for word in words)
            unit = CACHE / "units" / ("torch.cxx" if of_torch else f"{Path(output.partition('.dir/')[0]).name}.cxx")
            self.commands[unit] = self.joined(self.commands.get(unit, []), self.adapted(words), unit)
            self.outputs.setdefault(unit, []).append(output)
            self.members.setdefault(unit, []).extend(members)
            seen.update(members)
        for unit, members in self.members.items():
            text = "".join(f'#include "{member}"\n' for member in members)
            if not unit.exists() or unit.read_text() != text:
                unit.write_text(text)
        self.dependencies = self.read_dependencies(build)
        entries = [{"directory": str(build), "file": str(file), "arguments": command}
                   for file, command in self.commands.items()]
        (CACHE / "compile_commands.json").write_text(json.dumps(entries, indent=1))

    @staticmethod
    def put_together(unit: Path) -> list[Path]:
        """The source files that a file of CMake's includes; none for other files."""
        if unit.parent.name != "Unity":
            return []
        return [Path(name) for name in re.findall(r'#include "(.*\.cpp)"', unit.read_text())]

    @staticmethod
    def adapted(command: list[str]) -> list[str]:
        """A command without what only g++ understands, the file and its object."""
        kept, words = [], iter(command)
        for word in words:
            if word == "-include":
                header = next(words)
                kept += [] if "cmake_pch" in header else [f"{word}{header}"]
            elif word in ("-o", "-c", "-MF", "-MT"):
                next(words)
            elif word in ("-isystem", "-I", "-D"):
                kept.append(f"{word}{next(words)}")
            elif word != "-MD" and not DROPPED.fullmatch(word):
                kept.append(word)
        return kept

    @staticmethod
    def joined(command: list[str], other: list[str], unit: Path) -> list[str]:
        """A command that finds what either does."""
        if not command:
            return [*other, "-c", str(unit)]
        more = [word for word in other if word not in command and word.startswith(("-isystem", "-I", "-D", "-include"))]
        return [*command[:-2], *more, *command[-2:]]

    @staticmethod
    def read_dependencies(build: Path) -> dict[str, list[Path]]:
        """The project's headers that each object was last built from, as ninja recorded them."""
        _, listing = run(["ninja", "-C", str(build), "-t", "deps"])
        found: dict[str, list[Path]] = {}
        inside: list[Path] = []
        for line in listing.splitlines():
            if header := re.match(r"(\S.*): #deps \d+", line):
                inside = found.setdefault(header.group(1), [])
            elif line.startswith("    "):
                # No resolve(): of a hundred thousand names only the project's matter.
                name = os.path.normpath(os.path.join(build, line.strip()))
                if name.startswith(f"{ROOT}/") and "/.venv/" not in name:
                    inside.append(Path(name))
        return found

    def headers_of(self, unit: Path) -> list[Path] | None:
        """Of the project; none if it has not been built."""
        found = [self.dependencies.get(output) for output in self.outputs[unit]]
        return None if None in found else sorted({header for each in found for header in each})

    def fingerprint(self, unit: Path, configuration: str) -> str:
        """Changes whenever linting `unit` again could give another answer."""
        headers = self.headers_of(unit)
        if headers is None:  # not built: every header may matter
            headers = [f for f in project_files() if f.suffix in (".hpp", ".h")]
        parts = [configuration, json.dumps(self.commands[unit])]
        read = sorted({unit, *self.members[unit], *headers})
        parts += [f"{path}:{digest(path)}" for path in read if path.exists()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_tidy(folders: list[str], build: Path, jobs: int) -> tuple[bool, str]:
    """clang-tidy over every source file but tests; each must be compiled."""
    program = tool(Path(chosen_python()).parent / "clang-tidy")
    database = CompileCommands(build)
    files = {f for f in under(project_files(), folders)
             if f.suffix == ".cpp" and not f.is_relative_to(ROOT / "tests")}
    units = {unit: members for unit, members in database.members.items()
             if not files.isdisjoint(members)}
    orphans = sorted(files.difference(*units.values()))
    said = [f"{f.relative_to(ROOT)}: belongs to no target of {build.name}" for f in orphans]

    configuration = run([program, "--version"])[1]
    configuration += "".join(f.read_text() for f in project_files() if f.name == ".clang-tidy")
    fingerprints = {unit: database.fingerprint(unit, configuration) for unit in units}
    stamps = CACHE / "clean"
    stamps.mkdir(parents=True, exist_ok=True)
    todo = [f for f, fingerprint in fingerprints.items() if not (stamps / fingerprint).exists()]

    def lint(unit: Path) -> tuple[Path, bool, str, float]:
        started = time.monotonic()
        clean, text = run([program, "--quiet", "-p", str(CACHE), str(unit)])
        return unit, clean, text, time.monotonic() - started

    # Large units first, so that no core ends the run alone with one of them.
    todo.sort(key=lambda f: (f.stem != "torch", -len(database.members[f])))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done, (unit, clean, text, seconds) in enumerate(pool.map(lint, todo), 1):
            print(f"    [{done}/{len(todo)}] {unit.stem}, {len(units[unit])} files {seconds:.1f} s"
                  + ("" if clean else "  has findings"), flush=True)
            if clean:
                (stamps / fingerprints[unit]).touch()
            else:
                said.append(re.sub(r"^\d+ warnings.*\n?|^Suppressed .*\n?|^Use -header.*\n?", "",
                                   text, flags=re.MULTILINE))
    for stamp in stamps.iterdir():  # what no unit answers to any more
        if stamp.name not in fingerprints.values() and not folders:
            stamp.unlink()
    print(f"    clang-tidy: {len(todo)} units looked at, {len(units) - len(todo)} unchanged")
    return not said, "\n".join(said)


def write_junit(path: Path, results: list[tuple[str, bool, str, float]]) -> None:
    """Writes the checks as test cases in the form that CTest and pytest write."""
    suite = ElementTree.Element("testsuite", name="lint", tests=str(len(results)))
    for name, clean, text, seconds in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname="lint", name=name, time=f"{seconds:.3f}")
        if not clean:
            printable = re.sub(r"[^\t\n\r\x20-\uFFFD]", "?", text)
            ElementTree.SubElement(case, "failure", message="findings").text = printable
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", nargs="*", help="look at the files under these alone")
    parser.add_argument("--format", action="store_true", help="clang-format")
    parser.add_argument("--tidy", action="store_true", help="clang-tidy")
    parser.add_argument("--shell", action="store_true", help="shellcheck")
    parser.add_argument("--dead", action="store_true", help="functions that nobody calls")
    parser.add_argument("--fix", action="store_true", help="rewrite as clang-format wants")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release",
                        help="a finished build")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files at once")
    parser.add_argument("--junit", type=Path, help="also write the results there")
    options = parser.parse_args()
    folders, build = options.folders, options.build.resolve()
    everything = not (options.format or options.shell or options.tidy or options.fix or options.dead)
    chosen = {}
    if options.format or options.fix or everything:
        chosen["clang-format"] = lambda: check_format(folders, options.fix)
    if options.shell or everything:
        chosen["shellcheck"] = lambda: check_shell(folders)
    if options.dead or everything:
        chosen["callers"] = check_callers
    if options.tidy or everything:
        chosen["clang-tidy"] = lambda: check_tidy(folders, build, options.jobs)

    results = []
    unusable = False
    for name, check in chosen.items():
        started = time.monotonic()
        try:
            clean, text = check()
        except Unusable as problem:
            clean, text, unusable = False, str(problem), True
        seconds = time.monotonic() - started
        results.append((name, clean, text, seconds))
        if not clean:
            print(text, file=sys.stderr)
        print(f"==> {name}: {'clean' if clean else 'findings'} ({seconds:.1f} s)", flush=True)
    if options.junit:
        write_junit(options.junit, results)
    return 2 if unusable else int(not all(clean for _, clean, _, _ in results))


if __name__ == "__main__":
    sys.exit(main())

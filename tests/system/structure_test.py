"""The rules that hold the source tree together, checked on the tree itself."""

import ast
import concurrent.futures
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import lint  # noqa: E402

# Which folders each folder may include from, besides itself. A folder stands for what lies in it, but for what has a line here.
BASE = "memhandover/base"
MEMHANDOVER = [f"memhandover/{room}" for room in ("base", "device", "ledger", "broker", "client", "allocation", "parking")]
MAY_INCLUDE = {
    "abi": set(),
    "posix": set(),
    "scheduler": set(),
    **{room: {"posix", *MEMHANDOVER[:place]} for place, room in enumerate(MEMHANDOVER)},  # each those before it
    "nccl_shim/agreement": {"abi", "posix"},
    "nccl_shim/calls": {"abi", "nccl_shim/agreement"},
    "runtime/gate": {"abi"},
    "runtime/text": set(),
    "runtime/telemetry": {BASE},
    "runtime/policy": {BASE, "memhandover/device", "runtime/text"},
    "runtime/simulator": {BASE, "scheduler", "runtime/policy"},
    "runtime/launcher": {BASE, "memhandover/broker", "memhandover/device", "runtime/telemetry"},
    "runtime/step": {"abi", "scheduler", *MEMHANDOVER, "nccl_shim/agreement", "runtime/telemetry"},
    "runtime/server/inference": {BASE},
    "runtime/server/experience": {BASE, "scheduler", "runtime/server/inference", "runtime/telemetry"},
    "runtime/server/repository": {BASE, "runtime/server/inference", "runtime/text"},
    "runtime/server/http": {BASE, "runtime/server/inference", "runtime/telemetry"},
    "runtime/server/grpc": {BASE, "runtime/server/inference", "runtime/server/http", "runtime/telemetry"},
    "runtime/server/hosting": {"abi", "scheduler", BASE, "memhandover/client", "memhandover/allocation", "runtime/server/experience",
                               "runtime/server/inference", "runtime/telemetry"},
    "runtime/server/executor": {BASE, "scheduler", "runtime/server/inference", "runtime/server/hosting", "runtime/telemetry"},
    "runtime/server/engines": {BASE, "scheduler", "runtime/launcher", "runtime/policy", "runtime/server/executor", "runtime/server/http",
                               "runtime/server/inference", "runtime/telemetry"},
    "runtime/server": {BASE, "memhandover/broker", "memhandover/device", "memhandover/client", "runtime/launcher", "runtime/policy",
                       "runtime/server/engines", "runtime/server/executor", "runtime/server/grpc", "runtime/server/hosting", "runtime/server/http",
                       "runtime/server/inference", "runtime/server/repository", "runtime/telemetry"},
    "runtime/torch/model": {BASE, "runtime/server/inference", "runtime/server/hosting"},
    "runtime/torch/step": {"abi", "runtime/torch"},
    "runtime/torch": {"abi", BASE, "memhandover/device", "runtime/policy", "runtime/server", "runtime/server/executor", "runtime/server/experience",
                      "runtime/server/hosting", "runtime/server/inference", "runtime/telemetry", "runtime/torch/model"},
    "runtime/cli": {BASE, "memhandover/broker", "memhandover/device", "runtime/launcher", "runtime/policy", "runtime/server/repository", "runtime/simulator",
                    "runtime/telemetry"},
}
EVERYTHING = set(MAY_INCLUDE)
MAY_INCLUDE["benchmarks"] = {part for part in EVERYTHING if not part.startswith("nccl_shim/")}
MAY_INCLUDE["tests"] = EVERYTHING | {"benchmarks"}  # what plays a part in both
STANDARD_HEADER = re.compile(r"[a-z_]+")
SOURCES = (".cpp", ".hpp", ".h")


FILES = lint.project_files()
CXX_FILES = [f for f in FILES if f.suffix in SOURCES]


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def part_of(path: str) -> str:
    """The most specific folder in MAY_INCLUDE that holds `path`, or nothing."""
    holders = [part for part in MAY_INCLUDE if path.startswith(part + "/")]
    return max(holders, key=len, default="")


def included(file: Path) -> list[tuple[str, str]]:
    """All includes of a file as (delimiter, name)."""
    return re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', text_of(file), re.MULTILINE)


def test_includes_go_one_way():
    wrong = []
    for file in CXX_FILES:
        own = part_of(relative(file))
        for _, name in included(file):
            other = part_of(name)
            if own and other and other not in MAY_INCLUDE[own] | {own}:
                wrong.append(f"{relative(file)} includes {name}")
    assert not wrong


def test_every_source_has_a_folder_whose_includes_are_known():
    roots = {part.split("/")[0] for part in MAY_INCLUDE}
    lost = [relative(file) for file in CXX_FILES if relative(file).split("/")[0] in roots and not part_of(relative(file))]
    assert not lost


def test_no_folder_is_included_by_what_it_includes():
    def reached(part: str, through: set[str]) -> set[str]:
        for other in MAY_INCLUDE[part] - through:
            through.add(other)
            reached(other, through)
        return through

    assert not [part for part in MAY_INCLUDE if part in reached(part, set())]


def test_the_names_of_threads_are_as_short_as_the_kernel_has_them():
    named = [(relative(file), name) for file in CXX_FILES for name in re.findall(r'pthread_setname_np\([^"]*"([^"]*)"', text_of(file))]
    assert named and not [(file, name) for file, name in named if len(name) > 15]


def test_no_two_classes_share_a_name():
    product = ("abi/", "memhandover/", "nccl_shim/", "posix/", "runtime/", "scheduler/")
    defined = re.compile(r"^(?:class|struct|enum class) (?:alignas\(\w+\) )?(\w+)(?: final)?(?: : [^;{]*)? \{", re.MULTILINE)
    by_name = {}
    for file in CXX_FILES:
        if relative(file).startswith(product):
            for name in defined.findall(text_of(file)):
                by_name.setdefault(name, set()).add(relative(file))
    assert len(by_name) > 100
    assert not {name: files for name, files in by_name.items() if len(files) > 1}


#: Parts of names that once stood for what the field calls a distribution, an event, a record, to notify, log, release or resolve.
RETIRED = {"law", "laws", "happening", "happened", "tell", "tells", "told", "clerk", "settle", "settles", "settled", "owe", "owes"}


def names_in(file: Path) -> set[str]:
    """The identifiers of a source, without its comments and strings."""
    if file.suffix == ".py":
        return {token.string for token in tokenize.generate_tokens(io.StringIO(text_of(file)).readline) if token.type == tokenize.NAME}
    code = re.sub(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', " ", text_of(file), flags=re.DOTALL)
    return set(re.findall(r"[A-Za-z_]\w*", code))


def test_no_retired_word_is_left_in_a_name():
    """Names of tests are sentences, and may have them."""
    product = ("abi/", "benchmarks/", "examples/", "memhandover/", "nccl_shim/", "posix/", "runtime/", "scheduler/")
    named = {f"{relative(file)}: {name}" for file in FILES if relative(file).startswith(product) and file.suffix in (*SOURCES, ".py")
             for name in names_in(file) if RETIRED & set(name.lower().split("_")) or "let_go" in name}
    files = {name for name in map(relative, FILES) if name.startswith(product) and RETIRED & set(re.split(r"[_/.]", name))}
    assert not named | files


def test_no_file_takes_views_which_clang_cannot_compile_with_this_standard_library():
    """GCC takes them, so that the other builds say nothing; AddressSanitizer's build is clang 14's (CONTRIBUTING.md)."""
    assert CXX_FILES and not [relative(file) for file in CXX_FILES if re.search(r"^#include <ranges>|std::(ranges::)?views::", text_of(file), re.MULTILINE)]


def test_no_two_modules_of_python_tests_share_a_name():
    """A run that takes both cannot import the second."""
    modules = [file for file in FILES if relative(file).startswith("tests/") and file.suffix == ".py" and file.name != "conftest.py"]
    by_name = {}
    for file in modules:
        by_name.setdefault(file.name, []).append(relative(file))
    assert modules and not [files for files in by_name.values() if len(files) > 1]


@pytest.mark.parametrize("name", sorted(file.name for file in (ROOT / "tests" / "gpu").glob("*_test.py")))
def test_a_module_of_gpu_tests_can_be_read_by_itself(name):
    """Nothing else reads one where there is no GPU, and together each finds what an earlier one made importable."""
    found = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", ROOT / "tests" / "gpu" / name], cwd=ROOT, capture_output=True,
                           text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_clang_tidy_tells_its_findings_of_every_folder():
    header_filter = re.search(r"^HeaderFilterRegex: '(.*)'", text_of(ROOT / ".clang-tidy"), re.MULTILINE).group(1)
    folders = {relative(file).split("/")[0] for file in CXX_FILES}
    assert folders and not [folder for folder in sorted(folders) if not re.search(header_filter, f"/{folder}/")]


def private_names_of_torch(file: Path, own: set[str]) -> list[str]:
    """Where a Python file uses a name of torch that begins with an underscore, other than by an object of the package's own."""
    found = []
    for node in ast.walk(ast.parse(text_of(file))):
        named = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            named = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            named = [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            named = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value):
            named = node.value.split(".")
        found += [f"{relative(file)}:{node.lineno}: {name}" for name in named if re.match(r"_(?!_)", name)]
    return found


def test_private_names_of_torch_are_used_in_one_module_alone():
    package = sorted((ROOT / "runtime" / "python" / "sluice").glob("*.py"))  # integrations are of others
    own = {"_exit", "_getframe"}  # of os and sys
    for file in package:
        for node in ast.walk(ast.parse(text_of(file))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                own.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
    own -= {name for name in own if name.startswith("_torch")}
    own.add("_torch_compat")
    wrong = [name for file in package if file.name != "_torch_compat.py" for name in private_names_of_torch(file, own)]
    assert not wrong, wrong


def test_the_scheduler_includes_only_itself_and_the_standard_library():
    wrong = [f"{relative(file)} includes {name}"
             for file in CXX_FILES if relative(file).startswith("scheduler/")
             for delimiter, name in included(file)
             if not (delimiter == "<" and STANDARD_HEADER.fullmatch(name))
             and not (delimiter == '"' and name.startswith("scheduler/"))]
    assert not wrong


def test_details_are_included_by_their_own_folder_alone():
    wrong = []
    for file in CXX_FILES:
        for _, name in included(file):
            owner, detail, _ = name.partition("/detail/")
            tests = f"tests/{owner.split('/')[0]}/"  # a unit test may know its unit's details
            if detail and not relative(file).startswith((owner + "/", tests)):
                wrong.append(f"{relative(file)} includes {name}")
    assert not wrong


def test_a_namespace_detail_is_of_a_folder_detail():
    """It is opened there, and by what declares or defines for it beside that folder. Unit tests may lie in their unit's."""
    opened = [file for file in CXX_FILES if re.search(r"^(?:inline )?namespace (?:\w+::)*detail\b", text_of(file), re.MULTILINE)]
    wrong = [relative(file) for file in opened if not relative(file).startswith("tests/")
             and not any(folder.name == "detail" or (ROOT / folder / "detail").is_dir() for folder in Path(relative(file)).parents)]
    assert len(opened) > 20
    assert not wrong


@pytest.fixture(scope="module")
def compile_commands(build) -> list[dict]:
    return json.loads((build / "compile_commands.json").read_text())


def system_include_options(compile_commands: list[dict]) -> list[str]:
    """The folders of foreign and generated headers, without torch's: CUDA's come with it."""
    folders: dict[str, None] = {}
    for entry in compile_commands:
        words = shlex.split(entry["command"])
        for word, following in zip(words, words[1:]):
            if word == "-isystem" and "/torch/" not in following:
                folders[following] = None
            elif word.startswith("-I") and word != f"-I{ROOT}":
                folders[word[2:]] = None
    return [word for folder in folders for word in ("-isystem", folder)]


def reaches_torch(header: Path, seen: set[Path]) -> bool:
    """Whether a header includes torch, by itself or through headers of the project."""
    seen.add(header)
    for _, name in included(header):
        if re.match(r"(torch|ATen|c10|caffe2)/", name):
            return True
        for inner in (ROOT / name, header.parent / name):
            if inner.is_file() and inner not in seen and reaches_torch(inner, seen):
                return True
    return False


def proven_by_its_source(header: Path) -> bool:
    """Whether the build compiles this header first in a file, before anything it could lean on."""
    source = header.with_suffix(".cpp")
    return source.is_file() and included(source)[:1] == [('"', relative(header))]


@pytest.mark.deadline(600)
def test_every_header_compiles_by_itself(compile_commands):
    headers = [f for f in CXX_FILES if f.suffix != ".cpp" and not relative(f).startswith("tests/")
               and not proven_by_its_source(f) and not reaches_torch(f, set())]
    options = system_include_options(compile_commands)

    def compile_alone(header: Path) -> str:
        language = "c" if header.suffix == ".h" else "c++"
        standard = "c11" if language == "c" else "c++20"
        done = subprocess.run(
            ["g++" if language == "c++" else "gcc", f"-std={standard}", "-fsyntax-only", "-Wall",
             "-Werror", f"-I{ROOT}", *options, "-x", language, "-"],
            input=f'#include "{relative(header)}"\n', cwd=ROOT, capture_output=True, text=True,
            check=False)
        return "" if done.returncode == 0 else f"{relative(header)}:\n{done.stderr[:2000]}"

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(filter(None, pool.map(compile_alone, headers)))
    assert not problems, "\n".join(problems)


def test_every_header_guards_itself():
    wrong = [relative(f) for f in CXX_FILES if f.suffix != ".cpp"
             and not re.search(r"^#pragma once$|^#ifndef \w+_H\w*$", text_of(f), re.MULTILINE)]
    assert not wrong


def test_every_source_file_is_compiled(compile_commands):
    units = {(Path(e["directory"]) / e["file"]).resolve() for e in compile_commands}
    compiled = {member for unit in units for member in lint.CompileCommands.put_together(unit) or [unit]}
    assert not [relative(f) for f in CXX_FILES if f.suffix == ".cpp" and f not in compiled]


# What diagrams are drawn with.
DRAWN = re.compile("[←-⇿─-╿▲-◄]")


def without_comments(code: str) -> str:
    return re.sub(r"(^|\s)//.*", "", code, flags=re.MULTILINE)


def is_code(line: str) -> bool:
    """Whether it ends as a statement or a block does, or has a comment behind it."""
    code = without_comments(line).rstrip()
    commented = code.strip() != "" and code != line.rstrip()
    return not DRAWN.search(code) and (commented or code.endswith((";", "{", "}")))


def examples_of(header: str) -> list[str]:
    """The code in a header's doc comments: lines behind `///` and three spaces or more, as far as they follow each other,
    of which one is code. A drawing beside it, without an empty line between them, counts as code too."""
    blocks = re.findall(r"(?:^ *///   .*\n)+", header, re.MULTILINE)
    texts = [re.sub(r"^ *///", "", block, flags=re.MULTILINE) for block in blocks]
    return [text for text in texts if any(is_code(line) for line in text.splitlines())]


def test_examples_are_told_from_diagrams_and_prose():
    header = """\
/// A thing. It says {how} it is used;
///
///   made ──use({what})──► used;   beyond repair
///    ▲                     │
///    └──────mend();────────┘       // hardly ever
///
///   tidy   From the largest on; the rest goes
///          to {the next, the last}, if need be
///
///   auto thing = make(7);   // some
///   if (thing.broken()) {
///     // … mend it …
///   }
#pragma once
  /// Of a member:
  ///
  ///   thing.use("http://host")   // true; or false
  bool use(char const* what);
/// Broken by whatever filled its lines:
///
///   thing.use("a");   // keep it: the
///   thing stays
class thing {};
///   thing.size()
///   │ drawn
///   }
"""
    examples = [without_comments(example).split() for example in examples_of(header)]
    assert examples == [["auto", "thing", "=", "make(7);", "if", "(thing.broken())", "{", "}"],
                        ['thing.use("http://host")'],
                        ['thing.use("a");', "thing", "stays"],
                        ["thing.size()", "│", "drawn", "}"]]


def test_every_example_in_a_header_is_compiled():
    """Word for word but for comments and white space, as the end of a function that gives it what it speaks of."""
    def compacted(code: str) -> str:
        return re.sub(r"\s", "", without_comments(code))

    compiled = [compacted(text_of(f)) for f in CXX_FILES if f.name.endswith("header_examples.cpp")]
    examples = [(relative(f), example) for f in CXX_FILES if f.suffix != ".cpp" for example in examples_of(text_of(f))]
    missing = [f"{name}:\n{example}" for name, example in examples if not any(compacted(example) + "}" in text for text in compiled)]
    assert len(examples) > 40, "what tells examples from other comments finds too few"
    assert not missing, "\n".join(missing)
    longest = 100 - len("///")
    assert not [name for name, example in examples if any(len(line) > longest for line in example.splitlines())]


# Hosts that documents and code may name: papers, licences, specifications, and this machine.
KNOWN_HOSTS = re.compile(
    r"(www\.)?(apache\.org|arxiv\.org|doi\.org|json-schema\.org|github\.com|w3\.org)"
    r"|example\.(com|org)|127\.0\.0\.1|0\.0\.0\.0")


def readable_files() -> list[tuple[Path, str]]:
    """All text files of the project with their text, this one left out: it names what is wrong."""
    texts = []
    for file in FILES:
        raw = file.read_bytes()
        if file != Path(__file__).resolve() and b"\0" not in raw[:8192]:
            texts.append((file, raw.decode("utf-8", errors="replace")))
    return texts


def test_no_file_names_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.~}])/(?:work|root|home/\w+|Users/\w+|mnt|scratch)/[\w.-]+")
    wrong = [f"{relative(f)}: {m}" for f, text in readable_files() for m in pattern.findall(text)]
    assert not wrong


def test_no_file_names_an_unknown_host():
    # Only names with a dot: `http://host` and `http://{address}` are placeholders.
    pattern = re.compile(r"\b(?:https?|ftp)://([\w-]+(?:\.[\w-]+)+)")
    wrong = [f"{relative(f)}: {host}" for f, text in readable_files()
             for host in pattern.findall(text) if not KNOWN_HOSTS.fullmatch(host)]
    assert not wrong


def test_nothing_is_left_to_do_in_a_comment():
    pattern = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!X)")
    wrong = [f"{relative(f)}:{number}" for f, text in readable_files()
             for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert not wrong


def shell_scripts() -> list[Path]:
    return [f for f, text in readable_files()
            if f.suffix == ".sh" or re.match(r"#!.*\b(ba)?sh\b", text)]


def test_shell_scripts_are_executable_and_stop_at_the_first_error():
    wrong = [relative(f) for f in shell_scripts()
             if not os.access(f, os.X_OK)
             or not re.search(r"^set -euo pipefail$", text_of(f), re.MULTILINE)]
    assert not wrong


def readme_commands() -> list[str]:
    """The lines of the README's code blocks that are for a shell."""
    readme = ROOT / "README.md"
    assert readme.is_file(), "README.md is missing"
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text_of(readme), re.MULTILINE | re.DOTALL)
    blocks = (block for language, block in fenced if language in ("", "sh", "bash", "console", "shell"))
    lines = (line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def test_the_commands_of_the_readme_exist():
    commands = readme_commands()
    wrong = []
    for line in commands:
        for word in re.findall(r"(?<![\w/])\./([\w./-]+)", line):
            if not word.startswith("build/") and not os.access(ROOT / word, os.X_OK):
                wrong.append(f"./{word} is not an executable file")
    assert any("./examples/quickstart.sh" in line for line in commands)
    assert any("./tests/run.sh" in line for line in commands)
    assert not wrong


def test_the_subcommands_of_the_readme_exist(sluice):
    named = {match for line in readme_commands() for match in
             re.findall(r"(?:^|/|\s)sluice ([a-z]+)\b", line)}
    text = subprocess.run([sluice, "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"^ {2}([a-z]+)\b", text, re.MULTILINE))
    assert named, "README.md shows no use of the program"
    assert named <= known

"""Reads the entry points of the CUDA driver out of cuda.h.

cuda.h renames functions by macros: `cuMemcpyHtoD` is declared once, but the driver exports `cuMemcpyHtoD_v2` and
`cuMemcpyHtoD_v2_ptds`, and older callers still ask for the plain name with other parameters. So the header is read
several times, each time under another set of macros, and the names are taken after expansion; the union is what a
driver exports. This covers only as much of the preprocessor as cuda.h uses.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

# The ways in which programs include cuda.h: as usual, with per-thread default streams, and as old binaries saw it.
_VIEWS = ((), ("CUDA_API_PER_THREAD_DEFAULT_STREAM",), ("__CUDA_API_VERSION_INTERNAL",))
_COMPILER = {"__GNUC__": "12", "__cplusplus": "202002", "__LP64__": "1", "__x86_64__": "1", "__linux__": "1"}

_DIRECTIVE = re.compile(r"\s*#\s*(\w+)\s*(.*)")
_DECLARATION = re.compile(r"(?P<returns>[\w\s*]*?)\bCUDAAPI\s+(?P<name>cu\w+)\s*\((?P<parameters>.*)\)\s*$", re.DOTALL)
_PARAMETER = re.compile(r"(?P<type>.*?[\s*])(?P<name>\w+)\s*(?P<array>(\[\w*\])*)$", re.DOTALL)


class HeaderError(Exception):
    """The header says something that this reader does not understand."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a driver function: its type without the name, and the name."""

    type: str
    name: str


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """A function that the driver exports, under the exact name of its symbol."""

    name: str
    returns: str
    parameters_text: str

    @property
    def base(self) -> str:
        """The name without version and default-stream suffix: what cuGetProcAddress is asked for."""
        return re.sub(r"(_v\d+)?(_pt[ds][sz])?$", "", self.name)

    @property
    def per_thread(self) -> bool:
        """Whether a null stream means the calling thread's default stream."""
        return self.name.endswith(("_ptds", "_ptsz"))

    def parameters(self) -> list[Parameter]:
        """The parameters, in order.

        Raises:
            HeaderError: One of them is not of the form `type name`.
        """
        text = " ".join(self.parameters_text.split())
        if text in ("", "void"):
            return []
        found = []
        for piece in text.split(","):
            match = _PARAMETER.match(piece.strip())
            if match is None or "(" in piece:
                raise HeaderError(f"{self.name}: cannot tell type and name of the parameter '{piece.strip()}'")
            pointers = "*" * match["array"].count("[")
            kind = re.sub(r"\s*(\*+)", r" \1", match["type"] + pointers)  # where a header puts the blank says nothing
            found.append(Parameter(" ".join(kind.split()), match["name"]))
        return found


def read_entry_points(header: pathlib.Path) -> dict[str, EntryPoint]:
    """All entry points that `header` declares, by symbol name, sorted.

    Raises:
        HeaderError: Two views of the header declare one symbol with different parameters.
    """
    text = _without_comments(header.read_text(encoding="utf-8", errors="replace"))
    entry_points: dict[str, EntryPoint] = {}
    for view in _VIEWS:
        for entry in _read_view(text, view):
            known = entry_points.setdefault(entry.name, entry)
            if [p.type for p in known.parameters()] != [p.type for p in entry.parameters()]:
                raise HeaderError(f"{entry.name} is declared twice, with different parameters")
    return dict(sorted(entry_points.items()))


def _without_comments(text: str) -> str:
    text = text.replace("\\\n", " ")
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def _read_view(text: str, defined: tuple[str, ...]):
    macros = dict(_COMPILER) | {name: "1" for name in defined}
    active = [True]  # one flag per open conditional; a line counts if all are true
    taken = [True]  # whether some branch of that conditional has been taken
    statement = ""
    for line in text.split("\n"):
        directive = _DIRECTIVE.match(line)
        if directive:
            _follow(directive[1], directive[2].strip(), macros, active, taken)
            continue
        if not all(active):
            continue
        *complete, rest = line.split(";")
        for piece in complete:
            entry = _declared(statement + "\n" + piece, macros)
            statement = ""
            if entry is not None:
                yield entry
        statement += "\n" + rest


def _follow(word: str, rest: str, macros: dict[str, str], active: list[bool], taken: list[bool]) -> None:
    if word in ("if", "ifdef", "ifndef"):
        expression = {"if": rest, "ifdef": f"defined({rest})", "ifndef": f"!defined({rest})"}[word]
        holds = all(active) and _evaluate(expression, macros)
        active.append(holds)
        taken.append(holds)
    elif word == "elif":
        holds = not taken[-1] and all(active[:-1]) and _evaluate(rest, macros)
        active[-1] = holds
        taken[-1] = taken[-1] or holds
    elif word == "else":
        active[-1] = not taken[-1]
    elif word == "endif":
        active.pop()
        taken.pop()
    elif all(active) and word == "define":
        name, _, value = rest.partition(" ")
        if "(" in name:  # a macro with parameters: keep its head together
            head = re.match(r"(\w+)(\([^)]*\))(.*)", rest)
            name, value = (head[1], head[2] + " " + head[3].strip()) if head else (name, value)
        macros[name] = value.strip()
    elif all(active) and word == "undef":
        macros.pop(rest, None)


def _evaluate(expression: str, macros: dict[str, str]) -> bool:
    text = re.sub(r"defined\s*\(?\s*(\w+)\s*\)?", lambda m: "1" if m[1] in macros else "0", expression)
    if re.search(r"\b[A-Za-z_]\w*\s*\(", text):
        return False  # __has_include and its like: cuda.h hides no entry point behind them
    text = re.sub(r"\b([A-Za-z_]\w*)\b", lambda m: macros.get(m[1], "0") or "0", text)
    text = re.sub(r"(\d)[uUlL]+\b", r"\1", text)
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text)
    if not re.fullmatch(r"[\d\s()<>=!+*/x-]*(?:(?:and|or|not)[\d\s()<>=!+*/x-]*)*", text):
        return False
    return bool(eval(text, {"__builtins__": {}}))  # noqa: S307 - only digits and operators are left


def _declared(statement: str, macros: dict[str, str]) -> EntryPoint | None:
    statement = re.split(r"[{}]", statement)[-1]
    match = _DECLARATION.search(statement)
    if match is None or "typedef" in statement:
        return None
    returns = " ".join(word for word in match["returns"].split() if word not in ("__CUDA_DEPRECATED", "extern"))
    return EntryPoint(_expanded(match["name"], macros), returns, match["parameters"])


def _expanded(name: str, macros: dict[str, str]) -> str:
    seen = set()
    while name in macros and name not in seen:
        seen.add(name)
        value = macros[name]
        call = re.fullmatch(r"(\w+)\s*\(\s*(\w+)\s*\)", value)
        if call is None:
            name = value
            continue
        body = re.fullmatch(r"\((\w+)\)\s*(.*)", macros.get(call[1], ""))
        if body is None:
            raise HeaderError(f"{name} is defined by the unknown macro {value}")
        argument = call[2]
        name = re.sub(rf"\b{body[1]}\b", argument, body[2]).replace("##", "").replace(" ", "")
        if name == argument:
            break
    return name

"""Finds the functions of the product that nobody calls, by their names.

A function that a C++ source declares or defines in a namespace or a class must be named elsewhere in the product: in a body, a
default argument, an initialiser or a macro, in assembly, in a string by which it is looked up ("sluice_…"), or in the product's
Python, which opens libraries by ctypes and generates code. Neither its own body counts, nor other declarations of it, nor parameters
and variables of its name; what only tests and benchmarks call is not called.

It reads text, so that it needs no build and also sees functions that the compiler puts into their callers. It cannot see

* a function whose name another one has that is called, be it a container's: names are compared, not what they stand for. All
  that is told apart is an object before the name (`pool.acquire(…)`), which does not call a function outside of classes;
* constructors, destructors and operators, what is declared within a function, and what has no function's form (types, constants);
* what `override`s, since its caller may be a library: the function it overrides is looked at, where that is ours;
* that callers never run: two dead functions that call each other count as called.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = ("abi", "memhandover", "nccl_shim", "posix", "runtime", "scheduler")

#: What nobody in the product calls, and why it is there all the same: patterns of names.
UNCALLED = {
    "main": "programs begin with it",
    "cu[A-Z]*": "the driver's entry points, which training calls: runtime/gate/exports.map",
    "nccl[A-Z]*": "NCCL's entry points, which training calls: nccl_shim/calls/exports.map",
    "acquire": "contiguous memory, by which tests and benchmarks play a server",
    "start_array": "nlohmann::json calls it, of whatever is given to sax_parse",
    "start_object": "the same",
    "end_array": "the same",
    "end_object": "the same",
    "null": "the same",
    "number_*": "the same",
    "parse_error": "the same",
    "on_document_*": "Boost.JSON calls it, of whatever handles a parser's events",
    **dict.fromkeys(["on_object_*", "on_array_*", "on_key", "on_string", "on_number_part", "on_int64", "on_uint64", "on_double", "on_bool",
                     "on_null", "on_comment*"], "the same"),
    "On[A-Z]*": "gRPC calls it, of whatever answers a call",
    "init": "Boost.Beast calls it, of whatever writes a message's body",
    "get_scale": "programs in C++ ask their gradient scaler for it",
    "get_growth_tracker": "the same",
    "broker_pid": "kill loops and tests find by it whom to kill",
    "has_broker": "tests see by it that another broker was found",
    "correction": "what tests see of a prediction's inside",
    "*_per_micro_batch": "what tests see of a plan's inside",
    "probability_above": "a closed form that tests hold estimates and simulations against",
    "mean_wait_of_gathering": "the same",
    "mean_wait_behind": "the same",
    "mean_waits_by_rank": "the same",
    "with_teardown": "the same",
    "lundberg_tail": "the same",
    "exceed_for_extra_wait": "the same",
    "poisson_timeout": "the same",
    "cheapest_timeout": "the same",
    "competitive_timeout": "the same",
}

TOKEN = re.compile(
    r'(?P<skip>//(?:\\\n|[^\n])*|/\*.*?\*/|\s+)'
    r'|(?P<directive>(?<![^\n])[ \t]*\#(?:\\\n|//[^\n]*|/\*.*?\*/|[^\n])*)'
    r'|(?P<raw>\b(?:u8|[uUL])?R"(?P<fence>[^()\s]*)\(.*?\)(?P=fence)")'
    r'|(?P<text>(?:\b(?:u8|[uUL]))?"(?:\\.|[^"\\\n])*")'
    r"|(?P<character>\b(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')"
    r"|(?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)"
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<mark>::|->|&&|\|\||[<>=!]=|.)", re.DOTALL)

#: The name of a function of a C boundary, as `dlsym` wants it.
LOOKED_UP = re.compile(r'"(sluice_\w+)"')
#: Behind these a name with a parenthesis is a call, not the declaration of a variable of that type.
STATEMENTS = {"return", "co_return", "co_await", "co_yield", "throw", "else", "do", "case", "not", "and", "or", "in", "goto"}
#: What has parentheses in a declaration and is no function.
NO_FUNCTIONS = {"alignas", "decltype", "noexcept", "requires", "explicit", "static_assert", "__attribute__", "asm", "sizeof", "if",
                "while", "for", "switch", "return", "defined", "operator"}
CLASSES = {"class", "struct", "union"}


@dataclass
class Found:
    """What sources declare, and what they name other than by its declaration."""

    declared: dict[tuple[str, bool], list[str]] = field(default_factory=dict)  # by name and whether in a class: where
    called: set[str] = field(default_factory=set)  # on its own or qualified, or as a value
    called_of_objects: set[str] = field(default_factory=set)

    def uncalled(self) -> dict[str, list[str]]:
        """Where each function that is never named is declared."""
        found: dict[str, list[str]] = {}
        for (name, of_class), places in self.declared.items():
            if name not in self.called and not (of_class and name in self.called_of_objects):
                found.setdefault(name, []).extend(places)
        return found


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int


def tokens_of(code: str) -> Iterator[Token]:
    line = 1
    for match in TOKEN.finditer(code):
        if match.lastgroup != "skip":
            yield Token(match.lastgroup or "", match.group(), line)
        line += match.group().count("\n")


class Reader:
    """Goes through one file, from scope to scope."""

    def __init__(self, found: Found, name: str, code: str):
        self.found, self.name = found, name
        self.tokens: list[Token] = []
        for token in tokens_of(code):
            if token.kind == "directive":
                if re.match(r"\s*#\s*define\b", token.text):
                    self.found.called.update(re.findall(r"[A-Za-z_]\w*", token.text.partition("define")[2])[1:])
            else:
                self.tokens.append(token)
        self.at = 0

    def read(self) -> None:
        while self.at < len(self.tokens):
            self.scope("")
            self.at += 1  # a brace too many, behind a macro

    def scope(self, of_class: str) -> None:
        """What a namespace or a class declares, up to its closing brace."""
        head: list[Token] = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.text == "}" and token.kind == "mark":
                break
            if token.text == "{":
                head = self.opened(head, of_class)
                continue
            self.at += 1
            if token.text == ";":
                self.declaration(head, [], of_class)
                head = []
            elif token.text == ":" and head and head[-1].text in ("public", "private", "protected"):
                head = []
            else:
                head.append(token)
        self.declaration(head, [], of_class)

    def opened(self, head: list[Token], of_class: str) -> list[Token]:
        """At a brace behind `head`: goes past what it opens. Returns what the declaration goes on from."""
        words = [token.text for token in without_templates(head)]
        if "namespace" in words[:2] or (words[:1] == ["extern"] and len(words) == 2):
            self.at += 1
            self.scope("")
            self.at += 1
            return []
        if words[:1] and words[0] in CLASSES and not words[-1:] == [")"]:
            self.at += 1
            self.scope(class_name(words))
            self.at += 1
            self.uses(head, set())
            return []
        place = function_at(head)
        body = self.block()
        if words[:1] == ["enum"] or place is None or in_initialisers(head, place):
            return [*head, *body]
        self.declaration(head, body, of_class)
        return []

    def block(self) -> list[Token]:
        """The tokens from this brace to the one that closes it."""
        begun, depth = self.at, 0
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            depth += (token.text == "{") - (token.text == "}")
            self.at += 1
            if depth == 0:
                break
        return self.tokens[begun:self.at]

    def declaration(self, head: list[Token], body: list[Token], of_class: str) -> None:
        place = function_at(head)
        if place is None:
            self.uses(head + body, set())
            return
        name = head[place].text
        before = [token.text for token in head[:place]]
        qualifier = before[-2] if before[-1:] == ["::"] and len(before) > 1 else of_class
        special = name == qualifier or name == of_class or before[-1:] == ["~"] or not before
        after = {token.text for token in head[place:]}
        called_by_loader = "constructor" in before
        if not special and not called_by_loader and not {"override", "delete"} & after and "friend" not in before:
            where = f"{self.name}:{head[place].line}"
            # Outside of its class a method is told by its qualifier, which a namespace may be as well: then less is found.
            self.found.declared.setdefault((name, bool(qualifier)), []).append(where)
        self.uses(head[:place] + head[place + 1:] + body, {name})

    def uses(self, tokens: list[Token], own: set[str]) -> None:
        """Notes what a piece of code names."""
        variables = set(own)
        values: set[str] = set()
        for at, token in enumerate(tokens):
            before = tokens[at - 1] if at > 0 else Token("mark", ";", 0)
            after = tokens[at + 1].text if at + 1 < len(tokens) else ";"
            if token.kind == "text" and (looked_up := LOOKED_UP.fullmatch(token.text)):
                self.found.called.add(looked_up.group(1))
            if token.kind != "word":
                continue
            if before.text in (".", "->"):
                if token.text not in own or after == "(":
                    self.found.called_of_objects.add(token.text)
            elif token.text in own:
                continue
            elif before.text == "::":
                self.found.called.add(token.text)
            elif is_type_end(before) and (after in ("=", ";", ",", ")", "{", ":", "[") or (after == "(" and before.kind == "word")):
                variables.add(token.text)
            elif after in ("(", "<"):
                self.found.called.add(token.text)
            else:
                values.add(token.text)
        self.found.called |= values - variables


def is_type_end(token: Token) -> bool:
    """Whether a name behind it would be a variable's."""
    return (token.kind == "word" and token.text not in STATEMENTS) or token.text in (">", "*", "&&")


def without_templates(head: list[Token]) -> list[Token]:
    """A declaration without its template parameters and attributes at the beginning."""
    at = 0
    while at < len(head) and head[at].text in ("template", "[", "alignas"):
        opening = {"template": "<", "[": "[", "alignas": "("}[head[at].text]
        closing = {"<": ">", "[": "]", "(": ")"}[opening]
        depth = 0
        while at < len(head):
            depth += (head[at].text == opening) - (head[at].text == closing)
            at += 1
            if depth == 0 and head[at - 1].text == closing:
                break
    return head[at:]


def class_name(words: list[str]) -> str:
    """Of the words before a class's brace."""
    depth, name = 0, ""
    for word in words[1:]:
        depth += (word in "([<") - (word in ")]>") if len(word) == 1 else 0
        if word == ":":
            break
        if depth == 0 and re.fullmatch(r"[A-Za-z_]\w*", word) and word not in ("final", "alignas"):
            name = word
    return name


def function_at(head: list[Token]) -> int | None:
    """The place of a function's name in its declaration; None for everything else that is declared."""
    if head and head[0].text in ("using", "typedef", "namespace", "enum"):
        return None
    round_, angled, square = 0, 0, 0  # how deep in parentheses of each kind; braces count as square ones
    for at, token in enumerate(head):
        before = head[at - 1] if at else None
        if token.kind == "mark":
            if token.text == "(" and round_ == angled == square == 0 and before is not None:
                if before.kind == "word" and before.text not in NO_FUNCTIONS and not before.text.isupper():
                    return at - 1
                if before.kind != "word":
                    return None
            round_ += (token.text == "(") - (token.text == ")")
            square += (token.text in "[{") - (token.text in "]}") if len(token.text) == 1 else 0
            if round_ == 0 and square == 0:
                angled = max(0, angled + (token.text == "<") - (token.text == ">"))
            if token.text == "=" and round_ == angled == square == 0:
                return None
        elif token.text == "operator":
            return None
    return None


def in_initialisers(head: list[Token], place: int) -> bool:
    """Whether a brace behind `head` holds what a constructor gives a member."""
    depth, colon = 0, False
    for token in head[place:]:
        depth += (token.text in "({[") - (token.text in ")}]") if token.kind == "mark" and len(token.text) == 1 else 0
        colon = colon or (depth == 0 and token.text == ":" and token.kind == "mark")
    return colon and (head[-1].kind == "word" or head[-1].text == ">")


def named_by_python(code: str) -> set[str]:
    """What a module looks up or generates calls of: an attribute of a library, a whole string, a name before a parenthesis in one."""
    tree = ast.parse(code)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # doc strings
    texts = [node.value for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said]
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("sluice_")}
    return attributes | {name for text in texts for name in re.findall(r"^\w+$|\w+(?=\()", text)}


def look_at(files: Iterable[tuple[str, str]]) -> Found:
    """Of sources, each with its name and text."""
    found = Found()
    for name, text in files:
        suffix = Path(name).suffix
        if suffix in (".cpp", ".hpp", ".h"):
            Reader(found, name, text).read()
        elif suffix == ".py":
            found.called |= named_by_python(text)
        elif suffix == ".S":
            found.called |= set(re.findall(r"\b(?:call|j\w+)\s+\*?(\w+)", text))
    return found


def complaints(found: Found, known: dict[str, str]) -> list[str]:
    """What is not as it should be: functions that neither are called nor `known`, and what is known in vain."""
    uncalled = found.uncalled()
    said = [f"{place}: nobody calls {name}" for name, places in uncalled.items() for place in places
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in known)]
    said += [f"{pattern} needs no exception any more" for pattern in known if not fnmatch.filter(uncalled, pattern)]
    return sorted(said)


def check(root: Path, files: Iterable[Path], known: dict[str, str]) -> list[str]:
    """The complaints about the product below `root`, of which `files` are."""
    names = [(file.relative_to(root), file) for file in files]
    return complaints(look_at((str(name), file.read_text(encoding="utf-8")) for name, file in names
                              if name.parts[0] in PRODUCT and name.suffix in (".cpp", ".hpp", ".h", ".py", ".S")), known)

"""Which flags an SGLang release takes, read from its source by syntax tree: nothing of SGLang is imported or run.

    python -m lib.server.extract_flags OUT.json VERSION=UNPACKED_WHEEL [VERSION=UNPACKED_WHEEL ...]

Up to 0.5.13 `ServerArgs.add_cli_args` is a long list of `parser.add_argument` calls; from 0.5.14 on most flags are
derived from annotated fields (`name: A[type, Arg(...)] = default`, `arg_groups/arg_utils.py`), later spread over
`arg_groups/fields/`. Both forms are read. Choices are followed through constants, imports, class attributes, enums and
small functions; a condition on an environment variable counts as false (what a server without it accepts). What cannot
be resolved is said in the row (`unresolved`), never guessed. The result is compared with a real parser in
tests/server/test_flags.py.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.errors import BadInput, UnreadableFile

#: what argparse's own and SGLang's own actions are called in the table
ACTIONS = {
    "store_true": "true",
    "argparse.BooleanOptionalAction": "on_off",
    "DeprecatedAction": "ignored",
    "DeprecatedStoreTrueAction": "deprecated_true",
    "DeprecatedStoreConstAction": "deprecated_const",
    "DeprecatedAliasStoreAction": "deprecated_store",
    "LoRAPathAction": "lora_paths",
}
#: `type=` callables by the name that the table uses
TYPES = {"json.loads": "json", "json_list_type": "json_list", "parse_cuda_graph_config_arg": "cuda_graph_config"}
ENV_NAME = re.compile(r"(?:SGLANG|SGL)_[A-Z0-9_]+")


class Unresolved(Exception):
    """An expression whose value is not a constant of the source."""


@dataclass
class Class:
    """A class of the source: its constants, and whether its members are enum members."""

    module: Module
    node: ast.ClassDef

    @property
    def is_enum(self) -> bool:
        """True for Enum, IntEnum, StrEnum and their like."""
        return any("Enum" in ast.unparse(base) for base in self.node.bases)

    def constant(self, name: str) -> Any:
        """Value of a class attribute; an enum member is a dict of name and value."""
        for statement in self.node.body:
            targets: list[ast.expr] = []
            value = None
            if isinstance(statement, ast.Assign):
                targets, value = statement.targets, statement.value
            elif isinstance(statement, ast.AnnAssign):
                targets, value = [statement.target], statement.value
            if value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return self.module.value_of(value, {}, owner=self)
        raise Unresolved(f"{self.node.name}.{name}")

    def members(self) -> list[dict[str, Any]]:
        """Enum members in order, as {name, value}."""
        found = []
        for statement in self.node.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                found.append(
                    {"name": statement.targets[0].id, "value": self.module.value_of(statement.value, {}, owner=self)}
                )
        return found


@dataclass
class Function:
    """A function of the source, evaluated only when its body is imports, constants and a return."""

    module: Module
    node: ast.FunctionDef


@dataclass
class Module:
    """One source file, and the values of its names by following assignments and imports."""

    root: Path
    path: Path
    cache: dict[Path, Module]
    tree: ast.Module = field(init=False)
    bindings: dict[str, ast.stmt] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.tree = ast.parse(self.path.read_text("utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise UnreadableFile(
                f"{self.path.name} of an unpacked sglang wheel as Python source", str(error)
            ) from error
        self.cache[self.path] = self
        for statement in self.tree.body:
            self._bind(statement)

    def _bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self.bindings[target.id] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            self.bindings[statement.target.id] = statement
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
            self.bindings[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                self.bindings[alias.asname or alias.name] = statement
        elif isinstance(statement, ast.If | ast.Try):
            for inner in statement.body:
                self._bind(inner)

    def other(self, dotted: str) -> Module:
        """The module of that dotted name in the same wheel."""
        base = self.root.joinpath(*dotted.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path in self.cache:
                return self.cache[path]
            if path.is_file():
                return Module(self.root, path, self.cache)
        raise Unresolved(dotted)

    def name(self, name: str) -> Any:
        """Value of a module-level name."""
        statement = self.bindings.get(name)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            return self.value_of(statement.value, {})
        if isinstance(statement, ast.ClassDef):
            return Class(self, statement)
        if isinstance(statement, ast.FunctionDef):
            return Function(self, statement)
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            source = next(a.name for a in statement.names if (a.asname or a.name) == name)
            return self.other(statement.module).name(source)
        raise Unresolved(name)

    def call(self, function: Function, arguments: list[Any]) -> Any:
        """Value of a small function; branches whose condition is unknown are not taken."""
        names = [a.arg for a in function.node.args.args]
        scope: dict[str, Any] = dict(zip(names, arguments, strict=False))
        for statement in function.node.body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                for alias in statement.names:
                    scope[alias.asname or alias.name] = function.module.other(statement.module).name(alias.name)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                return function.module.value_of(statement.value, scope)
        raise Unresolved(f"{function.node.name}()")

    def value_of(self, node: ast.expr, scope: Mapping[str, Any], owner: Class | None = None) -> Any:
        """Value of a constant expression; raises Unresolved for anything else."""

        def value(inner: ast.expr) -> Any:
            return self.value_of(inner, scope, owner)

        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name):
                if name in scope:
                    return scope[name]
                if owner is not None:
                    try:
                        return owner.constant(name)
                    except Unresolved:
                        return self.name(name)
                return self.name(name)
            case ast.List(elts=elts):
                return [v for e in elts for v in (value(e.value) if isinstance(e, ast.Starred) else [value(e)])]
            case ast.Tuple(elts=elts):
                return tuple(value(e) for e in elts)
            case ast.Set(elts=elts):
                return sorted(value(e) for e in elts)
            case ast.Dict(keys=keys):
                return {value(k): None for k in keys if k is not None}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                a, b = value(left), value(right)
                return list(a) + list(b) if isinstance(a, list | tuple) else a + b
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
            case ast.Subscript(value=inner, slice=index):
                return value(inner)[value(index)]
            case ast.Attribute(value=ast.Name(id="argparse"), attr="SUPPRESS"):
                return Suppressed
            case ast.Attribute(value=inner, attr=attr):
                held = value(inner)
                if isinstance(held, Class):
                    if held.is_enum:
                        return next(m["value"] for m in held.members() if m["name"] == attr)
                    return held.constant(attr)
                if isinstance(held, dict) and attr in held:
                    return held[attr]
            case ast.Call():
                return self._call_value(node, scope, owner)
            case ast.ListComp(elt=elt, generators=[ast.comprehension(target=ast.Name(id=target), iter=it, ifs=[])]):
                held = value(it)
                items = held.members() if isinstance(held, Class) and held.is_enum else held
                return [self.value_of(elt, {**scope, target: item}, owner) for item in items]
        raise Unresolved(ast.unparse(node))

    def _call_value(self, node: ast.Call, scope: Mapping[str, Any], owner: Class | None) -> Any:
        text = ast.unparse(node.func)
        if text in ("dataclasses.field", "msgspec.field", "field"):
            factory = next((k.value for k in node.keywords if k.arg == "default_factory"), None)
            if isinstance(factory, ast.Lambda):
                return self.value_of(factory.body, scope, owner)
            if factory is not None and ast.unparse(factory) == "list":
                return []
            raise Unresolved(ast.unparse(node))
        arguments = [self.value_of(a, scope, owner) for a in node.args]
        if text in ("list", "tuple", "set", "sorted", "frozenset"):
            held = arguments[0] if arguments else []
            if isinstance(held, Class) and held.is_enum:
                return held.members()
            return sorted(held) if text in ("set", "sorted", "frozenset") else list(held)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "lower", "upper"):
            held = self.value_of(node.func.value, scope, owner)
            if node.func.attr == "keys":
                return list(held)
            return getattr(held, node.func.attr)()
        if isinstance(node.func, ast.Name):
            function = scope.get(node.func.id) or self.name(node.func.id)
            if isinstance(function, Function):
                return self.call(function, arguments)
        raise Unresolved(ast.unparse(node))


class Suppressed:
    """argparse.SUPPRESS: the option sets nothing when absent."""


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple | set):
        return [_jsonable(v) for v in value]
    if isinstance(value, list):
        return [_jsonable(v) for v in value]
    return value


class Extraction:
    """All flags of one unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        path = root / "sglang" / "srt" / "server_args.py"
        if not path.is_file():
            raise BadInput("a folder with an unpacked sglang wheel (sglang/srt/server_args.py)", str(root))
        self.main = Module(root, path, {})
        self.classes: list[Class] = []
        self.rows: list[dict[str, Any]] = []

    def flags(self) -> list[dict[str, Any]]:
        """Rows of all flags in the order of the parser."""
        # the class statement, not the name: from 0.5.20 on the name is assigned again from the assembled class
        node = next(s for s in self.main.tree.body if isinstance(s, ast.ClassDef) and s.name == "ServerArgs")
        server_args = Class(self.main, node)
        self.classes = [server_args]
        if "_INPUT_NAMESPACES" in self.main.bindings:
            self.classes = [*self.main.name("_INPUT_NAMESPACES"), server_args]
        adder = next(s for s in server_args.node.body if isinstance(s, ast.FunctionDef) and s.name == "add_cli_args")
        scope: dict[str, Any] = {}
        for statement in adder.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                try:
                    scope[statement.targets[0].id] = self.main.value_of(statement.value, scope)
                except Unresolved:
                    scope.pop(statement.targets[0].id, None)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                called = ast.unparse(statement.value.func)
                if called == "add_cli_args_from_dataclass":
                    self._annotated_fields()
                elif called.endswith(".add_argument"):
                    self._add_argument(statement.value, scope)
        return self.rows

    def default_of(self, name: str) -> Any:
        """Default of a field of ServerArgs."""
        for held in self.classes:
            for statement in held.node.body:
                if (
                    isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and statement.target.id == name
                    and statement.value is not None
                ):
                    return held.module.value_of(statement.value, {}, owner=None)
        raise Unresolved(f"ServerArgs.{name}")

    def _value(self, module: Module, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ServerArgs":
            return self.default_of(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_declared_default":
            return self.default_of(module.value_of(node.args[0], scope))
        return module.value_of(node, scope)

    def _fill(self, row: dict[str, Any], key: str, module: Module, node: ast.expr, scope: Mapping[str, Any]) -> None:
        try:
            value = _jsonable(self._value(module, node, scope))
        except Unresolved:
            row.setdefault("unresolved", {})[key] = ast.unparse(node)[:120]
            return
        if key == "default" and value is Suppressed:
            row["suppressed"] = True
        else:
            row[key] = value

    def _add_argument(self, call: ast.Call, scope: Mapping[str, Any]) -> None:
        names = [self.main.value_of(a, scope) for a in call.args]
        row: dict[str, Any] = {"flags": names, "dest": names[0].lstrip("-").replace("-", "_"), "action": "store"}
        for keyword in call.keywords:
            match keyword.arg:
                case "help" | None:
                    continue
                case "action":
                    row["action"] = _action(self.main, keyword.value)
                case "type":
                    row["type"] = _type_name(keyword.value)
                case "new_flag" | "error_message":
                    self._fill(
                        row, {"new_flag": "use", "error_message": "error"}[keyword.arg], self.main, keyword.value, scope
                    )
                case "const_value" | "const":
                    self._fill(row, "const", self.main, keyword.value, scope)
                case "nargs" | "choices" | "default" | "dest" | "required":
                    self._fill(row, keyword.arg, self.main, keyword.value, scope)
                case other:
                    row.setdefault("unresolved", {})[other] = ast.unparse(keyword.value)[:120]
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        if row["action"] in ("store", "deprecated_store") and "type" not in row:
            row["type"] = "str"
        if row["action"] in ("true", "deprecated_true") and "default" not in row:
            row["default"] = False
        row.setdefault("default", None)
        if row["default"] is None and "default" not in row.get("unresolved", {}):
            del row["default"]
        self.rows.append(row)

    def _annotated_fields(self) -> None:
        # 0.5.15 and 0.5.16 declare dcp_size twice: in a dataclass the later declaration stands
        found: dict[str, tuple[Class, ast.AnnAssign]] = {}
        for held in self.classes:
            for statement in held.node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    found[statement.target.id] = (held, statement)
        for name, (held, statement) in found.items():
            self._annotated_field(held, statement, name)

    def _annotated_field(self, held: Class, statement: ast.AnnAssign, name: str) -> None:
        note = statement.annotation
        if not (isinstance(note, ast.Subscript) and ast.unparse(note.value) in ("A", "Annotated")):
            return
        parts = note.slice.elts if isinstance(note.slice, ast.Tuple) else [note.slice]
        kind, metadata = parts[0], parts[1:]
        arg = next(
            (p for p in metadata if isinstance(p, ast.Call) and ast.unparse(p.func).split(".")[-1] == "Arg"), None
        )
        if arg is None and not any(_is_text(p) for p in metadata):
            return
        keywords = {k.arg: k.value for k in arg.keywords if k.arg} if arg is not None else {}
        module = held.module

        def get(key: str) -> Any:
            return module.value_of(keywords[key], {}) if key in keywords else None

        if get("no_cli"):
            return
        flags = [get("cli_name") or "--" + name.replace("_", "-"), *(get("aliases") or [])]
        row: dict[str, Any] = {"flags": flags, "dest": name, "action": "store"}
        if statement.value is not None:
            self._fill(row, "default", module, statement.value, {})
        if "const" in keywords:
            self._fill(row, "const", module, keywords["const"], {})
        if "action" in keywords:
            row["action"] = _action(module, keywords["action"])
            if "action_kwargs" in keywords and isinstance(keywords["action_kwargs"], ast.Dict):
                pairs = keywords["action_kwargs"]
                for key, value in zip(pairs.keys, pairs.values, strict=True):
                    label = module.value_of(key, {}) if key is not None else ""
                    if label == "type":
                        row["type"] = _type_name(value)
                    else:
                        self._fill(row, label, module, value, {})
            self._append(row)
            return
        inner = _without_none(kind)
        literal = _subscript(inner, "Literal")
        if literal is not None:
            values = [module.value_of(e, {}) for e in literal]
            row["choices"] = values
            row["type"] = "int" if isinstance(values[0], int) and not isinstance(values[0], bool) else "str"
        elements = _subscript(inner, "List") or _subscript(inner, "list")
        if "choices" in keywords:
            self._fill(row, "choices", module, keywords["choices"], {})
        if "type_parser" in keywords:
            row["type"] = _type_name(keywords["type_parser"])
        elif elements is not None:
            row["type"] = _scalar(elements[0])
        if literal is None:
            if elements is not None and "type_parser" not in keywords:
                row["nargs"] = get("nargs") or "+"
            elif isinstance(inner, ast.Name) and inner.id == "bool":
                row["action"] = "true"
                row.pop("choices", None)
            else:
                row.setdefault("type", _scalar(inner))
                if get("nargs"):
                    row["nargs"] = get("nargs")
                if get("required") or (get("required") is None and statement.value is None):
                    row["required"] = True
        self._append(row)

    def environment_names(self) -> list[str]:
        """Names of environment variables that the source reads: literals, `envs.NAME`, and fields of `Envs`."""
        found: set[str] = set()
        for path in sorted((self.root / "sglang").rglob("*.py")):
            if "test" in path.relative_to(self.root).parts:
                continue
            text = path.read_text("utf-8", "replace")
            if path.name == "environ.py":
                found.update(re.findall(r"^\s+((?:SGLANG|SGL)_[A-Z0-9_]+)\s*=", text, re.M))
            found.update(m.group(1) for m in re.finditer(r"""["'f]((?:SGLANG|SGL)_[A-Z0-9_]+)["']""", text))
            found.update(m.group(1) for m in re.finditer(r"\benvs\.((?:SGLANG|SGL)_[A-Z0-9_]+)", text))
        return sorted(n for n in found if ENV_NAME.fullmatch(n) and not n.endswith("_"))


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _action(module: Module, node: ast.expr) -> str:
    text = module.value_of(node, {}) if isinstance(node, ast.Constant) else ast.unparse(node)
    if text not in ACTIONS:
        raise BadInput(
            f"a known argparse action ({', '.join(ACTIONS)})", text, "add it to ACTIONS and to lib/server/flags.py"
        )
    return ACTIONS[text]


def _type_name(node: ast.expr) -> str:
    text = ast.unparse(node)
    return TYPES.get(text, text)


def _scalar(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if text in ("int", "float") else "str"


def _subscript(node: ast.expr, name: str) -> list[ast.expr] | None:
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] == name:
        return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    return None


def _without_none(node: ast.expr) -> ast.expr:
    """X of Optional[X] or X | None; a union of several stays what it is (SGLang's reader does the same)."""
    inner = _subscript(node, "Optional")
    if inner is not None:
        return inner[0]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts = _union(node)
        rest = [p for p in parts if not (isinstance(p, ast.Constant) and p.value is None)]
        if len(rest) == 1:
            return rest[0]
    return node


def _union(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(node.left) + _union(node.right)
    return [node]


def _ranges(versions: list[str], present: Iterable[str]) -> list[list[str]]:
    """Runs of consecutive versions as [first, last] pairs.

    >>> _ranges(["1", "2", "3", "4"], ["1", "2", "4"])
    [['1', '2'], ['4', '4']]
    """
    runs: list[list[str]] = []
    held = set(present)
    for i, version in enumerate(versions):
        if version not in held:
            continue
        if runs and i and runs[-1][1] == versions[i - 1]:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return runs


def table_of(extractions: Mapping[str, Extraction]) -> dict[str, Any]:
    """The stored table: one entry a flag, one form for each run of versions in which it reads the same.

    Choices are held once in `choices` and named by number, since several flags share a list.
    """
    versions = list(extractions)
    by_flag: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    environment: dict[str, list[str]] = {}
    lists: list[Any] = []
    for version, extraction in extractions.items():
        for row in extraction.flags():
            by_flag.setdefault(row["flags"][0], []).append((version, row))
        for name in extraction.environment_names():
            environment.setdefault(name, []).append(version)
    flags: dict[str, list[dict[str, Any]]] = {}
    for flag, rows in sorted(by_flag.items()):
        forms: list[dict[str, Any]] = []
        for version, row in rows:
            form = {k: v for k, v in row.items() if k != "flags"}
            if len(row["flags"]) > 1:
                form["also"] = row["flags"][1:]
            if isinstance(form.get("choices"), list):
                if form["choices"] not in lists:
                    lists.append(form["choices"])
                form["choices"] = lists.index(form["choices"])
            last = forms[-1] if forms else None
            previous = versions[versions.index(version) - 1] if versions.index(version) else None
            if (
                last
                and last["until"] == previous
                and {k: v for k, v in last.items() if k not in ("since", "until")} == form
            ):
                last["until"] = version
            else:
                forms.append({"since": version, "until": version, **form})
        flags[flag] = forms
    return {
        "source": "sglang wheels on PyPI: sglang/srt/server_args.py and its imports, by lib/server/extract_flags.py",
        "versions": versions,
        "choices": lists,
        "flags": flags,
        "environment": {name: _ranges(versions, present) for name, present in sorted(environment.items())},
    }


def dump(table: Mapping[str, Any]) -> str:
    """JSON with one flag, list and variable a line, so that a diff shows what a release changed."""

    def lines(held: Mapping[str, Any]) -> str:
        return ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(', ', ':'))}" for k, v in held.items())

    lists = ",\n".join(json.dumps(v, separators=(",", ":")) for v in table["choices"])
    return (
        f'{{"source": {json.dumps(table["source"])},\n"versions": {json.dumps(table["versions"])},\n'
        f'"choices": [\n{lists}\n],\n"flags": {{\n{lines(table["flags"])}\n}},\n'
        f'"environment": {{\n{lines(table["environment"])}\n}}}}\n'
    )


def main(arguments: list[str]) -> int:
    """Writes the table for the given wheels; versions must be in rising order."""
    if len(arguments) < 2 or any("=" not in a for a in arguments[1:]):
        raise BadInput("OUT.json VERSION=FOLDER ...", " ".join(arguments) or "nothing")
    pairs = [a.split("=", 1) for a in arguments[1:]]
    table = table_of({version: Extraction(Path(folder)) for version, folder in pairs})
    Path(arguments[0]).write_text(dump(table), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Imports run one way: heads -> core, inference -> core, train -> inference and core; read from the source files."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from selfspec import registry

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("heads", "inference", "train", "recipes")
# The lazy names of `__init__` and the command line may reach down; nothing else in the core may.
ROOTS = {"selfspec", "selfspec.cli", "selfspec.__main__"}
ALLOWED = {
    "core": {"core", "recipes"},
    "heads": {"core", "recipes", "heads"},
    "inference": {"core", "recipes", "inference"},
    "train": {"core", "recipes", "inference", "train"},
    "recipes": {"core", "recipes"},
}
# Names of methods that are ordinary words of this code as well: `combine="compose"`, the adapters of PEFT.
ORDINARY = {"compose", "adapter"}
METHODS = [re.findall("[a-z]+", kind) for kind in registry.kinds() if kind not in ORDINARY]
# transformers' own names, which code that deals with generate() has to spell, and the runs of `bench` that use them.
NOT_OURS = {
    *("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
    *("transformers-prompt-lookup", "transformers-early-exit", "early_exit", "EARLY_EXIT"),
}


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    lazy: bool = False  # inside a function: runs when called, not when the module is imported
    typing_only: bool = False  # under `if TYPE_CHECKING`


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def layer(self) -> str:
        return layer_of(self.name)


def layer_of(name: str) -> str:
    """The folder a module of selfspec belongs to: one of FOLDERS, or "core"."""
    second = name.split(".")[1] if "." in name else ""
    return second if second in FOLDERS else "core"


def is_root(name: str) -> bool:
    return name in ROOTS or name.startswith("selfspec.cli.")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def modules() -> dict[str, Module]:
    """Every module of the package by dotted name, read from the real folders so that no link has to be followed."""
    found = {}
    for prefix, folder in [("selfspec", ROOT / "selfspec"), *((f"selfspec.{name}", ROOT / name) for name in FOLDERS)]:
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if prefix == "selfspec" and parts[0] in FOLDERS:
                continue  # some Pythons follow the links
            name = ".".join((prefix, *parts)).removesuffix(".__init__")
            found[name] = Module(name, path)
    return found


def absolute(name: str, level: int, package: str) -> str:
    """`from ..a import b` in package p.q has name "a" and level 2; the answer is "p.a"."""
    if level == 0:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, name] if name else base)


def targets(node: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that one statement or call imports; `from a import b` gives "a.b"."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = absolute(node.module or "", node.level, package)
        yield from (f"{source}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.args[0].value
        if ast.unparse(node.func) in {"importlib.import_module", "import_module", "__import__"}:
            yield absolute(name.lstrip("."), len(name) - len(name.lstrip(".")), package)


def imports(tree: ast.AST, package: str, lazy: bool = False, typing_only: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        for target in targets(node, package):
            yield Import(target, getattr(node, "lineno", 0), lazy, typing_only)
        in_function = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from imports(ast.Module(node.body, []), package, in_function, True)
            yield from imports(ast.Module(node.orelse, []), package, in_function, typing_only)
        else:
            yield from imports(node, package, in_function, typing_only)


def owner(target: str) -> str:
    """The module that an import of `target` loads: the longest prefix that is a module of ours, else `target`."""
    name = target
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or target


def own_imports(module: Module) -> list[Import]:
    return [found for found in imports(parse(module.path), module.package) if found.target.split(".")[0] == "selfspec"]


def breach(module: Module, found: Import) -> str | None:
    """What is wrong with an import of ours, or None."""
    if module.name == "selfspec" and (found.lazy or found.typing_only):
        return None
    if is_root(module.name) and module.name != "selfspec":
        return None
    target = owner(found.target)
    if target == "selfspec" and found.target != "selfspec":
        return "takes a name from the root; import it from the module that defines it"
    if is_root(target) and target != "selfspec":
        return "imports the command line"
    # A target that names no module yet is judged by its spelling.
    layer = layer_of(found.target if target == "selfspec" else target)
    return None if layer in ALLOWED[module.layer] else f"{module.layer} may not import {layer}"


def words(text: str) -> list[str]:
    """The lower-case words of an identifier or a string: "Eagle3Head_x" gives eagle, head, x."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]


def names_a_method(text: str) -> bool:
    """Whether a text spells a method: its words in a row, or one name in mixed case. Numbers do not matter."""
    spoken = f" {' '.join(words(text))} "
    runs = [words(part) for part in re.findall("[A-Za-z]+", text)]
    joined = {"".join(run[i:j]) for run in runs for i in range(len(run)) for j in range(i + 1, len(run) + 1)}
    return any(f" {' '.join(method)} " in spoken or "".join(method) in joined for method in METHODS)


def names_and_strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every identifier and string of a file with its line, except strings that stand alone (docstrings)."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) in alone:
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield getattr(node, "lineno", 0), text


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_imports_run_one_way() -> None:
    wrong = [
        f"{where(module.path, found.line)}: {found.target}: {reason}"
        for module in modules().values()
        for found in own_imports(module)
        if (reason := breach(module, found))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_circle() -> None:
    graph = {
        module.name: {owner(found.target) for found in own_imports(module) if not (found.lazy or found.typing_only)}
        - {module.name}
        for module in modules().values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import circle: " + " <- ".join(error.args[1]))


def test_every_import_of_ours_names_a_module() -> None:
    """A submodule that was renamed must not live on in an import inside a function that no test calls."""
    wrong = []
    for module in modules().values():
        for found in own_imports(module):
            target = owner(found.target)
            if "." in found.target.removeprefix(target).lstrip("."):  # one more part may be a name inside the module
                wrong.append(f"{where(module.path, found.line)}: {found.target}")
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_a_folder_as_a_top_level_package() -> None:
    others = [*(ROOT / "tests").rglob("*.py"), *(ROOT / ".ci").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    wrong = [
        where(path, found.line)
        for path, package in [*((m.path, m.package) for m in modules().values()), *((path, "") for path in others)]
        for found in imports(parse(path), package)
        if found.target.split(".")[0] in FOLDERS
    ]
    assert not wrong, f"write selfspec.heads, not heads: {wrong}"


def test_inference_and_train_name_no_draft_method() -> None:
    wrong = [
        f"{where(module.path, line)}: {text!r}"
        for module in modules().values()
        if module.layer in {"inference", "train"}
        for line, text in names_and_strings(parse(module.path))
        if text not in NOT_OURS and names_a_method(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_bare_except() -> None:
    wrong = [
        where(module.path, node.lineno)
        for module in modules().values()
        for node in ast.walk(parse(module.path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not wrong, wrong


def test_importing_the_package_loads_no_top_level_folder() -> None:
    program = f"import sys, selfspec.heads; print([name for name in {FOLDERS} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "tests",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


# The checks above pass on an empty tree, so the reader they stand on is tested on source of its own.


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import selfspec.train.loop as x", Import("selfspec.train.loop", 1)),
        ("from selfspec.heads import layers", Import("selfspec.heads.layers", 1)),
        ("from ..heads import layers", Import("selfspec.heads.layers", 1)),
        ("from . import bench", Import("selfspec.inference.bench", 1)),
        ("try:\n    import heads\nexcept ImportError: ...", Import("heads", 2)),
        ("def f():\n    from ..train import loop", Import("selfspec.train.loop", 2, lazy=True)),
        ("def f():\n    return import_module('..train', p)", Import("selfspec.train", 2, lazy=True)),
        ("if TYPE_CHECKING:\n    import selfspec.heads", Import("selfspec.heads", 2, typing_only=True)),
    ],
)
def test_reader_sees_imports(source: str, expected: Import) -> None:
    assert list(imports(ast.parse(source), "selfspec.inference")) == [expected]


@pytest.mark.parametrize(
    ("name", "target", "allowed"),
    [
        ("selfspec.tree", "selfspec.heads", False),
        ("selfspec.heads.x", "selfspec.inference", False),
        ("selfspec.heads.x", "selfspec.train", False),
        ("selfspec.inference.x", "selfspec.heads", False),
        ("selfspec.inference.x", "selfspec.train", False),
        ("selfspec.inference.x", "selfspec.cli", False),
        ("selfspec.train.x", "selfspec.heads", False),
        ("selfspec.train.x", "selfspec.inference", True),
        ("selfspec.train.x", "selfspec._version", True),
        ("selfspec.train.x", "selfspec.patch", False),
        ("selfspec", "selfspec.inference", False),
        ("selfspec.cli", "selfspec.train", True),
    ],
)
def test_rules_of_the_layers(name: str, target: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    known = modules() | {"selfspec.cli": Module("selfspec.cli", ROOT / "selfspec" / "cli.py")}
    known.pop("selfspec.patch", None)
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: known)
    module = Module(name, ROOT / ("__init__.py" if name == "selfspec" else "x.py"))
    assert (breach(module, Import(target, 1)) is None) == allowed


def test_root_may_reach_down_lazily() -> None:
    module = Module("selfspec", ROOT / "selfspec" / "__init__.py")
    assert breach(module, Import("selfspec.inference", 1, lazy=True)) is None


@pytest.mark.parametrize(
    "source",
    [
        "x = 'medusa-2'",
        "class EagleHead: ...",
        "f(prompt_lookup=1)",
        "import hydra_head",
        "def layer_skip(): ...",
        "x = 'draft-model:folder'",
        "class LowRankDraft: ...",
        "class DFlashHead: ...",
    ],
)
def test_reader_sees_method_names(source: str) -> None:
    assert any(names_a_method(text) for _, text in names_and_strings(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["'''Like Medusa.'''", "x = 1  # as in EAGLE", "x = 'eager'", "look_up = 1", "model_of_draft = 1"]
)
def test_reader_passes_other_words(source: str) -> None:
    assert not any(names_a_method(text) for _, text in names_and_strings(ast.parse(source)))

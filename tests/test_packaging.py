"""What goes into the package, checked without a build; `make package` builds and installs it."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "pyproject.toml"
FOLDERS = ("heads", "train", "inference", "recipes")

pytestmark = pytest.mark.skipif(not PROJECT.exists(), reason="not a checkout: no pyproject.toml beside tests/")


def setting(*keys: str) -> dict:
    value = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    for key in keys:
        value = value[key]
    return value


def package_folders() -> dict[str, Path]:
    return {"selfspec": ROOT / "selfspec"} | {f"selfspec.{name}": ROOT / name for name in FOLDERS}


def source_files() -> list[tuple[str, Path, Path]]:
    """(package, its folder, file) for every file of the package, caches left out."""
    return [
        (package, folder, file)
        for package, folder in package_folders().items()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts and file.relative_to(folder).parts[0] not in FOLDERS
    ]


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "selfspec" / name
    if os.name == "nt" and not link.is_symlink():
        pytest.skip("checked out without symbolic links; set core.symlinks=true")
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_every_folder_with_code_is_a_package_that_setuptools_finds() -> None:
    setuptools = pytest.importorskip("setuptools")
    found = set(setuptools.find_packages(str(ROOT), **setting("tool", "setuptools", "packages", "find")))
    with_code = {
        ".".join((package, *file.relative_to(folder).parent.parts))
        for package, folder, file in source_files()
        if file.suffix == ".py"
    }
    assert found == with_code


def test_every_other_file_is_package_data() -> None:
    patterns = setting("tool", "setuptools", "package-data")
    matched = {
        package_folders()[package] / match
        for package, globs in patterns.items()
        for pattern in globs
        for match in package_folders()[package].glob(pattern)
    }
    left_out = [
        str(file.relative_to(ROOT)) for *_, file in source_files() if file.suffix != ".py" and file not in matched
    ]
    assert not left_out, f"add a pattern to [tool.setuptools.package-data] for {left_out}"


def test_package_is_marked_as_typed() -> None:
    assert (ROOT / "selfspec" / "py.typed").is_file()


def test_versions_agree() -> None:
    import selfspec
    from selfspec._version import __version__

    assert setting("tool", "setuptools", "dynamic")["version"] == {"attr": "selfspec._version.__version__"}
    assert getattr(selfspec, "__version__", __version__) == __version__
    try:
        installed = importlib.metadata.version("selfspec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("selfspec is not installed here")
    assert installed == __version__, "the installed metadata is old; run `make venv` again"


def test_constraints_are_exact_and_fit_every_machine() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and not set("+@/ ") & set(line) for line in lines), lines

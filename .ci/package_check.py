"""Build the sdist, build the wheel from it, install that wheel alone in a new environment, use it from another folder.

The new environment shares nothing with the one that runs this script, so a dependency missing from pyproject.toml
shows as a failing import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("heads", "train", "inference", "recipes")


def run(*command: str | Path, cwd: Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def shipped_files() -> set[Path]:
    """The files of this checkout that a wheel must hold, relative to the package."""
    sources = {"": ROOT / "selfspec"} | {name: ROOT / name for name in FOLDERS}
    return {
        Path(prefix, file.relative_to(folder))
        for prefix, folder in sources.items()
        for file in folder.rglob("*")
        if file.suffix in {".py", ".yaml", ".html"} or file.name == "py.typed"
    }


def build_and_install(work: Path) -> None:
    """Raise CalledProcessError at the first step that fails."""
    run(sys.executable, "-m", "build", "-q", "--outdir", work / "dist", ROOT, cwd=work)  # sdist, then the wheel from it
    (wheel,) = (work / "dist").glob("*.whl")
    venv.create(work / "venv", with_pip=True)
    binaries = work / "venv" / "bin"
    pip = (binaries / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
    constraints = ROOT / "constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    run(*pip, torch, cwd=work)
    run(*pip, wheel, "-c", constraints, cwd=work)
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    # -I keeps the script's folder, the current folder and PYTHONPATH out of sys.path.
    run(binaries / "python", "-I", __file__, "smoke", cwd=elsewhere)
    run(binaries / "selfspec", "--help", cwd=elsewhere)


def smoke() -> None:
    """Look at the installed package. Runs inside the new environment."""
    site = Path(sysconfig.get_path("purelib"))
    package = importlib.import_module("selfspec")
    assert package.__file__ is not None and Path(package.__file__).parent == site / "selfspec", package.__file__
    for name in FOLDERS:
        assert not (site / name).exists(), f"{name} is installed as a top-level package"
    missing = sorted(str(file) for file in shipped_files() if not (site / "selfspec" / file).is_file())
    assert not missing, f"not in the wheel: {missing}"
    modules = [module.name for module in pkgutil.walk_packages(package.__path__, "selfspec.")]
    assert {f"selfspec.{name}" for name in FOLDERS} <= set(modules), modules
    for module in modules:
        # The server's modules need the `serve` extra, which is not installed here.
        if not module.endswith(".__main__") and not module.startswith("selfspec.inference.serve."):
            importlib.import_module(module)
    print(f"selfspec {importlib.metadata.version('selfspec')}: {len(modules)} modules import from {site}")


def main() -> None:
    if sys.argv[1:] == ["smoke"]:
        smoke()
        return
    with tempfile.TemporaryDirectory() as work:
        build_and_install(Path(work))


if __name__ == "__main__":
    main()

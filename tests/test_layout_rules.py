"""Rules of the repository's layout that no other tool checks: the wheel, names, imports, tests, links."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "comm", "eplb", "launch", "moe_runtime")
MAX_LINES = 500
MAY_PRINT = ("launch/",)
SKIPPED_FOLDERS = {"__pycache__", ".venv", ".git", "build", "dist", ".pytest_cache"}

# Modules without a test file of their own, each with the reason.
WITHOUT_TEST_FILE = {
    "comm/base.py": "abstract; tested through its implementations, test_collective.py and others",
    "moe_runtime/engine/cpu_runner.py": "what every engine test runs on",
    "launch/serve.py": "run as users do by tests/e2e/test_serve.py",
    "moe_runtime/errors.py": "exception classes; raised in every other test",
    "moe_runtime/engine/model_files.py": "two readers; tested through test_tokenizer.py, test_generation_config.py",
    "moe_runtime/models/decoder.py": "shared by the architectures; tested through test_qwen3_moe.py, test_mixtral.py",
    "moe_runtime/models/model_config.py": "dataclasses without code",
    "moe_runtime/serve.py": "hands over to launch; e2e tests run it",
    "moe_runtime/generate.py": "hands over to launch; e2e tests run it",
    "moe_runtime/check.py": "hands over to launch; e2e tests run it",
    "moe_runtime/audit.py": "hands over to launch",
    "moe_runtime/demo_model.py": "hands over to launch",
    "moe_runtime/plan_placement.py": "hands over to launch",
    "moe_runtime/record_routing.py": "hands over to launch",
    "moe_runtime/plan.py": "hands over to launch; tested through tests/launch/test_plan.py",
    "moe_runtime/calibrate.py": "hands over to launch; tested through tests/launch/test_calibrate.py",
    "moe_runtime/planner/expert_cases.py": "launches for timing; every one of them is made in test_gpu_times.py",
    "moe_runtime/planner/graph_timing.py": "times CUDA graphs; needs a GPU, test_gpu_times.py runs it there",
    "moe_runtime/planner/kernel_cases.py": "launches for timing; every one of them is made in test_gpu_times.py",
}


def package_files() -> list[str]:
    """Every file of the packages on disk, relative to the root, caches left out."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(str(p.relative_to(ROOT)) for p in paths if SKIPPED_FOLDERS.isdisjoint(p.parts))


def module_files() -> list[str]:
    return [path for path in package_files() if path.endswith(".py")]


def code_files() -> list[str]:
    extra = (
        path for folder in ("tests", "tools", "benchmarks", ".ci") for path in (ROOT / folder).rglob("*.py")
    )
    return module_files() + sorted(str(path.relative_to(ROOT)) for path in extra)


def installed_path(path: str) -> str:
    return path if path.startswith("moe_runtime/") else f"moe_runtime/{path}"


def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=path)


def run_python(code: str) -> str:
    """Standard output of ``code`` in a new interpreter that does not see the working directory."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files in a wheel built from a copy of the tree, so that neither tree nor old builds interfere."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    build = "from setuptools import build_meta; build_meta.build_wheel('out')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (copy / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_installs_one_top_level_package(wheel_names):
    top_level = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"moe_runtime"}
    assert len(top_level) == 2


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel_names):
    packed = {name for name in wheel_names if not name.split("/")[0].endswith(".dist-info")}
    assert packed == {installed_path(path) for path in package_files()}


def test_the_wheel_holds_the_license(wheel_names):
    assert [name for name in wheel_names if name.endswith("licenses/LICENSE")]


def test_folder_names_are_not_import_names():
    code = "import sys, moe_runtime.comm, moe_runtime.kernels; print({'comm', 'kernels'} & set(sys.modules))"
    assert run_python(code) == "set()"


@pytest.mark.parametrize("package", ["moe_runtime", "moe_runtime.eplb", "moe_runtime.server"])
def test_import_does_not_load_torch(package):
    """With every module below it; for the root package, itself alone."""
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
below = pkgutil.iter_modules(package.__path__, {package!r} + ".") if {package!r} != "moe_runtime" else ()
for info in below:
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)
print("torch" in sys.modules)
"""
    assert run_python(code) == "False"


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run_python("import moe_runtime; print(moe_runtime.__version__)") == version
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert version in headings, f"CHANGELOG.md has no section for {version}"


def test_all_lists_the_public_names():
    """Modules: all they define but constants, and imports they pass on. ``__init__``: names it defines or imports."""
    faults = [fault for path in module_files() for fault in _faults_of_all(path)]
    assert not faults, _lines(faults)


def test_files_start_with_a_docstring_and_lazy_annotations():
    faults = []
    for path in code_files():
        body = parse(path).body
        if not body and path.endswith("__init__.py"):
            continue
        if not ast.get_docstring(parse(path)):
            faults.append(f"{path} has no module docstring")
        lazy = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body)
        if len(body) > 1 and not lazy:
            faults.append(f"{path} lacks `from __future__ import annotations`")
    assert not faults, _lines(faults)


def test_code_is_ascii():
    faults = []
    for path in code_files():
        lines = (ROOT / path).read_bytes().splitlines()
        faults += [f"{path}:{number}" for number, line in enumerate(lines, 1) if not line.isascii()]
    assert not faults, _lines(faults)


def test_modules_are_short():
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in module_files()}
    faults = [f"{path}: {length} lines" for path, length in lengths.items() if length > MAX_LINES]
    assert not faults, _lines(faults)


def test_modules_import_absolutely_and_do_not_print():
    faults = []
    for path in module_files():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                faults.append(f"{path}:{node.lineno}: relative import")
            is_print = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
            if is_print and not path.startswith(MAY_PRINT):
                faults.append(f"{path}:{node.lineno}: print")
    assert not faults, _lines(faults)


def test_nothing_is_pickled():
    """What arrives on a socket is data of fixed types. (torch's ``*_object`` collectives and pyzmq's ``*_pyobj``
    pickle.)"""
    faults = []
    for path in module_files():
        for node in ast.walk(parse(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            name = getattr(node, "attr", "")
            pickles = {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {
                n.split(".")[0] for n in names
            }
            if (
                pickles
                or name.endswith("_pyobj")
                or re.search(r"(scatter|gather|broadcast|send|recv)_object", name)
            ):
                faults.append(f"{path}:{node.lineno}: {', '.join(pickles) or name}")
    assert not faults, _lines(faults)


def test_every_module_has_a_test_file():
    """``comm/layout.py`` is tested by ``tests/comm/test_layout.py`` or ``tests/comm/test_layout_*.py``."""
    faults = []
    for path in module_files():
        folder, stem = ROOT / "tests" / Path(path).parent, Path(path).stem
        found = [*folder.glob(f"test_{stem}.py"), *folder.glob(f"test_{stem}_*.py")]
        if not found and stem not in ("__init__", "__main__") and path not in WITHOUT_TEST_FILE:
            faults.append(path)
    assert not faults, _lines(faults)


def test_relative_links_in_documents_lead_to_files():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "moe_runtime").rglob("*.md")]
    assert documents
    broken = []
    for document in documents:
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.split("#")[0]
            if "://" not in target and path and not (document.parent / path).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert not broken, _lines(broken)


def _lines(faults: list[str]) -> str:
    return "\n".join(["", *faults])


def _faults_of_all(path: str) -> list[str]:
    tree = parse(path)
    listed = _all_of(tree)
    defined = _defined_names(tree)
    if path.endswith("__init__.py"):
        unknown = set(listed or ()) - defined - _imported_names(tree) - {"__version__"}
        return [f"{path}: __all__ lists {sorted(unknown)}, which it does not bind"] if unknown else []
    public = {name for name in defined if not name.startswith("_")} - {"logger"}
    if listed is None:
        return [f"{path}: no __all__ for {sorted(public)}"] if public else []
    # A constant is public when it is listed; others may be read by tests and by neighbours that say so.
    missing = sorted(name for name in public - set(listed) if not name.isupper())
    unknown = sorted(set(listed) - public - _imported_names(tree))
    if not missing and not unknown and len(set(listed)) == len(listed):  # ruff keeps the order (RUF022)
        return []
    return [f"{path}: __all__ lacks {missing}, lists {unknown} without need, or lists a name twice"]


def _all_of(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def _top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of the module, those under a top-level ``if`` or ``try`` included."""
    statements: list[ast.stmt] = []
    for node in body:
        statements.append(node)
        if isinstance(node, ast.If | ast.Try):
            handlers = [s for h in getattr(node, "handlers", []) for s in h.body]
            statements += _top_level(node.body + node.orelse + handlers)
    return statements


def _defined_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in _top_level(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return {name for name in names if not name.startswith("__")}


def _imported_names(tree: ast.Module) -> set[str]:
    imports = [n for n in _top_level(tree.body) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name) for node in imports for alias in node.names}

"""What may import what, and what `agent --help` may cost."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    "langgraph",
    "langchain_core",
    "optuna",
    "anthropic",
    "openai",
    "gradio",
    "torch",
    "cupy",
    "chromadb",
    "numpy",
    "yaml",
)
PACKAGES = ("agent", "inspection", "training", "policy", "memory", "retrieval", "tools")


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def test_help_is_quick() -> None:
    """Under 0.5 s of processor time: the wall clock would measure what else the machine is doing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "agent.cli", "--help"], capture_output=True, cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert b"optimize" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("command", ["--help", "optimize --help", "show --help"])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from agent.cli import app\n"
        f"try: app({command.split()!r})\n"
        "except SystemExit: pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("module", ["agent.session", "agent.deps", "policy.factory", "tools.gate", "tools.replay"])
def test_modules_load_without_the_heavy_packages(module: str) -> None:
    heavy = tuple(name for name in HEAVY if name not in ("yaml", "numpy"))
    code = f"import sys, {module}; print(sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("langgraph", {"agent/graph.py"}),
        ("gradio", {"agent/ui/app.py"}),
        ("optuna", {"policy/search.py"}),
        ("anthropic", {"policy/anthropic_policy.py"}),
    ],
)
def test_one_edge_each(package: str, allowed: set[str]) -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in modules()
        if any(name == package or name.startswith(f"{package}.") for name in imports(path))
    }
    assert users == allowed


def test_nothing_imports_upward() -> None:
    rank = {name: index for index, name in enumerate(PACKAGES)}
    for path in modules():
        own = rank[path.relative_to(ROOT).parts[0]]
        for name in imports(path):
            other = rank.get(name.split(".")[0])
            assert other is None or other >= own, f"{path.relative_to(ROOT)} imports {name}"


def test_kernels_is_no_package() -> None:
    assert not list((ROOT / "kernels").rglob("__init__.py"))


def test_words_of_hgemm_stay_out_of_the_loop() -> None:
    """Later stages tune other operations: the graph and its state know tasks, not M, N, K."""
    for name in ("graph.py", "state.py", "routing.py", "nodes.py", "finish.py", "finish_nodes.py", "deps.py"):
        tree = ast.parse((ROOT / "agent" / name).read_text())
        words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not {"M", "N", "K"} & words, name
        assert "tools.hgemm" not in imports(ROOT / "agent" / name), name

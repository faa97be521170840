"""The README's tree, one line a file, from the first line of each module's docstring.

python scripts/readme_tree.py            # print it
python scripts/readme_tree.py --write    # put it between the README's markers
"""

from __future__ import annotations

import ast
import contextlib
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("agent", "inspection", "training", "policy", "memory", "retrieval", "tools", "kernels", "configs", "scripts")
BEGIN, END = "<!-- tree -->", "<!-- /tree -->"
WIDTH = 34
ABOUT = {
    "agent": "CLI, LangGraph graph, sessions, sweep, certify, report; imports everything below",
    "inspection": "a session's trace as values, and the tools that answer questions about it",
    "training": "trajectories out, adapters in: export, SFT, offline GRPO",
    "policy": "search and LLM policies, prompts, reward",
    "memory": "the persistent store; exemplars and how they are compared",
    "retrieval": "documentation index",
    "tools": "the one data model, compile … profile, replay device; imports nothing above",
    "tools/gpu": "all that touches CUDA: runs in a worker or a one-shot child only",
    "kernels": "kernel families as data: CUDA source + manifest, no Python",
    "configs": "defaults, prices, prompts",
    "scripts": "benchmarks and upkeep, each its own command",
}


def summary(path: Path) -> str:
    """One line about a file: its docstring's or its first comment's first sentence, a manifest's summary."""
    text = path.read_text()
    if path.suffix == ".py":
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
    elif path.name == "family.yaml":
        first = str(yaml.safe_load(text)["summary"])
    else:
        lines = text.splitlines()
        remarks = (x.lstrip("{/#-* ").strip() for x in lines if x.startswith(("//", "#", "{#")))
        first = next(remarks, lines[0] if lines else "")
    return first.replace("``", "`")[:150].strip()


def tree() -> str:
    lines = []
    for folder in FOLDERS:
        files = sorted(
            p
            for p in (ROOT / folder).rglob("*")
            if p.suffix in {".py", ".yaml", ".cu", ".cuh", ".md", ".css", ".js", ".jinja"}
            and p.name != "__init__.py"
            and "__pycache__" not in p.parts
        )
        lines.append(f"{folder + '/':{WIDTH}} {ABOUT[folder]}")
        seen = {folder}
        for path in files:
            parent = str(path.parent.relative_to(ROOT))
            if parent not in seen:
                seen.add(parent)
                if parent in ABOUT:
                    lines.append(f"{'  ' + parent + '/':{WIDTH}} {ABOUT[parent]}")
            name = str(path.relative_to(ROOT / folder))
            lines.append(f"{'  ' + name:{WIDTH}} {summary(path)}".rstrip())
    return "\n".join(lines)


def embedded(readme: str) -> str:
    """What stands between the markers now."""
    return readme.split(BEGIN)[1].split(END)[0].strip().removeprefix("```").removesuffix("```").strip("\n")


def main() -> None:
    if "--write" not in sys.argv:
        with contextlib.suppress(BrokenPipeError):
            print(tree(), flush=True)
        return
    path = ROOT / "README.md"
    text = path.read_text()
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n```\n{tree()}\n```\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

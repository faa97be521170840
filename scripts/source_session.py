"""A session on a GPU whose policy writes CUDA source, kept as a record file, so that it can be played without the GPU.

    python -m scripts.source_session --device cuda:0 --out tests/data/source-session.sqlite

The policy is a fixed conversation (tests/data/source-session), played by scripts/scripted_model.py: compile error →
repair → wrong result → repair → timed → profiled → faster → submitted. Everything else is as for a hosted model.
Afterwards the session is played from the file and compared with the live one. The same command again goes on where it
was stopped, and measures nothing twice.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripts.scripted_model import MODEL, Conversation, serving

ROOT = Path(__file__).resolve().parent.parent
CONVERSATION = ROOT / "tests" / "data" / "source-session" / "conversation.yaml"
OUT = ROOT / "tests" / "data" / "source-session.sqlite"
#: Of a session that is as it should be: the calls of the search, and what came of each.
STORY = (
    ("evaluate_source", "failed", "compile_error"),
    ("evaluate_source", "failed", "wrong_result"),
    ("evaluate_source", "ok", None),
    ("profile", "ok", None),
    ("evaluate_source", "ok", None),
    ("verify", "ok", None),
    ("profile", "ok", None),
    ("submit", "ok", None),
)
#: One conversation, and both timed variants through the whole gate.
SETTINGS = {
    "session.rounds": 1,
    "session.group_size": 1,
    "session.top_k": 2,
    "session.floor_pct": 0,
    "budget.evaluations": 8,
    "policy.docs_searches": 0,
}
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")

#: Begins the session at this address of the model, or goes on with it. Its exit code.
Live = Callable[[Path, str, str], int]


def record(out: Path, home: Path, session: str, live: Live, commit: str = "") -> int:
    """The exit code. Whatever went wrong has been said; what was measured is kept."""
    from agent.session_record import export_record

    conversation = Conversation.load(CONVERSATION)
    with serving(conversation, _port(home, session)) as url:
        if (code := live(home, session, url)) not in (0, 2):
            return code
    kept = export_record(home, session, out, commit)
    print(f"{out}: {kept.results} results of {kept.variants} sources, {kept.added} of them new")
    told = trace(home, session)
    wrong = list(departures(told))
    with tempfile.TemporaryDirectory() as folder:
        replayed = play(out, Path(folder), conversation)
    wrong += [f"on replay: {line}" for line in differences(told, replayed)]
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        first, last = (s["ratio"] for s in told["steps"] if s["tool"] == "evaluate_source" and s["ratio"])
        print(f"the story is complete: {first:.3f}x, then {last:.3f}x of cuBLASLt")
        print(f"played from {out}: all {len(told['steps'])} steps are the same")
    return 1 if wrong else 0


def play(out: Path, home: Path, conversation: Conversation, session: str = "replayed") -> dict[str, Any]:
    """The trace of the same conversation on the record."""
    from agent import session as sessions
    from agent.devices import open_device

    with serving(conversation) as url:
        device = open_device(f"replay:{out}")
        try:
            config = sessions.create(home, settings(conversation, url), session, f"replay:{out}", device.info)
            sessions.run(home, config, {}, device=device)
        finally:
            device.close()
    return trace(home, session)


def settings(conversation: Conversation, url: str) -> Any:
    from agent.config import load_settings

    of_policy = {"policy.name": "openai", "policy.model": MODEL, "policy.base_url": url}
    return load_settings(None, {}, {"session.shape": conversation.shape, **SETTINGS, **of_policy})


def trace(home: Path, session: str) -> dict[str, Any]:
    """What can be read in the session afterwards, but for the name of the device."""
    from agent.inspecting import opened

    names = ("step_id", "kind", "tool", "status", "reason", "detail", "key", "ratio", "text", "reasoning")
    with opened(home, session) as reader:
        found = reader.trace()
        label = found.device.label
        steps = [{name: getattr(step, name) for name in names} for step in found.steps]
        for step in steps:
            step["text"] = step["text"].replace(label, "this device")
        board = [(final.key, final.admitted, final.ratio) for final in found.finals]
    return {"steps": steps, "leaderboard": board}


def departures(told: dict[str, Any]) -> Iterator[str]:
    """Where the session is not the story that it should tell."""
    calls = [(s["tool"], s["status"], s["reason"]) for s in told["steps"] if s["kind"] == "call"]
    for number, (wanted, found) in enumerate(zip(STORY, [*calls, *[None] * len(STORY)], strict=False), start=1):
        if wanted != found:
            yield f"call {number} of the session should be {wanted} and is {found}"
    ratios = [s["ratio"] for s in told["steps"] if s["tool"] == "evaluate_source" and s["ratio"] is not None]
    if len(ratios) == 2 and ratios[1] <= ratios[0]:
        yield f"the last source should be faster than the one before it: {ratios[1]} and {ratios[0]}"
    if (admitted := sum(is_admitted for _, is_admitted, _ in told["leaderboard"])) != 2:
        yield f"two variants should have passed the whole gate, and {admitted} did"


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Where two traces say other things. Numbers of a record have six digits, so a rounded one may end otherwise."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for name in a:
            yield from differences(a[name], b[name], f"{where}.{name}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif isinstance(a, str) and isinstance(b, str):
        close = _NUMBER.sub("#", a) == _NUMBER.sub("#", b)
        if not close or not all(map(_close, _NUMBER.findall(a), _NUMBER.findall(b))):
            yield f"{where.lstrip('.')} is {a[:300]!r} live and {b[:300]!r} then"
    elif a != b and not (isinstance(a, float) and isinstance(b, float) and _close(a, b)):
        yield f"{where.lstrip('.')} is {str(a)[:300]} live and {str(b)[:300]} then"


def _close(a: str | float, b: str | float) -> bool:
    return math.isclose(float(a), float(b), rel_tol=1e-5, abs_tol=1.1e-3)


def _port(home: Path, session: str) -> int:
    """Of the model that a stopped session will look for; 0, any free one, for a session that has not begun."""
    from agent import session as sessions

    if not (sessions.folder_of(home, session) / "config.json").is_file():
        return 0
    return urlsplit(sessions.load(home, session).settings.policy.base_url or "").port or 0


def _agent(device: str, shape: str) -> Live:
    """`agent optimize`, or `agent resume`, in a process of its own: exactly what a user would run."""

    def live(home: Path, session: str, url: str) -> int:
        from agent import session as sessions

        command = ["resume", session]
        if not (sessions.folder_of(home, session) / "config.json").is_file():
            command = ["optimize", "--shape", shape, "--device", device, "--session", session]
            command += ["--policy", "openai", "--model", MODEL, "--base-url", url]
            command += [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
        print("$ agent", *command, flush=True)
        return subprocess.run([sys.executable, "-m", "agent", *command], cwd=ROOT, check=False).returncode

    return live


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda:0", metavar="cuda:N", help="default cuda:0")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="record file to begin or add to")
    parser.add_argument("--session", default="source-session", help="its name; another one measures anew")
    parser.add_argument("--commit", default="", help="source revision, where the program is no checkout")
    options = parser.parse_args()
    from agent.edge import sentence
    from tools.paths import home_dir

    try:
        live = _agent(options.device, Conversation.load(CONVERSATION).shape)
        return record(options.out, home_dir(), options.session, live, options.commit)
    except KeyboardInterrupt:
        print("interrupted; nothing is lost: the same command goes on", file=sys.stderr)
        return 130
    except Exception as error:
        if (found := sentence(error)) is None and not isinstance(error, OSError):
            raise
        print(f"error: {found or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

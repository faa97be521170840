"""The command ``agent chat``. agent/cli.py registers it."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agent.edge import complain, guarded, sentence

if TYPE_CHECKING:
    from agent.asking import Answer, Asker
    from agent.inspecting import Watch

PROMPT = "> "


def chat(
    session: Annotated[str, typer.Argument(help="Name of the session; `agent show` lists them.")],
    ask: Annotated[
        str | None, typer.Option(metavar="TEXT", help="One question, or a command like /best; then leave.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Who answers: anthropic or openai (any such server).")] = None,
    model: Annotated[str | None, typer.Option(help="Its model.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Its server, e.g. http://localhost:8000/v1 (vLLM).")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document a question, on stdout.")] = False,
) -> None:
    """Read a session and ask about it, finished or running: reasoning, calls, verdicts, sources, profiles.

    Without a language model the tools answer as commands; /help lists them. Every claim names its step.
    Example: agent chat SESSION --ask /best
    """
    with guarded():
        from agent.asking import Asker, find_policy
        from agent.inspecting import Watch, load
        from tools.paths import home_dir

        home = home_dir()
        config = load(home, session)
        watch = Watch(home, session)
        asker = None
        try:
            without = "commands are answered by the session itself"
            if ask is None or not _is_command(ask):
                found, without = find_policy(config.settings.policy, os.environ, policy, model, base_url)
                asker = Asker(found, watch.view) if found is not None else None
            if ask is not None:
                print(answered(watch, asker, without, ask, json_output))
            else:
                _converse(watch, asker, without, json_output)
        finally:
            if asker is not None:
                asker.close()


def answered(watch: Watch, asker: Asker | None, without: str, line: str, json_output: bool) -> str:
    """To one line of the user. Raises UsageError, PolicyError or StoreError with one sentence."""
    from agent.errors import UsageError
    from inspection import tools
    from inspection.answers import NotFound
    from inspection.rendering import text

    line = line.strip()
    if line in ("/help", "/?"):
        return json.dumps(tools.help_lines()) if json_output else "\n".join(tools.help_lines())
    if _is_command(line):
        try:
            with watch.view() as view:
                found = tools.run_command(view, line)
                _warn(view.trace.remarks)
        except NotFound as error:
            raise UsageError(str(error)) from error
        return found.to_json() if json_output else text(found)
    if asker is None:
        raise UsageError(f"{without}. Without one, ask by command: /best, /timeline, /why KEY; /help lists all")
    answer = asker.ask(line)
    return answer.to_json() if json_output else _shown(answer)


def _converse(watch: Watch, asker: Asker | None, without: str, json_output: bool) -> None:
    from inspection.words import heading
    from memory.contrast_budget import plain

    with watch.view() as view:
        for line in heading(view.trace):
            complain(plain(line))
    complain(f"answers come from {asker.name}; /help lists commands" if asker else f"{without}; /help lists commands")
    while True:
        if sys.stdin.isatty():
            import readline  # noqa: F401 - makes input() edit and remember lines
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line in ("/quit", "/exit"):
            return
        if not line:
            continue
        try:
            print(answered(watch, asker, without, line, json_output), flush=True)
        except Exception as error:  # the next question may be a better one
            if (told := sentence(error)) is None:
                raise
            complain(f"error: {told}")


def _shown(answer: Answer) -> str:
    from memory.contrast_budget import plain

    lines = [plain(answer.text).strip()]
    if answer.unknown:
        lines.append(f"(no such steps: {', '.join(answer.unknown)}; do not trust what rests on them)")
    elif not answer.cited:
        lines.append("(names no step: unproven)")
    if answer.usage.cost_usd:
        lines.append(f"(${answer.usage.cost_usd:.4f})")
    return "\n".join(lines)


def _warn(remarks: tuple[str, ...]) -> None:
    for remark in remarks:
        complain(f"warning: {remark}")


def _is_command(line: str) -> bool:
    return line.lstrip().startswith("/")

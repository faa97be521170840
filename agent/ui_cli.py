"""The command ``agent ui``. agent/cli.py registers it."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent.edge import complain, guarded

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN_VARIABLE = "HGEMM_AGENT_UI_TOKEN"
_TOKEN = re.compile(r"[A-Za-z0-9_~.-]+")


def ui(
    session: Annotated[str | None, typer.Argument(help="Session to open first (default: the newest).")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 7860,
    host: Annotated[str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")] = (
        "127.0.0.1"
    ),
    token: Annotated[
        str | None, typer.Option(envvar=TOKEN_VARIABLE, help="What a browser must show once, as ?token=...")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Who answers questions: anthropic or openai.")] = None,
    model: Annotated[str | None, typer.Option(help="Its model.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Its server, e.g. http://localhost:8000/v1 (vLLM).")] = None,
) -> None:
    """Sessions in a browser: reasoning, calls, verdicts, diffs, profiles, the best-so-far curve, questions.

    Reads only, also while a session runs. Works offline; nothing is sent anywhere.
    Example: agent ui --port 7860
    """
    with guarded():
        from agent.errors import UsageError
        from tools.extras import install_command

        check_access(host, token)
        missing = [name for name in ("gradio", "plotly") if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(f"agent ui needs {' and '.join(missing)}: {install_command('ui')}")
        from agent.asking import find_policy
        from agent.inspecting import load
        from tools.paths import home_dir

        home = home_dir()
        if session is not None:
            load(home, session)
        listener = listen(host, port)
        with listener:
            bound = listener.getsockname()[1]
            complain("starting …")
            _quiet_library()
            from agent.asking import Asker
            from agent.ui.app import build, mounted
            from agent.ui.guard import Guard, is_loopback

            def make_asker(name: str, look: Callable[[], Any]) -> Asker:
                own = load(home, name).settings.policy
                found, why = find_policy(own, os.environ, policy, model, base_url)
                if found is None:
                    raise UsageError(f"{why}. Without one, ask by command: /best, /timeline, /why KEY; /help lists all")
                return Asker(found, look)

            app = Guard(mounted(build(home, session, make_asker)), token, is_loopback(host))
            complain(f"open {address(host, bound, token)} (ctrl-C ends it)")
            serve(app, listener)


def check_access(host: str, token: str | None) -> None:
    """Raises UsageError with one sentence."""
    from agent.errors import UsageError
    from agent.ui.guard import MIN_TOKEN, is_loopback

    if token is not None and (len(token) < MIN_TOKEN or not _TOKEN.fullmatch(token)):
        raise UsageError(
            f"a token has at least {MIN_TOKEN} letters, digits, _ or -; make one: "
            'python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    if token is None and not is_loopback(host):
        raise UsageError(
            f"{host!r} can be reached from other machines, so a token is needed: --token, or better {TOKEN_VARIABLE} "
            "in the environment; or leave --host out and forward the port: ssh -L 7860:localhost:7860"
        )


def listen(host: str, port: int) -> socket.socket:
    """Bound before anything heavy is loaded, so that a port in use is told at once. Raises UsageError."""
    from agent.errors import UsageError, refusal

    try:
        family, *_, where = socket.getaddrinfo(host or "127.0.0.1", port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(where)
            found.listen(128)
        except BaseException:
            found.close()
            raise
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(f"{host!r} is no address of this machine; leave --host out for 127.0.0.1") from error
    except OSError as error:
        import errno

        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} is in use: choose another, or --port 0 for any free one") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"{host!r} is no address of this machine; leave --host out for 127.0.0.1") from error
        raise UsageError(f"{host}:{port} cannot be listened on: {refusal(error)}") from error
    return found


def address(host: str, port: int, token: str | None) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/{f'?token={token}' if token else ''}"


def serve(app: Any, listener: socket.socket) -> None:
    """Until ctrl-C or another signal."""
    import uvicorn

    # Live pages keep a request open; whoever ends the server does not want to wait for them.
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1, ws="none")
    uvicorn.Server(config).run(sockets=[listener])


def _quiet_library() -> None:
    """No telemetry, no look for newer versions: read by the libraries when they are imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"

"""The command line: ``agent optimize``, ``resume``, ``show``, ``check``, ``devices``, ``doctor`` and more.

Heavy packages are imported inside the commands, so that ``agent --help`` stays quick. Exit codes: see HELP. The
command's result goes to stdout, progress to stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from agent.certify_cli import certify
from agent.chat_cli import chat
from agent.collect_cli import collect
from agent.compare_cli import compare
from agent.docs_cli import app as index_app
from agent.docs_cli import docs
from agent.edge import complain, guarded, leave_with, sentence
from agent.errors import EXIT_ERROR, EXIT_OK, EXIT_REJECTED, Stopped
from agent.evaluate_cli import evaluate_policy
from agent.export_cli import export_trajectories
from agent.export_record_cli import export_record
from agent.model_cli import app as model_app
from agent.record_cli import record
from agent.report_cli import report
from agent.shapes_cli import shapes
from agent.sweep_cli import sweep
from agent.train_cli import app as train_app
from agent.ui_cli import ui

if TYPE_CHECKING:
    from agent.session import SessionConfig
    from agent.summary import Summary
    from tools.device import Device

HELP = """Search, check and time HGEMM CUDA kernels until they beat auto-tuned cuBLASLt.

Exit codes: 0 done; 1 wrong input, or something broke; 2 no kernel passed; 130 ctrl-C, 143 SIGTERM, 129 SIGHUP.
"""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; progress stays on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Shape = Annotated[str | None, typer.Option(metavar="M,N,K", help="For example 4096,4096,4096 or 64x64x16384.")]
DeviceName = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="auto (default), cuda:0, replay:h200, or replay:PATH of a record.")
]


@app.command()
def optimize(
    shape: Shape = None,
    device: DeviceName = None,
    policy: Annotated[
        str | None,
        typer.Option(help="local (default where it is installed), search (default else), random, anthropic or openai."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of anthropic or openai, or the base of local.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="A compatible server, e.g. http://localhost:8000/v1 (vLLM).")
    ] = None,
    evaluations: Annotated[
        int | None,
        typer.Option(
            help="Budget: new variants, e.g. 32 (default 24 for local, else 400: every plan of the families)."
        ),
    ] = None,
    wall: Annotated[float | None, typer.Option(metavar="SECONDS", help="Budget: time of the search, e.g. 600.")] = None,
    usd: Annotated[
        float | None,
        typer.Option("--usd", "--max-usd", help="Budget: money; no turn of a model begins beyond it."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, budget and device: same session (default 0).")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting, e.g. --set session.top_k=5."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML with the sections of configs/.")] = None,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the session, e.g. first-try.")] = None,
    json_output: Json = False,
    quiet: Quiet = False,
) -> None:
    """Propose kernels for one shape, put them through the gate, and keep the best.

    Example: agent optimize --shape 4096,4096,4096
    """
    flags: dict[str, Any] = {
        "session.shape": shape,
        "session.device": device,
        "session.seed": seed,
        "policy.name": policy,
        "policy.model": model,
        "policy.base_url": base_url,
        "budget.evaluations": evaluations,
        "budget.wall_s": wall,
        "budget.usd": usd,
    }
    with guarded():
        from agent import session as sessions
        from agent.config import load_settings, parse_assignment
        from agent.devices import check_fits, check_recorded, open_device, resolve
        from policy.packaged import default_policy
        from tools.paths import home_dir

        overrides = dict(parse_assignment(text) for text in settings or [])
        overrides |= {name: value for name, value in flags.items() if value is not None}
        loaded = load_settings(config, os.environ, overrides, default_policy())
        _ = loaded.session.task  # a missing shape is found before a GPU is started
        _check_policy(loaded)
        if session is not None:
            sessions.folder_of(home_dir(), session)
        name = resolve(loaded.session.device)
        opened = open_device(name)
        try:
            check_fits(loaded.session.task, opened.info)
            check_recorded(loaded.session.task, opened)
            begun = sessions.create(home_dir(), loaded, session, name, opened.info)
            _run(begun, opened, json_output, quiet)
        finally:
            opened.close()


@app.command()
def resume(
    session: Annotated[str, typer.Argument(help="Name of the session; `agent show` lists them.")],
    json_output: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a session that was stopped, killed or broke off. Nothing is measured twice."""
    with guarded():
        from agent import session as sessions
        from tools.paths import home_dir

        _run(sessions.load(home_dir(), session), None, json_output, quiet)


@app.command()
def show(
    session: Annotated[str | None, typer.Argument(help="Name of a session; without one, all are listed.")] = None,
    source: Annotated[str | None, typer.Option(metavar="KEY", help="Print the source of this variant.")] = None,
    json_output: Json = False,
) -> None:
    """List sessions; or one session's summary, leaderboard and rejections; or a variant's source."""
    with guarded():
        from agent import showing

        if source is not None:
            showing.show_source(source, json_output)
        elif session is None:
            showing.show_sessions(json_output)
        else:
            showing.show_session(session, json_output)


@app.command()
def check(
    kernel: Annotated[Path, typer.Argument(help="CUDA C++ device code, e.g. kernel.cu.")],
    launch: Annotated[Path, typer.Option(metavar="FILE", help="The launch spec, e.g. launch.json.")],
    shape: Annotated[str, typer.Option(metavar="M,N,K", help="For example 512,512,512.")],
    b_layout: Annotated[Literal["kn", "nk"], typer.Option(help="B row-major (kn) or transposed (nk).")] = "nk",
    device: DeviceName = None,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Every stage, or compile, verify quick and a screen timing.")
    ] = True,
    json_output: Json = False,
) -> None:
    """Put your own kernel through compile → verify → sanitize → time → profile. Exit 0 passed, 2 rejected.

    Example: agent check kernel.cu --launch launch.json --shape 512,512,512
    """
    with guarded():
        from agent import checking
        from agent.devices import check_fits, open_device
        from tools.hgemm import hgemm, parse_shape
        from tools.records import MODES

        task = hgemm(*parse_shape(shape))
        variant = checking.load_variant(kernel, launch, b_layout)
        opened = open_device(device or "auto", compile_really=True)
        try:
            check_fits(task, opened.info)
            out = sys.stderr if json_output else sys.stdout
            print(f"{kernel} at {task.label} on {opened.info.label}", file=out)

            def show_stage(stage: checking.Stage) -> None:
                word = f"{stage.status.value}, {stage.reason}" if stage.reason else stage.status.value
                print(f"{stage.name:<14} {word}: {stage.sentence}", file=out, flush=True)

            report = checking.check(opened, variant, task, full=full, modes=MODES, show=show_stage)
        finally:
            opened.close()
        print(report.to_json() if json_output else report.conclusion)
        raise typer.Exit(report.exit_code)


@app.command()
def devices(json_output: Json = False) -> None:
    """The GPUs of this machine and the recorded one."""
    with guarded():
        import json

        from agent.devices import find_devices

        found = find_devices()
        if json_output:
            print(json.dumps([d.model_dump() for d in found]))
            return
        for entry in found:
            detail = entry.detail if entry.usable else f"not usable: {entry.detail}"
            print(f"{entry.spec:<12} {entry.label}{f' — {detail}' if detail else ''}")


@app.command()
def doctor(json_output: Json = False) -> None:
    """What this machine has and lacks, and the command that adds it. Exit 1 if something needed is missing."""
    with guarded():
        import dataclasses
        import json

        from agent.doctor import diagnose

        checks = diagnose()
        if json_output:
            print(json.dumps([dataclasses.asdict(c) for c in checks]))
        else:
            for found in checks:
                word = "ok" if found.ok else "lacks" if found.needed else "-"
                print(f"{word:<6} {found.name}: {found.detail}")
                if not found.ok and found.fix:
                    print(f"       {found.fix}")
        raise typer.Exit(EXIT_OK if all(c.ok or not c.needed for c in checks) else EXIT_ERROR)


# Commands that have a module of their own.
app.command()(record)
app.command()(shapes)
app.command()(sweep)
app.command()(certify)
app.command()(compare)
app.command()(report)
app.command()(chat)
app.command()(ui)
app.add_typer(model_app, name="model")
app.command()(docs)
app.command()(export_trajectories)
app.command()(collect)
app.command()(export_record)
app.command()(evaluate_policy)
app.add_typer(train_app, name="train")
app.add_typer(index_app, name="index")


#: Typer carries its own copy of click; this is what all its errors have in common.
_COMMAND_LINE_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    """The console script. Exit code 2 means a rejected kernel here, so a mistyped command line gives 1."""
    from agent import streams
    from agent.interrupt import raise_on_signals

    raise_on_signals()
    streams.prepare()
    sys.exit(leave_with(_command))


def _command() -> object:
    try:
        return app(prog_name="agent", standalone_mode=False)
    except _COMMAND_LINE_ERROR as error:
        error.show()  # type: ignore[attr-defined]
        return EXIT_ERROR


# --- running ----------------------------------------------------------------------------------------------------------


def _run(config: SessionConfig, device: Device | None, json_output: bool, quiet: bool) -> NoReturn:
    """Runs a session to its end and leaves with its exit code."""
    from agent import session as sessions
    from agent.interrupt import StopFlag, interruptible
    from agent.live import Progress
    from agent.streams import result
    from tools.paths import home_dir

    stop = StopFlag()
    come_back = f"agent resume {config.session_id}"
    try:
        with Progress(config.settings.evaluations, quiet) as progress:

            def work() -> Summary:
                return sessions.run(home_dir(), config, os.environ, progress, stop.requested, device)

            def on_interrupt() -> None:
                stop.request()
                progress.note("stopping after the running call (ctrl-C again: at once)")

            summary = interruptible(work, on_interrupt, come_back)
    except Stopped as stopped:
        complain(f"interrupted; nothing is lost. Go on with: {come_back}")
        raise typer.Exit(stopped.exit_code) from None
    except Exception as error:
        if (found := sentence(error)) is None:
            raise
        complain(f"error: {found}\ngo on with: {come_back}", error)
        raise typer.Exit(EXIT_ERROR) from None
    with result(f"`agent show {config.session_id}` prints it"):
        if json_output:
            print(summary.to_json())
        else:
            from agent.report import print_summary
            from agent.tables import console_for_result

            print_summary(summary, console_for_result())
    raise typer.Exit(EXIT_OK if summary.best is not None else EXIT_REJECTED)


def _check_policy(settings: Any) -> None:
    """A missing key or model, or a broken manifest, is found before a session exists."""
    from policy.factory import make_policy
    from tools.families import load_families

    load_families()
    make_policy(settings.policy, {}, os.environ).close()


if __name__ == "__main__":
    main()

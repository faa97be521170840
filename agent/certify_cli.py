"""The command ``agent certify``. agent/cli.py registers it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.edge import guarded
from agent.errors import EXIT_ERROR, EXIT_OK, EXIT_REJECTED, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from agent.certify import Candidate, Event
    from agent.certify_against import Agreement, Earlier
    from agent.certify_record import Certificate, Certified
    from tools.records import Family, Task

DEFAULT_MODES = ("offline", "server")  # the paper's


def certify(
    db: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Winners of a database (default: <home>/sweep.sqlite).")
    ] = None,
    plans: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON: shape, family, b_layout, knobs.")] = None,
    records: Annotated[
        str | None, typer.Option(metavar="NAME", help="Winners of a recording: h200, or the path of a record file.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="M,N,K", help="Only this shape; repeatable.")] = None,
    shapes: Annotated[Path | None, typer.Option(metavar="CSV", help="Only these shapes.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many kernels.")] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cuda:0, replay:h200 or replay:PATH.")] = "auto",
    warm: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Warm-up of each mode.")] = 10.0,
    timed: Annotated[
        float, typer.Option(min=0.01, metavar="SECONDS", help="Timed, for the kernel and each one reference.")
    ] = 30.0,
    mode: Annotated[
        list[str] | None,
        typer.Option(metavar="MODE", help="offline, rotating or server; repeatable (default: offline and server)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate; one that broke off goes on.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with an old certificate, or a record file (h200: ours)."),
    ] = None,
    slack: Annotated[float, typer.Option(min=0, help="Room beyond both 95 % intervals, relative.")] = 0.02,
    compare_only: Annotated[
        Path | None, typer.Option("--compare-only", metavar="FILE", help="Compare this certificate; measure nothing.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure chosen kernels by the paper's protocol, into a signed-off record; compare two such runs.

    Exit 2: a kernel was rejected, or two runs disagree beyond both intervals and the slack.

    Example: agent certify --db sweep.sqlite --shape 4096,4096,4096 --device cuda:0
    """
    with guarded():
        from agent import certify_record
        from agent.certify_against import agreement
        from tools.families import load_families
        from tools.replay import path_of

        families = load_families()
        against = path_of(against) if against is not None else None
        if compare_only is not None:
            if against is None:
                raise UsageError("--compare-only needs --against, the certificate to compare with")
            certificate = certify_record.read(compare_only)
            keys = [(e.task.task_id, e.variant_key) for e in certificate.entries]
            earlier = _earlier(against, keys, certificate.entries)
            raise typer.Exit(_report(certificate, agreement(earlier, certificate, slack), json_output))
        wanted = _wanted_shapes(shape, shapes)
        candidates, inputs = _candidates(db, plans, records, against, families)
        from agent.certify_inputs import at_shapes

        candidates = at_shapes(candidates, wanted)[:limit]
        old = _earlier(against, [(c.task.task_id, c.variant.key) for c in candidates]) if against else None
        certificate = _measure(candidates, inputs, families, device, warm, timed, mode, out, quiet)
        found = agreement(old, certificate, slack) if old is not None else None
        raise typer.Exit(_report(certificate, found, json_output))


def _measure(
    candidates: list[Candidate], inputs: str, families: dict[str, Family], device: str, warm: float, timed: float,
    mode: Sequence[str] | None, out: Path | None, quiet: bool,
) -> Certificate:  # fmt: skip
    from pydantic import ValidationError

    from agent.certify import certify as run
    from agent.certify_record import CertifySettings, check_writable
    from agent.devices import open_device
    from tools.paths import home_dir
    from tools.records import MODES
    from tools.validation import first_error

    unknown = next((m for m in mode or () if m not in MODES), None)
    if unknown is not None:
        raise UsageError(f"there is no mode '{unknown}'; there are {', '.join(MODES)}")
    modes = tuple(m for m in MODES if m in (mode or DEFAULT_MODES))
    try:
        settings = CertifySettings(warm_s=warm, timed_s=timed, modes=modes)
    except ValidationError as error:
        raise UsageError(first_error(error)) from error
    path = out or home_dir() / "certificates" / f"{datetime.now().strftime('%Y%m%d-%H%M%S')}.json"

    def show(event: Event) -> None:
        if not quiet:
            print(f"{event.done}/{event.wanted} {event.text}", file=sys.stderr, flush=True)

    check_writable(path)
    opened = open_device(device)
    try:
        if not quiet:
            hours = len(candidates) * settings.entry_s / 3600
            took = f"{60 * hours:.0f} min" if hours < 2 else f"{hours:.1f} h"
            print(f"{len(candidates)} kernels on {opened.info.label}, {took} of timing → {path}", file=sys.stderr)
        return run(opened, candidates, settings, path, inputs=inputs, families=families, observer=show)
    finally:
        opened.close()


# --- inputs -----------------------------------------------------------------------------------------------------------


def _candidates(
    db: Path | None, plans: Path | None, records: str | None, against: Path | None, families: dict[str, Family]
) -> tuple[list[Candidate], str]:
    from agent import certify_inputs as inputs
    from agent import certify_record
    from tools.paths import home_dir
    from tools.replay import path_of

    if sum(given is not None for given in (db, plans, records)) > 1:
        raise UsageError("give one of --db, --plans and --records: where the kernels come from")
    if plans is not None:
        return inputs.of_plans(plans, families), f"plans {plans.name}"
    if records is not None:
        path = path_of(records)
        return inputs.of_recording(path, families), f"recording {path.name}"
    if db is None and against is not None:
        if is_recording(against):
            return inputs.of_recording(against, families), f"recording {against.name}"
        old = certify_record.read(against)
        return inputs.of_certificate(old, families), f"certificate {against.name}, sha256 {old.sha256}"
    path = db or home_dir() / "sweep.sqlite"
    return inputs.of_database(path, families), f"database {path.name}"


def _wanted_shapes(shape: list[str] | None, shapes: Path | None) -> list[Task]:
    from tools.hgemm import hgemm, parse_shape
    from tools.shapes import parse_shapes_csv

    wanted = [parse_shape(text) for text in shape or []]
    wanted += parse_shapes_csv(shapes) if shapes is not None else []
    return [hgemm(*dims) for dims in dict.fromkeys(wanted)]


def _earlier(path: Path, keys: list[tuple[str, str]], entries: Sequence[Certified] = ()) -> Earlier:
    from agent import certify_against as compare
    from agent import certify_record

    if is_recording(path):
        return compare.of_recording(path, keys, entries)
    return compare.of_certificate(path, certify_record.read(path))


def is_recording(path: Path) -> bool:
    """A SQLite file, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(15) == b"SQLite format 3"
    except OSError:
        return False  # the reader of certificates says what is wrong


# --- output -----------------------------------------------------------------------------------------------------------


def _report(certificate: Certificate, found: Agreement | None, json_output: bool) -> int:
    from agent.certify_record import entry_counts

    if json_output:
        import json

        document = {"certificate": certificate.model_dump(mode="json", exclude_none=True)}
        if found is not None:
            document["agreement"] = {**found.model_dump(mode="json"), "agrees": found.agrees}
        print(json.dumps(document))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(_table(certificate))
        for line in _lines(certificate, found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = entry_counts(certificate.entries)
    if counts["rejected"] or (found is not None and not found.agrees):
        return EXIT_REJECTED
    return EXIT_ERROR if counts["incomplete"] or not certificate.complete else EXIT_OK


def _table(certificate: Certificate) -> Table:
    from rich.table import Table

    table = Table(title="Certified: time of auto-tuned cuBLASLt (better of NN and TN) / time of the kernel")
    table.add_column("shape")
    for mode in certificate.settings.modes:
        table.add_column(mode, justify="right")
    table.add_column("kernel", overflow="fold")
    for entry in certificate.entries:
        cells = []
        for mode in certificate.settings.modes:
            timing = entry.timing(mode)
            row = timing.result.row() if timing else None
            cells.append(f"{row.ratio:.3f} [{row.ratio_lo:.3f}, {row.ratio_hi:.3f}]" if row else "-")
        table.add_row(entry.task.label, *cells, entry.label if not entry.why else f"{entry.status}: {entry.why}")
    return table


def _lines(certificate: Certificate, found: Agreement | None) -> Iterator[str]:
    from agent.certify_record import entry_counts
    from agent.compare_stats import mean

    device = certificate.device
    yield f"{device.label}; {certificate.settings.warm_s:g} s warm-up, {certificate.settings.timed_s:g} s timed"
    counted = [f"{count} {name}" for name, count in entry_counts(certificate.entries).items() if count]
    if not certificate.complete:
        counted.append(f"it broke off: {len(certificate.entries)} of {certificate.wanted} kernels are in it")
    yield ", ".join(counted)
    for mode in certificate.settings.modes:
        ratios = [ratio for e in certificate.entries if (ratio := e.ratio(mode)) is not None]
        if ratios:
            best = mean([max(1.0, ratio) for ratio in ratios]).value
            yield f"{mode}: mean {mean(ratios).value:.3f}x of {len(ratios)} kernels; max(kernel, cuBLASLt) {best:.3f}x"
    yield f"sha256 {certificate.sha256}"
    if found is None:
        return
    yield f"against {found.against} ({found.old_device}; now {found.new_device}), slack {100 * found.slack:g} %:"
    total = len(found.differences)
    yield f"  {total - len(found.disagreeing)} of {total} ratios agree" + (
        f"; {found.only_old} only in the old run, {found.only_new} only in the new" if found.only_old or found.only_new
        else ""
    )  # fmt: skip
    for d in sorted(found.disagreeing, key=lambda d: -d.gap)[:10]:
        yield (
            f"  {d.shape} {d.mode} against {d.reference}: {d.old[0]:.3f} [{d.old[1]:.3f}, {d.old[2]:.3f}] before, "
            f"{d.new[0]:.3f} [{d.new[1]:.3f}, {d.new[2]:.3f}] now"
        )

"""The later sections of a report: evidence for the tables of tables.py. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.reporting.model import Layout, ModeTiming, Published, PublishedMean, Report
from agent.reporting.tables import (
    FOLD_ROWS,
    NOT_MEASURED,
    Cell,
    Link,
    Row,
    Section,
    Table,
    deviation,
    kernel_anchor,
    kernel_link,
    percent,
    profile_anchor,
    ratio,
    reference_label,
    shape_anchor,
    size_labels,
    time_us,
)
from tools.hgemm import flops, hgemm, min_bytes
from tools.records import HEADLINE_REFERENCE, MODES, Mode

_PUBLISHED_MODES: tuple[Mode, ...] = ("offline", "server")


def source_anchor(source_id: str) -> str:
    return f"source-{source_id}"


# --- roofline --------------------------------------------------------------------------------------------------------


def roofline(report: Report) -> Section:
    peaks = report.peaks
    text = [
        "Arithmetic intensity is 2MNK over the bytes of A, B and C moved once. Offline operands that fit the L2 cache "
        "stay in it, so points may lie above the DRAM roof; rotating evicts them."
    ]
    if peaks is None:
        text.append(f"The peaks of {report.device} are not in configs/roofline.yaml, so no roof is drawn.")
    else:
        text.append(f"Roofs: {peaks.source}.")
    tables = (_best_throughput(report),)
    return Section("roofline", "Roofline", tuple(text), "roofline", tables)


def _best_throughput(report: Report) -> Table:
    """The highest TFLOP/s by size: what the cloud's upper edge is."""
    rows = []
    for mode in MODES:
        found = []
        for shape in report.shapes:
            timing = shape.timing(mode)
            if timing is not None:
                task = hgemm(shape.m, shape.n, shape.k)
                rate = flops(task) / timing.time_us / 1e6
                found.append((rate, shape.label, min_bytes(task) / timing.time_us / 1e6))
        if not found:
            rows.append(Row((mode, NOT_MEASURED, "-", "-", "-")))
            continue
        fast, wide = max(found), max(found, key=lambda entry: entry[2])
        rows.append(Row((mode, f"{fast[0]:.1f}", fast[1], f"{wide[2]:.2f}", wide[1])))
    columns = ("mode", "highest TFLOP/s", "at", "highest TB/s (A, B, C once)", "at")
    return Table("The fastest kernels", columns, tuple(rows))


# --- accuracy --------------------------------------------------------------------------------------------------------


def accuracy(report: Report) -> Section:
    text = (
        "Largest absolute error against FP64 on normal(0,1) inputs, of the kernel of each shape and of cuBLAS on the "
        "same inputs, from verify at full depth. Both round to FP16, so most of the error is the output's rounding.",
    )
    rows = []
    found = {b.label: b for b in report.accuracy}
    for label in size_labels():
        b = found.get(label)
        if b is None:
            rows.append(Row((label, "0", NOT_MEASURED, "-", "-", "-", "-")))
            continue
        theirs = b.cublas_median_error is not None and b.cublas_max_error is not None
        rows.append(
            Row(
                (
                    label,
                    str(b.shapes),
                    f"{b.median_error:.3g}",
                    f"{b.max_error:.3g}",
                    f"{b.cublas_median_error:.3g}" if theirs else NOT_MEASURED,
                    f"{b.cublas_max_error:.3g}" if theirs else NOT_MEASURED,
                    f"{b.no_worse} of {b.cublas_shapes}",
                )
            )
        )
    columns = ("MNK", "shapes", "median", "largest", "cuBLAS median", "cuBLAS largest", "at most cuBLAS's")
    return Section("accuracy", "Accuracy", text, "accuracy", (Table("Error by size", columns, tuple(rows)),))


# --- verification ----------------------------------------------------------------------------------------------------


def rejections(report: Report) -> Section:
    stages = Table(
        "What each stage of the gate passed and rejected (compile and sanitize once a kernel, the rest once a kernel "
        "and shape)",
        ("stage", "setting", "passed", "rejected", "not recorded"),
        tuple(
            Row((s.stage, s.setting or "-", str(s.passed), str(s.rejected), str(s.not_recorded))) for s in report.stages
        ),
        text_columns=2,
    )
    reasons = Table(
        "Rejections by reason",
        ("stage", "setting", "reason", "count", "shapes", "for example", "at", "detail"),
        tuple(
            Row(
                (
                    r.stage,
                    r.setting or "-",
                    r.reason,
                    str(r.count),
                    str(r.shapes) if r.shapes else "-",
                    r.example_kernel,
                    r.example_shape or "-",
                    r.detail,
                )
            )
            for r in report.rejections
        ),
        text_columns=8,
    )
    strict = sum(r.count for r in report.rejections if r.stage == "verify")
    text = (
        f"Strict verification rejected {strict} candidates. None of them was timed at the final budget, and none "
        "is in any table above.",
    )
    return Section("rejections", "What the gate rejected", text, None, (stages, reasons))


# --- published results -----------------------------------------------------------------------------------------------


def published(report: Report) -> Section:
    work = report.published
    origins = "; ".join(f"{_hardware(entry)}: {entry.origin}" for entry in work.sets)
    text = (f"{work.title}: {work.source}. {work.remark}", f"Means: {origins}. By size: {work.bins_origin}.")
    tables = (_published_means(report), *_published_bins(report))
    return Section("published", f"{work.title}'s published results beside ours", text, None, tables)


def _hardware(entry: Published) -> str:
    return f"{entry.hardware}, {entry.accumulate} accumulate"


def _published_means(report: Report) -> Table:
    sets = report.published.sets
    columns = ("reference, layout", f"ours, {report.device}", "shapes", *(_hardware(entry) for entry in sets))
    rows: list[Row] = []
    for fallback in (False, True):
        for reference, layout in dict.fromkeys((c.reference, c.layout) for c in report.comparisons):
            theirs = [_theirs(_find(entry, reference, layout), fallback) for entry in sets]
            if not any(value is not None for pair in theirs for value in pair):
                continue
            name = ("max(custom, reference): " if fallback else "") + reference_label(reference, layout)
            ours = [report.comparison(mode, reference, layout) for mode in _PUBLISHED_MODES]
            stats = [None if c is None else c.with_fallback if fallback else c.stats for c in ours]
            shapes = dict.fromkeys(s.shapes if s else 0 for s in stats)
            cells = (_both([s.mean_speedup if s else None for s in stats], NOT_MEASURED), " / ".join(map(str, shapes)))
            rows.append(Row((name, *cells, *(_both(pair, "-") for pair in theirs))))
    return Table("Mean speedup, offline / server (-: not published)", columns, tuple(rows))


def _find(entry: Published, reference: str, layout: Layout) -> PublishedMean | None:
    return next((m for m in entry.table1 if (m.reference, m.layout) == (reference, layout)), None)


def _theirs(found: PublishedMean | None, fallback: bool) -> tuple[float | None, float | None]:
    """Offline and server."""
    if found is None:
        return None, None
    if fallback:
        return found.offline_with_fallback, found.server_with_fallback
    return found.offline, found.server


def _both(speedups: Sequence[float | None], nothing: str) -> str:
    if all(speedup is None for speedup in speedups):
        return nothing
    return " / ".join(nothing if speedup is None else percent(speedup) for speedup in speedups)


def _published_bins(report: Report) -> Iterator[Table]:
    sets = [(entry, bins) for entry in report.published.sets for bins in entry.bins]
    for mode in _PUBLISHED_MODES:
        here = [(entry, bins) for entry, bins in sets if bins.mode == mode]
        ours = {b.label: b.stats for b in report.sizes if b.mode == mode}
        rows = []
        for index, label in enumerate(size_labels()):
            stats = ours[label]
            cells: list[Cell] = [label, f"{percent(stats.mean_speedup)} ({stats.shapes})" if stats else NOT_MEASURED]
            cells += [f"{percent(bins.speedups[index])} ({bins.shapes[index]})" for _, bins in here]
            rows.append(Row(tuple(cells)))
        found = report.headline(mode)
        wins = f"{100 * found.wins / found.shapes:.1f} %" if found else NOT_MEASURED
        summary = (
            ("all: mean", percent(found.mean_speedup if found else None), [percent(b.mean_speedup) for _, b in here]),
            (
                "all: geo. mean ratio",
                ratio(found.geo_mean_ratio) if found else NOT_MEASURED,
                [ratio(b.geo_mean_ratio) for _, b in here],
            ),
            ("all: win rate", wins, [f"{100 * b.win_rate:.1f} %" for _, b in here]),
        )
        rows += [Row((name, own, *others)) for name, own, others in summary]
        columns = ("MNK (shapes)", f"ours, {report.device}", *(_hardware(entry) for entry, _ in here))
        yield Table(f"By size, {mode}, over cuBLASLt auto-tuned, max", columns, tuple(rows))


# --- every shape -----------------------------------------------------------------------------------------------------


def every_shape(report: Report) -> Section:
    labels = {kernel.key: kernel.label for kernel in report.kernels}
    columns = ["shape", "kernel"]
    for mode in MODES:
        columns += [f"{mode} ratio", "95 % interval", "kernel us", "cuBLASLt us", "spread"]
    columns += ["error", "cuBLAS error", "ncu"]
    rows = []
    for shape in report.shapes:
        here = Link(shape.label, shape_anchor(shape.label))
        choice = shape.choice()
        if choice is None or shape.best is None:
            cells: tuple[Cell, ...] = (here, f"none: {shape.why_none}", *(NOT_MEASURED,) * (len(columns) - 2))
            rows.append(Row(cells, shape_anchor(shape.label)))
            continue
        timed = [cell for mode in MODES for cell in _timing_cells(choice.timings.get(mode))]
        errors = choice.accuracy
        cells = (
            here,
            kernel_link(labels, shape.best),
            *timed,
            f"{errors.max_abs_error:.3g}" if errors else NOT_MEASURED,
            f"{errors.cublas_max_abs_error:.3g}"
            if errors and errors.cublas_max_abs_error is not None
            else NOT_MEASURED,
            Link("record", profile_anchor(shape.label)) if choice.profiled else NOT_MEASURED,
        )
        rows.append(Row(cells, shape_anchor(shape.label)))
    tables = [Table(f"{len(rows)} shapes", tuple(columns), tuple(rows), text_columns=2, folded=len(rows) > FOLD_ROWS)]
    tables += list(_certified(report))
    text = ("Smallest first; * marks a noisy and ! a throttled timing. The spread is (p75 - p25) / median.",)
    return Section("shapes", "Every shape", text, None, tuple(tables))


def _timing_cells(timing: ModeTiming | None) -> tuple[Cell, ...]:
    row = timing.row(HEADLINE_REFERENCE) if timing else None
    if timing is None or row is None:
        return (NOT_MEASURED, "-", "-", "-", "-")
    marks = ("*" if timing.noisy else "") + ("!" if timing.throttled else "")
    return (
        ratio(row.ratio) + marks,
        f"{ratio(row.ratio_lo)} … {ratio(row.ratio_hi)}",
        time_us(timing.time_us),
        time_us(row.ref_us),
        deviation(timing.spread),
    )


def _certified(report: Report) -> Iterator[Table]:
    rows = []
    for shape in report.shapes:
        for mode, timing in shape.certified.items():
            row = timing.row(HEADLINE_REFERENCE)
            final = shape.timing(mode)
            short = final.row(HEADLINE_REFERENCE) if final and final.budget == "final" else None
            if row is not None:
                rows.append(
                    Row(
                        (
                            Link(shape.label, shape_anchor(shape.label)),
                            mode,
                            ratio(row.ratio),
                            f"{ratio(row.ratio_lo)} … {ratio(row.ratio_hi)}",
                            ratio(short.ratio) if short else NOT_MEASURED,
                            str(timing.samples),
                        )
                    )
                )
    if rows:
        columns = ("shape", "mode", "certified ratio", "95 % interval", "ratio at final", "samples")
        yield Table("Certified again at the long budget", columns, tuple(rows), 2, folded=len(rows) > FOLD_ROWS)


# --- kernels, profiles, provenance -----------------------------------------------------------------------------------


def kernels(report: Report) -> Section:
    rows = []
    for kernel in report.kernels:
        source: Cell = kernel.source_note or NOT_MEASURED
        if kernel.source is not None:
            source = Link(kernel.source, source_anchor(kernel.source))
        built = kernel.registers is not None
        rows.append(
            Row(
                (
                    kernel.label,
                    kernel.key,
                    source,
                    " ".join(kernel.defines.replace("#define ", "").replace(" ", "=").split()) or "-",
                    str(len(kernel.best_at)),
                    f"{kernel.registers}" if built else NOT_MEASURED,
                    f"{kernel.spill_bytes}" if built else NOT_MEASURED,
                    ", ".join(f"{name} x {count}" for name, count in kernel.mma.items()) or "-",
                    f"{kernel.sanitize_checks} passed",
                ),
                kernel_anchor(kernel.key),
            )
        )
    columns = ("kernel", "key", "source", "macros before it", "best at", "registers", "spill bytes", "MMA", "sanitizer")
    table = Table(f"{len(rows)} kernels", columns, tuple(rows), text_columns=4, folded=len(rows) > FOLD_ROWS)
    text = ("The kernels that are the best of their shape, or the best of their layout there. Sources are at the end.",)
    return Section("kernels", "Kernels", text, None, (table,))


_METRICS = (
    *("time_us", "tensor_pipe_pct", "sm_pct", "issue_slots_pct", "dram_pct", "l2_pct", "l1_pct", "shared_pct"),
    *("l1_hit_pct", "l2_hit_pct", "occupancy_pct", "occupancy_limit_pct", "registers", "waves", "bank_conflicts"),
)


def profiles(report: Report) -> Section:
    labels = {kernel.key: kernel.label for kernel in report.kernels}
    others = sorted({name for p in report.profiles for name in p.metrics} - set(_METRICS))
    shown = [name for name in (*_METRICS, *others) if any(name in p.metrics for p in report.profiles)]
    rows = []
    for profile in report.profiles:
        stalls = ", ".join(f"{name} {value:.3g}" for name, value in profile.stalls.items())
        rows.append(
            Row(
                (
                    Link(profile.shape, shape_anchor(profile.shape)),
                    kernel_link(labels, profile.kernel),
                    " ".join(profile.sentences) or "-",
                    stalls or "-",
                    *(f"{profile.metrics[name]:.5g}" if name in profile.metrics else NOT_MEASURED for name in shown),
                ),
                profile_anchor(profile.shape),
            )
        )
    columns = ("shape", "kernel", "what limits it", "top stalls (warps per issue)", *shown)
    table = Table(f"{len(rows)} ncu records", columns, tuple(rows), text_columns=4, folded=len(rows) > FOLD_ROWS)
    missing = report.shapes_with_kernel - len(rows)
    text = (f"Nsight Compute around one launch of the best kernel; {NOT_MEASURED} at {missing} shapes.",)
    return Section("profiles", "ncu records", text, None, (table,) if rows else ())


def provenance(report: Report) -> Section:
    rows = tuple(Row((fact.name, fact.value)) for fact in report.provenance)
    return Section("provenance", "Provenance", (), None, (Table("", ("fact", "value"), rows, text_columns=2),))

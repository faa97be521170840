"""Figures of a report, as Plotly figures. Pure.

Colours are Okabe and Ito's, and every group has a marker of its own, so that they hold for colour-blind readers and in
grey. The explorer is drawn by assets/page.js, for it is redrawn as the reader chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agent.reporting.data import samples
from agent.reporting.model import Band, Report
from agent.reporting.sizes import of_grid, size_of
from agent.reporting.tables import NOT_MEASURED, PANEL_NAMES, FigureName
from tools.hgemm import flops, hgemm, min_bytes
from tools.records import HEADLINE_REFERENCE, MODES, Mode

#: Pixels on the screen; print scales them (assets/page.css).
WIDTH = 1080
BLUE, VERMILLION, GREEN, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#000000", "#666666"
_MODE_STYLE: dict[Mode, tuple[str, str, str]] = {
    "offline": (BLUE, "circle", "rgba(0,114,178,0.16)"),
    "rotating": (VERMILLION, "diamond", "rgba(213,94,0,0.16)"),
    "server": (GREEN, "square", "rgba(0,158,115,0.16)"),
}
_AXIS = {
    "showline": True,
    "linecolor": "#444",
    "ticks": "outside",
    "gridcolor": "#e3e3e3",
    "zeroline": False,
    "mirror": True,
}


def figures(report: Report) -> dict[FigureName, Any]:
    """Plotly figures by name. Needs plotly (ImportError without it)."""
    return {"speedup": _speedup(report), "roofline": _roofline(report), "accuracy": _accuracy(report)}


def _layout(figure: Any, height: int, **more: Any) -> Any:
    figure.update_layout(
        template="none",
        width=WIDTH,
        height=height,
        font={"family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 13, "color": "#111"},
        margin={"l": 70, "r": 20, "t": 40, "b": 60},
        hoverlabel={"align": "left", "bgcolor": "white"},
        paper_bgcolor="white",
        plot_bgcolor="white",
        **more,
    )
    figure.update_xaxes(**_AXIS)
    figure.update_yaxes(**_AXIS)
    return figure


# --- speedup against size --------------------------------------------------------------------------------------------


def _speedup(report: Report) -> Any:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    names = list(PANEL_NAMES)
    figure = make_subplots(
        rows=len(MODES), cols=len(names), shared_yaxes="rows", horizontal_spacing=0.025, vertical_spacing=0.075
    )
    counted, _ = of_grid(report.shapes)
    by_label = {shape.label: shape for shape in counted}
    bands: dict[tuple[str, str], tuple[Band, ...]] = {(p.mode, p.x): p.bands for p in report.panels}
    for row, mode in enumerate(MODES, start=1):
        colour, symbol, fill = _MODE_STYLE[mode]
        found = samples(counted, mode)
        for column, x in enumerate(names, start=1):
            where = {"row": row, "col": column}
            _band(go, figure, bands[mode, x], colour, fill, where)
            figure.add_trace(
                go.Scatter(
                    x=[size_of(by_label[s.shape], x) for s in found],
                    y=[100 * (s.ratio - 1) for s in found],
                    mode="markers",
                    marker={"color": colour, "symbol": symbol, "size": 5, "opacity": 0.55},
                    text=[f"{s.shape}<br>ratio {s.ratio:.3f} [{s.ratio_lo:.3f}, {s.ratio_hi:.3f}]" for s in found],
                    hoverinfo="text",
                    showlegend=False,
                ),
                **where,
            )
            figure.add_hline(y=0, line={"color": "#111", "width": 1}, **where)
            if not found:
                figure.add_annotation(
                    text=NOT_MEASURED, showarrow=False, x=0.5, y=0.5, xref="x domain", yref="y domain", **where
                )
            figure.update_xaxes(title_text=PANEL_NAMES[x] if row == len(MODES) else None, **where)
        figure.update_yaxes(title_text=f"{mode}: speedup, %", row=row, col=1)
    return _layout(figure, 880, showlegend=False)


def _band(go: Any, figure: Any, bands: Sequence[Band], colour: str, fill: str, where: dict[str, int]) -> None:
    """The mean, and mean ± one standard deviation where a bin has more than one shape."""
    wide = [band for band in bands if band.std_speedup is not None]
    if len(wide) > 1:
        upper = [100 * (b.mean_speedup + (b.std_speedup or 0.0)) for b in wide]
        lower = [100 * (b.mean_speedup - (b.std_speedup or 0.0)) for b in wide]
        at = [b.x for b in wide]
        figure.add_trace(
            go.Scatter(
                x=at + at[::-1],
                y=upper + lower[::-1],
                fill="toself",
                fillcolor=fill,
                line={"width": 0.5, "color": colour},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
            ),
            **where,
        )
    figure.add_trace(
        go.Scatter(
            x=[b.x for b in bands],
            y=[100 * b.mean_speedup for b in bands],
            mode="lines",
            line={"color": colour, "width": 2.5},
            hoverinfo="skip",
            showlegend=False,
        ),
        **where,
    )


# --- roofline --------------------------------------------------------------------------------------------------------

_ROOFLINE_MODES: tuple[Mode, ...] = ("offline", "rotating")


def _roofline(report: Report) -> Any:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"{mode}" for mode in _ROOFLINE_MODES],
    )
    intensities = [_intensity(s.m, s.n, s.k) for s in report.shapes] or [1.0]
    lo, hi = min(intensities) / 1.3, max(intensities) * 1.3
    for column, mode in enumerate(_ROOFLINE_MODES, start=1):
        where = {"row": 1, "col": column}
        for name, colour, symbol in (
            ("cuBLASLt auto-tuned", VERMILLION, "x-thin"),
            ("best kernel", BLUE, "circle-open"),
        ):
            ours = name == "best kernel"
            x, y, text = [], [], []
            for shape in report.shapes:
                timing = shape.timing(mode)
                row = timing.row(HEADLINE_REFERENCE) if timing else None
                if timing is None or row is None:
                    continue
                time_us = timing.time_us if ours else row.ref_us
                work = flops(hgemm(shape.m, shape.n, shape.k))
                x.append(_intensity(shape.m, shape.n, shape.k))
                y.append(work / time_us / 1e6)
                text.append(f"{shape.label}<br>{name}, {mode}<br>{time_us:.4g} us, {y[-1]:.4g} TFLOP/s")
            marker = {"color": colour, "symbol": symbol, "size": 7, "line": {"width": 1.3, "color": colour}}
            figure.add_trace(
                go.Scatter(
                    x=x,
                    y=y,
                    mode="markers",
                    marker=marker,
                    text=text,
                    hoverinfo="text",
                    name=name,
                    legendgroup=name,
                    showlegend=column == 1,
                ),
                **where,
            )
        for name, tflops, tb_per_s, dash in _roofs(report):
            knee = tflops / tb_per_s
            xs = [lo, *([knee] if lo < knee < hi else []), hi]
            figure.add_trace(
                go.Scatter(
                    x=xs,
                    y=[min(tflops, x * tb_per_s) for x in xs],
                    mode="lines",
                    line={"color": BLACK, "width": 1.5, "dash": dash},
                    name=name,
                    legendgroup=name,
                    showlegend=column == 1,
                    hoverinfo="skip",
                ),
                **where,
            )
    figure.update_xaxes(
        type="log",
        dtick=1,
        title_text="2MNK / bytes of A, B, C (FLOP per byte)",
        range=[math.log10(lo), math.log10(hi)],
    )
    figure.update_yaxes(type="log", exponentformat="none", dtick=1)
    figure.update_yaxes(title_text="TFLOP/s", row=1, col=1)
    return _layout(figure, 560, legend={"orientation": "h", "y": -0.17, "x": 0})


def _roofs(report: Report) -> list[tuple[str, float, float, str]]:
    """(name, TFLOP/s, TB/s, dash)"""
    peaks = report.peaks
    if peaks is None:
        return []
    roofs = [("data sheet", peaks.tensor_tflops, peaks.dram_tb_per_s, "solid")]
    if peaks.reached_tflops and peaks.reached_dram_tb_per_s:
        roofs.append(("reached by good kernels", peaks.reached_tflops, peaks.reached_dram_tb_per_s, "dash"))
    if peaks.l2_tb_per_s:
        roofs.append(("from L2", peaks.reached_tflops or peaks.tensor_tflops, peaks.l2_tb_per_s, "dot"))
    return roofs


def _intensity(m: int, n: int, k: int) -> float:
    task = hgemm(m, n, k)
    return flops(task) / min_bytes(task)


# --- accuracy --------------------------------------------------------------------------------------------------------


def _accuracy(report: Report) -> Any:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.03)
    found = [(s, c.accuracy) for s in report.shapes if (c := s.choice()) is not None and c.accuracy is not None]
    axes = (("log2 of M*N*K", [math.log2(s.mnk) for s, _ in found]), ("log2 of K", [math.log2(s.k) for s, _ in found]))
    for column, (title, x) in enumerate(axes, start=1):
        where = {"row": 1, "col": column}
        sides = (
            ("cuBLAS", [a.cublas_max_abs_error for _, a in found], VERMILLION, "x-thin", 0.1),
            ("best kernel", [a.max_abs_error for _, a in found], BLUE, "circle-open", -0.1),
        )
        for name, y, colour, symbol, shift in sides:
            # A logarithmic axis has no zero: an exact result is left out of the figure, and is in the table.
            points = [(at, e, s.label) for at, e, (s, _) in zip(x, y, found, strict=True) if e]
            figure.add_trace(
                go.Scatter(
                    x=[p[0] + shift for p in points],  # side by side, for many shapes share an x and an error
                    y=[p[1] for p in points],
                    text=[f"{label}<br>{name}: {error:.4g}" for _, error, label in points],
                    hoverinfo="text",
                    mode="markers",
                    marker={"color": colour, "symbol": symbol, "size": 7, "line": {"width": 1.3, "color": colour}},
                    name=name,
                    legendgroup=name,
                    showlegend=column == 1,
                ),
                **where,
            )
        figure.update_xaxes(title_text=title, **where)
        if not found:
            figure.add_annotation(
                text=NOT_MEASURED, showarrow=False, x=0.5, y=0.5, xref="x domain", yref="y domain", **where
            )
    figure.update_yaxes(type="log", tickvals=_ticks(), ticktext=[f"{tick:g}" for tick in _ticks()])
    figure.update_yaxes(title_text="largest |C - C(FP64)|", row=1, col=1)
    return _layout(figure, 440, legend={"orientation": "h", "y": -0.2, "x": 0})


def _ticks() -> list[float]:
    """1, 2, 5, 10 … over any error that FP16 can have."""
    return [digit * 10.0**exponent for exponent in range(-8, 6) for digit in (1, 2, 5)]

"""The best-so-far curve as a Plotly figure. Pure."""

from __future__ import annotations

from typing import Any

from inspection.trace import Trace
from inspection.words import outcome
from tools.records import Status

BLUE, GREY, VERMILLION, GREEN = "#0072B2", "#888888", "#D55E00", "#009E73"


def best_curve(trace: Trace) -> Any:
    """Every variant by its first trial, the best so far as a line, the winner's final ratio as a star."""
    import plotly.graph_objects as go

    figure = go.Figure()
    trials, seen = [], set()
    for step in trace.steps:
        if step.key and step.evaluates and step.key not in seen:
            seen.add(step.key)
            trials.append(step)
    if trials:
        x, y = [s.evaluated for s in trials], [s.best_ratio for s in trials]
        figure.add_scatter(x=x, y=y, mode="lines", line={"shape": "hv", "color": BLUE}, name="best so far")
    passed = [s for s in trials if s.ratio is not None]
    figure.add_scatter(
        x=[s.evaluated for s in passed],
        y=[s.ratio for s in passed],
        mode="markers",
        marker={"color": GREY, "size": 6},
        name="passed the screen",
        text=[f"{s.step_id}: {_text(s.label)}" for s in passed],
        hovertemplate="%{text}<br>%{y:.3f}x<extra></extra>",
    )
    rejected = [s for s in trials if s.status == Status.FAILED]
    figure.add_scatter(
        x=[s.evaluated for s in rejected],
        y=[0.0] * len(rejected),
        mode="markers",
        cliponaxis=False,
        marker={"color": VERMILLION, "symbol": "x", "size": 8},
        name="rejected",
        text=[f"{s.step_id}: {_text(outcome(s))}" for s in rejected],
        hovertemplate="%{text}<extra></extra>",
    )
    winner = next((f for f in trace.finals if f.admitted and f.ratio is not None), None)
    if winner is not None and trials:
        figure.add_scatter(
            x=[trials[-1].evaluated],
            y=[winner.ratio],
            mode="markers",
            marker={"color": GREEN, "symbol": "star", "size": 14},
            name="through the whole gate, final budget",
            text=[_text(winner.label)],
            hovertemplate="%{text}<br>%{y:.3f}x<extra></extra>",
        )
    if trials and trials[-1].evaluated <= 12:  # no ticks between whole numbers
        figure.update_xaxes(dtick=1)
    figure.add_hline(y=1.0, line={"color": "#000000", "dash": "dot", "width": 1})
    figure.update_layout(
        template="plotly_white",
        height=420,
        margin={"l": 60, "r": 20, "t": 30, "b": 50},
        legend={"orientation": "h", "y": 1.12},
        xaxis_title="variants evaluated",
        yaxis_title="ratio to auto-tuned cuBLASLt",
        yaxis_rangemode="tozero",
    )
    return figure


def _text(text: str) -> str:
    """Plotly reads a little HTML in hover texts."""
    return text.replace("<", "&lt;").replace(">", "&gt;")[:200]

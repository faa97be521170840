"""Steps and findings as HTML. Pure; whatever a policy, a compiler or a user wrote goes through ``escape`` on its way.

A message of the chat component passes through its Markdown reader, so each is one block of HTML on a single line:
nothing in it is read as Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from agent.inspecting import Listed
from inspection.answers import Best, Claim, Diff, Finding, Profiles, Rejection, StepShown, Timeline, VariantShown
from inspection.rendering import SOURCE_FIELD, fields, number
from inspection.trace import Trace, TraceStep
from inspection.words import heading, outcome, title
from memory.contrast_budget import one_line, plain, source_lines

MAX_CHARS = 200_000


def link(session_id: str, step_id: str) -> str:
    """A step's own address, which stays the same."""
    where = f"?session={quote(session_id)}&step={quote(step_id)}"
    return f'<a class="step" href="{escape(where)}">{escape(step_id)}</a>'


def said(text: str, kind: str = "said") -> str:
    """Prose as it was written, line by line."""
    return f'<div class="{kind}">{_lines(_short(plain(text)))}</div>' if text.strip() else ""


def block(text: str, kind: str = "plain") -> str:
    """Text whose columns matter."""
    return f'<pre class="{kind}">{_lines(_short(chr(10).join(source_lines(text))))}</pre>'


def code(source: str, language: str = "cuda") -> str:
    """Highlighted by Pygments, which escapes."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    text = _short("\n".join(source_lines(source.rstrip())))
    marked = highlight(text, get_lexer_by_name(language, stripnl=False), HtmlFormatter(nowrap=True))
    return f'<pre class="code">{_breaks(marked.rstrip())}</pre>'


def diff(lines: Sequence[str]) -> str:
    """A unified diff, a class a line."""
    rows = []
    for line in lines:
        kind = "meta" if line.startswith(("+++", "---", "@@", "[")) else {"+": "add", "-": "del"}.get(line[:1], "same")
        rows.append(f'<span class="{kind}">{escape(one := _line(line))}{"" if one else " "}</span>')
    return f'<pre class="diff">{"".join(rows)}</pre>'


# --- steps ------------------------------------------------------------------------------------------------------------


def call_html(step: TraceStep) -> str:
    """What was sent."""
    parts = []
    arguments = {name: value for name, value in step.arguments.items() if name != SOURCE_FIELD}
    source = step.arguments.get(SOURCE_FIELD)
    if isinstance(source, str):
        parts.append(code(source))
    if arguments:
        parts.append(block(_json(_tidy(arguments))))
    if step.malformed:
        parts.append(said(f"The call could not be read: {step.malformed}", "bad"))
    return "".join(parts) or said("(no arguments)")


def answer_html(step: TraceStep) -> str:
    if step.kind == "finish":
        time = f", {step.time_us:.3f} us" if step.time_us is not None else ""
        return said(f"{outcome(step)}{time}" if step.ratio is not None else step.detail or "ok")
    if not step.text:
        return said("No answer yet.")
    found = fields(step.text)
    return block(step.text) if found is None else fields_html(found)


def fields_html(found: Mapping[str, Any]) -> str:
    """A tool's answer as a table, a field a row: sentences wrap, lists have a line an entry, numbers are in columns."""
    rows = (f"<tr><th>{escape(one_line(name, 60))}</th><td>{_value(one)}</td></tr>" for name, one in found.items())
    return f'<table class="answer">{"".join(rows)}</table>'


def _value(value: object) -> str:
    if isinstance(value, str):
        return block(value) if "\n" in value.strip() else said(value, "field")
    if isinstance(value, dict) and value and not any(isinstance(one, (dict, list, str)) for one in value.values()):
        cells = (
            f"<td>{escape(one_line(str(name), 60))}</td><td>{escape(_scalar(v))}</td>" for name, v in value.items()
        )
        return f'<table class="numbers">{"".join(f"<tr>{cell}</tr>" for cell in cells)}</table>'
    if isinstance(value, list) and any(isinstance(one, (dict, str)) for one in value):
        return "".join(said(_entry(one), "field") for one in value)
    return said(_scalar(value), "field")


def _entry(value: object) -> str:
    """One of a list, in a line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_scalar(one)}" for name, one in value.items())
    return _scalar(value)


def _scalar(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def step_html(trace: Trace, step: TraceStep, change: Diff | None = None) -> str:
    """All of one step; with the difference to the variant before it, where there is one."""
    # What a policy said comes below, whole.
    about = title(step).partition(": ")[0] if step.kind == "assistant" else title(step)
    parts = [f"<h3>{link(trace.session_id, step.step_id)} {escape(one_line(about, 300))}</h3>"]
    if step.reasoning:
        parts += ["<h4>Reasoning</h4>", said(step.reasoning)]
    if step.kind in ("system", "user", "assistant") and step.text:
        parts += ["<h4>Said</h4>" if step.kind == "assistant" else "<h4>Text</h4>", said(step.text)]
    if step.kind == "call":
        parts += ["<h4>Answer</h4>", answer_html(step)]
    if step.kind == "finish":
        parts.append(answer_html(step))
    if change is not None:
        parts += [f"<h4>Against the variant before it, {escape(change.keys[0])}</h4>", _diff(change, trace.session_id)]
    if step.kind == "call":
        parts += ["<h4>Sent</h4>", call_html(step)]
    return f'<div class="panel" id="panel">{"".join(parts)}</div>'


# --- findings ---------------------------------------------------------------------------------------------------------


def finding_html(trace: Trace, finding: Finding) -> str:
    """Any tool's answer: claims with links, then what they are about."""
    where = trace.session_id
    match finding:
        case StepShown():
            return step_html(trace, finding.step)
        case Diff():
            body = _diff(finding, where)
        case Profiles():
            body = claims_html(finding.claims, where) + profiles_html(finding)
        case VariantShown():
            launch = finding.variant.launch.model_dump(mode="json", exclude_defaults=True)
            body = claims_html(finding.claims, where) + code(finding.variant.source)
            body += block(_json(_tidy(launch)))
        case Rejection():
            body = claims_html(finding.claims, where) + (block("\n".join(finding.log)) if finding.log else "")
        case Timeline() | Best() | _:
            body = claims_html(finding.claims, where)
    return f'<div class="finding">{body}</div>'


def claims_html(claims: Iterable[Claim], session_id: str) -> str:
    rows = []
    for claim in claims:
        steps = " ".join(link(session_id, step_id) for step_id in claim.steps)
        rows.append(f"<li>{escape(one_line(claim.text, 700))} {steps}</li>")
    return f'<ul class="claims">{"".join(rows)}</ul>'


def cited_html(session_id: str, text: str, cited: Sequence[str]) -> str:
    """A model's answer as it was written, but the steps that it names are links."""
    shown = said(text)
    for step_id in cited:
        shown = shown.replace(f"[{step_id}]", f"[{link(session_id, step_id)}]")
    return shown


def profiles_html(found: Profiles) -> str:
    if not found.rows:
        return ""
    head = "".join(f"<th>{escape(key)}</th>" for key in found.keys)
    rows = "".join(
        f"<tr><td>{escape(row.name)}</td><td>{escape(number(row.a))}</td><td>{escape(number(row.b))}</td></tr>"
        for row in found.rows
    )
    return f'<table class="profiles"><tr><th>ncu</th>{head}</tr>{rows}</table>'


def _diff(found: Diff, session_id: str) -> str:
    parts = [claims_html(found.claims, session_id)]
    if found.knobs:
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in found.knobs)
        head = "".join(f"<th>{escape(key)}</th>" for key in found.keys)
        parts.append(f"<table><tr><th>knob</th>{head}</tr>{rows}</table>")
    if found.lines:
        parts.append(diff(found.lines))
    return "".join(parts)


# --- the page ---------------------------------------------------------------------------------------------------------


def heading_html(trace: Trace) -> str:
    first, *rest = heading(trace)
    remarks = set(trace.remarks)
    lines = [f'<p class="{"bad" if line in remarks else "quiet"}">{escape(one_line(line, 500))}</p>' for line in rest]
    title_line = f"<h2>{escape(one_line(first))}</h2>"
    return f'<div class="heading" data-session="{escape(trace.session_id)}">{title_line}{"".join(lines)}</div>'


def sessions_html(found: Sequence[Listed], chosen: str | None) -> str:
    if not found:
        return '<p class="quiet">No sessions yet: agent optimize --shape 4096,4096,4096</p>'
    rows = []
    for one in found:
        best = f"{one.best:.3f}x" if one.best is not None else one.state
        kind = " chosen" if one.session_id == chosen else ""
        about = escape(one_line(one.problem or f"{one.task} {one.policy} {one.state}", 200))
        name = f'<a href="?session={quote(one.session_id)}">{escape(one.session_id)}</a>'
        rows.append(f'<li class="session{kind}">{name} <b>{escape(best)}</b><br><small>{about}</small></li>')
    return f'<ul class="sessions">{"".join(rows)}</ul>'


def problem_html(sentence: str) -> str:
    return f'<p class="bad">{escape(one_line(sentence, 800))}</p>'


def style() -> str:
    from pygments.formatters import HtmlFormatter

    return f"{HtmlFormatter(style='friendly').get_style_defs('pre.code')}\n{_STYLE}"


def _tidy(value: object) -> object:
    """Without the fields of a launch spec that say nothing."""
    if isinstance(value, dict):
        return {name: _tidy(one) for name, one in value.items() if one is not None}
    return [_tidy(one) for one in value] if isinstance(value, list) else value


def _json(value: object, indent: str = "") -> str:
    """As JSON; a list of plain values is one line."""
    deeper = indent + " "
    if isinstance(value, dict) and value:
        inside = [f"{deeper}{json.dumps(name)}: {_json(one, deeper)}" for name, one in value.items()]
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        inside = [f"{deeper}{_json(one, deeper)}" for one in value]
    else:
        return json.dumps(value)
    first, last = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([first, ",\n".join(inside), indent + last])


def _line(line: str) -> str:
    return plain(line).replace("\n", " ")


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}\n[{len(text) - MAX_CHARS} more characters]"


def _lines(text: str) -> str:
    return _breaks(escape(text))


def _breaks(html: str) -> str:
    return html.replace("\r", "").replace("\n", "&#10;")


_STYLE = """
.said, .bad, .field { white-space: pre-wrap; overflow-wrap: anywhere; }
.bad { color: #b00020; }
.quiet { color: #555; margin: 0; }
.heading h2 { margin: 0; }
pre.plain, pre.code, pre.diff { background: #f6f8fa; color: #1f2328; padding: 8px; overflow: auto; max-height: 480px;
  font: 12px/1.45 ui-monospace, 'DejaVu Sans Mono', monospace; border-radius: 4px; white-space: pre; }
pre.diff span { display: block; min-height: 1.45em; }
pre.diff .add { background: #d7f5dd; } pre.diff .del { background: #ffdfdc; } pre.diff .meta { color: #57606a; }
a.step { font: 12px ui-monospace, 'DejaVu Sans Mono', monospace; }
ul.claims li, ul.sessions li { overflow-wrap: anywhere; }
ul.sessions { list-style: none; padding: 0; margin: 0; }
ul.sessions li { padding: 4px 6px; border-left: 3px solid transparent; }
ul.sessions li.chosen { border-color: #0072B2; background: #eef5fa; color: #1f2328; }
table.answer, table.answer table, table.answer table tr, table.answer table td { border: none !important; }
table.answer { width: 100%; }
table.answer th, table.answer td { vertical-align: top; padding: 3px 8px; border: none; }
table.answer > tbody > tr { border: none !important; border-bottom: 1px solid #e5e7eb !important; }
table.answer > tbody > tr > th { width: 1%; white-space: nowrap; text-align: left; font-weight: 600; color: #57606a; }
table.answer > tbody > tr > td { max-width: 0; }
table.answer pre.plain { margin: 0; }
.field + .field { margin-top: 4px; }
table.answer table.numbers td { padding: 0 16px 0 0; }
table.answer table.numbers td:nth-child(2) { text-align: right; font-variant-numeric: tabular-nums; }
table.profiles td:nth-child(n+2) { text-align: right; font-variant-numeric: tabular-nums; }
.panel h3 { margin-top: 0; overflow-wrap: anywhere; }
#trace .message-row, #talk .message-row { margin: 0; padding: 6px 16px; }
#trace .message > div > div:first-child { margin: 0; }
#trace .title, #trace .message { cursor: pointer; }
#trace .message-content, #trace .message-content .prose { opacity: 1; }
.icon-button-wrapper { display: none !important; }
#goto { display: none; }
footer { display: none !important; }
"""

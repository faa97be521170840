"""The web UI: layout and events, on Gradio. Everything it shows comes from inspection/ through agent/ui/html.py.

The address says what is shown: ``?session=NAME&step=ID``. Sessions are read, never changed. The only module that
imports gradio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr

from agent.edge import sentence
from agent.inspecting import Watch, fingerprint, listed, load
from agent.ui.chart import best_curve
from agent.ui.html import (
    cited_html,
    claims_html,
    finding_html,
    heading_html,
    problem_html,
    said,
    sessions_html,
    step_html,
    style,
)
from agent.ui.messages import EVERYTHING, messages, part_with, parts
from inspection import answers, tools
from inspection.answers import Diff, NotFound, View
from inspection.trace import Trace, TraceStep
from inspection.words import named, outcome
from memory.contrast_budget import one_line

Asking = Callable[[str, Callable[[], Any]], Any]
TICK_S = 2.0
_TICKED = 10  # outputs of a tick
#: A click on a message of the trace, or on the link of a step of the shown session, opens that step without loading the
#: page anew; the links alone work, too.
_SCRIPT = """
document.addEventListener('click', (event) => {
  if (event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const link = event.target.closest('a.step');
  const message = event.target.closest('#trace .message');
  const shown = document.querySelector('#heading [data-session]')?.dataset.session;
  let id = null;
  if (link) {
    const asked = new URL(link.href, location.href).searchParams;
    if (asked.get('session') !== shown) return;
    id = asked.get('step');
    event.preventDefault();
  } else if (message) {
    const heading = message.querySelector('.title')?.textContent.trim().split(/\\s/)[0];
    id = heading || message.querySelector('a.step')?.textContent;
  }
  if (id) trigger('click', { step: id });
}, true);
"""
HINT = (
    '<div class="panel" id="panel"><p class="quiet">Choose a step, or click one on the left: its reasoning, what it '
    "sent, its answer, and the difference to the variant before it.</p></div>"
)


class Pages:
    """What the events answer with. ``make_asker`` makes who answers questions of a session: an agent.asking.Asker, or
    a sentence why there is none."""

    def __init__(self, home: Path, first: str | None, make_asker: Asking) -> None:
        self.home = home
        self._first = first
        self._make_asker = make_asker
        self._watches: dict[str, Watch] = {}

    # --- opening -------------------------------------------------------------------------------------------------

    def chosen(self, request: gr.Request) -> tuple[str | None, str | None]:
        """Session and step of the address."""
        asked = dict(request.query_params) if request is not None else {}
        name = asked.get("session") or self._first
        if name is None:
            found = listed(self.home, 1)
            name = found[0].session_id if found else None
        return name, asked.get("step")

    @contextmanager
    def view(self, name: str) -> Iterator[View]:
        load(self.home, name)  # a name from an address; unknown ones make no entry
        with self._watches.setdefault(name, Watch(self.home, name)).view() as view:
            yield view

    def open(self, request: gr.Request) -> list[Any]:
        name, step_id = self.chosen(request)
        found = listed(self.home)
        stamp = fingerprint(self.home, name) if self._known(name) and name is not None else ()
        shown = self._guarded(lambda: self._page(name, step_id))
        return [name, stamp, sessions_html(found, name), *shown]

    def tick(self, name: str | None, stamp: tuple[object, ...], part: str | None) -> list[Any]:
        """What has changed of a session that goes on; nothing where nothing has."""
        if name is None or not self._known(name):
            return [gr.skip()] * _TICKED
        now = fingerprint(self.home, name)
        if _same(now, stamp):
            return [gr.skip()] * _TICKED
        heading, choices, chat, steps, _, a, b, curve, claims, *_ = self._guarded(lambda: self._page(name, None, part))
        # What the reader has chosen stays chosen.
        steps, a, b = ({k: v for k, v in one.items() if k != "value"} for one in (steps, a, b))
        sessions = sessions_html(listed(self.home), name)
        return [now, sessions, heading, choices, chat, steps, a, b, curve, claims]

    def _known(self, name: str | None) -> bool:
        return name is not None and any(one == name for one in _names(self.home))

    def _page(self, name: str | None, step_id: str | None, part: str | None = None) -> list[Any]:
        """heading, parts, chat, steps, panel, A, B, curve, claims, difference, profiles."""
        if name is None:
            raise NotFound("there are no sessions yet: agent optimize --shape 4096,4096,4096")
        with self.view(name) as view:
            trace = view.trace
            known = parts(trace.steps)
            if part not in known:
                part = part_with(known, step_id, trace.state == "running")
            choices = [(f"{s.step_id} {one_line(s.tool or s.kind, 40)}", s.step_id) for s in trace.steps]
            keys = [(_choice(trace, key), key) for key in trace.keys]
            a, b = _pair(trace)
            found = answers.best_so_far(view)
            return [
                heading_html(trace),
                gr.update(choices=list(known), value=part),
                messages(name, known[part]),
                gr.update(choices=choices, value=step_id if trace.step(step_id or "") else None),
                self._panel(view, step_id) if step_id else HINT,
                gr.update(choices=keys, value=a),
                gr.update(choices=keys, value=b),
                best_curve(trace),
                claims_html(found.claims, name),
                *self.compare(name, a, b),
            ]

    # --- events --------------------------------------------------------------------------------------------------

    def part(self, name: str | None, part: str) -> list[Any]:
        try:
            with self.view(name or "") as view:
                return messages(name or "", parts(view.trace.steps).get(part, []))
        except Exception as error:
            raise gr.Error(_told(error)) from None

    def step(self, name: str | None, step_id: str | None) -> str:
        if not name or not step_id:
            return HINT
        return self._html(lambda: self._in(name, lambda view: self._panel(view, step_id)))

    def goto(self, event: gr.EventData) -> tuple[Any, Any]:
        """What the page's script says was clicked."""
        return str(event.step), gr.Tabs(selected="trace")

    def compare(self, name: str | None, a: str | None, b: str | None) -> tuple[str, str]:
        if not name or not a or not b:
            return '<p class="quiet">Choose two variants.</p>', ""
        return (
            self._html(lambda: self._in(name, lambda v: finding_html(v.trace, answers.diff(v, a, b)))),
            self._html(lambda: self._in(name, lambda v: finding_html(v.trace, answers.compare_profiles(v, a, b)))),
        )

    def asked(self, name: str | None, question: str, chat: list[Any]) -> tuple[Any, ...]:
        """A question is shown at once; until its answer there is no other."""
        question = (question or "").strip()
        if not question or not name:
            return gr.skip(), gr.skip(), None
        shown = [*chat, {"role": "user", "content": said(question)}]
        return gr.update(value="", interactive=False, placeholder="answering …"), shown, question

    def answer(self, name: str | None, question: str | None, chat: list[Any], asker: Any) -> tuple[Any, ...]:
        """A command is answered by the session's tools, anything else by the model."""
        if not question or not name:
            return gr.skip(), gr.skip(), asker
        if asker is None or asker[0] != name:
            asker = (name, None)
        try:
            if question.startswith("/"):
                reply = self._command(name, question)
            else:
                if asker[1] is None:
                    asker = (name, self._make_asker(name, lambda: self.view(name)))
                reply = self._asked(name, asker[1].ask(question))
        except Exception as error:
            reply = problem_html(_told(error))
        return gr.update(interactive=True, placeholder=""), [*chat, {"role": "assistant", "content": reply}], asker

    def _command(self, name: str, line: str) -> str:
        if line in ("/help", "/?"):
            return said("\n".join(tools.help_lines()))
        with self.view(name) as view:
            return finding_html(view.trace, tools.run_command(view, line))

    def _asked(self, name: str, answer: Any) -> str:
        parts = [cited_html(name, answer.text, answer.cited)]
        if answer.unknown:
            parts.append(problem_html(f"It names steps that do not exist: {', '.join(answer.unknown)}"))
        elif not answer.cited:
            parts.append(problem_html("It names no step: unproven."))
        return "".join(parts)

    # --- parts ---------------------------------------------------------------------------------------------------

    def _panel(self, view: View, step_id: str) -> str:
        step = answers.find_step(view.trace, step_id)
        return step_html(view.trace, step, _change(view, step))

    def _in(self, name: str, work: Callable[[View], str]) -> str:
        with self.view(name) as view:
            return work(view)

    def _html(self, work: Callable[[], str]) -> str:
        try:
            return work()
        except Exception as error:
            return problem_html(_told(error))

    def _guarded(self, work: Callable[[], list[Any]]) -> list[Any]:
        """The parts of a page; of one that cannot be read, the sentence."""
        try:
            return work()
        except Exception as error:
            nothing = gr.update(choices=[], value=None)
            return [problem_html(_told(error)), nothing, [], nothing, HINT, nothing, nothing, None, "", "", ""]


def build(home: Path, first: str | None, make_asker: Asking) -> Any:
    pages = Pages(home, first, make_asker)
    with gr.Blocks(title="hgemm-agent", analytics_enabled=False, fill_width=True) as page:
        name, stamp, asking = gr.State(None), gr.State(()), gr.State(None)
        asker = gr.State(None, delete_callback=_close)
        goto = gr.HTML(elem_id="goto", js_on_load=_SCRIPT)
        with gr.Sidebar(label="Sessions", width=330):
            sessions = gr.HTML(elem_id="sessions")
        heading = gr.HTML(elem_id="heading")
        with gr.Tabs(selected="trace") as tabs:
            with gr.Tab("Trace", id="trace"):
                with gr.Row():
                    part = gr.Dropdown([EVERYTHING], label="Part", scale=1, elem_id="part")
                    step = gr.Dropdown([], label="Step", scale=3, elem_id="step")
                with gr.Row():
                    chat = gr.Chatbot(elem_id="trace", show_label=False, scale=3, **_chatbot(760))
                    with gr.Column(scale=3):
                        panel = gr.HTML(HINT)
            with gr.Tab("Compare"):
                with gr.Row():
                    first_key = gr.Dropdown([], label="From (A)", elem_id="variant-a")
                    second_key = gr.Dropdown([], label="To (B)", elem_id="variant-b")
                difference = gr.HTML(elem_id="difference")
                profiles = gr.HTML(elem_id="profiles")
            with gr.Tab("Best so far"):
                curve = gr.Plot(elem_id="curve", show_label=False)
                claims = gr.HTML(elem_id="claims")
            with gr.Tab("Ask"):
                talk = gr.Chatbot(elem_id="talk", show_label=False, **_chatbot(560))
                question = gr.Textbox(
                    label="Question, or a command: /best, /why KEY, /diff A B, /help", elem_id="question", max_lines=4
                )
        shown = [heading, part, chat, step, panel, first_key, second_key, curve, claims, difference, profiles]
        timer = gr.Timer(TICK_S)
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        page.load(pages.open, None, [name, stamp, sessions, *shown], **quiet)
        timer.tick(
            pages.tick,
            [name, stamp, part],
            [stamp, sessions, heading, part, chat, step, first_key, second_key, curve, claims],
            **quiet,
        )
        part.input(pages.part, [name, part], [chat], **quiet)
        goto.click(pages.goto, None, [step, tabs], **quiet)
        step.change(pages.step, [name, step], [panel], **quiet)
        for key in (first_key, second_key):
            key.input(pages.compare, [name, first_key, second_key], [difference, profiles], **quiet)
        question.submit(pages.asked, [name, question, talk], [question, talk, asking], **quiet).then(
            pages.answer, [name, asking, talk, asker], [question, talk, asker], **quiet
        ).then(None, js="() => document.querySelector('#question textarea').focus()", **quiet)
    return page


def mounted(page: Any) -> Any:
    """The page as an ASGI application; fonts are the system's own."""
    from fastapi import FastAPI

    fonts = ["system-ui", "sans-serif"]
    theme = gr.themes.Default(font=fonts, font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"])
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    return gr.mount_gradio_app(
        app, page, path="/", footer_links=[], theme=theme, css=style(), ssr_mode=False, show_error=False
    )


def _chatbot(height: int) -> dict[str, Any]:
    return {
        "height": height,
        "latex_delimiters": [],
        "sanitize_html": True,
        "allow_tags": False,
        "autoscroll": False,
        "layout": "panel",
        "group_consecutive_messages": False,
        "buttons": [],
        "feedback_options": None,
        "allow_file_downloads": False,
    }


def _close(asker: Any) -> None:
    """Of a browser that has left."""
    if asker is not None and asker[1] is not None:
        asker[1].close()


def _change(view: View, step: TraceStep) -> Diff | None:
    """From the variant that the same rollout evaluated before this one."""
    if step.kind != "call" or step.key is None:
        return None
    before = [
        s.key
        for s in view.trace.steps[: view.trace.steps.index(step)]
        if s.rollout == step.rollout and s.evaluates and s.key not in (None, step.key)
    ]
    if not before or before[-1] is None:
        return None
    try:
        return answers.diff(view, before[-1], step.key)
    except NotFound:
        return None


def _pair(trace: Trace) -> tuple[str | None, str | None]:
    """What is worth comparing first: the last two rises of the best."""
    risen = [s.key for s in trace.steps if s.rose]
    keys = (risen if len(risen) > 1 else trace.keys)[-2:]
    return (keys[0], keys[1]) if len(keys) == 2 else (None, None)


def _choice(trace: Trace, key: str) -> str:
    step = trace.of_key(key)[0]
    ratio = trace.ratios.get(key)
    return f"{step.step_id}  {f'{ratio:.3f}x' if ratio is not None else outcome(step)}  {named(step)}"


def _names(home: Path) -> list[str]:
    from agent.session import session_ids

    return session_ids(home)


def _same(now: tuple[object, ...], stamp: object) -> bool:
    """A state that went to the browser's session may come back with lists for tuples."""
    return repr(now) == repr(_tuples(stamp))


def _tuples(value: object) -> object:
    return tuple(_tuples(one) for one in value) if isinstance(value, (list, tuple)) else value


def _told(error: Exception) -> str:
    """What a user is told; of a bug of ours, its name alone, for its text may hold anything."""
    return str(error) if isinstance(error, NotFound) else sentence(error) or f"a bug of ours: {type(error).__name__}"

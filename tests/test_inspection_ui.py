"""`agent ui` in headless Chromium, with every socket but those to this machine blocked.

Set HGEMM_AGENT_TEST_SHOTS=DIR to keep the screenshots.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inspection_kit import ATTACK, go_on, make_session
from policy_kit import base_url, message, serve
from pytest_httpserver import HTTPServer
from records_kit import ROOT, agent, environment
from source_session_kit import conversation, record_to_play
from werkzeug import Request, Response

from agent.ui.html import answer_html
from agent.ui.messages import EVERYTHING, part_with, parts
from inspection.trace import TraceStep
from scripts.source_session import play

BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
needs_ui = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs the extra: pip install .[ui]")
needs_browser = pytest.mark.skipif(
    BROWSER is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium and playwright: apt-get install chromium; pip install playwright",
)

#: `agent`, but a connection to anywhere else than this machine is noted in $OUTSIDE and refused.
OFFLINE_AGENT = """
import os, socket
real = socket.socket.connect
def connect(self, where):
    if self.family in (socket.AF_INET, socket.AF_INET6) and where[0] not in ("127.0.0.1", "::1", "localhost"):
        with open(os.environ["OUTSIDE"], "a") as file:
            file.write(f"{where}\\n")
        raise OSError("this test has no network")
    return real(self, where)
socket.socket.connect = connect
socket.getaddrinfo = (lambda real: lambda host, *a, **k: real(host, *a, **k) if host in (None, "127.0.0.1", "localhost")
                      else connect(socket.socket(), (host, 0)))(socket.getaddrinfo)
from agent.cli import main
main()
"""


# --- parts of a page --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 6, 13])
def test_parts_hold_every_step_once_and_no_more_than_a_browser_can_show(count: int) -> None:
    steps = [TraceStep(step_id=f"{i % 2}.{i}", kind="assistant", rollout=i % 2) for i in range(count)]
    steps += [TraceStep(step_id="finish.k.verify", kind="finish")]
    found = parts(steps, size=5)
    assert all(len(one) <= 5 for one in found.values())
    pieces = [step for name, one in found.items() if name != EVERYTHING for step in one]
    assert sorted(s.step_id for s in pieces) == sorted(s.step_id for s in steps)
    assert (EVERYTHING in found) == (len(steps) <= 5)
    for step in steps:
        assert step in found[part_with(found, step.step_id, running=False)]
    grown = parts([*steps, TraceStep(step_id="0.99", kind="assistant", rollout=0)], size=5)
    assert set(found) - {EVERYTHING} <= set(grown), "names stay"


def test_an_answer_is_a_table_that_nothing_in_it_breaks_out_of() -> None:
    def answer(text: str) -> str:
        return answer_html(TraceStep(step_id="0.2.0", kind="call", status="ok", text=text))

    found = answer(
        json.dumps({
            "errors": f"a.cu(1): {ATTACK}\n  ^",
            "detail": ATTACK,
            ATTACK: [ATTACK, {"tier": ATTACK, "of": 3}],
            "metrics": {"waves": 0.12, ATTACK: 2},
            "none": [],
        })
    )  # fmt: skip
    assert "<script" not in found and "<img" not in found and found.count("&lt;script&gt;") == 6
    assert "<td>waves</td><td>0.12</td>" in found and ", of 3</div>" in found
    assert found.count("\n") == 0, "one block of HTML on one line: the chat component reads no Markdown in it"
    for other in ("plain & simple", "[1, 2]", '"x"', "{", "9" * 5000):
        assert answer(other).startswith("<pre") and "<table" not in answer(other)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_session(home)
    make_session(home, "live", stop_after=3)
    play(record_to_play(tmp_path_factory.mktemp("record")), home, conversation(), "sources")
    config = home / "sessions" / "newer" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"version": 99}))
    return home


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outside") / "connections"


@pytest.fixture(scope="module")
def url(home: Path, outside: Path, make_httpserver: HTTPServer) -> Iterator[str]:
    """Of a running `agent ui`, whose questions go to a model of our own."""
    model = ("--policy", "openai", "--model", "m", "--base-url", base_url(make_httpserver, "openai"))
    process = subprocess.Popen(
        [sys.executable, "-c", OFFLINE_AGENT, "ui", "story", "--port", "0", *model],
        cwd=ROOT,
        env=environment(home, OUTSIDE=str(outside), HGEMM_AGENT_POLICY__MAX_ATTEMPTS="1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if line.startswith("open http://127.0.0.1:"):
            break
    else:
        pytest.fail("".join(told))
    yield line.split()[1]
    process.send_signal(2)
    assert process.wait(20) == 130
    assert "Traceback" not in process.stderr.read()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=BROWSER,
            args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"],
        )
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A fresh page that asked nobody but our server, and on which no text of a session ran as code."""
    asked: list[str] = []
    found = browser.new_page(viewport={"width": 1400, "height": 1000})
    found.set_default_timeout(15_000)
    found.on("request", lambda request: asked.append(request.url))
    yield found
    assert found.evaluate("window.pwned") is None
    assert [one for one in asked if not one.startswith((url, "data:", "blob:"))] == []
    found.close()


def shot(page: Any, name: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("HGEMM_AGENT_TEST_SHOTS", tmp_path))
    page.screenshot(path=folder / f"{name}.png")
    assert (folder / f"{name}.png").stat().st_size > 10_000


@needs_ui
@needs_browser
def test_open_click_a_step_see_the_diff_compare_ask(
    page: Any, url: str, outside: Path, httpserver: HTTPServer, tmp_path: Path
) -> None:
    page.goto(url)
    page.get_by_text("0.5.0 evaluate_source").click()
    page.wait_for_selector("#panel pre.diff .add:has-text('wrong();')")
    assert page.locator("#panel h3").inner_text().startswith("0.5.0 evaluate_source")
    assert ATTACK in page.inner_text("#panel pre.diff"), "shown as text"
    assert page.locator("script:has-text('pwned'), img[src*=attacker]").count() == 0
    assert page.get_by_text("A plain kernel").count() == 0, "reasoning is folded away"
    page.get_by_text("0.2 reasoning").click()
    page.get_by_text("A plain kernel").first.wait_for()
    shot(page, "trace", tmp_path)

    page.get_by_role("tab", name="Compare").click()
    page.wait_for_selector("#profiles table.profiles td:has-text('tensor_pipe_pct')")
    assert "faster than" in page.inner_text("#difference")
    shot(page, "compare", tmp_path)

    page.get_by_role("tab", name="Best so far").click()
    page.wait_for_selector("#curve .main-svg .scatterlayer .trace")
    assert "1.239x" in page.inner_text("#claims")
    shot(page, "best", tmp_path)

    page.get_by_role("tab", name="Ask").click()
    question = page.locator("#question textarea")
    question.fill("/why 0.2.0")
    question.press("Enter")
    page.wait_for_selector("#talk li:has-text('compile_error')")
    hostile = f"It failed to compile [0.2.0]. {ATTACK} ![x](http://attacker.example/y)"
    serve(httpserver, "openai", message("openai", hostile), Response("no", status=500))
    question.fill("Why was the first one rejected?")
    question.press("Enter")
    page.wait_for_selector("#talk :text('It failed to compile')")
    assert page.locator("#talk img").count() == 0
    question.fill("And the second?")
    question.press("Enter")
    page.wait_for_selector("#talk .bad")
    shot(page, "ask", tmp_path)
    page.locator("#talk a.step", has_text="0.2.0").last.click()
    page.wait_for_selector("#panel h3:has-text('0.2.0 evaluate_source')")
    assert not outside.exists(), outside.read_text()


@needs_ui
@needs_browser
def test_the_next_question_waits_for_the_answer(page: Any, url: str, httpserver: HTTPServer) -> None:
    """Whose arrival wiped out what was typed meanwhile."""
    answering = threading.Event()

    def slow(_: Request) -> Response:
        assert answering.wait(20)
        return Response(json.dumps(message("openai", "It is the fastest [0.8.0].")), mimetype="application/json")

    serve(httpserver, "openai", slow)
    page.goto(f"{url}?session=story&step=0.8.0")
    page.wait_for_selector("#panel h3:has-text('0.8.0 evaluate_source')")
    page.get_by_role("tab", name="Ask").click()
    question = page.locator("#question textarea")
    question.fill("Which is best?")
    question.press("Enter")
    page.wait_for_selector("#talk :text('Which is best?')")
    assert question.is_disabled() and question.input_value() == ""
    answering.set()
    page.wait_for_selector("#talk :text('It is the fastest')")
    question.fill("/best")
    page.wait_for_function("document.activeElement === document.querySelector('#question textarea')")
    question.press("Enter")
    page.wait_for_selector("#talk :text('passed the whole gate')")


@needs_ui
@needs_browser
def test_sources_of_a_policy_s_own_from_the_compile_error_to_the_faster_one(
    page: Any, url: str, tmp_path: Path
) -> None:
    def open_step(title: str) -> str:
        page.get_by_text(title).first.click()
        page.wait_for_selector(f"#panel h3:has-text('{title.split()[0]}')")
        return str(page.inner_text("#panel"))

    page.goto(f"{url}?session=sources")
    found = open_step("0.2.0 evaluate_source")
    assert "rejected: compile_error" in found and 'error: identifier "PITCH" is undefined' in found
    shot(page, "sources-compile-error", tmp_path)
    found = open_step("0.5.0 evaluate_source")
    assert "rejected: wrong_result" in found and "65536 outputs are wrong" in found
    assert page.locator("#panel pre.diff .del").inner_text().startswith("-constexpr int PAD")
    assert page.locator("#panel pre.diff .add").inner_text().startswith("+constexpr int PITCH")
    shot(page, "sources-wrong-result", tmp_path)
    found = open_step("0.8.0 evaluate_source")
    assert "best so far" in found and "lines added 4, removed 0" in found
    assert "interval_95" in page.inner_text("#panel table.answer")
    shot(page, "sources-right", tmp_path)
    open_step("0.10.0 profile")
    assert "time_us" in page.inner_text("#panel table.answer table.numbers >> nth=0")
    assert page.locator("#panel table.answer tr:has(th:text-is('limits')) .field").count() == 3, "a line a sentence"
    shot(page, "sources-profile", tmp_path)
    assert "eight rounds of fetch, barrier, multiply, barrier" in open_step("0.12 reasoning")
    found = open_step("0.12.0 evaluate_source")
    assert "best so far" in found and "faster than" in found
    page.locator("#panel pre.diff .add", has_text="__ldg").wait_for()
    shot(page, "sources-faster", tmp_path)

    page.get_by_role("tab", name="Compare").click()
    page.wait_for_selector("#profiles table.profiles td:has-text('tensor_pipe_pct')")
    assert page.input_value("#variant-a input").startswith("0.8.0  ")
    assert page.input_value("#variant-b input").startswith("0.12.0  ")
    shot(page, "sources-compare", tmp_path)
    page.get_by_role("tab", name="Best so far").click()
    page.wait_for_selector("#curve .main-svg .scatterlayer .trace")
    assert page.locator("#curve .xtick text").all_text_contents() == ["1", "2", "3", "4"]
    claims = page.inner_text("#claims")
    assert "after 3 variants" in claims and "after 4 variants" in claims and "passed the whole gate" in claims
    shot(page, "sources-best", tmp_path)
    page.locator("#claims a.step", has_text="time.offline").click()
    page.wait_for_selector("#panel h3:has-text('finish: time offline')")
    assert " us" in page.inner_text("#panel .said"), "the time beside the ratio"


@needs_ui
@needs_browser
def test_the_address_of_a_step_and_of_sessions_that_cannot_be_read(page: Any, url: str, home: Path) -> None:
    page.goto(f"{url}?session=story&step=0.8.0")
    page.wait_for_selector("#panel h3:has-text('0.8.0 evaluate_source')")
    listed = page.inner_text("#sessions")
    assert "story" in listed and "newer hgemm-agent (version 99" in listed
    for name, says in (
        ("newer", "newer hgemm-agent"),
        ("stori", "did you mean story"),
        ("..%2Fx", "not a session name"),
    ):
        page.goto(f"{url}?session={name}")
        page.wait_for_selector(f"#heading .bad:has-text('{says}')")


@needs_ui
@needs_browser
def test_a_session_that_goes_on_is_followed(page: Any, url: str, home: Path) -> None:
    from agent import session as sessions

    page.goto(f"{url}?session=live&step=0.5.0")
    page.wait_for_selector("#panel h3:has-text('0.5.0')")
    assert page.get_by_text("0.12.0 evaluate_plan").count() == 0
    go_on(home, sessions.load(home, "live"))
    page.get_by_text("0.12.0 evaluate_plan").wait_for()
    page.wait_for_selector("#heading :text('finished')")
    assert page.locator("#panel h3").inner_text().startswith("0.5.0"), "what the reader looks at stays"


@needs_ui
def test_what_a_stranger_s_page_may_not(url: str) -> None:
    import urllib.error
    import urllib.request

    def ask(path: str, data: bytes | None = None, **headers: str) -> tuple[int, Any, str]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    status, headers, body = ask("")
    assert status == 200 and "connect-src 'self'" in headers["content-security-policy"]
    assert ask("", Host="attacker.example")[0] == 403
    assert ask("gradio_api/upload", b"x")[0] == 403
    assert ask("gradio_api/file=/etc/passwd")[0] in (403, 404)
    assert "fonts.googleapis" not in body


@needs_ui
def test_mistakes_end_the_command(home: Path) -> None:
    refused = agent(home, "ui", "--host", "0.0.0.0")
    assert refused.returncode == 1 and "a token is needed" in refused.stderr and refused.stderr.count("\n") == 1
    unknown = agent(home, "ui", "stori")
    assert unknown.returncode == 1 and "did you mean story" in unknown.stderr

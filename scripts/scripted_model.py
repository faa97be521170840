"""A chat server that plays a conversation from a file, as a hosted model would: demonstrations and tests without a key.

    python scripts/scripted_model.py tests/data/source-session/conversation.yaml --port 8765
    agent optimize --policy openai --model scripted --base-url http://127.0.0.1:8765/v1 --shape 256,256,256

Speaks Chat Completions, streamed or not. It keeps no state: which turn is due is read from the conversation that comes
with a request, so a session that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

HOST = "127.0.0.1"
MODEL = "scripted"
#: Of a streamed text, a piece.
PIECE = 200
#: Stands for a number that no tool gave.
UNKNOWN = "(unknown)"
#: What comes before a request's answer: the number of the turn. An exception ends the connection without an answer.
Before = Callable[[int], None]


@dataclass(frozen=True)
class Conversation:
    """``turns``: text, reasoning and calls. ``sources``: what stands in the files that the calls name."""

    shape: str
    turns: tuple[Mapping[str, Any], ...]
    sources: Mapping[str, str]

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Raises OSError, or ValueError if a call names what is not there."""
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        sent = [a["source"] for turn in data["turns"] for _, a in _calls(turn) if "source" in a]
        sources = {name: (path.parent / name).read_text(encoding="utf-8") for name in dict.fromkeys(sent)}
        for turn in data["turns"]:
            for tool, arguments in _calls(turn):
                if "key" in arguments and arguments["key"] not in sources:
                    raise ValueError(f"{tool} is of {arguments['key']}, which no call sends")
        return cls(str(data["shape"]), tuple(data["turns"]), sources)

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The assistant's next message: a pure function of the conversation so far."""
        number = turn_of(messages)
        if number >= len(self.turns):
            return {"role": "assistant", "content": "That was all I had to say."}
        turn = self.turns[number]
        keys, facts = self._learned(messages)
        calls = []
        for index, (tool, given) in enumerate(_calls(turn)):
            arguments = dict(given)
            if "source" in arguments:
                arguments["source"] = self.sources[arguments["source"]]
            if "key" in arguments:
                arguments["key"] = keys.get(arguments["key"], UNKNOWN)
            function = {"name": tool, "arguments": json.dumps(arguments)}
            calls.append({"id": f"call_{number}_{index}", "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": _filled(turn.get("text", ""), facts)}
        if "reasoning" in turn:
            message["reasoning_content"] = _filled(turn["reasoning"], facts)
        return {**message, "tool_calls": calls} if calls else message

    def _learned(self, messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
        """What the tools said: the key of each file's variant, and facts under ``<file's stem>_<name>``."""
        names = {source: name for name, source in self.sources.items()}
        sent: dict[str, tuple[str, Mapping[str, Any]]] = {}
        keys: dict[str, str] = {}
        facts: dict[str, str] = {}
        for message in messages:
            for call in message.get("tool_calls") or ():
                sent[call["id"]] = (call["function"]["name"], json.loads(call["function"]["arguments"]))
            if message["role"] != "tool":
                continue
            _, arguments = sent[message["tool_call_id"]]
            said = json.loads(message["content"])
            name = names.get(arguments.get("source", ""))
            if name is not None and "key" in said:
                keys[name] = said["key"]
            about = next((one for one, key in keys.items() if key == said.get("key")), None)
            if about is not None:
                facts |= {f"{Path(about).stem}_{fact}": text for fact, text in _facts(said)}
        return keys, facts


def turn_of(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _calls(turn: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [next(iter(call.items())) for call in turn.get("calls", ())]


def _facts(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("ratio", "time_us", "reference_us"):
        if name in said:
            yield name, str(said[name])
    if "interval_95" in said:
        yield "interval", " to ".join(map(str, said["interval_95"]))
    if "detail" in said:
        yield "detail", str(said["detail"]).rstrip(".")
    if "errors" in said:
        yield "errors", str(said["errors"]).splitlines()[0]
    yield from zip(("bound", "stalled", "shape"), said.get("limits", ()), strict=False)


class _Known(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return UNKNOWN


def _filled(text: str, facts: Mapping[str, str]) -> str:
    """YAML's folding leaves one line break between paragraphs."""
    return string.Template(text.replace("\n", "\n\n")).substitute(_Known(facts)).strip()


# --- the server -------------------------------------------------------------------------------------------------------


def completion(message: Mapping[str, Any]) -> dict[str, Any]:
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "scripted", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}


def chunks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same message as a stream."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for field in ("reasoning_content", "content"):
        text = message.get(field, "")
        deltas += [{field: text[at : at + PIECE]} for at in range(0, len(text), PIECE)]
    deltas += [{"tool_calls": [{**call, "index": index}]} for index, call in enumerate(message.get("tool_calls", ()))]
    whole = completion(message)
    common = {**whole, "object": "chat.completion.chunk"}
    for delta in deltas:
        yield {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": whole["choices"][0]["finish_reason"]}]}


@contextmanager
def serving(conversation: Conversation, port: int = 0, before: Before = lambda turn: None) -> Iterator[str]:
    """The address to give as --base-url, for as long as the block lasts. Raises OSError if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            before(turn_of(body["messages"]))
            message = conversation.answer(body["messages"])
            if body.get("stream"):
                lines = [f"data: {json.dumps(one)}\n\n" for one in chunks(message)]
                self._send("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))
            else:
                self._send("application/json", json.dumps(completion(message)))

        def _send(self, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Whoever asked was killed meanwhile: nothing to be told."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(*_)

    server = Server((HOST, port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("conversation", type=Path)
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    try:
        conversation = Conversation.load(options.conversation)
        with serving(conversation, options.port) as url:
            print(f"--policy openai --model {MODEL} --base-url {url} --shape {conversation.shape}", flush=True)
            threading.Event().wait()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

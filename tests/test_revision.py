"""The commit of a checkout: on a branch, packed, detached, in a worktree; and of what is none."""

import subprocess
from pathlib import Path

from tools.revision import commit


def git(folder: Path, *words: str) -> str:
    given = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org", *words]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_what_git_says(tmp_path: Path) -> None:
    main, tree = tmp_path / "main", tmp_path / "tree"
    main.mkdir()
    git(main, "init", "-q")
    assert commit(main) == ""  # nothing is committed
    git(main, "commit", "-q", "--allow-empty", "-m", "first")
    git(main, "worktree", "add", "-q", str(tree), "-b", "other")
    git(tree, "commit", "-q", "--allow-empty", "-m", "second")
    expected = git(main, "rev-parse", "HEAD"), git(tree, "rev-parse", "HEAD")
    assert (commit(main), commit(tree)) == expected and len(set(expected)) == 2
    git(main, "pack-refs", "--all")
    assert (commit(main), commit(tree)) == expected
    git(main, "checkout", "-q", "--detach")
    assert commit(main) == expected[0]


def test_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
    (tmp_path / ".git").write_text("gitdir: nowhere")
    assert commit(tmp_path) == ""

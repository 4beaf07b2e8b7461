"""Folders that become Hub repositories."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

CARD_NAME = "README.md"


def publish(
    repo_id: str,
    write: Callable[[Path], None],
    files: Sequence[str],
    *,
    message: str,
    replaced: Sequence[str] = (),
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
) -> str:
    """Uploads a folder to a Hub repository, made if need be, and returns the commit's address.

    Args:
        repo_id: `"owner/name"`.
        write: Writes the files into an empty folder, or beside the card that the repository has already.
        files: Names and patterns of what is uploaded.
        message: Of the commit.
        replaced: Patterns of files that are deleted where they are not uploaded.
        private: Whether a new repository is private; `None` takes the owner's default.
        token: A write token; `None` takes the one that is logged in.
        revision: The branch, made if need be; `None` is the main one.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        with contextlib.suppress(EntryNotFoundError):
            api.hf_hub_download(repo_id, CARD_NAME, revision=revision, local_dir=scratch, token=token)
        write(Path(scratch))
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=scratch,
            commit_message=message,
            revision=revision,
            allow_patterns=list(files),
            delete_patterns=list(replaced),
        )
    return str(commit.commit_url)

"""The fingerprint of a model's weights: a hash of what their files hold, whatever those are called."""

import hashlib
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polder.errors import ArgumentError

__all__ = ["fingerprint", "fingerprint_of_settings"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SETTINGS = (".json", ".py")
"""What a model computes with besides its weights, such as the base of its rotary positions, the size to which it brings
images, and code of its own."""
_TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "generation_config.json",
)
"""Settings that decide which tokens there are, and no more: those are in a block's key."""
_SETTLED_SECONDS = 2
"""A file that changed later than this before it was hashed may change again within one tick of its time stamp."""
_log = logging.getLogger(__name__)


def fingerprint(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, or of the weight files and the settings of a model's folder, in hex.

    Equal contents have equal fingerprints: names of weights do not count. A file is read once. Its hash is remembered
    in ``$XDG_CACHE_HOME/polder/fingerprints`` with its inode, size and times. As long as the kernel gives the same of
    it, to ask again costs a look at the file and no more.

    Parameters
    ----------
    path : path
        A file, or a folder with files such as ``model.safetensors`` and ``config.json``.

    Raises
    ------
    ArgumentError
        The folder holds no weights.
    OSError
        A file cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from polder.kv.fingerprint import fingerprint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "model.safetensors").write_bytes(b"weights")
    ...     before = fingerprint(folder)
    ...     _ = Path(folder, "model.safetensors").rename(Path(folder, "renamed.safetensors"))
    ...     fingerprint(folder) == before
    True
    """
    return _hash_all(*_files(Path(path)))


def fingerprint_of_settings(path: str | os.PathLike[str]) -> str:
    """The same of all that a model's folder has beside the weights, such as the settings of its processor of images.

    Parameters
    ----------
    path : path
        The folder, or a file, which has nothing beside it.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    return _hash_all([], _settings(Path(path)))


def _hash_all(weights: list[Path], settings: list[Path]) -> str:
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        hashes = [*threads.map(_hash, weights)]
        named = [f"{it.name} {digest}" for it, digest in zip(settings, threads.map(_hash, settings), strict=True)]
    return hashlib.sha256("\n".join(sorted(hashes + named)).encode()).hexdigest()


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """The weights, and the settings: what those decide depends on their names."""
    if not path.is_dir():
        return [path], []
    files = [it for it in path.iterdir() if it.suffix in _WEIGHTS]
    if not files:
        raise ArgumentError(f"{path} holds no weights: no file ends in {', '.join(_WEIGHTS)}")
    return files, _settings(path)


def _settings(path: Path) -> list[Path]:
    found = path.iterdir() if path.is_dir() else ()
    return [
        it
        for it in found
        if it.suffix in _SETTINGS and it.name not in _TEXTS and not it.name.endswith(".index.json") and it.is_file()
    ]


def _hash(path: Path) -> str:
    """The hash of a file, remembered or computed."""
    path = path.resolve(strict=True)
    note = _folder() / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
    seen = _seen(path)
    try:
        kept = json.loads(note.read_text())
        if kept["seen"] == seen:
            return kept["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # Nothing is remembered, or not as this version writes it.
    settled_before = time.time() - _SETTLED_SECONDS
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _seen(path) != seen:
        raise ArgumentError(f"{path} changed while it was hashed; start again when its writer has finished")
    if seen[-1] < settled_before * 1e9:
        _remember(note, json.dumps({"path": str(path), "seen": seen, "sha256": digest}))
    return digest


def _seen(path: Path) -> list[int]:
    """What the kernel changes of a file when its contents change; a program cannot set the last of it."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "polder", "fingerprints")


def _remember(note: Path, text: str) -> None:
    whole = note.with_suffix(f".{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(text)
        whole.replace(note)
    except OSError as error:
        _log.warning("the hash of a weight file is not remembered, and is computed at each start: %s", error)

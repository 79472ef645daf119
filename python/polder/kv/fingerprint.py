"""The fingerprint of a model's weights: a hash of what their files hold, whatever those are called."""

import hashlib
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polder.errors import ArgumentError

__all__ = ["fingerprint"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "quantization_config.json")
"""What a model computes with besides its weights, such as the base of its rotary positions."""
_SETTLED_SECONDS = 2
"""A file that changed later than this before it was hashed may change again within one tick of its time stamp."""
_log = logging.getLogger(__name__)


def fingerprint(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, or of the weight files and the configuration of a model's folder, in hex.

    Equal contents have equal fingerprints: names do not count. A file is read once. Its hash is remembered in
    ``$XDG_CACHE_HOME/polder/fingerprints`` with its inode, size and times. As long as the kernel gives the same of it,
    to ask again costs a look at the file and no more.

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
    files = _files(Path(path))
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as threads:
        hashes = sorted(threads.map(_hash, files))
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path.resolve(strict=True)]
    files = [it for it in path.iterdir() if it.suffix in _WEIGHTS]
    if not files:
        raise ArgumentError(f"{path} holds no weights: no file ends in {', '.join(_WEIGHTS)}")
    files += [path / name for name in _CONFIGS if (path / name).exists()]
    return [it.resolve(strict=True) for it in files]


def _hash(path: Path) -> str:
    """The hash of a file, remembered or computed."""
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

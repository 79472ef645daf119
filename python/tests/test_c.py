"""The C API: a C program on two emulated hosts."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import polder

EXAMPLES = Path(__file__).parents[2] / "examples"
POLDER = Path(os.environ.get("POLDER", Path(sys.prefix) / "bin/polder"))

if not shutil.which("pkg-config"):
    pytest.skip("there is no pkg-config", allow_module_level=True)


def compiled(scratch: Path, program: str) -> Path:
    environment = {**os.environ, "PKG_CONFIG_PATH": str(Path(sys.prefix) / "lib/pkgconfig")}
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "polder"], env=environment, capture_output=True, text=True, check=True
    )
    source = EXAMPLES / f"{program}.c"
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run(["cc", *strict, source, "-o", scratch / program, *flags.stdout.split()], check=True)
    return scratch / program


def start(program: Path, host: int, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    scratch = program.parent
    pool = {"POLDER_POOL": str(scratch / "pool"), "POLDER_HOST": str(host), "POLDER_RUN": str(scratch)}
    environment = {**os.environ, **pool, **environment}
    return subprocess.Popen(
        [program, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(program: Path, host: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    with start(program, host, *arguments, **environment) as process:
        stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def incoherent(scratch: Path, script: str) -> str:
    """What a script prints that runs the programs of `scratch` on two hosts whose caches are not coherent."""
    polder._core.format(scratch / "pool", "64MiB", hosts=2, coherence="software")
    hosts: list[str | Path] = [POLDER, "rehearse", "--file", scratch / "pool", "--launcher"]
    environment = {**os.environ, "POLDER_POOL": str(scratch / "pool")}
    done = subprocess.run(
        [*hosts, "--", "sh", "-ec", script],
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_c_program_reads_what_a_host_published_whose_caches_are_not_coherent(scratch: Path) -> None:
    compiled(scratch, "objects")
    script = "POLDER_HOST=0 ./objects publish && POLDER_HOST=1 ./objects sum"
    assert incoherent(scratch, script) == "498501\n"


def test_a_ring_carries_messages_between_hosts_whose_caches_are_not_coherent(scratch: Path) -> None:
    compiled(scratch, "ring")
    script = "POLDER_HOST=1 ./ring receive & POLDER_HOST=0 ./ring send; wait $!"
    assert incoherent(scratch, script).startswith("100 messages, 3333252 bytes; then: host 0 pid")


def test_ranks_count_in_one_window_of_hosts_whose_caches_are_not_coherent(scratch: Path) -> None:
    compiled(scratch, "window")
    script = "POLDER_HOST=1 ./window 1 2 & POLDER_HOST=0 ./window 0 2; wait $!"
    assert sorted(incoherent(scratch, script).splitlines()) == ["400 400 100", "400 400 101"]


def test_a_cache_gives_what_a_host_put_whose_caches_are_not_coherent(scratch: Path) -> None:
    compiled(scratch, "cache")
    script = "POLDER_HOST=0 ./cache put && POLDER_HOST=1 ./cache get"
    assert incoherent(scratch, script) == "2 of 3 blocks\n"


@pytest.mark.parametrize("environment", [{}, {"POLDER_COHERENCE": "software"}])
def test_a_c_program_reads_on_one_host_what_it_published_on_another(scratch: Path, environment: dict[str, str]) -> None:
    program = compiled(scratch, "objects")
    with polder.Pool(scratch / "pool", size="64MiB", host=3, run=scratch):
        published = run(program, 0, "publish", **environment)
        assert (published.returncode, published.stderr) == (0, "")
        again = run(program, 0, "publish", **environment)
        assert again.returncode == 3
        assert "/example/table exists already" in again.stderr
        summed = run(program, 1, "sum", **environment)
        assert (summed.stdout, summed.stderr) == ("498501\n", "")
        gone = run(program, 0, "sum", **environment)
        assert gone.returncode == 2
        assert "no object /example/table" in gone.stderr


def test_a_c_program_follows_the_coherence_of_the_pool_and_another_is_refused(scratch: Path) -> None:
    program = compiled(scratch, "objects")
    polder._core.format(scratch / "pool", "64MiB", coherence="software")
    published = run(program, 0, "publish", POLDER_LOG="info")
    assert published.returncode == 0, published.stderr
    assert "coherence=Software" in published.stderr
    refused = run(program, 0, "sum", POLDER_COHERENCE="coherent")
    assert refused.returncode != 0
    assert "was formatted with --coherence software, and coherent is set here" in refused.stderr


def test_a_host_id_that_the_pool_does_not_have_is_a_membership(scratch: Path) -> None:
    program = compiled(scratch, "objects")
    polder.Pool(scratch / "pool", size="64MiB", run=scratch).close()
    done = run(program, 64, "sum")
    assert done.returncode == 8
    assert "host id 64 is not one of this pool's ids" in done.stderr


def test_a_missing_pool_is_a_status_and_a_sentence(scratch: Path) -> None:
    done = run(compiled(scratch, "objects"), 0, "sum")
    assert done.returncode == 2
    assert f"{scratch / 'pool'}: no such file or device" in done.stderr


@pytest.mark.parametrize("environment", [{}, {"POLDER_COHERENCE": "software"}])
def test_a_ring_carries_messages_from_one_host_to_another(scratch: Path, environment: dict[str, str]) -> None:
    program = compiled(scratch, "ring")
    with polder.Pool(scratch / "pool", size="64MiB", host=3, run=scratch) as pool:
        with start(program, 1, "receive", **environment) as receiver:
            sent = run(program, 0, "send", **environment)
            assert (sent.returncode, sent.stderr) == (0, "")
            stdout, stderr = receiver.communicate(timeout=60)
        assert (receiver.returncode, stderr) == (0, "")
        assert stdout.startswith("100 messages, 3333252 bytes; then: host 0 pid")
        assert "has closed the sender of the ring /example/ring" in stdout
        assert pool.list() == []


@pytest.mark.parametrize("environment", [{}, {"POLDER_COHERENCE": "software"}])
def test_ranks_on_two_hosts_count_in_one_window(scratch: Path, environment: dict[str, str]) -> None:
    program = compiled(scratch, "window")
    with polder.Pool(scratch / "pool", size="64MiB", host=3, run=scratch) as pool:
        with start(program, 0, "0", "2", **environment) as first, start(program, 1, "1", "2", **environment) as second:
            for rank, process in enumerate((first, second)):
                assert process.communicate(timeout=60) == (f"400 400 {101 - rank}\n", "")
        assert pool.list() == []


def test_one_thread_of_a_window_has_a_lock_at_a_time(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads count 2,000 times each under one lock of one window."""
    monkeypatch.setenv("POLDER_RUN", str(scratch))
    library = ctypes.CDLL(str(Path(sys.prefix) / "lib/libpolder.so"))
    library.polder_error.restype = ctypes.c_char_p
    pool, window, patience = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(30_000)
    polder._core.format(scratch / "pool", "64MiB", hosts=2, coherence="software")
    assert library.polder_pool_open(str(scratch / "pool").encode(), 0, ctypes.byref(pool)) == 0
    name = ctypes.c_char_p(b"/locks")
    assert library.polder_window_create(pool, name, 0, 1, ctypes.c_size_t(64), patience, ctypes.byref(window)) == 0

    def get(into: ctypes.c_uint64) -> int:
        return library.polder_window_get(window, 0, ctypes.c_size_t(0), ctypes.byref(into), ctypes.c_size_t(8))

    def count(failures: list[int]) -> None:
        word = ctypes.c_uint64()
        for turn in range(2000):
            failures.append(library.polder_window_lock(window, 0, turn % 2, patience))
            failures.append(get(word))
            word.value += 1
            put = library.polder_window_put(window, 0, ctypes.c_size_t(0), ctypes.byref(word), ctypes.c_size_t(8))
            failures += [put, library.polder_window_unlock(window, 0)]

    failures: list[int] = []
    threads = [threading.Thread(target=count, args=[failures]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = ctypes.c_uint64()
    assert (get(counted), set(failures), counted.value) == (0, {0}, 4000)
    # No thread has the lock, so none gives it back. A thread that has it waits for nothing.
    assert library.polder_window_unlock(window, 0) == 1
    assert b"does not have the lock of rank 0" in library.polder_error()
    assert library.polder_window_lock(window, 0, 1, patience) == 0
    assert library.polder_window_lock(window, 0, 0, ctypes.c_uint64(1)) == 5
    assert (library.polder_window_unlock(window, 0), library.polder_window_unlock(window, 0)) == (0, 1)
    assert (library.polder_window_close(window), library.polder_pool_close(pool)) == (0, 0)


def test_a_second_receiver_and_a_second_rank_are_refused_by_the_names_that_the_caller_gave(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLDER_RUN", str(scratch))
    library = ctypes.CDLL(str(Path(sys.prefix) / "lib/libpolder.so"))
    library.polder_error.restype = ctypes.c_char_p
    polder._core.format(scratch / "pool", "64MiB", hosts=2)
    pool, sender, receiver, second = (ctypes.c_void_p() for _ in range(4))
    assert library.polder_pool_open(str(scratch / "pool").encode(), 0, ctypes.byref(pool)) == 0
    assert library.polder_ring_create(pool, b"/ring", 0, 0, ctypes.byref(sender)) == 0
    assert library.polder_ring_open(pool, b"/ring", ctypes.c_uint64(0), ctypes.byref(receiver)) == 0
    assert library.polder_ring_open(pool, b"/ring", ctypes.c_uint64(0), ctypes.byref(second)) == 3
    assert library.polder_error().startswith(b"the ring /ring has a receiver")
    window, again, none = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(0)
    assert library.polder_window_create(pool, b"w", 0, 1, ctypes.c_size_t(64), none, ctypes.byref(window)) == 0
    assert library.polder_window_create(pool, b"w", 0, 1, ctypes.c_size_t(64), none, ctypes.byref(again)) == 3
    assert library.polder_error().startswith(b"rank 0 of the window w is taken")
    assert library.polder_window_close(window) == 0
    assert (library.polder_receiver_close(receiver), library.polder_sender_close(sender)) == (0, 0)
    assert library.polder_pool_close(pool) == 0


def test_a_late_receiver_is_told_in_terms_of_c(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLDER_RUN", str(scratch))
    library = ctypes.CDLL(str(Path(sys.prefix) / "lib/libpolder.so"))
    library.polder_error.restype = ctypes.c_char_p
    polder._core.format(scratch / "pool", "64MiB", hosts=2)
    pool, sender, receiver = (ctypes.c_void_p() for _ in range(3))
    assert library.polder_pool_open(str(scratch / "pool").encode(), 1, ctypes.byref(pool)) == 0
    assert library.polder_ring_create(pool, b"/ring", 1, 64, ctypes.byref(sender)) == 0
    assert library.polder_ring_open(pool, b"/ring", ctypes.c_uint64(0), ctypes.byref(receiver)) == 0
    pushes = [library.polder_ring_push(sender, 0, b"x", ctypes.c_size_t(1), ctypes.c_uint64(0)) for _ in range(2)]
    assert pushes == [0, 5]
    said = library.polder_error()
    assert b"raise timeout_ms, or look at that process" in said
    assert b"timeout=" not in said
    assert (library.polder_receiver_close(receiver), library.polder_sender_close(sender)) == (0, 0)
    assert library.polder_pool_close(pool) == 0


def test_an_evicted_host_gets_no_address(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLDER_RUN", str(scratch))
    library = ctypes.CDLL(str(Path(sys.prefix) / "lib/libpolder.so"))
    library.polder_error.restype = ctypes.c_char_p
    library.polder_object_address.restype = ctypes.c_void_p
    polder._core.format(scratch / "pool", "64MiB", hosts=2)
    pool, held, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(64)
    assert library.polder_pool_open(str(scratch / "pool").encode(), 1, ctypes.byref(pool)) == 0
    assert library.polder_object_create(pool, b"/object", size, ctypes.byref(held)) == 0
    assert library.polder_object_address(held)
    subprocess.run([POLDER, "pool", "evict", "1", "--pool", scratch / "pool"], check=True, capture_output=True)
    written = (library.polder_object_write(held, ctypes.c_size_t(0), bytes(64), size) for _ in range(10_000_000))
    assert any(status != 0 for status in written), "it is told of its eviction"
    assert library.polder_object_address(held) is None
    assert b"host 1 was evicted" in library.polder_error()
    assert (library.polder_object_close(held), library.polder_pool_close(pool)) == (0, 0)


def test_a_sender_that_is_killed_is_named(scratch: Path) -> None:
    program = compiled(scratch, "ring")
    with polder.Pool(scratch / "pool", size="64MiB", host=3, run=scratch):
        with start(program, 0, "wait") as sender, start(program, 1, "receive") as receiver:
            assert sender.stdout
            assert sender.stdout.readline() == "the ring is there\n"
            sender.kill()
            stdout, _ = receiver.communicate(timeout=60)
        assert stdout == f"0 messages, 0 bytes; then: host 0 pid {sender.pid} died or stopped\n"


@pytest.mark.parametrize("environment", [{}, {"POLDER_COHERENCE": "software"}])
def test_what_one_host_puts_into_a_cache_another_gets(scratch: Path, environment: dict[str, str]) -> None:
    program = compiled(scratch, "cache")
    with polder.Pool(scratch / "pool", size="64MiB", host=3, run=scratch):
        assert run(program, 1, "get", **environment).stdout == "0 of 3 blocks\n"
        stored = run(program, 0, "put", **environment)
        assert (stored.returncode, stored.stderr) == (0, "")
        found = run(program, 1, "get", **environment)
        assert (found.stdout, found.stderr) == ("2 of 3 blocks\n", "")
        refused = run(program, 1, "twice", **environment)
        assert refused.returncode == 1
        assert "two buffers share memory" in refused.stderr

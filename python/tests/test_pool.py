"""Pools and objects."""

import itertools
import mmap
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import polder
from polder import _core

DTYPES = arrays.boolean_dtypes() | arrays.integer_dtypes(endianness="<") | arrays.floating_dtypes(endianness="<")


def sealed(words: list[int]) -> bytes:
    """A line of a pool whose checksum is right (docs/format.md)."""
    line = struct.pack("<7Q", *words)
    return line + struct.pack("<Q", xxhash.xxh3_64_intdigest(line))


def test_what_one_host_writes_another_reads(scratch: Path) -> None:
    with (
        polder.Pool(scratch / "pool", size="64MiB", host=0, coherence="software", run=scratch) as one,
        polder.Pool(scratch / "pool", host=1, coherence="software", run=scratch) as two,
    ):
        written = one.create("/x", shape=(3, 5), dtype="int16")
        with written.write() as array:
            array[:] = np.arange(15).reshape(3, 5)
        with two.open("/x", shape=(3, 5), dtype="int16").read() as array:
            assert array.tolist() == np.arange(15).reshape(3, 5).tolist()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_any_array_comes_back_bit_for_bit(pool: polder.Pool, data: st.DataObject) -> None:
    dtype = data.draw(DTYPES)
    expected = data.draw(arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=40)))
    fresh = data.draw(st.booleans())
    try:
        with pool.create("/array", shape=expected.shape, dtype=dtype) as thing, thing.write(fresh=fresh) as array:
            array[...] = expected
        with pool.open("/array", shape=expected.shape, dtype=dtype) as again, again.read() as array:
            assert array.tobytes() == expected.tobytes()
    finally:
        pool.destroy("/array")


def test_a_new_object_holds_zeros_and_a_read_array_cannot_be_written(pool: polder.Pool) -> None:
    with pool.create("/zeros", 1000).read() as array:
        assert not array.any()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_write_that_raises_publishes_nothing(pool: polder.Pool) -> None:
    thing = pool.create("/x", shape=4, dtype="float64")
    with pytest.raises(ZeroDivisionError), thing.write() as array:
        array[:] = 1 / 0
    with thing.write() as array:
        array[0] = 1
        with thing.read() as seen:
            assert seen[0] == 0
    with thing.read() as array:
        assert array.tolist() == [1, 0, 0, 0]


def test_names_are_taken_listed_and_given_back(pool: polder.Pool) -> None:
    pool.create("/a", 10)
    with pytest.raises(polder.NameExistsError, match="/a exists already"):
        pool.create("/a", 10)
    assert [(entry.name, entry.nbytes, entry.owner) for entry in pool.list()] == [("/a", 10, 0)]
    pool.destroy("/a")
    assert pool.list() == []
    with pytest.raises(polder.NotFoundError, match="no object /a") as caught:
        pool.open("/a")
    assert isinstance(caught.value, LookupError)
    with pytest.raises(polder.ArgumentError):
        pool.create("no slash\0", 10)


def test_counters_and_damage_are_told(pool: polder.Pool) -> None:
    assert pool.check() == []
    pool.create("/thousand", 1000)
    told = pool.stat()
    assert (told["objects"], told["object_bytes"]) == (1, 1000)
    assert told["bytes"] == pool.nbytes


def test_a_full_pool_says_so_and_goes_on(pool: polder.Pool) -> None:
    half = pool.nbytes // 2
    pool.create("/half", half).close()
    for _ in range(3):
        with pytest.raises(polder.PoolFullError, match="the pool is full"):
            pool.create("/other-half", half)
    with pool.create("/small", 100).write() as array:
        array[:] = 1
    pool.destroy("/half")
    pool.create("/quarter", half // 2)


def test_a_quota_is_a_limit_of_the_job(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="64MiB", job=7, quota="1MiB", run=scratch) as pool:
        pool.create("/fits", 1000)
        with pytest.raises(polder.QuotaError, match="job 7"):
            pool.create("/too-much", 2 << 20)
        assert [entry.job for entry in pool.list()] == [7]


def test_a_shape_that_the_object_cannot_hold_is_refused(pool: polder.Pool) -> None:
    pool.create("/ten", 10)
    with pytest.raises(polder.ArgumentError, match=r"/ten has 10 bytes"):
        pool.open("/ten", shape=3, dtype="float64")
    with pytest.raises(polder.ArgumentError, match="Python objects"):
        pool.create("/object", shape=3, dtype=object)
    with pytest.raises(polder.ArgumentError, match="one of them"):
        pool.create("/both", 10, shape=10)
    with pytest.raises(polder.ArgumentError, match="shape has 65 sides, of which NumPy makes no array"):
        pool.create("/sides", shape=(1,) * 65)


def test_a_name_that_utf_8_has_not_is_refused_as_an_argument(pool: polder.Pool) -> None:
    for call in (
        lambda name: pool.create(name, 10),
        pool.open,
        pool.destroy,
        pool.list,
        lambda name: polder.Group(pool, name, 0, 1),
        lambda name: _core.kv_remove(pool, name),
    ):
        with pytest.raises(polder.ArgumentError, match=r"'/\\ud800' holds half of a surrogate pair"):
            call("/\ud800")


def test_the_pool_keeps_dtype_and_shape_and_others_are_refused_by_name(scratch: Path) -> None:
    with (
        polder.Pool(scratch / "pool", size="64MiB", host=0, coherence="software", run=scratch) as one,
        polder.Pool(scratch / "pool", host=1, coherence="software", run=scratch) as two,
    ):
        point = np.dtype([("at", "<f8", (3,)), ("mass", "<f4")])
        for name, shape, dtype in [("/whole", (2, 3), "float32"), ("/one", (), "int64"), ("/points", (4,), point)]:
            one.create(name, shape=shape, dtype=dtype).close()
            with two.open(name) as found:
                assert (found.shape, found.dtype) == (shape, np.dtype(dtype))
        for asked in ({"dtype": "int32"}, {"shape": 6}, {"shape": (3, 2), "dtype": "float32"}, {"dtype": "uint8"}):
            with pytest.raises(polder.ArgumentError, match=r"/whole holds an array of float32 and shape \(2, 3\)"):
                two.open("/whole", **asked)
        two.open("/whole", shape=(2, 3), dtype="float32").close()
        # Of bytes alone nothing is kept, as of an object of C.
        one.create("/bytes", 16).close()
        assert two.open("/bytes").dtype == np.uint8
        assert two.open("/bytes", dtype="float32").shape == (4,)
        union = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [0, 0]})
        with pytest.raises(polder.ArgumentError, match=r"out-of-order fields.*share it as integers or bytes"):
            one.create("/union", shape=2, dtype=union)
        with pytest.raises(polder.ArgumentError, match="put its dimensions into shape"):
            one.create("/union", shape=2, dtype=np.dtype(("<f8", (3,))))
        assert "/union" not in [entry.name for entry in one.list()]


def test_an_array_that_is_not_alike_is_neither_written_nor_filled(pool: polder.Pool) -> None:
    object = pool.create("/floats", shape=(3, 4), dtype="float32")
    array = np.arange(12, dtype="float32").reshape(3, 4)
    object.write_from(array)
    others: list[Any] = [
        array.astype("int32"),
        array.astype(">f4"),
        array.reshape(4, 3),
        array[0],
        np.empty(6),
        bytearray(47),
    ]
    for other in others:
        for call in (object.write_from, object.read_into):
            with pytest.raises(polder.ArgumentError, match=r"/floats has dtype float32 and shape \(3, 4\), the array "):
                call(other)
    read = bytearray(48)
    object.read_into(read)
    assert bytes(read) == array.tobytes()
    object.close()


def test_an_evicted_hosts_objects_are_neither_read_nor_written(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="64MiB", host=3, run=scratch) as pool, pool.create("/one", shape=1) as one:
        command = [Path(sys.executable).parent / "polder", "pool", "evict", "3", "--pool", scratch / "pool"]
        subprocess.run(command, check=True, env={**os.environ, "POLDER_RUN": str(scratch)}, capture_output=True)
        with pytest.raises(polder.EvictedError):
            while True:
                pool.create("/other", shape=1).close()
                pool.destroy("/other")
        for call in (lambda: one.write_from(bytes(1)), lambda: one.read_into(bytearray(1))):
            with pytest.raises(polder.EvictedError):
                call()


def test_an_object_that_may_exist_is_opened_if_it_is_what_is_asked_for(pool: polder.Pool) -> None:
    with pool.create("/x", shape=3, dtype="int16", exist_ok=True).write() as array:
        array[:] = 7
    with pool.create("/x", shape=3, dtype="int16", exist_ok=True).read() as array:
        assert array.tolist() == [7, 7, 7]
    with pytest.raises(polder.ArgumentError, match="/x holds an array of int16"):
        pool.create("/x", shape=3, dtype="float32", exist_ok=True)
    with pytest.raises(polder.ArgumentError, match="/x has 6 bytes, not 7"):
        pool.create("/x", 7, exist_ok=True)
    with pytest.raises(polder.NameExistsError):
        pool.create("/x", shape=3, dtype="int16")


def test_a_pool_of_another_size_or_a_short_file_is_named(scratch: Path) -> None:
    path = scratch / "pool"
    polder.Pool(path, size="64MiB", run=scratch).close()
    polder.Pool(path, size="64MiB", run=scratch).close()
    with pytest.raises(polder.ArgumentError, match=r"is a pool of 64\.0 MiB, and a size of 128\.0 MiB is asked for"):
        polder.Pool(path, size="128MiB", run=scratch)
    (scratch / "short").write_bytes(b"x" * 1271)
    with pytest.raises(polder.NotAPoolError, match="short is no pool: it has 1271 bytes"):
        polder.Pool(scratch / "short", run=scratch)


def test_numbers_and_types_that_cannot_be_are_named_and_nothing_is_made(scratch: Path, pool: polder.Pool) -> None:
    byte_sizes = "give a number of bytes, or a size such as 64KiB or 8GiB"
    for wrong, message in [
        ({"host": -1}, "host is -1; give a whole number from 0 to 65535"),
        ({"host": 70000}, "host is 70000; give a whole number from 0 to 65535"),
        ({"job": -1}, f"job is -1; give a whole number from 0 to {(1 << 64) - 1}"),
        ({"host": True}, "host is True; give a whole number from 0 to 65535"),
        ({"size": -1}, f"size is -1; {byte_sizes}"),
        ({"quota": True}, f"quota is True; {byte_sizes}"),
        ({"timeout": True}, "timeout is True; give a number from 0 on"),
        ({"timeout": "5"}, "timeout is '5'; give a number from 0 on"),
        ({"size": "abc"}, f"size is 'abc'; {byte_sizes}"),
        ({"quota": "much"}, f"quota is 'much'; {byte_sizes}"),
        ({"coherence": "x"}, 'coherence is "x"; expected auto, coherent, software or hdm-db'),
    ]:
        with pytest.raises(polder.ArgumentError) as caught:
            polder.Pool(scratch / "new", run=scratch, **{"size": "64MiB", **wrong})
        assert str(caught.value) == message
    for layout, message in [
        ({"nbytes": -1}, "nbytes is -1"),
        ({"nbytes": True}, "nbytes is True"),
        ({"shape": (2, True)}, r"shape is \(2, True\)"),
        ({"nbytes": 1 << 64}, f"nbytes is {1 << 64}"),
        ({"shape": 1 << 64}, f"is {1 << 64}; give a whole number"),
        ({"shape": "abc"}, "shape is 'abc'; give a whole number or a sequence of them"),
        ({"shape": 2.5}, "shape is 2.5"),
        ({"shape": 3, "dtype": "S"}, "dtype is '|S0', of 0 bytes"),
        ({"shape": 3, "dtype": "V0"}, "dtype is '|V0', of 0 bytes"),
        ({"shape": 3, "dtype": "datetime64[s]"}, r"dtype is datetime64\[s\], which has no buffers"),
    ]:
        with pytest.raises(polder.ArgumentError, match=message.replace("|", r"\|")):
            pool.create("/x", **layout)
    assert pool.list() == []
    assert not (scratch / "new").exists()
    assert pool.create("/sixteen", shape=np.int64(16)).shape == (16,)
    assert pool.create("/pair", shape=np.array([2, 3])).shape == (2, 3)


@pytest.mark.parametrize(
    ("kept", "other"), [("software", "coherent"), ("coherent", "software"), ("hdm-db", "software")]
)
def test_every_attach_follows_what_a_pool_was_formatted_with_and_another_coherence_is_refused(
    scratch: Path, kept: str, other: str
) -> None:
    path = scratch / "pool"
    polder._core.format(path, "64MiB", coherence=kept)
    for said in (None, "auto", kept):
        with polder.Pool(path, run=scratch, coherence=said) as pool:
            assert pool.coherence == kept
    refused = f"pool was formatted with --coherence {kept}, and {other} is set here;"
    with pytest.raises(polder.SettingsError, match=refused):
        polder.Pool(path, run=scratch, coherence=other)
    with pytest.raises(polder.ArgumentError, match='coherence is "x"; expected auto, coherent, software or hdm-db'):
        polder._core.format(scratch / "none", "64MiB", coherence="x")
    assert not (scratch / "none").exists()


def test_a_pool_shows_where_it_is_and_as_whom(scratch: Path) -> None:
    pool = polder.Pool(scratch / "pool", size="64MiB", run=scratch)
    assert pool.path == scratch / "pool"
    assert repr(pool) == f"<polder.Pool {scratch}/pool host=0 coherence=coherent>"
    pool.close()
    assert repr(pool) == f"<polder.Pool {scratch}/pool closed>"


def test_regions_that_are_no_pools_are_told_apart(scratch: Path) -> None:
    with pytest.raises(polder.RegionError, match="no such file") as caught:
        polder.Pool(scratch / "missing")
    assert isinstance(caught.value, OSError)
    (scratch / "junk").write_bytes(b"\x07" * (1 << 20))
    with pytest.raises(polder.NotAPoolError, match="polder pool format"):
        polder.Pool(scratch / "junk", run=scratch)
    with pytest.raises(polder.RegionError, match="directory"):
        polder.Pool(scratch)
    for error in (polder.RegionError, polder.NotAPoolError, polder.PeerDeadError, polder.SettingsError):
        assert issubclass(error, polder.PolderError)


def test_an_empty_path_and_a_type_that_python_refuses_are_named() -> None:
    for size in (None, "1MiB"):
        with pytest.raises(polder.RegionError, match=r'^"" is an empty path; name a dax device, or a file'):
            polder.Pool("", size=size)
    with pytest.raises(TypeError, match="path"):
        polder.Pool(3)  # type: ignore[arg-type]


def test_any_flipped_byte_of_the_first_lines_is_found(scratch: Path) -> None:
    path = scratch / "pool"
    polder.Pool(path, size="64MiB", run=scratch).close()
    whole = path.read_bytes()[:128]
    for index in range(128):
        with path.open("r+b") as file:
            file.seek(index)
            file.write(bytes([whole[index] ^ 0x10]))
        with pytest.raises((polder.CorruptError, polder.NotAPoolError, polder.VersionError)):
            polder.Pool(path, run=scratch)
        with path.open("r+b") as file:
            file.seek(index)
            file.write(whole[index : index + 1])
    polder.Pool(path, run=scratch).close()


def test_a_pool_that_is_too_small_or_of_another_version_is_refused_and_left_as_it_was(scratch: Path) -> None:
    path = scratch / "pool"
    polder.Pool(path, size="64MiB", run=scratch).close()
    whole = path.read_bytes()
    os.truncate(path, 1 << 20)
    with pytest.raises(polder.TooSmallError, match="needs 64 MiB here, the region has 1 MiB"):
        polder.Pool(path, run=scratch)
    path.write_bytes(whole)
    words = list(struct.unpack("<7Q", whole[:56]))
    words[1] += 1
    with path.open("r+b") as file:
        file.write(sealed(words))
    with pytest.raises(polder.VersionError, match=f"has format {words[1] & 0xFFFFFFFF},"):
        polder.Pool(path, run=scratch)
    assert path.read_bytes() == sealed(words) + whole[64:]
    with pytest.raises(polder.TooSmallError):
        polder.Pool(scratch / "new", size="64KiB", run=scratch)
    assert not (scratch / "new").exists()


def test_a_host_id_that_another_machine_holds_is_refused(scratch: Path) -> None:
    path = scratch / "pool"
    (scratch / "elsewhere").mkdir()
    with (
        polder.Pool(path, size="64MiB", host=1, run=scratch) as holder,
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as pool,
    ):
        holder.create("/held", 10).close()

        def find(told: Callable[[list[int]], bool]) -> tuple[int, list[int]]:
            lines = ((at, list(struct.unpack_from("<7Q", pool, at))) for at in range(4096, len(pool), 64))
            return next((at, words) for at, words in lines if told(words))

        host_line, host = find(lambda words: words[0] == words[2] == 1 and words[1] >> 32 > 0)
        process_line, process = find(lambda words: words[0] == 1 and words[2] == os.getpid())
        heartbeat = process_line + 64 * struct.unpack_from("<H", pool, 66)[0]
        over = threading.Event()

        def beat() -> None:
            for count in itertools.count(1 << 32):
                pool[heartbeat : heartbeat + 64] = sealed([count, process[1], 0, 0, 0, 0, 0])
                if over.wait(0.01):
                    return

        # As if another kernel had started the holder.
        pool[host_line : host_line + 64] = sealed([host[0], host[1] ^ 1, *host[2:]])
        beating = threading.Thread(target=beat)
        beating.start()
        try:
            with pytest.raises(polder.HostLiveError, match="host id 1 is live") as caught:
                polder.Pool(path, host=1, run=scratch / "elsewhere")
            assert caught.value.host == 1
        finally:
            over.set()
            beating.join()
        pool[host_line : host_line + 64] = sealed(host)
        # Its heartbeat may have seen the other line: then it writes no more.
        assert [entry.name for entry in holder.list()] == ["/held"]


def test_a_pool_without_permission_is_refused_with_its_owner_and_mode(scratch: Path) -> None:
    nobody = 65534
    path = scratch / "pool"
    polder.Pool(path, size="64MiB", run=scratch).close()
    path.chmod(0o600 if os.getuid() == 0 else 0)
    scratch.chmod(0o755)
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:  # whom no mode keeps out
            os.setuid(nobody)
        try:
            polder.Pool(path, run=scratch)
        except polder.RegionError as error:
            os._exit(0 if "no permission" in str(error) and f"owner {path.stat().st_uid}" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_closed_pool_says_so(scratch: Path) -> None:
    pool = polder.Pool(scratch / "pool", size="64MiB", run=scratch)
    thing = pool.create("/x", 10)
    thing.close()
    with pytest.raises(polder.ClosedError, match="object is closed"), thing.read():
        pass
    pool.close()
    pool.close()
    with pytest.raises(polder.ClosedError, match="pool is closed"):
        pool.list()


def test_threads_that_use_and_close_one_object_do_not_wait_for_each_other_for_ever(scratch: Path) -> None:
    program = f"""
import threading, polder
pool = polder.Pool({str(scratch / "pool")!r}, size="64MiB", run={str(scratch)!r})
thing = pool.create("/x", 10)
thing.close()

def use():
    for _ in range(3000):
        try:
            with thing.read():
                pass
        except polder.ClosedError:
            thing.close()

threads = [threading.Thread(target=use) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_a_host_id_that_the_pool_does_not_have_or_that_no_keeper_gives_is_no_membership(scratch: Path) -> None:
    path = scratch / "pool"
    polder.Pool(path, size="64MiB", run=scratch).close()
    with pytest.raises(polder.MembershipError, match="host id 9 is not one of this pool's ids, 0 to 7"):
        polder.Pool(path, host=9, run=scratch)
    keeper = subprocess.Popen(
        [Path(sys.executable).with_name("polder"), "--pool", path, "keeper", "--ids", "keeper"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout
    assert "runs" in keeper.stdout.readline()
    keeper.kill()
    keeper.communicate()
    with pytest.raises(polder.MembershipError, match="no keeper answered"):
        polder.Pool(path, host=1, run=scratch, timeout=0.1)


def test_a_forked_child_is_told_to_open_the_pool_anew(pool: polder.Pool) -> None:
    child = os.fork()
    if child == 0:
        try:
            pool.list()
        except polder.ClosedError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.list() == []


def test_an_argument_goes_before_the_environment_and_that_before_the_file(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = scratch / "config.toml"
    config.write_text(f'pool = "{scratch}/from-file"\nhost = 3\nrun = "{scratch}"\n')
    monkeypatch.setenv("POLDER_CONFIG", str(config))
    monkeypatch.setenv("POLDER_POOL", f"{scratch}/from-environment")
    with polder.Pool(size="64MiB") as pool:
        assert (str(pool.path), pool.host) == (f"{scratch}/from-environment", 3)
    monkeypatch.setenv("POLDER_HOST", "2")
    with polder.Pool(scratch / "from-argument", size="64MiB") as pool:
        assert (str(pool.path), pool.host) == (f"{scratch}/from-argument", 2)
    monkeypatch.setenv("POLDER_COHERENCE", "hopeful")
    with pytest.raises(polder.SettingsError, match="POLDER_COHERENCE=hopeful"):
        polder.Pool(size="64MiB")


def test_a_size_in_thousands_makes_a_pool_of_whole_pages_and_a_pool_that_is_named_is_not_made_without(
    scratch: Path,
) -> None:
    with polder.Pool(scratch / "pool", size="17MB", run=scratch):
        assert (scratch / "pool").stat().st_size == 17_000_000 // 4096 * 4096
    with pytest.raises(polder.RegionError, match="mistyped: no such file or device; check the path, or create a pool"):
        polder.Pool(scratch / "mistyped", run=scratch)
    assert not (scratch / "mistyped").exists()


def test_a_pool_larger_than_its_file_system_is_not_made(scratch: Path) -> None:
    twice = 2 * shutil.disk_usage(scratch).total
    with pytest.raises(polder.RegionError, match=r" free, not .*; give a smaller --size or size=, or make room there"):
        polder.Pool(scratch / "pool", size=twice, run=scratch)
    assert not (scratch / "pool").exists()


DEFAULT = """
import os, polder
folder = f"/dev/shm/polder-{os.getuid()}"
with polder.Pool(size="64MiB") as pool:
    assert str(pool.path) == f"{folder}/pool", pool.path
    assert [os.stat(path).st_mode & 0o777 for path in (folder, pool.path)] == [0o700, 0o600]
    assert len(os.listdir(folder)) == 3, os.listdir(folder)
assert os.listdir(folder) == ["pool"]
os.chown(folder, 4711, 4711)
try:
    polder.Pool()
except polder.RegionError as error:
    assert f"{folder} belongs to user 4711, not to {os.getuid()}; it is not this pool's" in str(error), error
else:
    raise AssertionError("a folder that another user planted is used")
"""


def test_the_default_pool_lies_in_a_folder_that_no_other_user_enters() -> None:
    alone = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    own_shm = "mount -t tmpfs tmpfs /dev/shm"
    if subprocess.run([*alone, own_shm], capture_output=True, check=False).returncode:
        pytest.skip("this user may not have mounts of its own")
    subprocess.run([*alone, f'{own_shm} && exec "$@"', "sh", sys.executable, "-c", DEFAULT], check=True, timeout=60)


def test_a_program_that_never_closes_its_pool_leaves_nothing_behind(scratch: Path) -> None:
    program = f"import polder; p = polder.Pool({str(scratch / 'pool')!r}, size='64MiB', run={str(scratch)!r})"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
    assert os.listdir(scratch) == ["pool"]

"""Packs what the wheel has beside its Python module for Debian, and as an OCI image.

    python scripts/packages.py deb     dist/polder_VERSION_amd64.deb
    python scripts/packages.py image   dist/polder-image, an OCI layout; needs root, mmdebstrap and Debian's archive
    python scripts/packages.py check   both, and what their users do with them: lintian, and commands in the image

The package depends on the C library alone. The Python module is not in it, because Debian 12's numpy is too old.
`pip install` of the wheel brings both.
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "target/wheel/polder_memory.data"
VERSION = next(
    line.split('"')[1] for line in (ROOT / "Cargo.toml").read_text().splitlines() if line.startswith("version")
)
DEB = ROOT / f"dist/polder_{VERSION}-1_amd64.deb"
IMAGE = ROOT / "dist/polder-image"
SUITE = "bookworm"
EPOCH = int(
    os.environ.get("SOURCE_DATE_EPOCH", "") or subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT)
)

# No device of a pool is open to users unless an administrator puts them into this group.
UDEV = 'SUBSYSTEM=="dax", GROUP="polder", MODE="0660"\n'
POSTINST = """#!/bin/sh
set -e
getent group polder >/dev/null || groupadd --system polder
"""
CONTROL = f"""Package: polder
Version: {VERSION}-1
Architecture: amd64
Maintainer: Polder <maintainers@polder.invalid>
Depends: libc6 (>= 2.34), libgcc-s1, passwd
Recommends: udev
Section: admin
Priority: optional
Homepage: https://github.com/polder-memory/polder
Description: memory that several hosts share, and tiers of memory
 One pool of CXL memory, or of a file in /dev/shm, for many hosts: named
 objects, MPI through a libfabric provider, and a planner. An agent keeps the
 services of a host on their tiers of memory.
"""
COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: polder
Source: https://github.com/polder-memory/polder

Files: *
Copyright: 2026 The Polder authors
License: Apache-2.0
 On Debian systems, the text of the license is in /usr/share/common-licenses/Apache-2.0.
"""


def run(*command: object, **options: object) -> str:
    """The standard output of a command that has to succeed."""
    ended = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False, **options)  # type: ignore[call-overload]
    if ended.returncode:
        sys.exit(f"packages: {' '.join(map(str, command))}: exit status {ended.returncode}")
    return ended.stdout


def put(path: Path, text: str | bytes, mode: int = 0o644) -> None:
    """Writes a file of the package, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)


def deb() -> None:
    """The package, of the files that `make dist` has put beside the wheel's module."""
    if not DATA.exists():
        sys.exit(f"packages: {DATA} is missing; `make dist` builds it")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        command = DATA / "scripts/polder"
        put(root / "usr/bin/polder", command.read_bytes(), 0o755)
        for library in (DATA / "data/lib").rglob("*.so"):
            put(root / "usr/lib" / library.relative_to(DATA / "data/lib"), library.read_bytes())
        put(root / "usr/include/polder.h", (DATA / "data/include/polder.h").read_text())
        put(root / "usr/lib/pkgconfig/polder.pc", (DATA / "data/lib/pkgconfig/polder.pc").read_text())
        unit = (ROOT / "crates/agent/share/polder-agent.service").read_text()
        put(root / "usr/lib/systemd/system/polder-agent.service", unit.replace("/usr/local/bin/", "/usr/bin/"))
        put(root / "usr/lib/udev/rules.d/60-polder.rules", UDEV)
        for shell, place in [("bash", "bash-completion/completions/polder"), ("zsh", "zsh/vendor-completions/_polder")]:
            put(root / "usr/share" / place, run(command, "completion", shell))
        documents = root / "usr/share/doc/polder"
        put(documents / "copyright", COPYRIGHT)
        stamp = datetime.fromtimestamp(EPOCH, UTC).strftime("%a, %d %b %Y %H:%M:%S +0000")
        change = f"polder ({VERSION}-1) unstable; urgency=medium\n\n  * See CHANGELOG.md of the project.\n\n"
        change += f" -- Polder <maintainers@polder.invalid>  {stamp}\n"
        put(documents / "changelog.Debian.gz", gzip.compress(change.encode(), 9, mtime=0))
        put(root / "DEBIAN/control", CONTROL)
        put(root / "DEBIAN/triggers", "activate-noawait ldconfig\n")
        put(root / "DEBIAN/postinst", POSTINST, 0o755)
        for path in [root, *root.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
        DEB.parent.mkdir(exist_ok=True)
        run(
            "dpkg-deb",
            "--root-owner-group",
            "-Zxz",
            "--build",
            root,
            DEB,
            env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)},
        )
    print(DEB.relative_to(ROOT))


def blob(image: Path, kind: str, content: bytes) -> dict[str, object]:
    """Adds a blob to the layout; what others name it by."""
    digest = hashlib.sha256(content).hexdigest()
    put(image / "blobs/sha256" / digest, content)
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}


def image() -> None:
    """An OCI image layout of one layer: Debian's smallest root with the package."""
    deb()
    with tempfile.TemporaryDirectory() as folder:
        layer = Path(folder) / "layer.tar"
        inside = "/var/tmp/polder.deb"
        hooks = [f"upload {DEB} {inside}", f'chroot "$1" dpkg -i {inside}', f'rm -f "$1{inside}"']
        options = ["--variant=essential", "--include=libgcc-s1,passwd", *(f"--customize-hook={hook}" for hook in hooks)]
        run("mmdebstrap", "--quiet", *options, SUITE, layer, env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)})
        plain = layer.read_bytes()
    created = datetime.fromtimestamp(EPOCH, UTC).isoformat()
    config = {
        "created": created,
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/usr/bin/polder"], "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(plain).hexdigest()}"]},
        "history": [{"created": created, "created_by": "scripts/packages.py"}],
    }
    shutil.rmtree(IMAGE, ignore_errors=True)
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(IMAGE, "config.v1+json", json.dumps(config).encode()),
        "layers": [blob(IMAGE, "layer.v1.tar+gzip", gzip.compress(plain, 6, mtime=0))],
    }
    entry = blob(IMAGE, "manifest.v1+json", json.dumps(manifest).encode())
    entry["annotations"] = {"org.opencontainers.image.ref.name": VERSION}
    put(IMAGE / "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    put(IMAGE / "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}))
    print(IMAGE.relative_to(ROOT))


def unpack(folder: Path) -> None:
    """Lays the image's layer out below `folder`, by what its index, manifest and configuration say."""

    def read(entry: dict[str, str]) -> bytes:
        kind, digest = entry["digest"].split(":")
        content = (IMAGE / "blobs" / kind / digest).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, f"{digest} is damaged"
        return content

    index = json.loads((IMAGE / "index.json").read_text())
    manifest = json.loads(read(index["manifests"][0]))
    config = json.loads(read(manifest["config"]))
    (layer,) = manifest["layers"]
    plain = gzip.decompress(read(layer))
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(plain).hexdigest()}"]
    archive = folder / "layer.tar"
    archive.write_bytes(plain)
    with tarfile.open(archive) as layer_files:
        layer_files.extractall(folder / "root", filter="tar" if hasattr(tarfile, "tar_filter") else None)
    archive.unlink()


def check() -> None:
    """Holds package and image against what their users do; ends with an error where one fails."""
    image()
    findings = run("lintian", "--fail-on", "error", "--suppress-tags", "no-manual-page", DEB)
    print(findings, end="")
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        root = Path(folder) / "root"

        def inside(command: str) -> str:
            # As a container has it: /proc, and a /dev/shm.
            mounts = f"mount -t proc proc {root}/proc && mkdir -p {root}/dev/shm && mount -t tmpfs tmpfs {root}/dev/shm"
            chroot = f'{mounts} && exec chroot {root} /bin/sh -c "$0"'
            path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
            return run("unshare", "--mount", "--pid", "--fork", "sh", "-c", chroot, command, env=path)

        assert inside("polder --version").startswith(f"polder {VERSION}"), "version"
        question = "plan train --model llama3-405b --platform nvl72-ndr --gpus 16384 --json"
        assert inside(f"polder {question}") == run(ROOT / "target/dist/polder", *question.split()), "plan"
        story = "polder pool format --pool /dev/shm/p --size 64MiB && polder pool check --pool /dev/shm/p"
        inside(f"{story} && polder pool destroy --pool /dev/shm/p --yes")
        assert inside("getent group polder"), "the group of the udev rule"
        inside("polder agent check /nowhere.toml 2>&1 | grep -q nowhere.toml")
        for file in [
            "lib/udev/rules.d/60-polder.rules",
            "lib/systemd/system/polder-agent.service",
            "lib/libfabric/libpolder-fi.so",
        ]:
            assert (root / "usr" / file).exists(), file
    print("packages: the package and the image are right")


if __name__ == "__main__":
    os.chdir(ROOT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["deb", "image", "check"])
    {"deb": deb, "image": image, "check": check}[parser.parse_args().what]()

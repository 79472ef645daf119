"""modules.py UNPACKED FOLDER: copies drivers of a kernel's package into FOLDER: nvdimm, CXL, dax, the network card.

Their names begin with their place in the order of loading. FOLDER stays empty where modules are in another package.
"""

import lzma
import pathlib
import re
import subprocess
import sys

NVDIMM = ["nfit", "nd_pmem", "device_dax", "dax_pmem", "kmem"]
CXL = ["cxl_port", "cxl_acpi", "cxl_mem", "cxl_pmem", "cxl_pci", "dax_cxl"]
NETWORK = ["e1000"]


def content(path: pathlib.Path) -> bytes:
    """A module as the kernel takes it."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", path], capture_output=True, check=True).stdout
    return path.read_bytes()


def main(unpacked: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies what is wanted, after what each of them needs. What is not there is built in."""
    found = {path.name.split(".ko")[0].replace("-", "_"): path for path in unpacked.rglob("*.ko*")}
    modules: dict[str, bytes] = {}

    def load(name: str) -> None:
        if name in modules or name not in found:
            return
        module = content(found[name])
        needs = re.search(rb"\0depends=([^\0]*)\0", module)
        for other in (needs[1].decode() if needs else "").split(","):
            load(other.replace("-", "_"))
        modules[name] = module

    for name in [*NVDIMM, *CXL, *NETWORK]:
        load(name)
    for number, (name, module) in enumerate(modules.items()):
        (folder / f"{number:02}-{name}.ko").write_bytes(module)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))

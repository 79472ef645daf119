#!/bin/sh
# The window tests of mpi4py at 16 ranks on two emulated hosts: nothing fails through the pool that does not fail over TCP. The first run
# fetches the suite from PyPI.
# mpi_suite.sh PYTHON
home=$(dirname "$0")/../..
exec "$1" "$home/scripts/mpi_check.py" --libraries mpich --ranks 16 --ways windows --limit 600 \
    test_attributes test_errhandler test_handle test_rma test_rma_nb test_util_sync test_win

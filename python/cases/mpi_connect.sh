#!/bin/sh
# Two jobs of MPI connect if they have one pool and one POLDER_JOB. Without that, the one that connects is told so.
# mpi_connect.sh MPICC MPIEXEC
"$1" "$(dirname "$0")/mpi_connect.c" -o connect || exit 1

# pair ARGUMENTS...: a job that accepts, and beside it one that connects.
pair() {
    rm -f port
    polder mpi run -np 2 --mpiexec "$mpiexec" "$@" ./connect accept >accept.out 2>&1 &
    accepts=$!
    polder mpi run -np 2 --mpiexec "$mpiexec" "$@" ./connect connect >connect.out 2>&1
}

mpiexec=$2
polder pool format --pool "$PWD/pool" --size 64MiB >formatted || exit 1
export POLDER_JOB=7
pair --pool "$PWD/pool" && wait "$accepts" || { cat accept.out connect.out; exit 1; }
[ "$(cat accept.out connect.out | grep -c RIGHT)" = 4 ] || { cat accept.out connect.out; exit 1; }

# In a pool each: the one that waits would do so for ever.
unset POLDER_JOB
pair && { echo "connected to another job"; exit 1; }
kill "$accepts"; wait "$accepts"
grep -q "of another job or in another pool" connect.out || { cat connect.out; exit 1; }
! grep -q "died" connect.out || { cat connect.out; exit 1; }

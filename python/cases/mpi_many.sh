#!/bin/sh
# 64 ranks on 4 emulated hosts, in one pool of 1 GiB: everybody sends to everybody, sums, exchanges halos and puts into windows, every
# value checked. Then the same over TCP. Prints what the pool's file takes, and how long the first exchange of all with all took.
# mpi_many.sh MPICC MPIEXEC
ranks=64
"$1" -O1 "$(dirname "$0")/../tests/ranks/many.c" -o many || exit 1
pool=$(mktemp -u /dev/shm/polder-case-XXXXXX)
trap 'rm -f "$pool"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
polder pool format --pool "$pool" --size 1GiB >formatted || exit 1

# once NAME COMMAND...: runs it, and prints what it says of memory and time.
once() {
    name=$1
    shift
    "$@" >said 2>&1 || { tail -30 said; exit 1; }
    [ "$(grep -c 'is done' said)" = $ranks ] || { tail -30 said; exit 1; }
    grep -E 'MiB|took|polder:' said | sed "s/^/$name: /"
}

for round in 1 2 3; do
    once "pool $round" polder mpi run -np $ranks --emulate 4 --pool "$pool" --mpiexec "$2" ./many 10
    once "tcp $round" env FI_PROVIDER=tcp MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1 "$2" -n $ranks ./many 10
done

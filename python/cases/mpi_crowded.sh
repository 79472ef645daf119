#!/bin/sh
# Streams between four ranks a core, on two emulated hosts, beside eight busy processes a core: through the pool, then over TCP, in turn.
# Prints the seconds of a message, and is wrong if the pool was slower in each round.
# mpi_crowded.sh MPICC MPIEXEC
ranks=$((4 * $(nproc)))
"$1" -O2 "$(dirname "$0")/../../crates/dev/src/bench/mpi.c" -o streams || exit 1
cases="stream:65536 stream:1048576 stream:4194304"
busy=
for _ in $(seq $((8 * $(nproc)))); do
    sh -c 'while :; do :; done' &
    busy="$busy $!"
done
trap 'kill $busy' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

for round in 1 2 3; do
    # shellcheck disable=SC2086
    polder mpi run -np $ranks --emulate 2 --mpiexec "$2" ./streams $cases >pool 2>said || { cat said; exit 1; }
    # shellcheck disable=SC2086
    FI_PROVIDER=tcp MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1 "$2" -n $ranks ./streams $cases >tcp || exit 1
    paste pool tcp | tee -a rounds
done
# Each message: the rounds in which the pool was slower.
awk '{ slower[$1] += $2 > $4 } END { for (name in slower) if (slower[name] == 3) { print name " is slower"; bad = 1 } exit bad }' rounds

#!/bin/sh
# own_shm.sh COMMAND...: runs a command with a /dev/shm of its own, and fails if the command leaves a pool there.
exec unshare --mount --propagation private sh -euc '
    left_in_shm=$1; shift
    mount -t tmpfs tmpfs /dev/shm
    "$@"
    left=$("$left_in_shm")
    [ -z "$left" ] || { printf "left in /dev/shm: %s\n" "$left" >&2; exit 1; }
' sh "$(dirname "$0")/left_in_shm.sh" "$@"

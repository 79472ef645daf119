#!/bin/sh
# own_shm.sh COMMAND...: runs a command with a /dev/shm of its own, and fails if the command leaves a pool there.
exec unshare --mount --propagation private sh -euc '
    mount -t tmpfs tmpfs /dev/shm
    "$@"
    # The folder of the own pools of this user stays.
    left=$(find /dev/shm -mindepth 1 -maxdepth 2 -path "*polder*" ! -path "/dev/shm/polder-$(id -u)")
    [ -z "$left" ] || { printf "left in /dev/shm: %s\n" "$left" >&2; exit 1; }
' sh "$@"

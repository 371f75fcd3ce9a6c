#!/usr/bin/env bash
# Debian's SLURM, for the tests of this folder, which are skipped without it. Starts nothing.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
if command -v slurmctld && command -v slurmd && command -v munged && command -v ip; then
    exit 0
fi >/dev/null
# Installing must not start daemons with the system's own settings.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2

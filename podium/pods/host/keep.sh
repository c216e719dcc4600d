#!/bin/sh
# Runs on the small machine that keeps a run alive (podium/pods/keeper.py): `podium pod run`; then the slice is deleted
# if it is still there, and the machine itself.
#   keep.sh MACHINE ZONE SLICE PYTHON ARGUMENTS...     SLICE: - leaves it rented; ARGUMENTS of `podium pod run`
machine=$1 zone=$2 slice=$3 python=$4
shift 4
"$python" -m podium.cli pod run "$@"
status=$?
tries=0
until [ "$slice" = - ] || "$python" -m podium.cli pod down "$slice" || [ $tries -ge 288 ]; do   # a day
    tries=$((tries + 1))
    sleep 300
done
gcloud compute instances delete "$machine" --zone="$zone" --quiet || sudo poweroff
exit $status

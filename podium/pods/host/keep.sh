#!/bin/sh
# Runs on the small machine that keeps a run alive (podium/pods/keeper.py): `podium pod run`; then the slice that was
# rented for the run is deleted if it is still there, and the machine itself. After a failure the machine is turned off,
# which costs only its disk, and its description keeps the end of the log: no one may have been watching.
#   keep.sh MACHINE ZONE SLICE PYTHON ARGUMENTS...     SLICE: - leaves it rented; ARGUMENTS of `podium pod run`
machine=$1 zone=$2 slice=$3 python=$4
shift 4
"$python" -m podium.cli pod run "$@"
status=$?
tail -c 2000 "$PODRUN_JOB_DIR/log" > "$PODRUN_JOB_DIR/end"
tries=0
until [ "$slice" = - ] || "$python" -m podium.cli pod down "$slice" || [ $tries -ge 288 ]; do   # a day
    tries=$((tries + 1))
    sleep 300
done
if [ $status != 0 ] && [ $status != 143 ]; then   # 143: stopped, as somebody wished
    gcloud compute instances add-metadata "$machine" --zone="$zone" \
        --metadata-from-file="podium-end=$PODRUN_JOB_DIR/end" --quiet && sudo poweroff && exit $status
fi
gcloud compute instances delete "$machine" --zone="$zone" --quiet || sudo poweroff
exit $status

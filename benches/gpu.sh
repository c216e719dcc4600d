#!/bin/sh
# What Podium does on a CUDA machine: the tests that need one, decode and update of SmolLM2-135M's shape in bfloat16, then
# what `podium doctor --full` finds, kernels beside references among it (benches/doctor.py), and what `podium plan` says of
# that GPU beside what memory_stats, nvidia-smi and the clock say (benches/gpu_accuracy.py).
#
#     benches/gpu.sh             results in build/results/*-gpu.json and gpu-*-h100.json, about fifteen minutes
#     benches/gpu.sh --record    the same, in place of the committed ones in benches/results
#     benches/gpu.sh --tiny      the tests, decode and update on the CPU, one layer, nothing kept: does this script work?
#
# From a checkout, in an environment with `pip install -e '.[cuda,demo]' pytest`; PYTHON names another interpreter.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi

if [ "${1:-}" = --tiny ]; then
    export JAX_PLATFORMS=cpu
    results=$(mktemp -d)
    trap 'rm -rf "$results"' EXIT
    tiny="--layers 1 --vocab 512"
    decode="$tiny --batch 8 --slots 8 --lengths fixed:4 --max-new-tokens 4"
    update="$tiny --repeats 1 --set prompts_per_step=2 --set group_size=4 --set rollout.max_new_tokens=8"
    update="$update --set train.row_tokens=96 --set rollout.slots=8"
elif [ $# -eq 0 ] || [ "$1" = --record ]; then
    export JAX_PLATFORMS=cuda,cpu
    results=build/results
    if [ $# -eq 1 ]; then results=benches/results; fi
    "$PYTHON" -c "import jax; print(jax.devices('gpu'))"
    decode="--batch 1024 --slots 512 --lengths fixed:256 --max-new-tokens 256"
    update="--set prompts_per_step=32 --set group_size=16 --set rollout.max_prompt_tokens=256"
    update="$update --set rollout.max_new_tokens=256 --set rollout.slots=512 --set train.row_tokens=1024"
    update="$update --set train.rows_per_device=16 --set train.head_chunk_tokens=8192"
else
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 2
fi

"$PYTHON" -m pytest -q -m "" tests/test_accelerator.py
# shellcheck disable=SC2086 # the options are words
"$PYTHON" -m benches.decode --results "$results" $decode
# shellcheck disable=SC2086
"$PYTHON" -m benches.update --results "$results" $update
if [ "${1:-}" != --tiny ]; then
    "$PYTHON" -m benches.doctor --results "$results" || echo "podium doctor has found something wrong, above"
    "$PYTHON" -m benches.gpu_accuracy --results "$results"
fi

#!/bin/sh
# What Podium does on a CUDA machine: the tests that need one, then decode and update of SmolLM2-135M's shape in bfloat16,
# then what `podium plan` says of that GPU beside what memory_stats, nvidia-smi and the clock say (benches/gpu_accuracy.py).
#
#     benches/gpu.sh             results in benches/results/*-gpu.json and gpu-accuracy-*.json, about fifteen minutes
#     benches/gpu.sh --tiny      the first two on the CPU, one layer, nothing kept: does this script work?
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
    decode="--layers 1 --vocab 512 --slots 8 --requests 2 --completions 4 --new-tokens 4 --prefill-rows 2 --repeats 1"
    update="--layers 1 --vocab 512 --prompts 2 --completions 2 --prompt-tokens 8 --new-tokens 8 --row-tokens 32 --repeats 1"
elif [ $# -eq 0 ]; then
    export JAX_PLATFORMS=cuda,cpu
    results=benches/results
    "$PYTHON" -c "import jax; print(jax.devices('gpu'))"
    lengths="--prompt-tokens 200 --new-tokens 256"
    decode="$lengths --max-prompt-tokens 256 --slots 512 --requests 64 --completions 16 --prefill-rows 32 --refill-steps 16"
    update="$lengths --prompts 32 --completions 16 --row-tokens 1024 --rows 16 --head-chunk-tokens 8192"
else
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
fi

"$PYTHON" -m pytest -q tests/test_accelerator.py
# shellcheck disable=SC2086 # the options are words
"$PYTHON" -m benches.decode --dtype bfloat16 --results "$results" $decode
# shellcheck disable=SC2086
"$PYTHON" -m benches.update --dtype bfloat16 --results "$results" $update
if [ -z "${1:-}" ]; then
    "$PYTHON" -m benches.gpu_accuracy --results "$results"
fi

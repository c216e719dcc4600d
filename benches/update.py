"""How fast the demo's update is on this machine: `podium bench update`, recorded.

    python -m benches.update --set train.rows_per_device=4

The demo's config with a random model of SmolLM2-135M's shape. Prints the figures of `podium bench update` and the
accelerator's peak memory as one JSON line, and writes benches/results/update-PLATFORM.json.
"""

import dataclasses
import json
from pathlib import Path

import jax

from benches.decode import SMOLLM2_135M
from benches.record import arguments, record
from podium.doctor.benchmarks.rollout import run_lengths
from podium.doctor.benchmarks.update import measure
from podium.hosts.platform import prepare_platform
from podium.models.architecture import with_layers
from podium.settings import load_settings
from podium.sharding import make_mesh
from podium.train.setup import run_spec

DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"


def main() -> None:
    """Measure, print and record."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.layers, help="fewer: a quick trial")
    parser.add_argument("--vocab", type=int, default=SMOLLM2_135M.vocab)
    parser.add_argument("--lengths", default="gsm8k", help="of completions, as of `podium bench update`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the config")
    parser.add_argument("--repeats", type=int, default=3, help="steps to time; the fastest counts")
    args = parser.parse_args()
    prepare_platform()
    config = load_settings([DEMO], args.set, {}).config
    decoder = dataclasses.replace(with_layers(SMOLLM2_135M, args.layers), vocab=args.vocab)
    mesh = make_mesh(config.mesh)
    spec = run_spec(config, decoder, mesh)
    found = measure(spec, mesh, run_lengths(args.lengths, spec), args.repeats)
    stats = jax.local_devices()[0].memory_stats() or {}
    result = {
        "layers": args.layers,
        "vocab": args.vocab,
        "lengths": args.lengths,
        "settings": args.set,
        **found,
        "peak_memory_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
    }
    print(json.dumps(result))
    record(f"update-{jax.default_backend()}", result, args.results)


if __name__ == "__main__":
    main()

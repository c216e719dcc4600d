"""Decoding long sequences of a model with windows, planned: Gemma 3 4B compiled for TPUs that are not there.

    python -m benches.windows_planned            (minutes of two cores; the compilation is kept)

A decode step of 128 sequences of 8,192 tokens on v6e-8: the roofline of the compiled program at the chip's published
bandwidths, over the time that it takes to read weights and keys and values, of layers with a window those within it
(without transfers between chips, which `floor_with_links_ms` has). The cache of such a sequence is held against one of
all layers for all tokens. Writes benches/results/windows-planned.json and its part of docs/planner-measurements.md;
exit status 1 where a bar is missed.
"""

import sys
from collections.abc import Mapping

from benches.planned import decode_step
from benches.record import MEASUREMENTS, ROOT, arguments, record, write_section
from podium.accelerators import find_accelerator
from podium.config.schema import Config
from podium.config.sizes import table_pages
from podium.rollout.cache_layout import kept_places
from podium.run.roles import find_decoder
from podium.settings import load_settings

NAME, TPU, MODEL = "windows-planned", "v6e-8", "google/gemma-3-4b-it"
SEQUENCES, TOKENS = 128, 8192
SETTINGS = (
    f"model={MODEL}",
    f"rollout.max_prompt_tokens={TOKENS // 2}",
    f"rollout.max_new_tokens={TOKENS // 2}",
    f"rollout.slots={SEQUENCES}",
    f"prompts_per_step={SEQUENCES // 8}",
)
BARS: Mapping[str, float] = {"cache_share": 0.3, "over_floor": 1.35}


def cache_share(config: Config) -> float:
    """Pages of the longest sequence, over those that all layers would have with all its tokens."""
    pages, kept = table_pages(config.rollout), kept_places(find_decoder(config), config.rollout)
    return sum(each.layers * (each.ring or pages) for each in kept) / (pages * sum(each.layers for each in kept))


def main() -> None:
    """Compile, compare with the bars, and write the figures."""
    args = arguments(__doc__).parse_args()
    config = load_settings([ROOT / "configs" / "gsm8k_gemma3_1b.yaml"], SETTINGS, {}).config
    found = decode_step(config, find_accelerator(TPU), TOKENS, folder=NAME)
    share, over = round(cache_share(config), 3), found["over_floor"]
    assert isinstance(over, float), "decode_step rounds it"
    found |= {"cache_share": share}
    print(found)
    met = {"cache_share": share <= BARS["cache_share"], "over_floor": over <= BARS["over_floor"]}
    record(NAME, {"settings": SETTINGS, "found": found, "bars": BARS, "met": met}, args.results, packages=["libtpu"])
    write_section(MEASUREMENTS, "windows", table(found), args.results)
    sys.exit(not all(met.values()))


def table(found: Mapping[str, object]) -> list[str]:
    """Markdown."""
    return [
        "| model | TPU | step, ms | floor, ms | with transfers, ms | step over its floor | cache over a full one |",
        "|---|---|---|---|---|---|---|",
        f"| {MODEL} | {found['tpu']} | {found['planned_ms']} | {found['floor_ms']} | {found['floor_with_links_ms']} |"
        f" {found['over_floor']} | {found['cache_share']} |",
    ]


if __name__ == "__main__":
    main()

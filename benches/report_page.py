"""Is a report right, small and harmless in a real browser? Headless Chromium opens it, wide and narrow.

    python -m benches.report_page RUN        (a run's folder, such as runs/demo; needs playwright and Chromium)

For RUN: no console error, no request, each section there, nothing wider than the window, and each value that is drawn
read back from the charts and compared with metrics.jsonl. For a made run of 2,000 steps with 256 completions each: the
seconds that `podium report` takes, the page's size, and its first paint. For a made run whose texts are hostile:
nothing of them runs. Prints and writes benches/results/report-page-cpu.json; exit status 1 where a bar is missed.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.record import arguments, record
from podium.files import read_lines
from podium.observe.report.page import write_report

WIDTHS = {"wide": 1280, "narrow": 390}
SECTIONS = ("headline", "findings", "curves", "time", "samples-0", "settings")
BAR_S, BAR_BYTES, BAR_PAINT_S = 15.0, 12_000_000, 2.0
STEPS, GROUPS, COMPLETIONS = 2_000, 32, 8
HOSTILE = (
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'><svg onload='window.pwned = 1'>",
    "javascript:window.pwned=1 \u202e right to left \u2066 \x1b[2J\x1b]0;title\x07",
    "y" * 1_000_000,
    "\ud800 half a character \udfff",
)
DRAWN = """() => [...document.querySelectorAll('.chart')].filter((e) => e.data).flatMap((e) =>
  e.data.filter((t) => t.showlegend !== false && t.type !== 'heatmap').map((t) => ({
    chart: e.parentElement.querySelector('h3')?.textContent, name: t.name, x: [...t.x], y: [...t.y] })))"""


def look(browser: Any, page_file: Path, width: int, folder: Path | None) -> dict[str, Any]:
    """What a browser of this width makes of a page; with a run's folder, its values are compared."""
    errors: list[str] = []
    requests: list[str] = []
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    page.uncheck("input[type=checkbox]")  # raw values, not smoothed ones
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # draws all charts
    drawn = page.evaluate(DRAWN)
    found = {
        "first_paint_s": round(paint, 2),
        "errors": errors,
        "requests": [url for url in requests if not url.startswith("file:")],
        "missing": [each for each in SECTIONS if not page.query_selector(f"#{each}")],
        "too_wide_px": page.evaluate("document.documentElement.scrollWidth") - width,
        "pwned": page.evaluate("window.pwned || document.title === 'title'"),
        "traces": len(drawn),
    }
    if folder is not None:
        found["wrong_values"] = wrong_values(drawn, folder)
    page.close()
    return found


def wrong_values(drawn: list[dict[str, Any]], folder: Path) -> list[str]:
    """Charts with a line that is no metric of the run."""
    values: dict[str, list[tuple[int, float]]] = {}
    for line in read_lines(folder / "metrics.jsonl"):
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                values.setdefault(name, []).append((line["step"], value))

    def is_a_metric(trace: dict[str, Any]) -> bool:
        points = list(zip(trace["x"], trace["y"], strict=True))
        return any(
            len(points) == len(series)
            and all(a == c and abs(b - d) <= 1e-5 * abs(d) for (a, b), (c, d) in zip(points, series, strict=True))
            for series in values.values()
        )

    return [f"{trace['chart']}: {trace['name']}" for trace in drawn if not is_a_metric(trace)]


def make_run(folder: Path, *, steps: int, groups: int, text: str, name: str = "made") -> Path:
    """A run whose metrics are numbers and whose samples all have this text."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"name: {json.dumps(name)}\nmodel: demo\nsteps: {steps}\n")
    metrics = (
        "train-reward/total/mean",
        "rollout/entropy",
        "time/train/rollout_s",
        "time/train/update_s",
        "time/wall_s",
    )
    more = tuple(f"train-reward/func/part{n}/mean" for n in range(40))  # as many as a real run has
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, **dict.fromkeys((*metrics, *more), step / 7)}) + "\n")
    one = {"text": text, "reward": 1.0, "parts": {"correct": 1.0}, "finish_reason": "stop", "tokens": 60}
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            for group in range(groups):
                head = {"step": step, "split": "train", "task": "made", "prompt": f"{(step * groups + group) % 7000}"}
                line = {**head, "question": text, "answer": "1", "completions": [one] * COMPLETIONS}
                file.write(json.dumps(line) + "\n")
    return folder


def main() -> None:
    """Prints and writes what was found."""
    parser = arguments(__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="the browser's program")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder, browser = (
            Path(scratch),
            playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"]),
        )
        write_report([args.run], folder / "run.html")
        found: dict[str, Any] = {
            name: look(browser, folder / "run.html", width, args.run) for name, width in WIDTHS.items()
        }
        long = make_run(folder / "long", steps=STEPS, groups=GROUPS, text="a sum of two numbers is 12 " * 8)
        start, cpu = time.perf_counter(), time.process_time()
        write_report([long], folder / "long.html")
        seconds = {"wall_s": round(time.perf_counter() - start, 2), "cpu_s": round(time.process_time() - cpu, 2)}
        size = (folder / "long.html").stat().st_size
        found["long"] = seconds | {"bytes": size, **look(browser, folder / "long.html", WIDTHS["wide"], None)}
        runs = [
            make_run(
                folder / f"hostile{n}", steps=3, groups=2, text=text.encode("utf-8", "replace").decode(), name=text[:90]
            )
            for n, text in enumerate(HOSTILE)
        ]
        write_report(runs, folder / "hostile.html")
        found["hostile"] = look(browser, folder / "hostile.html", WIDTHS["wide"], None)
    looks = [found[name] for name in (*WIDTHS, "long", "hostile")]
    harmless = not any(each["errors"] or each["requests"] or each["missing"] or each["pwned"] for each in looks)
    met = (
        harmless
        and all(
            found[name]["too_wide_px"] <= 0 and found[name]["traces"] and not found[name]["wrong_values"]
            for name in WIDTHS
        )
        and found["long"]["cpu_s"] <= BAR_S
        and found["long"]["bytes"] <= BAR_BYTES
        and found["long"]["first_paint_s"] <= BAR_PAINT_S
    )
    print(json.dumps(found, indent=2))
    record("report-page-cpu", {"met": met, **found}, args.results, packages=["plotly", "playwright"])
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()

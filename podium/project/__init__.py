"""`podium init`: writes a project to start from, with a config, questions, and a reward function of the user's own."""

import json
from pathlib import Path

from podium.config.errors import UsageError

TEMPLATES = Path(__file__).parent
FILES = {"config.yaml": "config.yaml", "rewards.txt": "rewards.py", "README.md": "README.md"}


def write_project(folder: Path) -> list[Path]:
    """Write the project into a new or empty folder, whose name becomes the project's, and return the files.

    Raises ValueError if the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; give the name of a new folder")
    texts = {
        Path(name): (TEMPLATES / template).read_text(encoding="utf-8").replace("{name}", folder.absolute().name)
        for template, name in FILES.items()
    }
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    for name, held_out in (("train", False), ("test", True)):
        chosen = [(a, b) for a, b in sums if ((a + 3 * b) % 4 == 0) == held_out]
        rows = [{"question": f"What is {a} + {b}? Answer with only the number.", "answer": a + b} for a, b in chosen]
        texts[Path("data") / f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]

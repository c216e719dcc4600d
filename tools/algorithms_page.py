"""The recipes in docs/algorithms.md, made from their code and docstrings: `python -m tools.algorithms_page`."""

import inspect
import re
import textwrap
from pathlib import Path

from podium.algorithms import recipes
from podium.algorithms.recipes import LOSSES, RECIPES

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
COLUMNS = ("recipe", "paper", "advantage", "loss", "mean", "clip", "ratio to", "equal rewards")
PAPER = re.compile(r"(arXiv|doi):([\w./-]*\w)")
ADDRESSES = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}


def algorithms_page(text: str) -> str:
    """The page with what stands between `<!-- recipes -->` and `<!-- differences -->` and their ends made anew."""
    made = {"recipes": _table(), "differences": "\n".join(map(_difference, RECIPES))}
    for name, content in made.items():
        begin, end = f"<!-- {name}: python -m tools.algorithms_page -->\n", f"\n<!-- end of {name} -->"
        before, after = text.index(begin) + len(begin), text.index(end)
        text = text[:before] + content + text[after:]
    return text


def _table() -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, RECIPES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---").replace("--- |", "---|")


def _row(name: str) -> tuple[str, ...]:
    recipe, paper = RECIPES[name](), PAPER.search(_docstring(name))
    assert paper is not None, f"the docstring of {name} cites no paper: arXiv:NUMBER or doi:NAME"
    site, number = paper.groups()
    clip = "none" if not LOSSES[recipe.loss].clips else f"{recipe.clip_low:g} / {recipe.clip_high:g}"
    return (
        f"`{name}`",
        f"[{number if site == 'arXiv' else paper[0]}]({ADDRESSES[site]}{number})",
        f"`{recipe.advantage.func.__name__}`",
        recipe.loss,
        recipe.mean,
        clip,
        recipe.old_logprobs,
        recipe.zero_variance,
    )


def _difference(name: str) -> str:
    """How a recipe differs from its paper: what its docstring says after `Differs:`."""
    _, found, text = _docstring(name).partition("Differs: ")
    assert found, f"the docstring of {name} does not say how it differs from its paper: Differs: ..."
    text = f"- `{name}`: {text[0].upper()}{text[1:]}"
    return textwrap.fill(text, width=120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _docstring(name: str) -> str:
    """The docstring of the function that makes a recipe; it has the recipe's name."""
    return inspect.getdoc(getattr(recipes, name)) or ""


if __name__ == "__main__":
    PAGE.write_text(algorithms_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

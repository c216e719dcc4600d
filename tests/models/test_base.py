"""What an export's card says of the model that the run began with."""

from pathlib import Path

import pytest
import yaml

from podium.models.files.model_licence import DEMO_MODEL, BaseModel, base_of, name_for_others
from podium.models.files.source import ModelSource, resolve
from podium.observe.card import _front_matter, _snippet


def source(path, name: str) -> ModelSource:
    return ModelSource(name=name, path=path, kind="folder")


def test_the_demo_model_is_known_with_its_licence():
    assert base_of(resolve("demo")) == BaseModel(hub_id=DEMO_MODEL, same_weights=True, license="apache-2.0")


def test_a_model_of_the_hub_has_its_cards_licence(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: other/base\n---\n# A model\n")
    assert base_of(source(tmp_path, "me/model")) == BaseModel(hub_id="me/model", same_weights=True, license="mit")
    own = BaseModel(hub_id="other/base", same_weights=False, license="mit")
    assert base_of(source(tmp_path, str(tmp_path))) == own


@pytest.mark.parametrize("card", ["", "# no front matter", "---\n- a list\n---\n", "---\n: : {\n---\n"])
def test_a_card_without_them_is_no_error(tmp_path, card):
    (tmp_path / "README.md").write_text(card)
    assert base_of(source(tmp_path, str(tmp_path))) == BaseModel(hub_id=None, same_weights=False, license=None)


def test_others_load_the_base_of_an_adapter_by_a_name_that_they_can_resolve(tmp_path, monkeypatch):
    """A folder's own weights are not those of the model that its card names."""
    assert name_for_others(resolve("demo")) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert name_for_others(source(tmp_path, "me/model")) == "me/model"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("---\nbase_model: other/base\n---\n")
    assert name_for_others(source(Path("mine"), "mine")) == str(tmp_path / "mine")


@pytest.mark.parametrize("adapter", [True, False])
def test_the_card_names_the_library_that_loads_the_weights(adapter):
    front = _front_matter("grpo", adapter=adapter, base=BaseModel(hub_id="me/model", same_weights=True, license="mit"))
    library, relation = ("peft", "adapter") if adapter else ("transformers", "finetune")
    assert yaml.safe_load(yaml.safe_dump(front)) == front
    assert (front["library_name"], front["base_model"], front["base_model_relation"], front["license"]) == (
        library, "me/model", relation, "mit",
    )  # fmt: skip
    code = "\n".join(_snippet(adapter=adapter, base="me/model"))
    compile(code, "snippet", "exec")
    assert ("PeftModel" in code) == adapter


def test_the_card_of_an_adapter_of_local_weights_leaves_their_place_open():
    assert 'BASE = "..."' in "\n".join(_snippet(adapter=True, base=None))
    assert "/" not in "\n".join(_snippet(adapter=False, base=None))

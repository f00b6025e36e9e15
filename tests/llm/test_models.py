"""What a model's name means: a folder or file that exists, then a known name; the network is not asked unbidden."""

from __future__ import annotations

import pathlib
import socket

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import TINY

from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.llm import LLM, models
from repro.llm.pool import PoolSize

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """A checkpoint of another model in a folder called opt-125m, in the working and the home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    models.from_config(TINY, "tiny").model.save_pretrained(tmp_path / "opt-125m")
    return tmp_path / "opt-125m"


@pytest.mark.parametrize(
    "name", ["opt-125m", "./opt-125m", "~/opt-125m", pathlib.Path("opt-125m"), pathlib.Path("~/opt-125m")]
)
def test_a_folder_that_exists_is_what_is_loaded_whatever_it_is_called(folder, name):
    loaded = models.load(name)
    assert loaded.config.num_parameters == models.from_config(TINY, "tiny").config.num_parameters
    assert loaded.config.name == str(name)


def test_a_known_name_is_the_known_model_where_nothing_is_called_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "from_config", lambda config, name, *others: (type(config), name))
    assert models.load("opt-125m") == (transformers.OPTConfig, "opt-125m")


def test_a_folder_without_a_model_is_refused_and_not_taken_for_the_known_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "opt-125m").mkdir()
    with pytest.raises(UserError, match="'opt-125m' cannot be loaded"):
        models.load("opt-125m")


@pytest.mark.parametrize(
    "message, name",
    [
        ("did you mean 'smollm2'", "smollm3"),
        ("did you mean 'opt-125m'", "OPT-125M"),
        ("unknown, and there is no such folder or file.*use one of smollm2", "owner/name"),
        ("unknown, and there is no such folder", "/no/such/folder"),
        ("unknown, and there is no such folder", ""),
        ("unknown, and there is no such folder", "x" * 5000),
        ("unknown, and there is no such folder", "a\0b"),
        ("no such GGUF file", "~/none.GGUF"),
        ("no such GGUF file", pathlib.Path("none.gguf")),
        ("neither a name nor a path", None),
        ("neither a name nor a path", 5),
    ],
)
def test_an_unknown_name_is_refused_in_a_line_without_asking_the_network(name, message, monkeypatch, tmp_path):
    def no_network(*unused: object, **options: object) -> None:
        raise AssertionError("the network is asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    with pytest.raises(UserError, match=message) as refusal:
        models.load(name)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="no GGUF file; for a transformers checkpoint give its folder"):
        models.load(tmp_path / "weights.bin")


@pytest.mark.parametrize("suffix", ["gguf", "GGUF"])
def test_a_suffix_means_the_same_in_capitals(tmp_path, suffix):
    (tmp_path / f"damaged.{suffix}").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=f"damaged.{suffix}' cannot be loaded"):
        models.load(tmp_path / f"damaged.{suffix}")


@pytest.mark.parametrize(
    "config", [TINY, transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=64)]
)
def test_a_checkpoint_without_a_tokenizer_takes_token_ids_and_refuses_text(tmp_path, config):
    models.from_config(config, "tiny").model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, pool=PoolSize(kv_slots=256), quiet=True)
    [result] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), progress=False)
    assert len(result.token_ids[0]) == 4 and result.texts == [None]
    with pytest.raises(UserError, match="has no tokenizer; give lists of token ids"):
        llm.generate(["text"], progress=False)


def test_a_damaged_tokenizer_is_not_taken_for_none(tmp_path):
    models.from_config(TINY, "tiny").model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(UserError, match="cannot be loaded"):
        models.load(tmp_path)

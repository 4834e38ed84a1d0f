import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig
from typer.testing import CliRunner

from dynchunk.cli import app, doctor
from dynchunk.ops._registration import default_impl

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    def save(config):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
        config.save_pretrained(tmp_path)
        return tmp_path

    return save


def test_versions_and_operations_are_printed():
    found = run()
    assert found.exit_code == 0
    for words in ("torch", "transformers", "attend_selected", "kernels for tensors on 'cpu'"):
        assert words in found.stdout


def test_json_says_what_each_operation_would_use_and_why():
    found = json.loads(run("--json").stdout)
    assert found["model"] is None
    assert {row["package"] for row in found["versions"]} >= {"torch", "triton", "transformers"}
    assert not {row["package"] for row in found["versions"]} & {"ruff", "pytest"}
    uses = {(row["operation"], row["dtype"]): row for row in found["operations"]}
    assert uses["decode", "bfloat16"]["impl"] == "cpu"
    assert uses["decode", "float64"]["impl"] == "reference"
    assert uses["decode", "float64"]["why"] == "no kernel computes in float64"


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cuda", torch.float32, "triton"),
        ("cpu", torch.float32, "reference"),
        ("mps", torch.float16, "reference"),
        ("cuda", torch.float64, "reference"),
    ],
)
def test_the_default_is_the_kernels_of_the_device(device, dtype, expected):
    assert default_impl({"reference": None, "triton": None}, device, dtype).impl == expected


def test_what_is_missing_says_which_extra_brings_it(monkeypatch):
    installed = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda x: None if x == "tokenizers" else installed(x))
    assert "pip install 'dynchunk[hf]'" in run().stdout


def test_a_model_is_described_layer_by_layer(folder):
    found = run(folder(LlamaConfig(**SIZES)), "--json")
    assert found.exit_code == 0
    model = json.loads(found.stdout)["model"]
    assert (model["class"], model["tested"], model["problems"]) == ("LlamaForCausalLM", True, [])
    assert [layer["wrapped"] for layer in model["layers"]] == [True] * 3


def test_layers_that_are_left_alone_say_why(folder):
    found = run(folder(MistralConfig(**SIZES, sliding_window=8)))
    assert found.exit_code == 1  # no layer is left to wrap
    assert "sliding_attention has a memory of its own" in found.stdout


def test_a_model_that_cannot_be_wrapped_is_told_and_exits_with_1(folder):
    found = run(folder(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)))
    assert found.exit_code == 1
    assert "cannot be wrapped" in found.stdout


@pytest.mark.parametrize("name", ["nowhere.gguf", "some/where"])
def test_a_model_that_is_not_there(name):
    found = run(name)
    assert found.exit_code == 2
    assert "error: " in found.stderr


def test_a_folder_without_a_model(tmp_path):
    found = run(tmp_path)
    assert found.exit_code == 2
    assert "MODEL: expected a folder with a config.json" in found.stderr
